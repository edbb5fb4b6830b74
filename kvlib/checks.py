"""Checks a chapter runs on itself: exercises, and predictions beside published numbers."""

import html
import itertools
import math
import os
import random
from numbers import Real

import numpy as np

from kvlib._data import read_json
from kvlib._validate import one_of
from kvlib.blocks import appended_blocks, blocks_needed, fragmentation, tail_waste
from kvlib.eviction import break_even_tokens, recompute_seconds, refill_seconds
from kvlib.gather import gather_bytes, gather_kv
from kvlib.memory import bits_per_value, kv_bytes_per_token, max_sequences, sequence_kv_bytes
from kvlib.models import LayerGroup, ModelShape
from kvlib.plan import plan
from kvlib.quantization import quantize_per_channel_asymmetric, quantize_per_channel_symmetric
from kvlib.sharing import prefix_saving_blocks, shareable_tokens
from kvlib.token_selection import freed_blocks, keep_highest, keep_recent


class Verdict(str):
    """A one-line result that shows without quotes."""

    __repr__ = str.__str__


def published(entry_id):
    """Return one number that somebody else published.

    Parameters
    ----------
    entry_id : str
        The ``id`` in data/published_numbers.json.

    Returns
    -------
    dict
        The entry: source, inputs, expected, unit and the rule it needs.

    Raises
    ------
    ValueError
        If there is no entry of that id.

    Examples
    --------
    >>> published("isca-dsv3")["expected"]
    70.272
    """
    for entry in read_json("published_numbers.json"):
        if entry["id"] == entry_id:
            return entry
    raise ValueError(f"entry_id={entry_id!r}; no such entry. See data/published_numbers.json.")


class Comparison:
    """A table: predicted beside reported, misses kept.

    Parameters
    ----------
    rows : iterable of tuple
        ``(what, predicted, reported, source)`` each; the numbers in the same unit.
    tolerance : float
        Largest relative difference that counts as agreement, 0 to 1.

    Attributes
    ----------
    misses : list of str
        The rows that differ by more than the tolerance.

    Examples
    --------
    >>> Comparison([("OPT-13B [KiB/token]", 800, 800, "vLLM paper")], tolerance=0)
    what                | predicted | reported | difference |    | source
    OPT-13B [KiB/token] | 800       | 800      | +0.00 %    | ok | vLLM paper
    """

    def __init__(self, rows, tolerance):
        self._lines = [("what", "predicted", "reported", "difference", "", "source")]
        self.misses = []
        for what, predicted, reported, source in rows:
            difference = predicted / reported - 1
            agrees = abs(difference) <= tolerance
            if not agrees:
                self.misses.append(what)
            self._lines.append(
                (
                    what,
                    f"{predicted:,.6g}" if isinstance(predicted, float) else f"{predicted:,}",
                    f"{reported:,}",
                    f"{difference:+.2%}".replace("%", " %"),
                    "ok" if agrees else "miss",
                    source,
                )
            )

    def __repr__(self):
        widths = [max(map(len, column)) for column in zip(*self._lines, strict=True)]
        return "\n".join(
            " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
            for line in self._lines
        )

    def _repr_html_(self):
        rows = ["".join(f"<td>{html.escape(cell)}</td>" for cell in line) for line in self._lines]
        return "<table><tr>" + "</tr>\n<tr>".join(rows) + "</tr></table>"


def _positions(mask):
    """Positions that the last query of the first head keeps."""
    return np.flatnonzero(mask[0, -1]).tolist()


def simulated_hits(policy):
    """Return what two other simulators counted on the Mooncake conversation trace [blocks].

    Parameters
    ----------
    policy : {"lru", "lfu", "belady"}
        Who leaves.

    Returns
    -------
    dict of int to int
        Resident hits at each capacity, file order [blocks].

    Raises
    ------
    ValueError
        If the policy is none of the three.

    Examples
    --------
    >>> simulated_hits("belady")
    {1000: 54994, 10000: 105710}
    """
    keys = {"lru": "lru", "lfu": "lfu (ties: least recent)", "belady": "belady"}
    recorded = read_json("cache_crosscheck.json")
    hits = recorded["block_hits"][keys[one_of("policy", policy, keys)]]
    if policy == "lru":
        hits = dict(zip(recorded["capacities"], hits, strict=True))
    return {int(capacity): count for capacity, count in hits.items()}


