"""Exercises accept the right answer, name the first wrong case, and are strict only when asked."""

import pytest

from kvlib import checks, memory

EXERCISES = {
    checks.check_mixed_widths: (
        lambda layers, heads, width, k_bits, v_bits: (
            layers * heads * width * (k_bits + v_bits) // 8
        ),
        lambda layers, heads, width, k_bits, v_bits: 2 * layers * heads * width * k_bits // 8,
    ),
    checks.check_scale_overhead: (
        lambda payload_bits, group_size: payload_bits + 16 / group_size,
        lambda payload_bits, group_size: payload_bits + 32 / group_size,
    ),
    checks.check_chats_that_fit: (
        lambda budget, shape, tokens: budget // memory.sequence_kv_bytes(shape, tokens),
        lambda budget, shape, tokens: memory.max_cached_tokens(budget, shape) // tokens,
    ),
    checks.check_symmetric_code: (
        lambda value, largest, bits: round(value / (largest / (2 ** (bits - 1) - 1))),
        lambda value, largest, bits: round(value / (largest / 2 ** (bits - 1))),
    ),
    checks.check_zero_point_fits: (
        lambda low, high: -128 <= round(-128 - low / ((high - low) / 255)) <= 127,
        lambda low, high: high - low < 10,
    ),
    checks.check_cheapest: (
        lambda schemes, limit: min(scheme for scheme in schemes if scheme[1] <= limit),
        lambda schemes, limit: min(schemes, key=lambda scheme: scheme[1]),
    ),
}


@pytest.fixture(autouse=True)
def lenient(monkeypatch):
    monkeypatch.delenv("KVLIB_STRICT", raising=False)


@pytest.mark.parametrize("check", EXERCISES, ids=lambda check: check.__name__)
def test_right_passes_wrong_is_named_untried_is_said(check):
    right, wrong = EXERCISES[check]
    assert check(right) == "PASS: 50 random cases agree."
    assert check(wrong).startswith("NOT YET: <lambda>(")
    assert "expected" in check(wrong)
    assert check(lambda *case: ...).startswith("NOT TRIED")
    assert "raises ZeroDivisionError" in check(lambda *case: 1 / 0)


@pytest.mark.parametrize("check", EXERCISES, ids=lambda check: check.__name__)
def test_strict_mode_raises(check, monkeypatch):
    monkeypatch.setenv("KVLIB_STRICT", "1")
    right, wrong = EXERCISES[check]
    assert check(right).startswith("PASS")
    for answer in (wrong, lambda *case: ...):
        with pytest.raises(AssertionError):
            check(answer)


def test_a_comparison_keeps_its_misses():
    table = checks.Comparison([("a", 100, 100, "x"), ("b", 110, 100, "y")], tolerance=0.05)
    assert table.misses == ["b"]
    assert "+10.00 %" in repr(table)
    assert table._repr_html_().count("<tr>") == 3


def test_an_unknown_published_id_is_an_error():
    with pytest.raises(ValueError, match=r"entry_id='nope'; no such entry\. See"):
        checks.published("nope")
