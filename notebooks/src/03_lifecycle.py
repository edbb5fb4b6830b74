# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 3 · When does one more token cost a block?
#
# 再多一个 token，什么时候要多占一个块？（KV Cache 公式到源码对照，第 2 节）
#
# - **In a hurry:** `blocks.appended_blocks(1_000, tail_free_slots=12, block_size=16)` gives 62 blocks.
# - **You will be able to decide** how many free blocks a scheduler must hold back before it lets a batch decode on.
# - **Needs** chapter 2. **20 minutes.**
# - **First** choose *Run > Run All Cells*: until then the pictures stand still. A click opens folded code.

# %%
from kvlib import blocks, checks, figures, paged_cache, panel, scenario

# %% [markdown]
# A request comes, is written into blocks, grows token by token, and leaves. Play its life forwards and backwards with the step slider,
# or write your own: `A=40` starts A with 40 tokens, `A+9` appends 9, `A+1*12` appends 1 twelve times, `A>C` forks A as C, `-A` releases A.

# %% jupyter={"source_hidden": true}
# Scenarios to choose from, each with its pool.
scenarios = {
    "two requests and a fork": ("A=40 B=20 A+1*12 B+13 A>C C+1 A+1*8 -B D=90 D+1*12 -A -C -D", 32),
    "one long decode": ("A=100 A+1*60 -A", 16),
    "out of blocks": ("A=60 B=40 A+1*2 A+40 B+8 B+1 B+1*15 B+1 -A B+1", 8),
    "fork, write, copy": ("A=56 B=40 A>C A+3 C+1 C+1*7 C+1 -B -A -C", 24),
    "released blocks are reused": ("A=48 B=48 C=48 -B D=30 -A E=80 -C -D -E", 16),
    "eight decode in step": ("A=48 B=48 C=48 D=48 E=48 F=48 G=48 H=48 A+1 B+1 C+1 D+1 E+1 F+1 G+1 H+1 A+15 A+1", 32),
}
first_script, first_pool = scenarios["two requests and a fork"]
presets = {"scenario": {name: {"script": text, "num_blocks": pool} for name, (text, pool) in scenarios.items()}}


# %% jupyter={"source_hidden": true}
# What starting says, and the call that gives its number.
def count(number, noun, nouns=None):
    return f"{number:,} {noun if number == 1 else nouns or noun + 's'}"


def tell_start(frame, before, block_size):
    name, tokens = frame.step.seq_id, frame.step.argument
    needed = count(blocks.blocks_needed(tokens, block_size), "block")
    return f"{name} starts with {count(tokens, 'token')}: ⌈{tokens:,} / {block_size}⌉ = {needed}", \
        panel.as_python(blocks.blocks_needed, tokens, block_size), f"{name} starts: {needed} for {count(tokens, 'token')}"


# %% jupyter={"source_hidden": true}
# What growing says.
def tell_growth(frame, before, block_size):
    tokens, tail = frame.step.argument, frame.tail_free_slots
    new = count(blocks.appended_blocks(tokens, tail, block_size), "block")
    copy = f", and a copy of the shared block {frame.copied[0]}" if frame.copied else ""
    words = f"the tail of {frame.step.seq_id} had {count(tail, 'free slot')}, so ⌈max(0, {tokens:,} − {tail}) / {block_size}⌉ = {new}"
    title = f"{count(tokens, 'more token')} of {frame.step.seq_id}: {new}, since the tail had {count(tail, 'free slot')}"
    title = f"A write to the shared tail copies block {frame.copied[0]} to {frame.copied[1]}" if copy else title
    return words + copy, panel.as_python(blocks.appended_blocks, tokens, tail, block_size), title


# %% jupyter={"source_hidden": true}
# What forking, leaving and doing nothing say.
def tell_fork(frame, before, block_size):
    parent, child = frame.step.seq_id, frame.step.argument
    entries = f"{child} copies the {count(frame.walked, 'table entry', 'table entries')} of {parent}"
    return f"{entries}; the blocks' counts rise by 1, and no block is taken", \
        panel.as_python(blocks.blocks_needed, before.num_tokens[parent], block_size), f"A fork takes no block: {child} points at {parent}'s"