def check_mixed_widths(answer):
    """Check exercise 1.1: bytes per token when keys and values have different widths.

    Parameters
    ----------
    answer : callable
        The reader's ``mixed_bytes(num_layers, num_kv_heads, head_dim, k_bits, v_bits)``.

    Returns
    -------
    Verdict
        PASS, NOT YET with the first case that differs, or NOT TRIED.
    """
    widths = {4: "int4", 8: "int8", 16: "bf16", 32: "fp32"}

    def _make_case(rng):
        shape = (rng.randint(1, 96), rng.choice([1, 2, 4, 8]), rng.choice([64, 80, 128, 256]))
        return *shape, rng.choice(list(widths)), rng.choice(list(widths))

    def _expected(num_layers, num_kv_heads, head_dim, k_bits, v_bits):
        shape = ModelShape(num_layers=num_layers, num_kv_heads=num_kv_heads, head_dim=head_dim)
        return kv_bytes_per_token(shape, (widths[k_bits], widths[v_bits]))

    return _check(answer, _make_case, _expected)


def check_scale_overhead(answer):
    """Check exercise 1.2: bits per value when a group of values shares a scale.

    Parameters
    ----------
    answer : callable
        The reader's ``bits_with_scale(payload_bits, group_size)``.

    Returns
    -------
    Verdict
        PASS, NOT YET with the first case that differs, or NOT TRIED.
    """

    def _expected(payload_bits, group_size):
        return float(bits_per_value(f"int{payload_bits}/g{group_size}"))

    return _check(
        answer, lambda rng: (rng.choice([2, 4, 8]), rng.choice([16, 32, 64, 128])), _expected
    )


def check_chats_that_fit(answer):
    """Check exercise 1.3: how many chats of one length fit a budget, windows included.

    Parameters
    ----------
    answer : callable
        The reader's ``chats_that_fit(budget_bytes, shape, num_tokens)``.

    Returns
    -------
    Verdict
        PASS, NOT YET with the first case that differs, or NOT TRIED.
    """

    def _make_case(rng):
        heads, width = rng.choice([1, 4, 8, 16]), rng.choice([64, 128, 256])
        full = LayerGroup(rng.randint(1, 20), heads, width, width)
        window = LayerGroup(rng.randint(1, 60), heads, width, width, rng.choice([128, 1024]))
        shape = ModelShape.from_groups([full, window])
        return rng.randint(1, 80) * 2**30, shape, rng.choice([256, 1024, 8192, 131_072])

    return _check(answer, _make_case, max_sequences)


def check_slot_of(answer):
    """Check exercise 6.1: where a token stands in a paged pool.

    Parameters
    ----------
    answer : callable
        The reader's ``slot_of(t, block_table, block_size)``.

    Returns
    -------
    Verdict
        PASS, NOT YET with the first case that differs, or NOT TRIED.
    """

    def _make_case(rng):
        table, block_size = rng.sample(range(99), rng.randint(1, 6)), rng.choice([1, 8, 16, 128])
        return rng.randrange(len(table) * block_size), table, block_size

    def _expected(t, block_table, block_size):
        pool = np.arange(99 * block_size).reshape(99, block_size)
        return divmod(int(gather_kv(pool, block_table, t + 1)[-1]), block_size)

    return _check(answer, _make_case, _expected)


def check_fused_gain(answer):
    """Check exercise 6.2: bytes of two steps over bytes of one fused read.

    Parameters
    ----------
    answer : callable
        The reader's ``fused_gain(stored_bits)``.

    Returns
    -------
    Verdict
        PASS, NOT YET with the first case that differs, or NOT TRIED.
    """

    def _expected(stored_bits):
        two_steps, fused = (
            gather_bytes(path, int(stored_bits * 4), 64)
            for path in ("gather, then dequantize", "gather and dequantize fused")
        )
        return two_steps / fused

    return _check(answer, lambda rng: (rng.choice([2, 2.5, 4, 4.5, 6, 8, 8.25, 8.5]),), _expected)


