"""Exercises accept the right answer, name the first wrong case, and are strict only when asked."""

import pytest

from kvlib import checks, memory
from kvlib.plan import plan

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
    checks.check_sequences_on_ranks: (
        lambda usable, weights, ranks, one: max(0, (usable + -weights // ranks) // one),
        lambda usable, weights, ranks, one: max(0, ranks * (usable - weights) // one),
    ),
    checks.check_sequences_with_prefix: (
        lambda budget, one, prefix: max(0, budget - prefix) // (one - prefix),
        lambda budget, one, prefix: budget // (one - prefix),
    ),
    checks.check_gpus_needed: (
        lambda *case: fewest_gpus(*case),
        lambda *case: fewest_gpus(*case[:4], "bf16", case[5]),
    ),
}


def fewest_gpus(model, gpu, num_tokens, concurrency, dtype, seconds):
    for num_gpus in (1, 2, 4, 8):
        found = plan(
            model, gpu, num_tokens, num_gpus=num_gpus, dtype=dtype, concurrency=concurrency
        )
        if found.recompute_seconds_per_minute <= seconds:
            return num_gpus
    return 0


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
