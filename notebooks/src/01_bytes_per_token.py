# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 1 · How many bytes does one token cost?
#
# 一个 token 要占多少字节？（KV Cache 公式到源码对照，第 1.1 节）
#
# - **In a hurry:** `memory.kv_bytes_per_token(models.find_model("llama-3.1-8b"))` gives 131,072 bytes.
# - **You will be able to decide** which model, cache dtype and context length fit a GPU, and how many sequences at once.
# - **Needs** no other chapter. **20 minutes**, and 15 more for the second hour.
# - **First** choose *Run > Run All Cells*: until then the pictures stand still. A click opens folded code.

# %%
import numpy as np

from kvlib import checks, figures, memory, models, panel, units

# %% [markdown]
# A server keeps the key and the value of every token it has read, in every layer, so that the next token need not
# compute them again. That is the KV cache. Three models: 0.6, 8 and 671 billion parameters. Which stores most for one token?

# %% jupyter={"source_hidden": true}
# What the first panel multiplies.
known = {
    name: memory.kv_bytes_per_token(models.find_model(name))
    for name in ("qwen3-0.6b", "llama-3.1-8b", "deepseek-v3")
}


def multiply(num_layers, num_kv_heads, head_dim, dtype):
    shape = models.ModelShape(num_layers=num_layers, num_kv_heads=num_kv_heads, head_dim=head_dim)
    factors = (2, num_layers, num_kv_heads, head_dim, float(memory.bits_per_value(dtype)))
    one_token, product = memory.kv_bytes_per_token(shape, dtype), " × ".join(f"{factor:g}" for factor in factors)
    call, cost = panel.as_python(memory.kv_bytes_per_token, shape, dtype), units.format_bytes(one_token)
    return {
        "title": f"One token costs {cost}; no tile is the parameter count",
        "sentence": f"{product} bits ÷ 8 = {one_token:,} bytes, {cost} a token of context. `{call}`",
        "factors": factors, "bytes_per_token": one_token, "others": known,
    }


# %% jupyter={"source_hidden": true}
# The first panel.
powers_of_two = [2**k for k in range(8)]

panel.Panel(
    figures.FactorTiles(),
    multiply,
    guess=panel.Guess("Order them by cache per token, smallest first.", tuple(known), picks=3),
    num_layers=panel.Slider("layers", 32, range(1, 129)),
    num_kv_heads=panel.Slider("KV heads", 8, powers_of_two),
    head_dim=panel.Slider("head_dim", 128, [32, 64, 80, 96, 128, 160, 192, 256, 512]),
    dtype=panel.Choice("cache dtype", "bf16", memory.DTYPES),
)

# %% [markdown]
# ## The formula
#
# $$m = 2 \, L \, H_{KV} \, d_{head} \, s / 8 \tag{1.1}$$
#
# | symbol | name in code | meaning | unit | value today |
# |---|---|---|---|---|
# | $m$ | `kv_bytes_per_token` | what one token adds to the cache | bytes/token | 131,072 |
# | $L$ | `num_layers` | transformer layers | layers | 32 |
# | $H_{KV}$ | `num_kv_heads` | key/value heads of a layer | heads | 8 |
# | $d_{head}$ | `head_dim` | width of one head | elements | 128 |
# | $s$ | `bits_per_value` | width of one stored value, scales included | bits | 16 |
#
# A layer keeps one key and one value for every KV head: that is the 2. Each is a vector of $d_{head}$ elements, and each
# element takes $s$ bits. Query heads do not appear, since queries are used once and forgotten: this is how grouped-query
# attention saves memory. Nor do the feed-forward layers and the experts appear, where most parameters are.
# Units: layers · heads · elements · bits / 8 = bytes.


# %%
def my_bytes_per_token(num_layers, num_kv_heads, head_dim, bits):
    return 2 * num_layers * num_kv_heads * head_dim * bits // 8


llama = models.find_model("llama-3.1-8b")
assert my_bytes_per_token(32, 8, 128, 16) == memory.kv_bytes_per_token(llama)
units.format_bytes(memory.kv_bytes_per_token(llama))

# %% [markdown]
# A sequence of $T$ tokens takes $T$ times as much. Qwen3-0.6B's weights take 1.11 GiB. From which length on does its cache
# outweigh them: 1,000, 10,000 or 100,000 tokens?

# %%
models.released_weight_bytes("qwen3-0.6b") // memory.kv_bytes_per_token(models.find_model("qwen3-0.6b")) + 1

