"""Checks a chapter runs on itself: exercises, and predictions beside published numbers."""

import html
import os
import random

from kvlib._data import read_json
from kvlib.memory import bits_per_value, kv_bytes_per_token, max_sequences
from kvlib.models import LayerGroup, ModelShape
from kvlib.quantization import quantize_per_channel_asymmetric, quantize_per_channel_symmetric


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
        low = rng.uniform(-10, 10)
        return low, low + rng.uniform(0.5, 10)

    def _expected(low, high):
        zero_point = quantize_per_channel_asymmetric([[low], [high]]).zero_point
        return bool(-128 <= zero_point[0] <= 127)

    return _check(answer, _make_case, _expected)


def check_cheapest(answer):
    """Check exercise 5.3: the scheme of fewest bytes among those that are exact enough.

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
        num_bytes = rng.sample(range(96, 768, 8), rng.randint(1, 6))
        return [(each, round(rng.uniform(0, 0.5), 3)) for each in num_bytes] + [(768, 0.0)], 0.2

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
        if given != expected(*case):
            return _verdict(f"NOT YET: {said} gives {given}; expected {expected(*case)}.")
    return Verdict("PASS: 50 random cases agree.")


def _verdict(text):
    if os.environ.get("KVLIB_STRICT") == "1":
        raise AssertionError(text)
    return Verdict(text)