def check_outweighs_from(answer):
    """Check exercise 6.3: the batch from which caches outweigh the weights.

    Parameters
    ----------
    answer : callable
        The reader's ``outweighs_from(weight_bytes, shape, num_tokens)``.

    Returns
    -------
    Verdict
        PASS, NOT YET with the first case that differs, or NOT TRIED.
    """

    def _make_case(rng):
        shape = ModelShape(num_layers=rng.randint(8, 80), num_kv_heads=8, head_dim=128)
        num_tokens = rng.choice([1024, 8192, 32_768])
        whole_batches = rng.randint(1, 90) * sequence_kv_bytes(shape, num_tokens)
        return whole_batches + rng.choice([-1, 0, 1]), shape, num_tokens

    def _expected(weight_bytes, shape, num_tokens):
        return next(
            batch
            for batch in range(1, 99)
            if batch * sequence_kv_bytes(shape, num_tokens) >= weight_bytes
        )

    return _check(answer, _make_case, _expected)


def check_blocks_to_grow(answer):
    """Check exercise 3.1: blocks that a sequence of known length takes when it grows.

    Parameters
    ----------
    answer : callable
        The reader's ``blocks_to_grow(num_tokens, num_new_tokens, block_size)``.

    Returns
    -------
    Verdict
        PASS, NOT YET with the first case that differs, or NOT TRIED.
    """

    def _expected(num_tokens, num_new_tokens, block_size):
        return appended_blocks(num_new_tokens, tail_waste(num_tokens, block_size), block_size)

    return _check(
        answer, lambda rng: (rng.randint(0, 99), rng.randint(1, 99), rng.randint(1, 20)), _expected
    )


def check_blocks_freed(answer):
    """Check exercise 3.2: blocks that become free when their sequence leaves.

    Parameters
    ----------
    answer : callable
        The reader's ``blocks_freed(ref_counts)``.

    Returns
    -------
    Verdict
        PASS, NOT YET with the first case that differs, or NOT TRIED.
    """

    def _make_case(rng):
        return (sorted(rng.choices([1, 1, 2, 3], k=rng.randint(1, 9)), reverse=True),)

    return _check(answer, _make_case, lambda ref_counts: ref_counts.count(1))


def check_blocks_to_hold_back(answer):
    """Check exercise 3.3: free blocks that let every sequence decode on, whatever its tail.

    Parameters
    ----------
    answer : callable
        The reader's ``blocks_to_hold_back(num_sequences, num_steps, block_size)``.

    Returns
    -------
    Verdict
        PASS, NOT YET with the first case that differs, or NOT TRIED.
    """

    def _expected(num_sequences, num_steps, block_size):
        full_tail = 0
        return num_sequences * appended_blocks(num_steps, full_tail, block_size)

    return _check(
        answer, lambda rng: (rng.randint(1, 64), rng.randint(1, 99), rng.randint(1, 32)), _expected
    )


def check_blocks_saved(answer):
    """Check exercise 4.1: blocks that a shared prefix saves after some branches wrote.

    Parameters
    ----------
    answer : callable
        The reader's ``blocks_saved(num_branches, prefix_tokens, block_size, num_written)``.

    Returns
    -------
    Verdict
        PASS, NOT YET with the first case that differs, or NOT TRIED.
    """

    def _make_case(rng):
        num_branches = rng.randint(1, 8)
        prefix = rng.randint(0, 300), rng.choice([1, 4, 16, 32])
        return num_branches, *prefix, rng.randint(0, num_branches)

    return _check(answer, _make_case, prefix_saving_blocks)


def check_tokens_to_compute(answer):
    """Check exercise 4.2: tokens of a prompt that a prefix cache does not spare.

    Parameters
    ----------
    answer : callable
        The reader's ``tokens_to_compute(prefix_tokens, prompt_tokens, block_size)``.

    Returns
    -------
    Verdict
        PASS, NOT YET with the first case that differs, or NOT TRIED.
    """

    def _make_case(rng):
        prefix_tokens = rng.choice([16, 32, 48, rng.randint(1, 300)])
        prompt_tokens = prefix_tokens + rng.choice([0, rng.randint(0, 200)])
        return prefix_tokens, prompt_tokens, rng.choice([1, 4, 16, 528])

    return _check(answer, _make_case, lambda *case: case[1] - shareable_tokens(*case))


