"""Causal softmax attention, as every module here understands it."""

import numpy as np


def attention_weights(xp, q, k):
    """Weights of each query's keys, [kv_heads, query heads of each, queries, tokens]."""
    (num_heads, n, head_dim), (num_kv_heads, num_tokens, _) = q.shape, k.shape
    grouped = q.reshape(num_kv_heads, num_heads // num_kv_heads, n, head_dim)
    scores = grouped @ k[:, None].swapaxes(-1, -2) * head_dim**-0.5
    position = xp.arange(num_tokens)
    scores = xp.where(position <= position[num_tokens - n :, None], scores, -np.inf)
    weights = xp.exp(scores - scores.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)