# %% [markdown]
# ## What fits on one GPU
#
# What the weights and a reserve (activations, buffers, fragmentation) leave free is the cache's. Choose a model, a GPU, a
# length and a number of sequences. A model from the list moves the sliders under *Assumptions*; moving one of those makes the
# model your own ("custom", every layer alike). GPU memory is what programs see, not the number in the name.

# %% jupyter={"source_hidden": true}
# Bytes against context length, and the longest context that fits.
contexts = np.array([eighths * 2**k for k in range(7, 17) for eighths in range(8, 16)] + [2**20])
devices = models.load_devices()


def growth(shape, dtype, num_sequences):
    shapes = {"this model": shape} | models.attention_variants(shape)
    return {
        label: num_sequences * memory.sequence_kv_bytes(variant, contexts, dtype)
        for label, variant in shapes.items()
    }


def longest_each(share_bytes, shape, dtype):
    if share_bytes < memory.sequence_kv_bytes(shape, 1, dtype):
        return 0  # not even one token
    return memory.max_cached_tokens(share_bytes, shape, dtype, block_size=1)


# %% jupyter={"source_hidden": true}
# The second panel in words.
def fill_title(gpu_bytes, weights, reserve, many, longest):
    if weights + reserve < gpu_bytes:
        return f"{many} fill this GPU at {longest:,} tokens each" if longest else "None fits"
    return f"No cache fits: the weights alone fill {-(-(weights + 1) // (gpu_bytes - reserve))} such GPUs"


def fill_sentence(where, parts, many, context, cache_bytes, fitting, longest):
    gpu_text, weights_text, reserve_text = map(units.format_bytes, parts)
    start, free = f"{where}: {gpu_text} minus {weights_text} of weights and {reserve_text} of reserve", parts[0] - sum(parts[1:])
    if free <= 0:
        return f"{start} leaves nothing for the cache of {many} of {context:,} tokens."
    verdict = "which fits" if cache_bytes <= free else f"{units.format_bytes(cache_bytes - free)} too much"
    return f"{start} leaves {units.format_bytes(free)}. A cache for {many} of {context:,} tokens takes " \
        f"{units.format_bytes(cache_bytes)}, {verdict}; {fitting:,} of this length fit, or {many} of {longest:,} tokens each."