def check_blocks_saved_by_padding(answer):
    """Check exercise 4.3: blocks that padding a shared prompt saves in the end.

    Parameters
    ----------
    answer : callable
        The reader's ``blocks_saved_by_padding(num_branches, prefix_tokens, suffix_tokens,
        block_size)``.

    Returns
    -------
    Verdict
        PASS, NOT YET with the first case that differs, or NOT TRIED.
    """

    def _in_use(num_branches, prefix_tokens, suffix_tokens, block_size):
        alone = num_branches * blocks_needed(prefix_tokens + suffix_tokens, block_size)
        return alone - prefix_saving_blocks(num_branches, prefix_tokens, block_size, num_branches)

    def _expected(num_branches, prefix_tokens, *rest):
        padded = prefix_tokens + tail_waste(prefix_tokens, rest[-1])
        return _in_use(num_branches, prefix_tokens, *rest) - _in_use(num_branches, padded, *rest)

    def _make_case(rng):
        return rng.randint(1, 8), rng.randint(1, 200), rng.randint(1, 60), rng.choice([4, 8, 16])

    return _check(answer, _make_case, _expected)


def check_empty_slots(answer):
    """Check exercise 2.1: the empty slots of sequences of these lengths.

    Parameters
    ----------
    answer : callable
        The reader's ``empty_slots(lengths, block_size)``.

    Returns
    -------
    Verdict
        PASS, NOT YET with the first case that differs, or NOT TRIED.
    """

    def _make_case(rng):
        block_size = rng.choice([1, 4, 16, 256])
        return [rng.choice([block_size, rng.randint(0, 600)]) for _ in range(3)], block_size

    def _expected(lengths, block_size):
        return sum(tail_waste(num_tokens, block_size) for num_tokens in lengths)

    return _check(answer, _make_case, _expected)


def check_largest_block_size(answer):
    """Check exercise 2.2: the largest block that keeps the loss below a bound.

    Parameters
    ----------
    answer : callable
        The reader's ``largest_block_size(lengths, most_percent)``.

    Returns
    -------
    Verdict
        PASS, NOT YET with the first case that differs, or NOT TRIED.
    """

    def _expected(lengths, most_percent):
        powers = [2**k for k in range(12)]
        return max(b for b in powers if 100 * fragmentation(lengths, b) <= most_percent)

    return _check(
        answer,
        lambda rng: ([rng.randint(1, 5000) for _ in range(5)], rng.choice([1, 2, 4, 10])),
        _expected,
    )


def check_paying_tenant(answer):
    """Check exercise 7.1: the tenant that is furthest above its quota.

    Parameters
    ----------
    answer : callable
        The reader's ``paying_tenant(usage, quotas)``.

    Returns
    -------
    Verdict
        PASS, NOT YET with the first case that differs, or NOT TRIED.
    """

    def _make_case(rng):
        tenants = "ABCD"[: rng.randint(2, 4)]
        return tuple({t: rng.randint(0, most) for t in tenants} for most in (6, 12))

    def _expected(usage, quotas):
        excess = {tenant: usage[tenant] - quotas[tenant] for tenant in usage}
        payer = max(excess, key=lambda tenant: (excess[tenant], tenant))
        return payer if excess[payer] > 0 else "nobody"

    return _check(answer, _make_case, _expected)


def check_blocks_back(answer):
    """Check exercise 7.2: the blocks that a victim really gives back.

    Parameters
    ----------
    answer : callable
        The reader's ``blocks_back(victim, others)``.

    Returns
    -------
    Verdict
        PASS, NOT YET with the first case that differs, or NOT TRIED.
    """

    def _make_case(rng):
        tables = [rng.sample(range(12), rng.randint(1, 8)) for _ in range(rng.randint(1, 4))]
        return tables[0], tables[1:]

    def _expected(victim, others):
        return sum(not any(block in table for table in others) for block in victim)

    return _check(answer, _make_case, _expected)


