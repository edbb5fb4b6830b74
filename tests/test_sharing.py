"""kvlib.sharing: the saving formulas against hand counts and a cache that really forks."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlib.blocks import blocks_needed
from kvlib.paged_cache import PagedKVCacheManager
from kvlib.sharing import (
    no_share_bytes,
    prefix_saving_blocks,
    prefix_saving_bytes,
    shareable_tokens,
    shared_bytes,
)

branches = st.integers(1, 7)
prefixes = st.integers(0, 60)
block_sizes = st.integers(1, 20)


def test_hand_worked_bytes():
    # Llama-3.1-8B in bf16 keeps 2 * 32 * 8 * 128 * 2 = 131,072 bytes of a token.
    assert no_share_bytes(4, 1_000, 131_072) == 524_288_000
    assert shared_bytes(4, 1_000, 131_072) == 131_072_000
    assert prefix_saving_bytes(4, 1_000, 131_072) == 393_216_000
    assert prefix_saving_bytes(1, 1_000, 131_072) == 0


@given(branches, prefixes, st.integers(0, 10**7))
def test_saving_is_the_difference_and_linear(num_branches, prefix_tokens, bytes_per_token):
    arguments = num_branches, prefix_tokens, bytes_per_token
    saving = prefix_saving_bytes(*arguments)
    assert saving == no_share_bytes(*arguments) - shared_bytes(*arguments)
    assert saving == sum(prefix_tokens * bytes_per_token for _ in range(num_branches - 1))
    assert prefix_saving_bytes(num_branches, 2 * prefix_tokens, bytes_per_token) == 2 * saving


@pytest.mark.parametrize(
    ("prefix_tokens", "savings"),
    [
        # 1,000 = 62 * 16 + 8: 3 * 63 before any write; each writer but the last copies the tail.
        (1_000, [189, 188, 187, 186, 186]),
        (1_008, [189, 189, 189, 189, 189]),  # 63 full blocks: nothing is ever copied
        (15, [3, 2, 1, 0, 0]),
        (0, [0, 0, 0, 0, 0]),
    ],
)
def test_hand_worked_blocks(prefix_tokens, savings):
    written = range(5)
    found = [prefix_saving_blocks(4, prefix_tokens, 16, num_written=m) for m in written]
    assert found == savings
    array = prefix_saving_blocks(4, prefix_tokens, 16, num_written=np.arange(5))
    assert array.dtype == np.int64
    assert array.tolist() == savings


@given(branches, prefixes, block_sizes, st.integers(1, 30), st.randoms(use_true_random=False))
def test_saving_equals_a_cache_that_forks(num_branches, prefix_tokens, block_size, grow, rng):
    manager = PagedKVCacheManager(num_branches * (60 + 30), block_size)
    family = [manager.allocate_for_sequence("0", prefix_tokens)]
    family += [manager.fork(family[0], str(i)) for i in range(1, num_branches)]
    num_prefix_blocks = blocks_needed(prefix_tokens, block_size)
    rng.shuffle(family)
    for num_written in range(num_branches + 1):
        if num_written:
            manager.append_tokens(family[num_written - 1], grow)
        tables = [seq.block_table[:num_prefix_blocks] for seq in family]
        num_distinct = len({block.block_id for table in tables for block in table})
        saved = num_branches * num_prefix_blocks - num_distinct
        assert saved == prefix_saving_blocks(num_branches, prefix_tokens, block_size, num_written)


@given(branches, prefixes, block_sizes)
def test_the_byte_formula_lies_between_last_and_first(num_branches, prefix_tokens, block_size):
    first = prefix_saving_blocks(num_branches, prefix_tokens, block_size)
    last = prefix_saving_blocks(num_branches, prefix_tokens, block_size, num_branches)
    saved_tokens = prefix_saving_bytes(num_branches, prefix_tokens, 1)
    assert block_size * last <= saved_tokens <= block_size * first


def test_arrays_in_arrays_out():
    num_branches = np.array([1, 2, 4])
    assert no_share_bytes(num_branches, 10, 3).tolist() == [30, 60, 120]
    assert prefix_saving_bytes(num_branches, 10, 3).tolist() == [0, 30, 90]
    assert shared_bytes(2, np.array([0, 10]), 3).tolist() == [0, 30]
    assert prefix_saving_blocks(num_branches, 10, 4).tolist() == [0, 3, 9]
    assert shareable_tokens(np.array([3, 10, 14]), 14, 4).tolist() == [0, 8, 12]
    assert num_branches.tolist() == [1, 2, 4]


def test_published_case_of_a_prefix_shorter_than_a_block():
    # vllm-project/vllm #54607: 240 common tokens, blocks of 784, nothing is reused.
    assert shareable_tokens(240, 2_000, 784) == 0
    assert shareable_tokens(784, 2_000, 784) == 784


def test_the_last_token_of_a_prompt_is_computed():
    assert shareable_tokens(16, 16, 4) == 12  # min(16, 15) = 15: three full blocks
    assert shareable_tokens(16, 17, 4) == 16
    assert shareable_tokens(1, 1, 1) == 0
    assert shareable_tokens(15, 15, 16) == 0


@given(prefixes, st.integers(0, 60), block_sizes)
def test_shareable_is_the_most_whole_blocks_below_the_prompt(prefix_tokens, more, block_size):
    prompt_tokens = max(1, prefix_tokens + more)
    whole_blocks = range(0, prompt_tokens, block_size)
    allowed = [tokens for tokens in whole_blocks if tokens <= min(prefix_tokens, prompt_tokens - 1)]
    assert shareable_tokens(prefix_tokens, prompt_tokens, block_size) == max(allowed)


BAD_CALLS = [
    (no_share_bytes, (0, 10, 2), ValueError, "num_branches=0; it must be at least 1. Pass 1"),
    (no_share_bytes, (2, -1, 2), ValueError, "prefix_tokens=-1; it must be at least 0"),
    (shared_bytes, (0, 10, 2), ValueError, "num_branches=0; it must be at least 1"),
    (shared_bytes, (2, 10, -2), ValueError, "bytes_per_token=-2; it must be at least 0"),
    (shared_bytes, (2, 10, 0.5), TypeError, "bytes_per_token=0.5; it must be an integer"),
    (prefix_saving_bytes, (2, 10.0, 2), TypeError, "prefix_tokens=10.0; .* Write 10"),
    (prefix_saving_bytes, (True, 10, 2), TypeError, "num_branches=True; it must be an integer"),
    (prefix_saving_blocks, (4, 10, 0), ValueError, "block_size=0; it must be at least 1"),
    (prefix_saving_blocks, (4, 10, 16, -1), ValueError, "num_written=-1; it must be at least 0"),
    (
        prefix_saving_blocks,
        (4, 10, 16, 5),
        ValueError,
        "num_written=5; it must be at most num_branches=4. Count each branch",
    ),
    (shareable_tokens, (10, 0, 4), ValueError, "prompt_tokens=0; it must be at least 1"),
    (shareable_tokens, (-1, 10, 4), ValueError, "prefix_tokens=-1; it must be at least 0"),
    (shareable_tokens, (10, 14, 0), ValueError, "block_size=0; it must be at least 1"),
    (
        shareable_tokens,
        (15, 14, 4),
        ValueError,
        "prefix_tokens=15; it must be at most prompt_tokens=14. Count the shared tokens",
    ),
]


@pytest.mark.parametrize(("function", "arguments", "error", "message"), BAD_CALLS)
def test_bad_input(function, arguments, error, message):
    with pytest.raises(error, match=message):
        function(*arguments)


def test_products_that_int64_cannot_hold_are_refused():
    many = np.array([2**31])
    for function in (no_share_bytes, prefix_saving_bytes):
        with pytest.raises(ValueError, match="an int64 array cannot hold it"):
            function(many, many, 2)
        assert function(2**31, 2**31, 2) >= 2**63 - 2**32
    with pytest.raises(ValueError, match="an int64 array cannot hold it"):
        prefix_saving_blocks(many * 2**10, many * 2**10, 1)
