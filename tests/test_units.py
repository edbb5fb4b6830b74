"""Bytes to text and back: the two worlds of prefixes, and nothing in between."""

import re
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlib.units import GiB, KiB, MiB, TiB, format_bytes, parse_bytes

BINARY = {"KiB": 1024, "MiB": 1024**2, "GiB": 1024**3, "TiB": 1024**4}
DECIMAL = {"kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "PB": 10**15}


def test_the_constants_are_powers_of_1024():
    assert (KiB, MiB, GiB, TiB) == tuple(BINARY.values())


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (1536, "1.50 KiB"),  # 1.5 * 1,024
        (114_688, "112.00 KiB"),  # 112 * 1,024: one token of Qwen3-0.6B
        (2**20, "1.00 MiB"),
        (11_173_625_856, "10.41 GiB"),  # 10.40625 * 2**30
        (79 * 2**30 + 2**29, "79.50 GiB"),
        (2**40, "1.00 TiB"),
        (5000 * 2**40, "5,000.00 TiB"),  # no larger prefix: the number grows
        (-3 * 2**30, "-3.00 GiB"),
    ],
)
def test_format_by_hand(num_bytes, text):
    assert format_bytes(num_bytes) == text


def test_format_takes_a_numpy_integer():
    assert format_bytes(np.int64(2**30)) == "1.00 GiB"


@given(st.integers(-(2**60), 2**60))
@settings(deadline=None)
def test_the_text_is_the_number_to_two_decimals(num_bytes):
    number, unit = format_bytes(num_bytes).replace(",", "").split()
    factor = BINARY.get(unit, 1)
    # Half a hundredth of the unit, and the rounding of the division before it.
    assert abs(Fraction(number) * factor - num_bytes) <= Fraction(factor, 199)
    assert factor == 1 or abs(num_bytes) >= factor
    assert unit == "TiB" or abs(num_bytes) < 1024 * factor


@pytest.mark.parametrize("wrong", [1.0, True, "1 GiB", None, np.float64(2), np.bool_(True)])
def test_format_takes_integers_only(wrong):
    with pytest.raises(TypeError, match=r"num_bytes=.*; it must be an integer\. Write"):
        format_bytes(wrong)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1 TB", 10**12),
        ("1 TiB", 2**40),
        ("24 GiB", 25_769_803_776),  # 24 * 1,073,741,824
        ("3.35 TB/s", 3_350_000_000_000),
        ("900 GB/s", 900_000_000_000),
        ("0.5 KiB", 512),
        ("16KiB", 16_384),
        ("  2   MB ", 2_000_000),
        ("7 B", 7),
        ("0 B", 0),
        # 1.1 has no exact binary float; the decimal that was written counts.
        ("1.1 PB", 1_100_000_000_000_000),
        ("4.35 kB", 4350),
        ("1,234.50 kB", 1_234_500),
    ],
)
def test_parse_by_hand(text, expected):
    num_bytes = parse_bytes(text)
    assert num_bytes == expected
    assert type(num_bytes) is int


@given(st.integers(0, 10**9), st.sampled_from(sorted({"B": 1} | BINARY | DECIMAL)))
@settings(deadline=None)
def test_parse_multiplies_by_the_prefix(number, unit):
    factor = ({"B": 1} | BINARY | DECIMAL)[unit]
    assert parse_bytes(f"{number} {unit}") == number * factor
    assert parse_bytes(f"{number}{unit}/s") == number * factor


@given(st.integers(1, 1023), st.sampled_from(sorted(BINARY)))
@settings(deadline=None)
def test_whole_units_survive_the_round_trip(number, unit):
    assert parse_bytes(format_bytes(number * BINARY[unit])) == number * BINARY[unit]


@pytest.mark.parametrize("text", ["80G", "16 KB", "1 Gb", "2 K", "3 mib", "5 tokens"])
def test_ambiguous_or_unknown_units_are_refused(text):
    with pytest.raises(ValueError, match=rf"text={re.escape(repr(text))}; .*Write one of B, KiB"):
        parse_bytes(text)


@pytest.mark.parametrize(
    "text", ["", "24", "GiB", "-1 GiB", "1,5 GB", "1000,000 B", "1e3 GB", "1 GiB 2 MiB"]
)
def test_malformed_sizes_are_refused(text):
    with pytest.raises(ValueError, match=rf"text={re.escape(repr(text))}; .*Write '24 GiB'"):
        parse_bytes(text)


@pytest.mark.parametrize("text", ["0.5 B", "1.0001 kB", "0.3 KiB"])
def test_a_part_of_a_byte_is_refused(text):
    with pytest.raises(ValueError, match=rf"text='{text}'; .*whole number of bytes\. Use a "):
        parse_bytes(text)


@pytest.mark.parametrize("wrong", [24, 2.5, None, b"24 GiB", True])
def test_parse_takes_text_only(wrong):
    with pytest.raises(TypeError, match=r"text=.*; it must be a string\. Write a number"):
        parse_bytes(wrong)
