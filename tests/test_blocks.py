"""kvlib.blocks: exact integers, laws against a slow oracle, published counts, bad input."""

import csv
import gzip
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlib import _data
from kvlib.blocks import appended_blocks, blocks_needed, fragmentation, tail_waste
from kvlib.replay import load_request_lengths

lengths = st.integers(0, 400)
block_sizes = st.integers(1, 70)


def fill_slot_by_slot(num_tokens, block_size, free_slots=0):
    """Slow oracle: put the tokens down one at a time; return blocks opened and slots left."""
    num_opened = 0
    for _ in range(num_tokens):
        if free_slots == 0:
            num_opened += 1
            free_slots = block_size
        free_slots -= 1
    return num_opened, free_slots


@pytest.mark.parametrize(
    ("num_tokens", "block_size", "num_blocks", "waste"),
    [
        (0, 16, 0, 0),
        (1, 16, 1, 15),
        (16, 16, 1, 0),
        (17, 16, 2, 15),  # one token opens a second block: 32 - 17
        (100, 16, 7, 12),  # 6 * 16 = 96 < 100 <= 7 * 16 = 112
        (1_000, 16, 63, 8),  # 62 * 16 = 992 < 1000 <= 1008
        (113, 1, 113, 0),
        (5, 2_048, 1, 2_043),
    ],
)
def test_hand_worked_counts(num_tokens, block_size, num_blocks, waste):
    assert blocks_needed(num_tokens, block_size) == num_blocks
    assert tail_waste(num_tokens, block_size) == waste


@pytest.mark.parametrize(
    ("num_new_tokens", "tail_free_slots", "num_blocks"),
    [
        (1, 0, 1),
        (1, 1, 0),
        (12, 12, 0),  # 100 tokens leave 112 - 100 = 12 slots: exactly filled
        (13, 12, 1),
        (1_000, 12, 62),  # 988 left over; 61 * 16 = 976 < 988 <= 62 * 16 = 992
        (0, 12, 0),
        (16, 15, 1),  # 16 more steps cost at most one block, wherever the tail stands
        (16, 0, 1),
    ],
)
def test_hand_worked_appends_at_block_size_16(num_new_tokens, tail_free_slots, num_blocks):
    assert appended_blocks(num_new_tokens, tail_free_slots, 16) == num_blocks


def test_only_blocks_needed_clamps():
    assert blocks_needed(-5, 16) == 0
    assert blocks_needed(np.array([-17, -1, 0, 1]), 16).tolist() == [0, 0, 0, 1]
    with pytest.raises(ValueError, match="num_tokens=-5; it must be at least 0"):
        tail_waste(-5, 16)


@given(lengths, block_sizes)
def test_counts_equal_filling_slot_by_slot(num_tokens, block_size):
    expected = fill_slot_by_slot(num_tokens, block_size)
    assert (blocks_needed(num_tokens, block_size), tail_waste(num_tokens, block_size)) == expected


@given(lengths, lengths, block_sizes)
def test_append_pays_the_difference(num_tokens, num_new_tokens, block_size):
    free_slots = tail_waste(num_tokens, block_size)
    num_blocks = appended_blocks(num_new_tokens, free_slots, block_size)
    assert num_blocks == fill_slot_by_slot(num_new_tokens, block_size, free_slots)[0]
    both = blocks_needed(num_tokens + num_new_tokens, block_size)
    assert blocks_needed(num_tokens, block_size) + num_blocks == both


@given(st.lists(st.integers(-50, 10**6), min_size=1), block_sizes)
def test_arrays_equal_scalars(values, block_size):
    num_tokens = np.array(values)
    for function in (blocks_needed, tail_waste):
        if function is tail_waste:
            num_tokens = np.abs(num_tokens)
        result = function(num_tokens, block_size)
        assert result.dtype == np.int64
        assert result.tolist() == [function(value, block_size) for value in num_tokens.tolist()]
    assert all(type(blocks_needed(value, block_size)) is int for value in values)


def test_arrays_broadcast_and_stay_untouched():
    num_tokens = np.array([[0], [5], [16]], dtype=np.int8)
    before = num_tokens.copy()
    block_size = np.array([1, 4, 16])
    assert blocks_needed(num_tokens, block_size).tolist() == [[0, 0, 0], [5, 2, 1], [16, 4, 1]]
    assert tail_waste(num_tokens, block_size).tolist() == [[0, 0, 0], [0, 3, 11], [0, 0, 0]]
    free_slots = np.array([0, 3, 11])
    assert appended_blocks(20, free_slots, block_size).tolist() == [20, 5, 1]  # 20/1, 17/4, 9/16
    assert (num_tokens == before).all()
    assert num_tokens.dtype == np.int8


