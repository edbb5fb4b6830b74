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
    checks.check_four_lots: (
        lambda blocks, found, bound, ceiling: (
            found,
            bound - found,
            ceiling - bound,
            blocks - ceiling,
        ),
        lambda blocks, found, bound, ceiling: (found, bound, ceiling, blocks),
    ),
    checks.check_tokens_again: (
        lambda tokens, leading, ideal: min(512 * ideal, tokens) - min(512 * leading, tokens),
        lambda tokens, leading, ideal: 512 * (ideal - leading),
    ),
    checks.check_tier_saves: (
        lambda gpu, tier, num_bytes, link, rate: (tier - gpu) * (512 / rate - num_bytes / link),
        lambda gpu, tier, num_bytes, link, rate: tier * (512 / rate - num_bytes / link),
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


def test_simulated_hits_are_those_of_the_file():
    lru = checks.simulated_hits("lru")
    assert (lru[10_000], len(lru)) == (60_921, 7)
    assert checks.simulated_hits("lfu") == {1000: 13_871, 10_000: 38_013, 100_000: 104_755}
    with pytest.raises(ValueError, match="policy='fifo'; it is not a known name"):
        checks.simulated_hits("fifo")