def check_faster_way(answer):
    """Check exercise 7.3: whether to copy an evicted context back or to recompute it.

    Parameters
    ----------
    answer : callable
        The reader's ``faster_way(num_tokens, bytes_per_token, bytes_per_second,
        prefill_tokens_per_second, attention_tokens)``.

    Returns
    -------
    Verdict
        PASS, NOT YET with the first case that differs, or NOT TRIED.
    """

    def _make_case(rng):
        link = rng.choice([0.25, 0.5, 1, 2, 25]) * 1e9
        model = rng.choice([70_272, 131_072, 327_680])
        return rng.randint(1, 200_000), model, link, rng.choice([2000.0, 8000.0]), 30_000

    def _expected(num_tokens, bytes_per_token, bytes_per_second, rate, attention_tokens):
        even = break_even_tokens(bytes_per_token, bytes_per_second, rate, attention_tokens)
        return "copy" if num_tokens >= even else "recompute"

    return _check(answer, _make_case, _expected)


def check_sequences_on_ranks(answer):
    """Check exercise 9.1: sequences that fit beside the weights of a tensor-parallel group.

    Parameters
    ----------
    answer : callable
        The reader's ``sequences_on_ranks(usable_bytes, weight_bytes, ranks, sequence_bytes)``.

    Returns
    -------
    Verdict
        PASS, NOT YET with the first case that differs, or NOT TRIED.
    """

    def _make_case(rng):
        ranks = rng.choice([1, 2, 4, 8])
        return (
            rng.randint(10**9, 10**11),
            rng.randint(10**9, 2 * 10**11),
            ranks,
            rng.randint(1, 10**9),
        )

    def _expected(usable_bytes, weight_bytes, ranks, sequence_bytes):
        left = max(0, usable_bytes - blocks_needed(weight_bytes, ranks))
        return left // sequence_bytes

    return _check(answer, _make_case, _expected)


def check_sequences_with_prefix(answer):
    """Check exercise 9.2: sequences that fit when they share a prefix.

    Parameters
    ----------
    answer : callable
        The reader's ``sequences_with_prefix(budget_bytes, sequence_bytes, prefix_bytes)``.

    Returns
    -------
    Verdict
        PASS, NOT YET with the first case that differs, or NOT TRIED.
    """

    def _make_case(rng):
        sequence_bytes = rng.randint(2, 1000)
        return rng.randint(0, 20_000), sequence_bytes, rng.randrange(sequence_bytes)

    def _expected(budget_bytes, sequence_bytes, prefix_bytes):
        shape = ModelShape.from_groups([LayerGroup(1, 1, 1, 0)])  # in int8, one byte a token
        settings = {"weights": 0, "memory_fraction": 1, "dtype": "int8", "block_size": 1}
        settings["prefix_tokens"] = prefix_bytes
        return plan(
            shape, budget_bytes + 1, sequence_bytes, reserve_bytes=1, **settings
        ).num_sequences

    return _check(answer, _make_case, _expected)


def check_gpus_needed(answer):
    """Check exercise 9.3: the fewest GPUs that hold the weights and evict cheaply enough.

    Parameters
    ----------
    answer : callable
        The reader's ``gpus_needed(model, gpu, num_tokens, concurrency, dtype, seconds)``.

    Returns
    -------
    Verdict
        PASS, NOT YET with the first case that differs, or NOT TRIED.
    """

    def _make_case(rng):
        model = rng.choice(["llama-3.1-8b", "qwen3-32b", "llama-3.1-70b", "deepseek-v3"])
        gpu = rng.choice(["A100 80GB", "H100 80GB", "B200 192GB"])
        traffic = rng.choice([1024, 8192, 65_536]), rng.choice([16, 64, 512])
        return model, gpu, *traffic, rng.choice(["bf16", "int8"]), rng.choice([0, 6, 30])

    def _expected(model, gpu, num_tokens, concurrency, dtype, seconds):
        settings = {"dtype": dtype, "concurrency": concurrency}
        found = {n: plan(model, gpu, num_tokens, num_gpus=n, **settings) for n in (1, 2, 4, 8)}
        fits = (n for n in found if not found[n].missing_bytes)
        return next((n for n in fits if found[n].recompute_seconds_per_minute <= seconds), 0)

    return _check(answer, _make_case, _expected)


