"""Exercises accept the right answer, name the first wrong case, and are strict only when asked."""

import numpy as np
import pytest

from kvlib import blocks, checks, memory
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
    checks.check_slot_of: (
        lambda t, table, block_size: (table[t // block_size], t % block_size),
        lambda t, table, block_size: (t // block_size, t % block_size),
    ),
    checks.check_fused_gain: (
        lambda bits: (3 * bits + 16) / (bits + 16),
        lambda bits: (2 * bits + 16) / (bits + 16),
    ),
    checks.check_outweighs_from: (
        lambda weights, shape, tokens: -(-weights // memory.sequence_kv_bytes(shape, tokens)),
        lambda weights, shape, tokens: weights // memory.sequence_kv_bytes(shape, tokens),
    ),
    checks.check_blocks_to_grow: (
        lambda tokens, more, block: -(-(tokens + more) // block) - -(-tokens // block),
        lambda tokens, more, block: -(-more // block),
    ),
    checks.check_blocks_freed: (
        lambda ref_counts: ref_counts.count(1),
        lambda ref_counts: len(ref_counts),
    ),
    checks.check_blocks_to_hold_back: (
        lambda sequences, steps, block: sequences * -(-steps // block),
        lambda sequences, steps, block: -(-sequences * steps // block),
    ),
    checks.check_blocks_saved: (
        lambda branches, prefix, block, written: (
            (branches - 1) * (prefix // block)
            + (prefix % block > 0) * max(0, branches - 1 - written)
        ),
        lambda branches, prefix, block, written: (branches - 1) * -(-prefix // block) - written,
    ),
    checks.check_tokens_to_compute: (
        lambda prefix, prompt, block: prompt - min(prefix, prompt - 1) // block * block,
        lambda prefix, prompt, block: prompt - prefix // block * block,
    ),
    checks.check_blocks_saved_by_padding: (
        lambda branches, prefix, suffix, block: (
            branches * (-(-(prefix % block + suffix) // block) - -(-suffix // block))
            - (prefix % block > 0)
        ),
        lambda branches, prefix, suffix, block: (branches - 1) * (prefix % block > 0),
    ),
    checks.check_empty_slots: (
        lambda lengths, size: sum(-num_tokens % size for num_tokens in lengths),
        lambda lengths, size: sum(size - num_tokens % size for num_tokens in lengths),
    ),
    checks.check_largest_block_size: (
        lambda lengths, most: max(
            2**k for k in range(12) if 100 * blocks.fragmentation(lengths, 2**k) <= most
        ),
        # Trusts the mean of random lengths, where the lengths are given.
        lambda lengths, most: max(
            2**k for k in range(12) if 50 * (2**k - 1) <= most * sum(lengths) / len(lengths)
        ),
    ),
    checks.check_paying_tenant: (
        lambda usage, quotas: (
            max((usage[t] - quotas[t], t) for t in usage if usage[t] > quotas[t])[1]
            if any(usage[t] > quotas[t] for t in usage)
            else "nobody"
        ),
        lambda usage, quotas: max(usage, key=lambda t: (usage[t] - quotas[t], t)),
    ),
    checks.check_blocks_back: (
        lambda victim, others: len(set(victim) - {b for table in others for b in table}),
        lambda victim, others: len(victim),
    ),
    checks.check_faster_way: (
        lambda tokens, token_bytes, link, rate, attention: (
            "copy" if token_bytes / link <= (1 + tokens / (2 * attention)) / rate else "recompute"
        ),
        lambda tokens, token_bytes, link, rate, attention: (
            "copy" if token_bytes / link <= 1 / rate else "recompute"  # forgets attention
        ),
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
        lambda *case: fewest_gpus(*case, may_lack=True),
    ),
    checks.check_sink_positions: (
        lambda tokens, kept, sinks: [*range(sinks), *range(tokens - kept + sinks, tokens)],
        lambda tokens, kept, sinks: [*range(sinks), *range(tokens - kept, tokens)],
    ),
    checks.check_heavy_positions: (
        lambda scores, kept, recent: (
            sorted(
                sorted(range(len(scores) - recent), key=scores.__getitem__)[::-1][: kept - recent]
            )
            + list(range(len(scores) - recent, len(scores)))
        ),
        # Forgets that the newest keys are kept already.
        lambda scores, kept, recent: sorted(
            sorted(range(len(scores)), key=scores.__getitem__)[::-1][:kept]
        ),
    ),
    checks.check_returned_blocks: (
        lambda kept, tokens, block: -(-tokens // block) - len({place // block for place in kept}),
        lambda kept, tokens, block: (tokens - len(kept)) // block,
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
    checks.check_symmetric_code: (
        lambda value, largest, bits: round(value / (largest / (2 ** (bits - 1) - 1))),
        lambda value, largest, bits: round(value / (largest / 2 ** (bits - 1))),
    ),
    checks.check_zero_point_fits: (
        lambda low, high: -128 <= round(-128 - low / ((high - low) / 255)) <= 127,
        lambda low, high: low <= 0 <= high,
    ),
    checks.check_cheapest: (
        lambda schemes, limit: min(scheme for scheme in schemes if scheme[1] <= limit),
        lambda schemes, limit: min(
            (scheme for scheme in schemes if scheme[1] <= limit), key=lambda scheme: scheme[0]
        ),
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


NEAR_MISSES = {
    checks.check_zero_point_fits: [
        lambda low, high: -128 <= -128 - low / ((high - low) / 255) <= 127,  # no rounding
        lambda low, high: -128 <= round(-128 - low / ((high - low) / 256)) <= 127,
        lambda low, high: abs(round(-128 - low / ((high - low) / 255))) <= 128,
    ],
    checks.check_cheapest: [
        lambda schemes, limit: min(schemes, key=lambda scheme: scheme[1]),
        lambda schemes, limit: min(scheme for scheme in schemes if scheme[1] < limit),
    ],
    checks.check_gpus_needed: [lambda *case: fewest_gpus(*case[:4], "bf16", case[5])],
}


@pytest.mark.parametrize("check", NEAR_MISSES, ids=lambda check: check.__name__)
def test_nearly_right_is_not_right(check):
    for wrong in NEAR_MISSES[check]:
        assert check(wrong).startswith("NOT YET: <lambda>(")


@pytest.mark.parametrize("container", [list, tuple, np.array, iter])
def test_any_sequence_will_do_for_a_list_or_a_tuple(container):
    right_list, right_tuple = (
        EXERCISES[check][0] for check in (checks.check_sink_positions, checks.check_four_lots)
    )
    says = "NOT YET" if container is iter else "PASS"
    assert checks.check_sink_positions(lambda *case: container(right_list(*case))).startswith(says)
    assert checks.check_four_lots(lambda *case: container(right_tuple(*case))).startswith(says)


def test_answers_of_another_shape_are_wrong_and_no_error():
    right = EXERCISES[checks.check_sink_positions][0]
    for answer in (
        lambda *case: np.array(right(*case))[:-1],
        lambda *case: np.array([right(*case)]),
        lambda *case: 7,
        lambda *case: "sinks",
    ):
        assert checks.check_sink_positions(answer).startswith("NOT YET: <lambda>(")
    grow = checks.check_blocks_to_grow
    assert grow(lambda *case: np.array([1, 2])).startswith("NOT YET: <lambda>(")


def test_the_last_digits_of_a_float_do_not_decide():
    right = EXERCISES[checks.check_fused_gain][0]
    check = checks.check_fused_gain
    assert check(lambda bits: np.float64(1 + 2 * bits / (bits + 16))).startswith("PASS")
    assert check(lambda bits: right(bits) * (1 + 1e-6)).startswith("NOT YET")
    assert check(lambda bits: str(right(bits))).startswith("NOT YET")


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


def fewest_gpus(model, gpu, num_tokens, concurrency, dtype, seconds, may_lack=False):
    for num_gpus in (1, 2, 4, 8):
        found = plan(
            model, gpu, num_tokens, num_gpus=num_gpus, dtype=dtype, concurrency=concurrency
        )
        holds = may_lack or not found.missing_bytes
        if holds and found.recompute_seconds_per_minute <= seconds:
            return num_gpus
    return 0


def test_simulated_hits_are_those_of_the_file():
    lru = checks.simulated_hits("lru")
    assert (lru[10_000], len(lru)) == (60_921, 7)
    assert checks.simulated_hits("lfu") == {1000: 13_871, 10_000: 38_013, 100_000: 104_755}
    with pytest.raises(ValueError, match="policy='fifo'; it is not a known name"):
        checks.simulated_hits("fifo")