@pytest.mark.parametrize("num_tokens", [2**53 + 1, 2**60 + 1, 2**63 - 1])
def test_exact_where_a_float_quotient_is_not(num_tokens):
    # 2**53 + 1 is the first whole number that a double cannot hold.
    assert blocks_needed(num_tokens, 1) == num_tokens
    assert blocks_needed(np.array([num_tokens]), 1).tolist() == [num_tokens]
    assert tail_waste(num_tokens, 2**62) == -num_tokens % 2**62
    assert blocks_needed(16 * num_tokens + 1, 16) == num_tokens + 1


def test_the_ends_of_int64_do_not_wrap():
    ends = np.array([-(2**63), 2**63 - 1])
    assert blocks_needed(ends, 16).tolist() == [0, 2**59]  # (2**63 - 1) / 16, rounded up


def test_fragmentation_by_hand():
    # 100 and 32 tokens: 7 + 2 blocks, 144 slots, 12 empty.
    assert fragmentation(np.array([100, 32]), 16) == 12 / 144
    assert fragmentation([1, 1, 1, 0], 4) == 9 / 12
    assert fragmentation(100, 16) == 12 / 112
    assert fragmentation([16, 32], 16) == 0.0
    assert fragmentation([], 16) == 0.0
    assert fragmentation([0, 0], 16) == 0.0


@given(st.lists(lengths), block_sizes)
def test_fragmentation_equals_counting_slots(num_tokens, block_size):
    filled = [fill_slot_by_slot(length, block_size) for length in num_tokens]
    num_slots = sum(num_blocks * block_size for num_blocks, _ in filled)
    num_empty = sum(free_slots for _, free_slots in filled)
    result = fragmentation(num_tokens, block_size)
    assert result == (num_empty / num_slots if num_slots else 0.0)
    assert 0 <= result < 1


def test_fragmentation_of_totals_beyond_int64():
    # Four sequences of 2**62 + 1 tokens: the total 2**64 + 4 would wrap to 4.
    assert fragmentation([2**62 + 1] * 4, 2**62) == pytest.approx(1 / 2)


def test_mean_waste_over_random_lengths_is_half_a_block():
    # Over one whole period the waste takes every value 0..B-1 once: (B - 1) / 2.
    for block_size in (1, 16, 256):
        period = np.arange(1, block_size + 1)
        assert tail_waste(period, block_size).mean() == (block_size - 1) / 2


@pytest.mark.parametrize(
    ("entry", "block_size"),
    [("vllm-2418-tokens", 16), ("vllm-10517-29k-tokens", 16)],
)
def test_published_block_counts(entry, block_size):
    published = {row["id"]: row for row in _data.read_json("published_numbers.json")}[entry]
    assert published["inputs"]["block"] == block_size
    num_blocks = published["inputs"]["gpu_blocks"]
    assert blocks_needed(published["expected"], block_size) == num_blocks
    assert tail_waste(published["expected"], block_size) == 0


def test_published_sharded_pool():
    rows = {row["id"]: row for row in _data.read_json("published_numbers.json")}
    published = rows["hf-cb-qwen3-32b-tp4"]
    num_blocks = blocks_needed(np.array(published["expected"]), published["inputs"]["block"])
    assert num_blocks.tolist() == [814, 3258]


BAD_CALLS = [
    (blocks_needed, (1, 0), ValueError, "block_size=0; it must be at least 1. Pass 1"),
    (blocks_needed, (1, -4), ValueError, "block_size=-4; it must be at least 1"),
    (blocks_needed, (1.0, 16), TypeError, "num_tokens=1.0; it must be an integer. Write 1."),
    (blocks_needed, (True, 16), TypeError, "num_tokens=True; it must be an integer"),
    (blocks_needed, (float("nan"), 16), TypeError, "num_tokens=nan; it must be an integer"),
    (blocks_needed, ("7", 16), TypeError, "num_tokens='7'; it must be an integer"),
    (blocks_needed, (np.array([1.5]), 16), TypeError, r"num_tokens.dtype=float64; .* \.astype"),
    (
        blocks_needed,
        (5, np.array([4, 0])),
        ValueError,
        r"block_size.min\(\)=0; it must be at least",
    ),
    (tail_waste, (np.array([3, -1]), 16), ValueError, r"num_tokens.min\(\)=-1; it must be at lea"),
    (tail_waste, (1, 0), ValueError, "block_size=0; it must be at least 1"),
    (appended_blocks, (-1, 0, 16), ValueError, "num_new_tokens=-1; it must be at least 0"),
    (appended_blocks, (1, -1, 16), ValueError, "tail_free_slots=-1; it must be at least 0"),
    (appended_blocks, (1, 17, 16), ValueError, "tail_free_slots=17; it must be at most block_size"),
    (appended_blocks, (1, 0, 0), ValueError, "block_size=0; it must be at least 1"),
    (fragmentation, ([1, -1], 16), ValueError, r"num_tokens_array.min\(\)=-1; it must be at least"),
    (fragmentation, ([1.5], 16), TypeError, "num_tokens_array.dtype=float64; it must be integer"),
    (fragmentation, ([], 0), ValueError, "block_size=0; it must be at least 1"),
    (fragmentation, ([1], np.array([16])), TypeError, "block_size=.*; it must be an integer"),
]