def check_sink_positions(answer):
    """Check exercise 10.1: the keys that sinks and a sliding window keep for the last query.

    Parameters
    ----------
    answer : callable
        The reader's ``sink_positions(num_tokens, num_kept, num_sinks)``.

    Returns
    -------
    Verdict
        PASS, NOT YET with the first case that differs, or NOT TRIED.
    """

    def _make_case(rng):
        num_tokens = rng.randint(8, 40)
        num_kept = rng.randint(5, num_tokens)
        return num_tokens, num_kept, rng.randint(0, 4)

    def _expected(num_tokens, num_kept, num_sinks):
        return _positions(keep_recent(num_tokens, 1, num_kept, num_sinks))

    return _check(answer, _make_case, _expected)


def check_heavy_positions(answer):
    """Check exercise 10.2: the keys that heavy hitters and a window keep for the last query.

    Parameters
    ----------
    answer : callable
        The reader's ``heavy_positions(scores, num_kept, num_recent)``.

    Returns
    -------
    Verdict
        PASS, NOT YET with the first case that differs, or NOT TRIED.
    """

    def _make_case(rng):
        scores = rng.sample(range(100), rng.randint(5, 12))
        num_kept = rng.randint(1, len(scores))
        return scores, num_kept, rng.randint(1, num_kept)

    def _expected(scores, num_kept, num_recent):
        return _positions(keep_highest([scores], 1, num_kept, num_recent))

    return _check(answer, _make_case, _expected)


def check_returned_blocks(answer):
    """Check exercise 10.3: the blocks in which no token is kept.

    Parameters
    ----------
    answer : callable
        The reader's ``returned_blocks(kept_positions, num_tokens, block_size)``.

    Returns
    -------
    Verdict
        PASS, NOT YET with the first case that differs, or NOT TRIED.
    """

    def _make_case(rng):
        num_tokens = rng.randint(10, 60)
        kept = sorted(rng.sample(range(num_tokens), rng.randint(1, 9)))
        return kept, num_tokens, rng.choice([2, 4, 8, 16])

    def _expected(kept_positions, num_tokens, block_size):
        return int(freed_blocks(np.isin(np.arange(num_tokens), kept_positions), block_size))

    return _check(answer, _make_case, _expected)


def check_four_lots(answer):
    """Check exercise 8.1: every block is found, lost to the order, lost to the capacity, or new.

    Parameters
    ----------
    answer : callable
        The reader's ``four_lots(num_blocks, found_blocks, bound_blocks, ceiling_blocks)``.

    Returns
    -------
    Verdict
        PASS, NOT YET with the first case that differs, or NOT TRIED.
    """

    def _expected(num_blocks, found_blocks, bound_blocks, ceiling_blocks):
        ends = (0, found_blocks, bound_blocks, ceiling_blocks, num_blocks)
        return tuple(high - low for low, high in itertools.pairwise(ends))

    def _make_case(rng):
        *found_to_ceiling, num_blocks = sorted(rng.sample(range(10**6), 4))
        return num_blocks, *found_to_ceiling

    return _check(answer, _make_case, _expected)