def tell_release(frame, before, block_size):
    name, freed = frame.step.seq_id, len(frame.freed)
    walked = count(frame.walked, "table entry", "table entries")
    words = f"{name} leaves: {walked} walked, {count(freed, 'block')} freed, {frame.walked - freed:,} kept by others; no other table is read"
    return words, panel.as_python(blocks.blocks_needed, before.num_tokens[name], block_size), f"{name} leaves: {walked} walked"


def tell_nothing(frame, before, block_size):
    words = f"{frame.step.text} has no sequence to act on" if frame.step else "nothing has happened yet"
    return f"{words}: 0 blocks change", panel.as_python(blocks.blocks_needed, 0, block_size), "Nothing happens"


# %% jupyter={"source_hidden": true}
# What the panel shows for its controls.
tell = {"allocate_for_sequence": tell_start, "append_tokens": tell_growth, "fork": tell_fork, "release": tell_release}


def play_to(step, script, block_size, num_blocks, **_):
    frames = scenario.play(script, num_blocks, block_size)
    now, texts = min(step, len(frames) - 1), [frame.step.text for frame in frames[1:]]
    frame, before = frames[now], frames[max(0, now - 1)]
    is_idle = frame.step is None or (frame.refused and "start" in frame.refused)
    words, call, title = (tell_nothing if is_idle else tell[frame.step.method])(frame, before, block_size)
    refusal = f". Blocks: {frame.refused}; refused, and nothing changed" if frame.refused and not is_idle else ""
    used, where = num_blocks - len(frame.free_list), f"Step {step} of {len(texts)}" if step == now else f"Step {step}: the scenario ended at {now}"
    sentence = f"{where}: {words}{refusal}. In use: {used} of {num_blocks} blocks, {100 * frame.fragmentation:.1f} % of their slots empty. `{call}`"
    strip = " ".join(texts[max(0, now - 8) : max(0, now - 1)]), texts[now - 1] if now else "start", " ".join(texts[now : now + 7])
    return {"title": "Refused: too few blocks, and nothing changed" if refusal else title, "sentence": sentence, "frame": frame,
            "block_size": block_size, "steps": strip, "note": f"blocks: {frame.refused}" if refusal else frame.refused, "answer": "62"}


# %% jupyter={"source_hidden": true}
# The panel.
panel.Panel(
    figures.BlockPool(),
    play_to,
    guess=panel.Guess(
        "A request of 100 tokens decodes 1,000 more, 16 tokens a block. How many blocks does it take on the way?",
        ("1,000", "63", "62", "7"),
    ),
    presets=presets,
    assumptions={"num_blocks": panel.Slider("pool [blocks]", first_pool, range(4, 65))},
    scenario=panel.Choice("scenario", "two requests and a fork", ["custom", *scenarios]),
    step=panel.Slider("step", 11, range(64)),
    script=panel.Text("script", first_script),
    block_size=panel.Slider("block size", 16, [1, 2, 4, 8, 12, 16, 20, 24, 32, 48, 64]),
)

# %% [markdown]
# Most steps cost nothing: a token goes into the free slots of the last block. The one that finds the tail full costs a block. Choose
# *out of blocks*: step 5 asks for 3 blocks, 1 is free, and even the 2 free slots of the tail stay empty. Choose *eight decode in step*: eight blocks for eight tokens.

