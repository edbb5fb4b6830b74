# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 4 · How much does a shared prefix save, and when does the saving end?
#
# 共享前缀能省多少，省到什么时候为止？（KV Cache 公式到源码对照，第 3 节）
#
# - **In a hurry:** `sharing.prefix_saving_blocks(4, 1_000, 16, num_written=4)` gives 186 blocks, not 187.5.
# - **You will be able to decide** whether to share or copy a prompt, and whether padding it to a whole block pays.
# - **Needs** chapters 2 and 3. **25 minutes.**
# - **First** choose *Run > Run All Cells*: until then the pictures stand still. A click opens folded code.

# %%
import numpy as np

from kvlib import (
    blocks,
    checks,
    figures,
    memory,
    models,
    paged_cache,
    panel,
    scenario,
    sharing,
    units,
)

# %% [markdown]
# One prompt, several continuations: four beams, eight samples, a tree of three drafts. All begin with the same tokens, so one copy of their keys and
# values will do, until somebody writes into a block that others still read.

# %% jupyter={"source_hidden": true}
# Three kinds of work that fork, and models to count bytes for.
uses = {
    "beam search": {"num_branches": 4, "prefix_tokens": 1_000, "suffix_tokens": 1},
    "parallel sampling": {"num_branches": 8, "prefix_tokens": 500, "suffix_tokens": 24},
    "speculative decoding": {"num_branches": 3, "prefix_tokens": 1_500, "suffix_tokens": 5},
}
uniform = ["qwen3-0.6b", "llama-3.1-8b", "llama-3.1-70b", "deepseek-v3"]


def fork_and_write(num_branches, prefix_tokens, suffix_tokens, block_size, num_written):
    names = "ABCDEFGH"[:num_branches]
    script = [f"A={prefix_tokens}", *(f"A>{name}" for name in names[1:]), *(f"{name}+{suffix_tokens}" for name in names[:num_written])]
    own = blocks.blocks_needed(suffix_tokens, block_size) + 1
    num_blocks = blocks.blocks_needed(prefix_tokens, block_size) + num_branches * own
    return scenario.play(" ".join(script), num_blocks, block_size)[-1]


# %% jupyter={"source_hidden": true}
# The first panel in words.
def saving_title(frame, prefix_tokens, block_size, num_written, saved):
    if num_written == 0:
        return f"Before anyone writes, {saved[0]:,} blocks are saved"
    if prefix_tokens % block_size == 0:
        return f"The prefix fills its last block: nothing to copy, {saved[0]:,} blocks stay saved"
    if not frame.copied:
        return f"The last writer is alone with the tail: no copy, {saved[-1]:,} blocks stay saved"
    return f"A write to the shared tail copies 1 block, not {blocks.blocks_needed(prefix_tokens, block_size):,}: {saved[num_written]:,} stay saved"


def saving_sentence(num_branches, prefix_tokens, suffix_tokens, num_written, saved, in_use, alone, formula, model, num_bytes):
    wrote = f"{num_written} of them wrote {suffix_tokens:,} more" if num_written else "none has written"
    return f"{num_branches} branches share {prefix_tokens:,} tokens and {wrote}. {saved[num_written]:,} blocks are saved, {units.format_bytes(num_bytes[0])} of " \
        f"{model}; the formula says {num_branches - 1} × {prefix_tokens:,} tokens, {formula:,g} blocks, {units.format_bytes(num_bytes[1])}. " \
        f"Before any write it is {saved[0]:,}, after all {saved[-1]:,}. Blocks in use: {in_use:,} instead of {alone:,}."


