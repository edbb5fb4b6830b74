"""Make token_figures.json: the text of the sample's tokens, and what rules cost in all 30 layers.

smollm2_kv.npz holds three layers and the last queries only. This script runs the model again, as
record_kv_sample.py does (see there for what to install), and keeps one number a layer and rule:

    python data/make_token_figures.py

Each of the last 64 queries keeps 205 keys, a fifth of the sequence:

- recent: the newest 205.
- sinks: the first 4 and the newest 201.
- heavy: the newest 102 and the 103 that queries 0 to 959 attended to most, chosen for each query
  anew.
- evicted: the same rule as a cache must play it from the first token on; what it dropped is gone
  and scores add up only what is still there.
"""

import json
from pathlib import Path

import numpy as np
import record_kv_sample

from kvlib import token_selection

KEPT, RECENT, SINKS, JUDGED = 205, 102, 4, 64


def errors(q, k, v):
    """Return every rule's error of the attention output of the last queries."""
    q, k, v = (array.astype(np.float32) for array in (q, k, v))
    num_tokens, seen = k.shape[1], k.shape[1] - JUDGED
    received = token_selection.accumulated_attention(q[:, :seen], k[:, :seen])
    masks = {
        "recent": token_selection.keep_recent(num_tokens, JUDGED, KEPT),
        "sinks": token_selection.keep_recent(num_tokens, JUDGED, KEPT, SINKS),
        "heavy": token_selection.keep_highest(received, JUDGED, KEPT, RECENT, num_tokens),
        "evicted": token_selection.evict_for_good(q, k, KEPT, RECENT)[:, seen:],
    }
    attention = token_selection.KeptAttention(q[:, seen:], k, v)
    return {rule: round(attention.error(kept), 4) for rule, kept in masks.items()}


def main():
    weights = record_kv_sample.Weights(record_kv_sample.find_weights())
    token_ids = np.load(record_kv_sample.SHIPPED, allow_pickle=False)["token_ids"]
    num_layers = int(weights.number("block_count"))
    record_kv_sample.LAYERS, record_kv_sample.FIRST_QUERY = range(num_layers), 0
    arrays = record_kv_sample.record(weights, token_ids)
    layers = [errors(*(arrays[f"{name}_{i}"] for name in "qkv")) for i in range(num_layers)]
    figures = {
        "tokens": [record_kv_sample.decode(weights, [token]) for token in token_ids],
        "kept": KEPT,
        "errors": {rule: [layer[rule] for layer in layers] for rule in layers[0]},
    }
    target = Path(__file__).with_name("token_figures.json")
    target.write_text(json.dumps(figures, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