# %% [markdown]
# ## The formula
#
# $$\Delta n_{blocks} = \left\lceil \frac{\max(0,\ \Delta T - f_{last})}{B_{block}} \right\rceil \tag{3.1}$$
#
# | symbol | name in code | meaning | unit | value today |
# |---|---|---|---|---|
# | $\Delta n_{blocks}$ | `appended_blocks` | blocks that a growing sequence takes | blocks | 62 |
# | $\Delta T$ | `num_new_tokens` | tokens that are appended | tokens | 1,000 |
# | $f_{last}$ | `tail_free_slots` | empty slots in the last block of a sequence | tokens | 12 |
# | $B_{block}$ | `block_size` | slots of one block | tokens/block | 16 |
#
# New tokens fill the tail first; only what is left over needs blocks, and blocks are whole, hence the ceiling. With 0 tokens so far
# there is no tail, $f_{last} = 0$, and the formula is the one for a new request, $\lceil T / B_{block} \rceil$. Nothing in it depends on how long the
# sequence is: a step takes as many blocks at any length. (Its time does grow: it reads the whole cache, chapter 6.) Units: tokens / (tokens/block) = blocks.


# %%
def my_appended_blocks(num_new_tokens, tail_free_slots, block_size):
    left_over = max(0, num_new_tokens - tail_free_slots)
    return -(-left_over // block_size)  # a floor of the negative is a ceiling


assert my_appended_blocks(1_000, 12, 16) == blocks.appended_blocks(1_000, 12, 16)
my_appended_blocks(1_000, 12, 16)

# %% [markdown]
# 100 tokens take 7 blocks and leave 12 slots. The first 12 new tokens cost nothing, the 113th token of the sequence costs a block, and
# then every 16th does. One by one or all at once, the sum is the same:

# %%
manager = paged_cache.PagedKVCacheManager(num_blocks=80, block_size=16)
request = manager.allocate_for_sequence("request", 100)
costs = {101 + k: manager.append_tokens(request, 1) for k in range(1_000)}
costly = [position for position, taken in costs.items() if taken]
sum(costs.values()), costly[:3]

# %% [markdown]
# ## Leaving
#
# $$\text{release cost} = O(n_{blocks}) \tag{3.2}$$
#
# | symbol | name in code | meaning | unit | value today |
# |---|---|---|---|---|
# | $n_{blocks}$ | `blocks_needed` | blocks of one sequence | blocks | 69 |
#
# A release walks the sequence's own table and gives back one reference for each entry. Nothing is moved: other tables name the same blocks as before.
# An allocator of contiguous regions would have to close the gap or live with a hole.

# %%
neighbour = manager.allocate_for_sequence("neighbour", 40)
table_before = [block.block_id for block in neighbour.block_table]
num_freed = manager.release(request)
assert [block.block_id for block in neighbour.block_table] == table_before
num_freed, manager.allocator.num_free

# %% [markdown]
# ## Out of blocks, half-way
#
# The listing in the notes fills the tail, then takes blocks one at a time, and raises when none is left. By then it has written
# into the tail and taken blocks, but has not counted the tokens. The cache disagrees with itself:


# %%
def append_as_listed(manager, seq, num_new_tokens):
    remaining = num_new_tokens - min(num_new_tokens, seq.tail_free_slots())
    seq.block_table[-1].filled += num_new_tokens - remaining
    while remaining > 0:
        block = manager.allocator.allocate()  # raises when none is left
        block.filled = min(remaining, block.capacity)
        remaining -= block.filled
        seq.block_table.append(block)
    seq.num_tokens += num_new_tokens


# %%
def try_to_append(append):
    manager = paged_cache.PagedKVCacheManager(num_blocks=4, block_size=16)
    seq = manager.allocate_for_sequence("A", 40)
    try:
        append(manager, seq, 40)
    except paged_cache.OutOfBlocks as problem:
        print(problem)
    return {"tokens": seq.num_tokens, "slots filled": sum(block.filled for block in seq.block_table)}


print(try_to_append(append_as_listed))
print(try_to_append(lambda manager, seq, tokens: manager.append_tokens(seq, tokens)))

# %% [markdown]
# kvlib counts first and takes all blocks or none, so a scheduler can evict somebody and try again.

# %% [markdown]
# ## Does it match what engines do?
#
# Two worked examples that others published. Counts of blocks are whole numbers, so the tolerance is zero. The vLLM paper decodes a prompt of 7 tokens at block size 4
# (section 4.3, Figure 6). The vLLM documentation lets two requests of 15 and 14 tokens live in a pool of 10 blocks; their
# first 10 tokens are alike, so 8 of them are shared, two full blocks.

# %%
paper = scenario.play("A=7 A+1 A+1", num_blocks=8, block_size=4)
docs = scenario.play("A=8 A>B A+7 A+2 B+6 -A -B", num_blocks=10, block_size=4)
queue, docs_source = [checks.published("vllm-prefix-freequeue")[key] for key in ("expected", "source")]
in_use = [len(frame.filled) - len(frame.free_list) for frame in paper]
rows = [
    ("7 tokens, blocks of 4 [blocks]", in_use[1], 2, "vLLM paper, section 4.3"),
    ("... one more token [blocks]", in_use[2], 2, "vLLM paper, section 4.3"),
    ("... and one more [blocks]", in_use[3], 3, "vLLM paper, section 4.3"),
    ("two requests [blocks in use]", 10 - len(docs[5].free_list), len(queue[3:]), docs_source),
]
checks.Comparison(rows, tolerance=0)

# %% [markdown]
# The order in which the seven blocks come back is the same too, tail first. What differs is which free block goes out next: vLLM takes the one that has been free longest,
# so that released prefixes stay findable for long; kvlib takes the one freed last.

# %%
freed_last_first = docs[-1].free_list[:7]
assert list(freed_last_first[::-1]) == queue[3:]
queue

# %% [markdown]
# ## Exercises
#
# **3.1** A sequence has `num_tokens` and grows by `num_new_tokens`. How many **more** blocks does it take? No tail is given. (1 line)


# %%
def blocks_to_grow(num_tokens, num_new_tokens, block_size):
    # solution
    return -(-(num_tokens + num_new_tokens) // block_size) - -(-num_tokens // block_size)


checks.check_blocks_to_grow(blocks_to_grow)

# %% [markdown]
# **3.2** A sequence leaves; `ref_counts` are the counts of its blocks. How many become free? (1 line)


# %%
def blocks_freed(ref_counts):
    # solution
    return sum(ref_count == 1 for ref_count in ref_counts)


checks.check_blocks_freed(blocks_freed)

# %% [markdown]
# **3.3** Transfer. How many free blocks guarantee that `num_sequences` unshared sequences can each decode `num_steps` more tokens, whatever their tails? (1 line)
# Then decide: 8 sequences at block size 16 should run 16 more steps and 5 blocks are free. How many sequences may you promise that to?


# %%
def blocks_to_hold_back(num_sequences, num_steps, block_size):
    # solution
    return num_sequences * -(-num_steps // block_size)


checks.check_blocks_to_hold_back(blocks_to_hold_back)

# %% [markdown]
# A tail may be full, so each sequence may need a block at its very first step: 5 blocks are a promise to 5 sequences, or evict until 8 are free (chapter 7).

# %% [markdown]
# ## What the formula leaves out
#
# - A shared tail: a write copies it first, one block more (chapter 4).
# - Look-ahead slots: engines that draft several tokens a step reserve them before they know how many stay, up to that many slots a sequence more.
# - Window layers give blocks back at their front while the sequence grows: less, down to the window's blocks (chapter 1).
# - Contents of free blocks: a prefix cache keeps them until the block is taken again. A gauge that shows 0 % in use may stand over a warm cache (vllm #5176).
# - Time: a decode step that takes a block also sends one table entry, 4 bytes, to the GPU.
#
# ## References
#
# 1. Kwon et al., "Efficient Memory Management for Large Language Model Serving with PagedAttention", 2023, arXiv:2309.06180, sections 4.2, 4.3 and 4.5.
# 2. vLLM, `docs/design/prefix_caching.md`, the worked example of allocation and release.
# 3. Data: `data/README.md`.
#
# Next question: how much does a shared prefix save, and when does the saving end?