# %% jupyter={"source_hidden": true}
# What the first panel shows for its controls.
def save(num_branches, prefix_tokens, suffix_tokens, block_size, num_written, model, **_):
    num_written = min(num_written, num_branches)
    frame = fork_and_write(num_branches, prefix_tokens, suffix_tokens, block_size, num_written)
    saved = [sharing.prefix_saving_blocks(num_branches, prefix_tokens, block_size, written) for written in range(num_branches + 1)]
    one_token, formula = memory.kv_bytes_per_token(models.find_model(model)), (num_branches - 1) * prefix_tokens / block_size
    num_bytes = saved[num_written] * block_size * one_token, sharing.prefix_saving_bytes(num_branches, prefix_tokens, one_token)
    in_use = len(frame.filled) - len(frame.free_list)
    alone = sum(blocks.blocks_needed(length, block_size) for length in frame.num_tokens.values())
    call = panel.as_python(sharing.prefix_saving_blocks, num_branches, prefix_tokens, block_size, num_written)
    words = saving_sentence(num_branches, prefix_tokens, suffix_tokens, num_written, saved, in_use, alone, formula, model, num_bytes)
    numbers = {"frame": frame, "block_size": block_size, "saved": saved, "formula": formula, "num_written": num_written, "answer": "186"}
    numbers |= {"title": saving_title(frame, prefix_tokens, block_size, num_written, saved), "sentence": f"{words} `{call}`"}
    return numbers | {"first_block": max(0, prefix_tokens // block_size - 3)}


# %% jupyter={"source_hidden": true}
# The first panel.
question = "4 branches share 1,000 tokens, 16 a block. How many blocks does sharing save once all four have written?"
assumptions = {
    "suffix_tokens": panel.Slider("own tokens", 1, range(1, 257)),
    "block_size": panel.Slider("block size", 16, [8, 16, 32, 64, 128, 256]),
    "model": panel.Choice("model", "llama-3.1-8b", uniform),
}

panel.Panel(
    figures.ForkSaving(), save, guess=panel.Guess(question, ("189", "188", "187", "186")),
    presets={"scenario": uses}, assumptions=assumptions,
    prefix_tokens=panel.Slider("prefix [tokens]", 1_000, range(4, 2_049, 4)),
    num_branches=panel.Slider("branches", 4, range(2, 9)),
    num_written=panel.Slider("have written", 1, range(9)),
    scenario=panel.Choice("scenario", "beam search", ["custom", *uses]),
)

# %% [markdown]
# A beam search forks at every step, parallel sampling once after the prompt, a tree of drafts where drafts differ (a single chain of drafts needs no fork, chapter 3). In
# all three the full blocks stay shared while two branches live. The partial tail is copied by every writer but the last, one block each. Drag the prefix to 1,008: the
# tail is full, and the saving never ends. This is the design of the vLLM paper. Today's vLLM starts as many requests as there are samples: they share full blocks through
# its prefix cache, and no tail is ever copied.

# %% [markdown]
# ## The formula
#
# $$\Delta M = (k - 1) \, M(T_{prefix}) \tag{4.1}$$
#
# $$n_{saved} = (k - 1) \left\lfloor \frac{T_{prefix}}{B_{block}} \right\rfloor + [\,T_{prefix} \bmod B_{block} > 0\,] \, \max(0,\ k - 1 - k_w) \tag{4.2}$$
#
# | symbol | name in code | meaning | unit | value today |
# |---|---|---|---|---|
# | $\Delta M$ | `prefix_saving_bytes` | bytes saved by sharing a prefix | bytes | 375.00 MiB |
# | $n_{saved}$ | `prefix_saving_blocks` | whole blocks saved by sharing a prefix | blocks | 188 |
# | $k$ | `num_branches` | sequences that start with the prefix | sequences | 4 |
# | $T_{prefix}$ | `prefix_tokens` | length of the shared prefix | tokens | 1,000 |
# | $k_w$ | `num_written` | branches that have appended since the fork | sequences | 1 |
# | $B_{block}$ | `block_size` | slots of one block | tokens/block | 16 |
#
# Without sharing, $k$ copies of the prefix are kept, with sharing one: (4.1) is the difference. Blocks are whole, so a cache saves $(k - 1)\lceil T_{prefix} / B_{block} \rceil$
# blocks at first, a little more than (4.1). Each writer needs its own copy of a partial tail, until one branch is left alone with it. Then it is
# $(k - 1)\lfloor T_{prefix} / B_{block} \rfloor$, a little less. Units: sequences · tokens / (tokens/block) = blocks.


# %%
def my_saving_blocks(num_branches, prefix_tokens, block_size, num_written):
    num_full, tail = divmod(prefix_tokens, block_size)
    return (num_branches - 1) * num_full + (tail > 0) * max(0, num_branches - 1 - num_written)


mine = [my_saving_blocks(4, 1_000, 16, written) for written in range(5)]
assert mine == [sharing.prefix_saving_blocks(4, 1_000, 16, written) for written in range(5)]
mine, sharing.prefix_saving_bytes(4, 1_000, one_token := 131_072) / (16 * one_token)

# %% [markdown]
# ## What happens without the copy
#
# The listing in the notes forks by counting references, and appends by filling the last block. It never asks who else reads that block. With real keys and values,
# and each token written where the block table says:


# %%
def append_as_listed(manager, seq, k, v):
    """Fill the last block, whoever else holds it."""
    last, slot = seq.block_table[-1], seq.num_tokens % manager.block_size
    manager.pool.k[last.block_id, slot], manager.pool.v[last.block_id, slot] = k[0], v[0]
    last.filled = max(last.filled, slot + 1)
    seq.num_tokens += 1


def token(number):
    """A key of one head and one element that names its token, and its negative as the value."""
    k = np.full((1, 1, 1), number, dtype="float16")
    return k, -k


# %%
def fork_and_append(append):
    pool = paged_cache.KVPool(num_blocks=8, block_size=4, num_kv_heads=1, head_dim=1)
    manager = paged_cache.PagedKVCacheManager(num_blocks=8, block_size=4, pool=pool)
    parent = manager.allocate_for_sequence("parent", 0)
    for number in range(1, 7):
        manager.append_kv(parent, *token(number))
    child = manager.fork(parent, "child")
    append(manager, parent, *token(70))
    seen = [manager.read_kv(parent)[0].ravel().astype(int).tolist()]
    append(manager, child, *token(90))
    seen.append(manager.read_kv(parent)[0].ravel().astype(int).tolist())
    return seen


# %%
listed = fork_and_append(append_as_listed)
copied = fork_and_append(lambda manager, seq, k, v: manager.append_kv(seq, k, v))
assert listed[0] != listed[1]
assert copied[0] == copied[1]
print("as listed:   parent reads {}; once the child has written, {}".format(*listed))
print("with a copy: parent reads {}; once the child has written, {}".format(*copied))

# %% [markdown]
# The child's token 90 stands where the parent's 70 was: the parent goes on with somebody else's memory, and no error says so. kvlib's append
# copies a shared, partial tail first, its keys and values included.

# %% [markdown]
# ## Two readings of fragmentation
#
# `blocks.fragmentation` counts sequences, the manager's `fragmentation()` counts physical blocks. They agree until blocks are shared. A shared
# block has one set of empty slots, however many tables point at it:

# %%
manager = paged_cache.PagedKVCacheManager(num_blocks=20, block_size=16)
manager.allocate_for_sequence("A", 32)
manager.allocate_for_sequence("B", 33)
unshared = manager.fragmentation(), blocks.fragmentation([32, 33], 16)
manager.release("B")
manager.append_tokens(manager.fork("A", "B"), 1)
shared = manager.fragmentation(), blocks.fragmentation([32, 33], 16)
assert unshared[0] == unshared[1] == shared[1] == 15 / 80
unshared, shared

# %% [markdown]
# 15 empty slots either way, of 5 blocks for two sequences on their own and of 3 when two full blocks are shared: the share of empty slots rises from 18.75 % to
# 31.25 % although less memory is in use. A high figure may mean good sharing.

# %% [markdown]
# ## A prefix cache shares full blocks
#
# A fork knows its parent. A prefix cache must find a stranger's blocks again: vLLM does so by a hash of their tokens, and a block has a hash only when it is full. (SGLang's
# tree matches single tokens by default, $B_{block} = 1$ below; TensorRT-LLM can copy a block that matches in part.) The last token of a prompt is always computed, since its
# output is the first new token. So of a prompt of $T$ tokens
#
# $$T_{reused} = \left\lfloor \frac{\min(T_{prefix},\ T - 1)}{B_{block}} \right\rfloor B_{block} \tag{4.3}$$
#
# | symbol | name in code | meaning | unit | value today |
# |---|---|---|---|---|
# | $T_{reused}$ | `shareable_tokens` | tokens of a prompt that a prefix cache reuses | tokens | 0 |
#
# Hybrid models have large blocks, since a block must be as large as a linear-attention layer's state: 528, 784 or 2,096 tokens. Drag the prefix from 240 up.

# %% jupyter={"source_hidden": true}
# The second panel.
def reuse(prefix_tokens, prompt_tokens, block_size):
    reused = sharing.shareable_tokens(prefix_tokens, prompt_tokens, block_size)
    again, call = prefix_tokens - reused, panel.as_python(sharing.shareable_tokens, prefix_tokens, prompt_tokens, block_size)
    words = f"A prompt of {prompt_tokens:,} tokens has its first {prefix_tokens:,} in common with one that is cached. In blocks of {block_size:,} tokens these make " \
        f"{reused // block_size:,} full blocks: {reused:,} tokens are reused, {again:,} are computed again. `{call}`"
    title = f"{reused:,} of {prefix_tokens:,} shared tokens are reused" if reused else "No full block is shared: nothing is reused"
    return {"title": title, "sentence": words, "reused": reused, "prefix_tokens": prefix_tokens, "prompt_tokens": prompt_tokens, "block_size": block_size}


panel.Panel(
    figures.PromptBar(), reuse,
    prefix_tokens=panel.Slider("shared [tokens]", 240, range(0, 4_097, 16)),
    prompt_tokens=panel.Slider("prompt [tokens]", 2_000, range(100, 8_193, 100)),
    block_size=panel.Slider("block size", 784, [16, 32, 64, 128, 256, 528, 784, 1_056, 2_096]),
)

# %% [markdown]
# A hit is also contiguous: block 3 counts only if blocks 0, 1 and 2 were hits. And a released block that keeps its contents is free: a usage gauge may
# show 0 % while the cache is warm.

# %% [markdown]
# ## Does it match what others report?
#
# Tolerance: 5 %. The first five rows are worked examples and measured logs. The last two are the vLLM paper's parallel sampling on ShareGPT, blocks saved over
# blocks without sharing (section 6.3), predicted from the dataset's mean lengths alone, 161 tokens in and 338 out (Figure 11).

# %%
hit, compressed = checks.published("vllm-prefix-hit"), checks.published("vllm-ascend-10440")
sampled = scenario.play("A=7 A>B A+1 B+1", num_blocks=8, block_size=4)  # the paper's Figure 8
share = {n: 100 * sharing.prefix_saving_blocks(n, 161, 16, n) / (n * blocks.blocks_needed(161 + 338, 16)) for n in (2, 6)}
rows = [
    ("10 of 14 shared, blocks of 4 [tokens]", sharing.shareable_tokens(10, 14, 4), hit["expected"], hit["source"]),
    ("128 slots x 128 [tokens at least]", sharing.shareable_tokens(16_384, 10**6, 128 * 128), compressed["expected"], compressed["source"]),
    ("552 cached, blocks of 528 [computed]", 552 - sharing.shareable_tokens(552, 552, 528), 24, "vllm-project/vllm #40696"),
    ("979 cached, blocks of 528 [computed]", 979 - sharing.shareable_tokens(979, 979, 528), 451, "vllm-project/vllm #40696"),
    ("2 samples, both wrote [blocks]", len(sampled[-1].filled) - len(sampled[-1].free_list), 3, "vLLM paper, section 4.4"),
    ("2 samples a request [% saved]", round(share[2], 1), 16.2, "vLLM paper, section 6.3"),
    ("6 samples a request [% saved]", round(share[6], 1), 30.5, "vLLM paper, section 6.3"),
]
assert sharing.shareable_tokens(240, 2_000, 784) == 0  # vllm-project/vllm #54607: nothing was reused
checks.Comparison(rows, tolerance=0.05)

# %% [markdown]
# The miss stays. Means cannot give it: a server is measured while answers still grow, when the prompt is more of each sequence than at the end, and long prompts weigh more than a mean
# says. Both push the real figure up.

# %% [markdown]
# ## Exercises
#
# **4.1** Blocks saved after `num_written` of `num_branches` have written. (2 lines)


# %%
def blocks_saved(num_branches, prefix_tokens, block_size, num_written):
    # solution
    num_full, tail = divmod(prefix_tokens, block_size)
    return (num_branches - 1) * num_full + (tail > 0) * max(0, num_branches - 1 - num_written)


checks.check_blocks_saved(blocks_saved)

# %% [markdown]
# **4.2** Tokens that a prefix cache must compute of a prompt whose first `prefix_tokens` are cached. (1 line)


# %%
def tokens_to_compute(prefix_tokens, prompt_tokens, block_size):
    # solution
    return prompt_tokens - min(prefix_tokens, prompt_tokens - 1) // block_size * block_size


checks.check_tokens_to_compute(tokens_to_compute)

# %% [markdown]
# **4.3** Transfer. Padding a prompt to whole blocks keeps its last block shared for ever. It also gives up the free slots that each branch's copy had. How many blocks
# does padding save once every branch has written `suffix_tokens`? The answer may be negative. (3 lines)
# Then decide for 4 branches of 1,000 tokens, padded to 1,008: 16 own tokens each, and 200.


# %%
def blocks_saved_by_padding(num_branches, prefix_tokens, suffix_tokens, block_size):
    # solution
    num_full, tail = divmod(prefix_tokens, block_size)
    copied = num_full + num_branches * -(-(tail + suffix_tokens) // block_size)
    return copied - num_full - (tail > 0) - num_branches * -(-suffix_tokens // block_size)


checks.check_blocks_saved_by_padding(blocks_saved_by_padding)

# %% [markdown]
# The prefix alone saves 3 blocks for 8 tokens of padding. With 16 own tokens each, the whole cache keeps these 3. With 200 it loses one: every copy had 8 free slots to offer. Over all
# suffix lengths the mean gain is $k \, (T_{prefix} \bmod B_{block}) / B_{block} - 1$, here 1 block. Pad when many branches share a tail that is nearly full.

# %%
gains = [sharing.prefix_saving_blocks(4, 1_008, 16, 4) - sharing.prefix_saving_blocks(4, 1_000, 16, 4)]
for suffix_tokens in (16, 200):
    used = [blocks.blocks_needed(n + suffix_tokens, 16) * 4 - sharing.prefix_saving_blocks(4, n, 16, 4) for n in (1_000, 1_008)]
    gains.append(used[0] - used[1])
gains

# %% [markdown]
# ## What the formula leaves out
#
# - Beams keep forking after the prompt, so their answers share blocks too: more, 37.6 to 55.2 % saved where parallel sampling saved 6.1 to 9.8 % (vLLM paper, section 6.3, Alpaca).
# - Prefix caches round down to full blocks and compute the last token: less, up to `block_size` tokens a prompt.
# - Window layers share only what the window still holds: less, at most the window's tokens (chapter 1).
# - The copy moves one block once: 2 MiB for Llama-3.1-8B at 16 tokens a block.
# - Tables: every branch keeps its own, 4 bytes a block. 63 entries, 252 bytes, for 1,000 tokens.
# - Who pays for a shared block when tenants have quotas (chapter 7).
#
# ## References
#
# 1. Kwon et al., "Efficient Memory Management for Large Language Model Serving with PagedAttention", 2023, arXiv:2309.06180, sections 4.4 and 6.3, Figures 8, 11 and 15.
# 2. vLLM, `docs/design/prefix_caching.md`.
# 3. vllm-project/vllm, issues #40696, #54607 (blocks larger than the prefix), #5176 (the gauge).
# 4. LMCache issue #443 and llm-d-inference-sim issue #701 (a hit starts at block 0).
# 5. Data: `data/README.md`.
#
# Next question: what does one bit less cost?
