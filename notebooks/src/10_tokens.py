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

from kvlib import blocks, checks, figures, memory, models, panel, quantization, token_selection

# %% [markdown]
# Chapters 7 and 8 evict whole sequences. Here one sequence must shrink, and recency or frequency of *access* says nothing: every
# query reads every key. Keys and values below are real: SmolLM2-135M reads the first 1,024 tokens of Jane Austen's *Persuasion*
# ("Sir Walter Elliot, of Kellynch Hall, in Somersetshire, ..."). Keep the newest fifth of the keys, and layer 26's attention output
# is off by 121 % of its own length. Now give up the 4 oldest of these 205 for the novel's first 4 tokens.

# %% jupyter={"source_hidden": true}
# Three layers; the first 32 recorded queries vote, the other 32 judge.
sample, tokens = quantization.load_kv_sample(), token_selection.load_token_figures()["tokens"]
num_tokens, judged, rules = 1024, 32, token_selection.RULES
names = dict(zip(rules, ("recent", "sinks + recent", "heavy hitters + recent", "observed + recent"), strict=True))
queries = {layer: sample[layer].q[:, judged:] for layer in sample}
scores = {
    (layer, rule): token_selection.rule_scores(sample[layer], rule) for layer in sample for rule in rules
}
drawn = {
    layer: token_selection.accumulated_attention(queries[layer], sample[layer].k).sum(axis=0) / (9 * judged)
    for layer in sample
}


# %% jupyter={"source_hidden": true}
# What a rule keeps, and what its output is off by; each number is computed once.
def parts_of(rule, kept, share, sinks):
    """How many of the kept keys are the newest."""
    return {"recent": kept, "sinks": max(0, kept - sinks)}.get(rule, round(kept * share / 100))


@functools.lru_cache(512)
def mask(layer, rule, kept, recent):
    return token_selection.keep_highest(scores[layer, rule], judged, kept, recent, num_tokens)


@functools.cache
def attention(layer, bits=16):
    return token_selection.KeptAttention(queries[layer], sample[layer].k, sample[layer].v, *read_back(layer, bits))


@functools.cache
def error(layer, rule, kept, recent, bits=16):
    """Error of the attention output [%]."""
    return 100 * attention(layer, bits).error(mask(layer, rule, kept, recent))
