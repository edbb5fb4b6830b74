"""Causal softmax attention, as every module here understands it."""

import numpy as np


def attention_weights(xp, q, k):
    """Weights of each query's keys, [kv_heads, query heads of each, queries, (versions,) tokens].

    Queries are [heads, n, d], the last n of the sequence; keys [kv_heads, (versions,) tokens, d].
    """
    (num_heads, n, head_dim), (num_kv_heads, *versions, num_tokens, _) = q.shape, k.shape
    queries = q.reshape(num_kv_heads, -1, head_dim) * head_dim**-0.5
    weights = queries @ k.reshape(num_kv_heads, -1, head_dim).swapaxes(1, 2)
    weights = weights.reshape(num_kv_heads, num_heads // num_kv_heads, n, *versions, num_tokens)
    last_seen = xp.arange(num_tokens - n, num_tokens).reshape(n, *[1] * (len(versions) + 1))
    weights += xp.where(xp.arange(num_tokens) > last_seen, -np.inf, 0).astype(weights.dtype)
    weights -= weights.max(axis=-1, keepdims=True)
    # Of less than e**-80 exp would make denormals, which multiply very slowly.
    weights = xp.exp(xp.where(weights < -80, -np.inf, weights))
    weights /= weights.sum(axis=-1, keepdims=True)
    return weights


def output_norm(xp, output):
    """||o||, which a relative error divides by."""
    norm = float(xp.linalg.norm(output))
    if not norm:
        raise ValueError("||o||=0; a relative error needs an output. Pass values that are not 0.")
    return norm
