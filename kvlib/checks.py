"""Checks a chapter runs on itself: exercises, and predictions beside published numbers."""

import html
import itertools
import os
import random

from kvlib._data import read_json
from kvlib._validate import one_of
from kvlib.eviction import recompute_seconds, refill_seconds
from kvlib.memory import bits_per_value, kv_bytes_per_token, max_sequences
from kvlib.models import LayerGroup, ModelShape


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
        if given != expected(*case):
            return _verdict(f"NOT YET: {said} gives {given}; expected {expected(*case)}.")
    return Verdict("PASS: 50 random cases agree.")


def _verdict(text):
    if os.environ.get("KVLIB_STRICT") == "1":
        raise AssertionError(text)
    return Verdict(text)