def check_tokens_again(answer):
    """Check exercise 8.2: tokens that evictions make a request compute again.

    Parameters
    ----------
    answer : callable
        The reader's ``tokens_again(input_tokens, num_leading, num_leading_ideal)``.

    Returns
    -------
    Verdict
        PASS, NOT YET with the first case that differs, or NOT TRIED.
    """

    def _make_case(rng):
        input_tokens = rng.randint(1, 9000)
        ideal = rng.randint(0, -(-input_tokens // 512))
        return input_tokens, rng.randint(0, ideal), ideal

    def _expected(input_tokens, num_leading, num_leading_ideal):
        filled = [min(512, input_tokens - 512 * block) for block in range(num_leading_ideal)]
        return sum(filled[num_leading:])

    return _check(answer, _make_case, _expected)


def check_tier_saves(answer):
    """Check exercise 8.3: seconds that a tier of host memory saves over recomputing.

    Parameters
    ----------
    answer : callable
        The reader's ``tier_saves(hits_gpu, hits_with_tier, block_bytes, bytes_per_second,
        tokens_per_second)``.

    Returns
    -------
    Verdict
        PASS, NOT YET with the first case that differs, or NOT TRIED.
    """

    def _make_case(rng):  # powers of two: any order of the operations gives the same float
        hits_gpu, block_bytes = rng.randint(0, 9999), 2 ** rng.randint(20, 26)
        link, rate = 2 ** rng.randint(30, 36), 2 ** rng.randint(10, 16)
        return hits_gpu, hits_gpu + rng.randint(1, 99_999), block_bytes, link, rate

    def _expected(hits_gpu, hits_with_tier, block_bytes, bytes_per_second, tokens_per_second):
        computed = recompute_seconds(512, tokens_per_second)
        copied = refill_seconds(block_bytes, bytes_per_second)
        return (hits_with_tier - hits_gpu) * (computed - copied)

    return _check(answer, _make_case, _expected)


def check_symmetric_code(answer):
    """Check exercise 5.1: the symmetric code of a value.

    Parameters
    ----------
    answer : callable
        The reader's ``symmetric_code(value, largest, bits)``.

    Returns
    -------
    Verdict
        PASS, NOT YET with the first case that differs, or NOT TRIED.
    """

    def _make_case(rng):
        largest = rng.uniform(0.1, 20)
        return rng.uniform(-largest, largest), largest, rng.choice([2, 4, 8])

    def _expected(value, largest, bits):
        return int(quantize_per_channel_symmetric([[value], [largest]], bits=bits).codes()[0, 0])

    return _check(answer, _make_case, _expected)


def check_zero_point_fits(answer):
    """Check exercise 5.2: whether a channel's int8 zero point fits into an int8.

    Parameters
    ----------
    answer : callable
        The reader's ``zero_point_fits(low, high)``.

    Returns
    -------
    Verdict
        PASS, NOT YET with the first case that differs, or NOT TRIED.
    """

    def _make_case(rng):
        width = rng.uniform(0.5, 10)
        near = rng.uniform(-2, 2) * width / 255  # where the zero point reaches its last integers
        low = rng.choice([rng.uniform(-10, 10), near, near - width])
        return low, low + width

    def _expected(low, high):
        zero_point = quantize_per_channel_asymmetric([[low], [high]]).zero_point
        return bool(-128 <= zero_point[0] <= 127)

    return _check(answer, _make_case, _expected)


def check_cheapest(answer):
    """Check exercise 5.3: the smallest of the schemes that are exact enough, or its most exact.

    Parameters
    ----------
    answer : callable
        The reader's ``cheapest(schemes, limit)``.

    Returns
    -------
    Verdict
        PASS, NOT YET with the first case that differs, or NOT TRIED.
    """

    def _make_case(rng):
        schemes = [
            (rng.randrange(96, 160, 8), rng.choice([0.2, round(rng.uniform(0, 0.5), 3)]))
            for _ in range(rng.randint(1, 6))
        ]
        return [*schemes, (768, 0.0)], 0.2

    def _expected(schemes, limit):
        return min(scheme for scheme in schemes if scheme[1] <= limit)

    return _check(answer, _make_case, _expected)


def _check(answer, make_case, expected):
    """Try 50 seeded cases; report the first miss, raise it only when KVLIB_STRICT=1."""
    rng = random.Random(0)
    for _ in range(50):
        case = make_case(rng)
        said = f"{answer.__name__}({', '.join(map(repr, case))})"
        try:
            given = answer(*case)
        except Exception as problem:  # whatever the reader's code does, the chapter goes on
            return _verdict(f"NOT YET: {said} raises {type(problem).__name__}: {problem}")
        if given is None or given is ...:
            return _verdict("NOT TRIED: replace the ... and run this cell again.")
        if not _agrees(given, expected(*case)):
            return _verdict(f"NOT YET: {said} gives {given}; expected {expected(*case)}.")
    return Verdict("PASS: 50 random cases agree.")


def _agrees(given, expected):
    """Compare as a reader means it: any sequence for a list, floats but for their last digits."""
    if isinstance(expected, list | tuple):
        if not isinstance(given, list | tuple | range | np.ndarray):
            return False
        return len(given) == len(expected) and all(map(_agrees, given, expected))
    if isinstance(expected, float) and isinstance(given, Real):
        return math.isclose(given, expected, rel_tol=1e-9)
    return np.ndim(given) == 0 and bool(given == expected)


def _verdict(text):
    if os.environ.get("KVLIB_STRICT") == "1":
        raise AssertionError(text)
    return Verdict(text)