# %% jupyter={"source_hidden": true}
# What the second panel shows for its controls.
def fill_gpu(model, gpu, context, num_sequences, k_dtype, v_dtype, weights, reserve, **numbers):
    shape = models.ModelShape(**numbers) if model == "custom" else models.find_model(model)
    gpu_bytes, dtype = devices[gpu].memory_bytes, (k_dtype, v_dtype)
    parts = gpu_bytes, round(weights * units.GiB), gpu_bytes * reserve // 100
    budget = max(0, parts[0] - parts[1] - parts[2])
    longest, fitting = longest_each(budget // num_sequences, shape, dtype), memory.max_sequences(budget, shape, context, dtype)
    cache_bytes = num_sequences * memory.sequence_kv_bytes(shape, context, dtype)
    many = f"{num_sequences:,} sequence{'s' if num_sequences > 1 else ''}"
    call = panel.as_python(
        memory.max_sequences, panel.as_python(memory.kv_budget_bytes, *parts[:2], safety_bytes=parts[2]), shape, context, dtype)
    words = fill_sentence(f"{model} on one {gpu}", parts, many, context, cache_bytes, fitting, longest) + (f" `{call}`" if budget else "")
    numbers = {"gpu": gpu, "parts": parts, "context": context, "cache_bytes": cache_bytes, "longest": longest}
    numbers |= {"contexts": contexts, "curves": growth(shape, dtype, num_sequences)}
    return numbers | {"title": fill_title(*parts, many, longest), "sentence": words}


# %% jupyter={"source_hidden": true}
# A preset moves these five sliders.
def alike(name):
    """A preset as five sliders: every layer like its full layers, keys as wide as values."""
    shape, first = models.find_model(name), models.find_model(name).layer_groups[0]
    return {
        "weights": round(models.released_weight_bytes(name) / units.GiB, 2),
        "num_layers": shape.num_layers,
        "num_heads": shape.num_heads or first.num_kv_heads,
        "num_kv_heads": first.num_kv_heads,
        "head_dim": (first.k_dim + first.v_dim) // 2,
    }


presets = {"model": {name: alike(name) for name in models.load_models()}}
start = presets["model"]["llama-3.1-8b"]

# %% jupyter={"source_hidden": true}
# Controls folded away under "Assumptions".
assumptions = {
    "k_dtype": panel.Choice("key dtype", "bf16", memory.DTYPES),
    "v_dtype": panel.Choice("value dtype", "bf16", memory.DTYPES),
    "weights": panel.Slider("weights [GiB]", start["weights"], np.geomspace(0.2, 2048, 60).round(2)),
    "reserve": panel.Slider("reserve [%]", 10, range(51)),
    "num_layers": panel.Slider("layers", start["num_layers"], range(1, 129)),
    "num_heads": panel.Slider("query heads", start["num_heads"], powers_of_two),
    "num_kv_heads": panel.Slider("KV heads", start["num_kv_heads"], powers_of_two),
    "head_dim": panel.Slider("head_dim", start["head_dim"], range(32, 577, 16)),
}

# %% jupyter={"source_hidden": true}
# The second panel.
panel.Panel(
    figures.MemoryCurve(),
    fill_gpu,
    presets=presets,
    assumptions=assumptions,
    model=panel.Choice("model", "llama-3.1-8b", ["custom", *models.load_models()]),
    gpu=panel.Choice("GPU", "A100 80GB", devices),
    context=panel.Slider("context [tokens]", 32_768, contexts[::2]),
    num_sequences=panel.Slider("sequences", 8, sorted({round(2 ** (k / 2)) for k in range(21)})),
)

# %% [markdown]
# Both axes are logarithmic, so every uniform model is a straight line of the same slope. Fewer heads or fewer bits only move it
# down: 8 KV heads instead of 32 by a factor of 4, q4_0 (llama.cpp's 4 bits and a 16-bit scale for each 32 values) instead of bf16 by 3.56.
# Plain int4 counts no scales and would say 4 (chapter 5).

# %% [markdown]
# ## Second hour: today's models bend the line
#
# $$M(T) = \sum_g L_g \left( H_g \, (k_g + v_g) \, s / 8 \cdot \min(T, W_g) + c_g \right) \tag{1.2}$$
#
# | symbol | name in code | meaning | unit | value today |
# |---|---|---|---|---|
# | $M(T)$ | `sequence_kv_bytes` | what a sequence of $T$ tokens holds | bytes | 10.41 GiB |
# | $T$ | `num_tokens` | tokens of the sequence | tokens | 131,072 |
# | $g$ | `layer_groups` | layers of one kind | - | 2 |
# | $L_g, H_g$ | `num_layers`, `num_kv_heads` | layers of one kind, and KV heads of each | - | 52, 16 |
# | $k_g, v_g$ | `k_dim`, `v_dim` | width of a stored key, of a stored value | elements | 128, 128 |
# | $W_g$ | `window` | a layer forgets tokens older than this | tokens | 1,024 |
# | $c_g$ | `state_bytes` | constant state of a linear-attention layer | bytes | 0 |
#
# Two things bend it: a **sliding window** stops growing at $W_g$ tokens, and **linear attention** keeps a state of fixed size and
# nothing per token. Two only move it: **MLA** (multi-head latent attention) stores one vector instead of keys and values, 512 latent
# elements and a rotated key of 64 in DeepSeek-V3: one head, no 2. Some models give keys and values **unequal widths**. In Qwen3.8-27B only
# 16 of 64 layers grow. Tensor parallelism splits the heads over several GPUs, its ranks, and once the heads run out it copies them.

# %% jupyter={"source_hidden": true}
# What each kind of layer of a model holds.
today = ["llama-3.1-8b", "gemma-3-27b", "qwen3.8-27b", "deepseek-v3", "mimo-v2.5", "kimi-k3"]


def rows_of(shape, context, dtype, tensor_parallel):
    parts = {group.label: models.ModelShape.from_groups([group]) for group in shape.layer_groups}
    if any(group.window for group in shape.layer_groups):
        parts["if every layer were full"] = models.attention_variants(shape)["all layers full"]
    return [
        (label, memory.sequence_kv_bytes(part, context, dtype, tensor_parallel))
        for label, part in parts.items()
    ]


# %% jupyter={"source_hidden": true}
# The third panel in words.
def bend_words(model, context, ranks, rows, dtype):
    stored = [row for row in rows if not row[0].startswith("if")]
    total, alone = sum(num_bytes for _, num_bytes in stored), memory.sequence_kv_bytes(models.find_model(model), context, dtype)
    copies = f" ({total * ranks / alone:.3g} times one rank's bytes in all)" if total * ranks > alone else ""
    parts = " + ".join(f"{units.format_bytes(num_bytes)} in {label}" for label, num_bytes in stored)
    call = panel.as_python(memory.sequence_kv_bytes, models.find_model(model), context, dtype, ranks)
    full = rows[-1][1]  # if every layer were full, where some are not
    instead = f", not {units.format_bytes(full)}" if stored != rows and full > total else ""
    return {
        "title": f"{model}: {units.format_bytes(total)} at {context:,} tokens{instead}",
        "sentence": f"{model} at {context:,} tokens holds {parts} = {total:,} bytes"
        + (f", on each of {ranks} ranks{copies}" if ranks > 1 else "") + f". `{call}`",
    }


# %% jupyter={"source_hidden": true}
# What the third panel shows for its controls.
def bend(model, context, tensor_parallel, dtype):
    rows = rows_of(models.find_model(model), context, dtype, tensor_parallel)
    curves = {
        name: memory.sequence_kv_bytes(models.find_model(name), contexts, dtype, tensor_parallel) for name in today
    }
    numbers = {"selected": model, "context": context, "contexts": contexts, "curves": curves, "rows": rows}
    return numbers | bend_words(model, context, tensor_parallel, rows, dtype)


# %% jupyter={"source_hidden": true}
# The third panel.
panel.Panel(
    figures.ModelCurves(),
    bend,
    model=panel.Choice("model", "gemma-3-27b", today),
    context=panel.Slider("context [tokens]", 131_072, contexts[::2]),
    tensor_parallel=panel.Slider("tensor parallel", 1, [1, 2, 4, 8, 16]),
    dtype=panel.Choice("cache dtype", "bf16", memory.DTYPES),
)

# %% [markdown]
# Gemma-3-27B at 131,072 tokens holds 10.41 GiB, not the 62 GiB that formula (1.1) says, since 52 of its 62 layers stop at
# 1,024 tokens. What the next token adds falls accordingly:

# %%
gemma = models.find_model("gemma-3-27b")
[units.format_bytes(memory.marginal_kv_bytes(gemma, num_tokens)) for num_tokens in (100, 100_000)]

# %% [markdown]
# Engines log how many tokens fit. Dividing them by the length of your own chats is right for uniform models only: 20 GiB hold 256,816
# tokens of one Gemma-3-27B sequence, which looks like 251 chats of 1,024, and 41 fit, because short sequences pay for their windows in full.

# %%
quotient = memory.max_concurrency(memory.max_cached_tokens(20 * units.GiB, gemma), 1024)
round(quotient), memory.max_sequences(20 * units.GiB, gemma, 1024)

# %% [markdown]
# With 4 KV heads, 8 ranks store each head twice: a rank holds as much as with 8 heads. MLA has one head and copies it on every rank.

# %%
[memory.kv_heads_per_rank(num_kv_heads, tensor_parallel=8) for num_kv_heads in (8, 4, 1)]

# %% [markdown]
# ## Against published numbers
#
# Numbers that others printed, each with its own model and rounding. Tolerance, stated before looking: 0.5 % relative, which covers two
# printed decimals. Every entry of `data/published_numbers.json` is checked in `tests/test_published_numbers.py`; here are ten of them.


# %% jupyter={"source_hidden": true}
# The models that the published numbers are about.
def beside(what, entry_id, predicted):
    entry = checks.published(entry_id)
    return what, predicted, entry["expected"], entry["source"]


opt_token, llama_70b_token, deepseek_token, llama_token = (
    memory.kv_bytes_per_token(models.find_model(name))
    for name in ("opt-13b", "llama-3.1-70b", "deepseek-v3", "llama-3.1-8b")
)
coder_32b = models.ModelShape(num_layers=64, num_kv_heads=8, head_dim=128)
coder_7b = models.ModelShape(num_layers=32, num_kv_heads=32, head_dim=128)
window_layers = models.ModelShape.from_groups([models.LayerGroup(52, 16, 128, 128, window=1024)])

# %%
logged = [
    beside("OPT-13B [KiB/token]", "vllm-paper-opt13b", opt_token // units.KiB),
    beside("Llama-3-70B [KiB/token]", "mooncake-70b", llama_70b_token // units.KiB),
    beside("DeepSeek-V3 [kB/token]", "isca-dsv3", deepseek_token / 1000),
    beside("1,952 blocks of 16 [GiB]", "vllm-10517-20k-gib", 1952 * 16 * llama_token / units.GiB),
    beside("... for 20,000 tokens each [x]", "vllm-10517-20k-conc", memory.max_concurrency(1952 * 16, 20_000)),
]

# %%
fitted = {
    "vllm-cpu-blocks-llama3-8b": memory.max_cached_tokens(4 * units.GiB, llama) // 16,
    "vllm-cpu-blocks-deepseekcoder-tp2": memory.max_cached_tokens(4 * units.GiB, coder_7b, "fp16", 2) // 16,
    "mooncake-1tb": units.parse_bytes("1 TB") // llama_70b_token / 1e6,
    "llamacpp-11200-q8": memory.sequence_kv_bytes(coder_32b, 32_768, "q8_0") // units.MiB,
}
names = ["8B, 4 GiB [blocks]", "6.7B, 4 GiB, 2 ranks [blocks]", "70B, 1 TB [M tokens]", "32B, 32K, q8_0 [MiB]"]
fits = [beside(what, *item) for what, item in zip(names, fitted.items(), strict=True)]
window_source = checks.published("gemma27b-local-cells")["source"]
window_mib = memory.sequence_kv_bytes(window_layers, 4096) // units.MiB
window = ("Gemma-3-27B, window layers [MiB]", window_mib, 442, window_source)
checks.Comparison([*logged, *fits, window], tolerance=0.005)

# %% [markdown]
# Two misses stay. The Mooncake paper says "about" 3 million tokens. llama.cpp gives a window layer 1,088 cells instead of 1,024,
# since its window also holds the tokens of the running batch (here 64): 6.25 % more than the formula, and 1,088 cells make its 442 MiB exactly.

# %% [markdown]
# ## Exercises
#
# **1.1** Keys in `k_bits`, values in `v_bits`: bytes per token? (1 line)


# %%
def mixed_bytes(num_layers, num_kv_heads, head_dim, k_bits, v_bits):
    # solution
    return num_layers * num_kv_heads * head_dim * (k_bits + v_bits) // 8


checks.check_mixed_widths(mixed_bytes)

# %% [markdown]
# **1.2** A group of values shares one 16-bit scale. How many bits does a value take? (1 line)


# %%
def bits_with_scale(payload_bits, group_size):
    # solution
    return payload_bits + 16 / group_size


checks.check_scale_overhead(bits_with_scale)

# %% [markdown]
# **1.3** Transfer. You have `budget_bytes` and chats of `num_tokens` each, for a model with windows. How many chats fit? (1 line)
# Then decide: Gemma-3-27B with 20 GiB of bf16 cache must hold 40 chats of 1,024 tokens. Does it, and how many of 8,192 tokens?


# %%
def chats_that_fit(budget_bytes, shape, num_tokens):
    # solution
    return budget_bytes // memory.sequence_kv_bytes(shape, num_tokens)


checks.check_chats_that_fit(chats_that_fit)

# %% [markdown]
# The decision: how many of 1,024 tokens, and of 8,192.

# %%
[memory.max_sequences(20 * units.GiB, gemma, num_tokens) for num_tokens in (1024, 8192)]

# %% [markdown]
# ## What the formula leaves out
#
# - Blocks: caches are handed out in whole blocks, up to `block_size - 1` tokens more per sequence (chapter 2).
# - Scales and minima of a quantized cache: counted where the dtype's name has them (6 % of q8_0, 11 % of q4_0, `int4/g32`). Bare int8, int4 and
#   int2 have none: +0.5 bits a value for 16-bit scales of groups of 32.
# - Window layers in some engines: the running batch on top of the window, 64 of 1,024 tokens above (+6 %), and 512 in the same log's next row (+50 %).
# - Index keys of sparse attention (DeepSeek-V3.2, GLM-5, MiniMax-M3): 128 more elements a token and layer, often in fp8 (+11 % for DeepSeek-V3.2).
# - Draft layers for multi-token prediction: one more layer's cache where they run (+1.6 % for DeepSeek-V3).
# - Weights, activations and buffers: not cache, but they decide what is left; the more tokens a step may
#   compute (without chunked prefill: the longest prompt), the fewer blocks.
# - Sharing of prefixes (chapter 4): less than the sum over sequences.
#
# ## References
#
# 1. Kwon et al., "Efficient Memory Management for Large Language Model Serving with PagedAttention", 2023, arXiv:2309.06180, section 3.
# 2. Shazeer, "Fast Transformer Decoding: One Write-Head is All You Need", 2019, arXiv:1911.02150, section 3 (MQA).
# 3. Ainslie et al., "GQA: Training Generalized Multi-Query Transformer Models", 2023, arXiv:2305.13245, section 2.2.
# 4. DeepSeek-AI, "DeepSeek-V2", 2024, arXiv:2405.04434, section 2.1 (MLA).
# 5. Data: `data/README.md`.
#
# Next question: why does a sequence pay for tokens it does not have?
