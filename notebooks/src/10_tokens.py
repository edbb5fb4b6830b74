# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 10 · Which tokens matter?
#
# 一条序列里，哪些 token 值得留下？（KV 驱逐数学，第 8 节表格第四行：“强依赖历史重要性、需要内容感知”）
#
# - **In a hurry:** `token_selection.rule_error(quantization.load_kv_sample()[26], "sinks", 205, 201)` gives 0.117: a fifth of the keys, an output 12 % off.
# - **You will be able to decide** whether to drop tokens or bits, by which rule, and how much memory that really returns.
# - **Needs** chapters 2 (blocks), 5 (bits) and 7 (eviction). **20 minutes**, and 10 more for the second hour.
# - **First** choose *Run > Run All Cells*: until then the pictures stand still. A click opens folded code.

# %%
import functools

import numpy as np

from kvlib import blocks, checks, figures, memory, models, panel, quantization, token_selection, units

# %% [markdown]
# Chapters 7 and 8 evict whole sequences. Here one sequence must shrink, and counting accesses does not help: every query reads
# every key. The keys are real: a small model reads the opening of Jane Austen's *Persuasion*, "Sir Walter Elliot, of Kellynch
# Hall, ...". Keep the newest 205 of 1,024 keys, and layer 26's attention output is off by 121 % of its own length.

# %% jupyter={"source_hidden": true}
# Three layers; the first 32 recorded queries vote, the other 32 judge.
sample, tokens = quantization.load_kv_sample(), token_selection.load_token_figures()["tokens"]
num_tokens, judged, rules = 1024, 32, token_selection.RULES
names = dict(zip(rules, ("recent", "sinks + recent", "heavy + recent", "observed + recent"), strict=True))
queries = {layer: sample[layer].q[:, -judged:] for layer in sample}
scores = {(layer, rule): token_selection.rule_scores(sample[layer], rule) for layer in sample for rule in rules}
drawn = {
    layer: token_selection.accumulated_attention(queries[layer], sample[layer].k).sum(axis=0) / (9 * judged)
    for layer in sample
}


# %% jupyter={"source_hidden": true}
# What a rule keeps and what its output is off by; each number is computed once.
def newest(rule, kept, share, sinks):
    """How many of the kept keys are the newest."""
    return {"recent": kept, "sinks": max(0, kept - sinks)}.get(rule, round(kept * share / 100))


@functools.lru_cache(512)
def mask(layer, rule, kept, recent):
    return token_selection.keep_highest(scores[layer, rule], judged, kept, recent, num_tokens)


@functools.cache
def error(layer, rule, kept, recent, dtype="fp16"):
    return 100 * attention(layer, dtype).error(mask(layer, rule, kept, recent))


# %% jupyter={"source_hidden": true}
# Keys and values as they are, or read back from chapter 5's best scheme: keys by channel, values by token.
widths = {"fp16": 16, "int8/g32z": 8, "int4/g32z": 4, "int2/g32z": 2}


@functools.cache
def attention(layer, dtype="fp16"):
    stored = [sample[layer].k, sample[layer].v]
    for i, granularity in enumerate(("channel", "token") if widths[dtype] < 16 else ()):
        stored[i] = quantization.dequantize(quantization.quantize(
            stored[i], bits=widths[dtype], symmetric=False, zero="minimum", granularity=granularity,
            group_size=32, scale_dtype="float16"))
    return token_selection.KeptAttention(queries[layer], sample[layer].k, sample[layer].v, *stored)


# %% jupyter={"source_hidden": true}
# Every curve a slider step can show, computed beforehand.
def keys(percent):
    return -(-num_tokens * percent // 100)


grid = [keys(percent) for percent in (2, 3, 5, 7, 10, 14, 20, 30, 45, 65, 80, 95)]
shares, sink_steps = [0, 10, 25, 50, 75, 100], [0, 1, 2, 4, 8, 16, 32]


def curve(layer, rule, share=50, sinks=4, dtype="fp16"):
    return [error(layer, rule, kept, newest(rule, kept, share, sinks), dtype) for kept in grid]


for layer in sample:
    for share, sinks in [*((share, 4) for share in shares), *((50, sinks) for sinks in sink_steps)]:
        rows = [curve(layer, rule, share, sinks) for rule in rules]


# %% jupyter={"source_hidden": true}
# The words that stand at the positions drawing most attention, not closer than 60 tokens.
def heaviest_words(layer, count=5):
    places = []
    for place in np.argsort(-drawn[layer]).tolist():
        if tokens[place].strip() and all(abs(place - other) > 60 for other in places):
            places.append(place)
    return [(place, f"“{tokens[place].strip()}”") for place in places[:count] if drawn[layer][place] > 0.02]


words = {layer: heaviest_words(layer) for layer in sample}


def call_of(layer, rule, kept, recent):
    recorded = panel.Code(f"quantization.load_kv_sample()[{layer}]")
    return f"round(100 * {panel.as_python(token_selection.rule_error, recorded, rule, kept, recent)}, 1)"


# %% jupyter={"source_hidden": true}
# What the first panel shows for its controls.
def select(percent, share, sinks, layer):
    layer, kept = int(layer), keys(percent)
    recent = {rule: newest(rule, kept, share, sinks) for rule in rules}
    off = {rule: error(layer, rule, kept, recent[rule]) for rule in rules}
    best, (place, word) = min(rules, key=off.get), words[layer][0]
    parts = "; ".join(f"{names[rule]} ({kept - recent[rule]} + {recent[rule]}) {off[rule]:.1f} %" for rule in rules)
    x = 100 * np.array(grid) / num_tokens
    return {
        "title": f"Layer {layer}, {percent} % of the keys: {names[best]} wins, {off[best]:.1f} % off",
        "sentence": f"Layer {layer}, {percent} % of 1,024 keys kept, others + newest; the output is off by: {parts}. {word} at position "
        f"{place} draws {drawn[layer][place]:.0%} of the attention. `{call_of(layer, best, kept, recent[best])}`".replace("0% of", "0 % of"),
        "curves": [(x, curve(layer, rule, share, sinks)) for rule in rules], "points": [(percent, off[rule]) for rule in rules],
        "tags": [f"{rule[0].upper()}  {rule} {off[rule]:.1f} %" for rule in rules], "guess_at": 20,
        "kept": np.concatenate([mask(layer, rule, kept, recent[rule])[:, -1].mean(axis=0)[None] for rule in rules]),
        "drawn": drawn[layer], "words": words[layer]}


# %% jupyter={"source_hidden": true}
# The first panel.
question = "Give up the 4 oldest of these 205 keys for the novel's first 4. What is left of the 121 %?"

panel.Panel(
    figures.RuleCurves(),
    select,
    guess=panel.Guess(question, ("about 119 %", "about 60 %", "about 12 %")),
    percent=panel.Slider("keys kept [%]", 20, range(2, 101)),
    share=panel.Slider("recent share [%]", 50, shares),
    sinks=panel.Slider("sinks", 4, sink_steps),
    layer=panel.Choice("layer", "26", ["4", "14", "26"]),
)