@pytest.mark.parametrize(("function", "arguments", "error", "message"), BAD_CALLS)
def test_bad_input(function, arguments, error, message):
    with pytest.raises(error, match=message):
        function(*arguments)


def _trace_lengths(name):
    """Prompt plus generated tokens of each request of a public trace, if the file is here."""
    near_checkout = Path(__file__).parents[2] / "shared" / "data"
    folder = Path(os.environ.get("KVLIB_TRACES", near_checkout))
    path = folder / f"azure_llm_inference_2023_{name}.csv.gz"
    if not path.is_file():
        pytest.skip(f"{path.name} is not here; set KVLIB_TRACES to the folder that holds it")
    with gzip.open(path, "rt", newline="") as lines:
        rows = list(csv.DictReader(lines))
    return [int(row["ContextTokens"]) + int(row["GeneratedTokens"]) for row in rows]


@pytest.mark.parametrize(("name", "num_requests"), [("code", 8_819), ("conv", 19_366)])
def test_waste_on_real_traffic(name, num_requests):
    total = _trace_lengths(name)
    assert len(total) == num_requests
    for block_size in (16, 32, 64, 128, 256, 2_048):
        num_blocks = [length // block_size + (length % block_size > 0) for length in total]
        num_slots = block_size * sum(num_blocks)
        assert fragmentation(total, block_size) == (num_slots - sum(total)) / num_slots
    # 0.4 to 0.5 % of 16-token blocks, 37 to 46 % of 2,048-token blocks, 7.5 tokens a request.
    assert 0.0035 < fragmentation(total, 16) < 0.0055
    assert 0.365 < fragmentation(total, 2_048) < 0.465
    assert tail_waste(np.array(total), 16).mean() == pytest.approx(7.5, abs=0.15)


@pytest.mark.parametrize(
    ("name", "file"), [("azure-code", "code"), ("azure-conversations", "conv")]
)
def test_shipped_lengths_are_those_of_the_files(name, file):
    shipped, total = load_request_lengths(name), _trace_lengths(file)
    assert shipped.tolist() == sorted(total)
    for block_size in (16, 32, 64, 128, 256):
        num_slots = sum(block_size * len(range(0, length, block_size)) for length in total)
        assert fragmentation(shipped, block_size) == (num_slots - sum(total)) / num_slots


# Mean empty slots, mean table entries and percent of slots lost, from histogram arithmetic.
REAL = {
    ("azure-conversations", 16): (7.47, 85.83, 0.544),
    ("azure-code", 16): (7.64, 130.21, 0.367),
    ("azure-conversations", 256): (119.05, 5.80, 8.017),
    ("azure-code", 256): (134.60, 8.63, 6.089),
    ("azure-conversations", 2_048): (1_155.52, 1.23, 45.830),
    ("azure-code", 2_048): (1_199.12, 1.60, 36.616),
}


@pytest.mark.parametrize(("name", "block_size"), REAL)
def test_waste_entries_and_fragmentation_of_the_shipped_lengths(name, block_size):
    lengths = load_request_lengths(name)
    waste, entries, percent = REAL[name, block_size]
    assert tail_waste(lengths, block_size).mean() == pytest.approx(waste, abs=0.005)
    assert blocks_needed(lengths, block_size).mean() == pytest.approx(entries, abs=0.005)
    assert 100 * fragmentation(lengths, block_size) == pytest.approx(percent, abs=0.0005)


def test_an_unknown_service_is_named():
    with pytest.raises(ValueError, match=r"name='azure-chat'; it is not a known name\. Did you"):
        load_request_lengths("azure-chat")
