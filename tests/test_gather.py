"""Paged gather: worked integers, a token-by-token oracle, laws, and input that must be refused."""

import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlib.gather import (
    copy_blocks,
    decode_seconds_per_token,
    gather_bytes,
    gather_dequantize,
    gather_kv,
    write_tokens,
)
from kvlib.paged_cache import KVPool, PagedKVCacheManager
from kvlib.quantization import dequantize, quantize

f16, f32 = np.float16, np.float32
SCHEMES = [
    {"granularity": granularity, "bits": bits, **zero}
    for granularity in ("token", "channel")
    for bits in (8, 4, 2)
    for zero in (
        {},
        {"symmetric": False},
        {"symmetric": False, "zero": "minimum", "scale_dtype": "float16", "group_size": 2},
    )
]


def random_pool(rng, shape, dtype=f16):
    if np.issubdtype(dtype, np.floating):
        return rng.standard_normal(shape).astype(dtype)
    return rng.integers(0, 100, shape).astype(dtype)


def one_by_one(pool, table, num_tokens):
    """The definition: one token after the other."""
    places = (divmod(token, pool.shape[1]) for token in range(num_tokens))
    tokens = [pool[table[place], slot] for place, slot in places]
    return np.array(tokens, pool.dtype).reshape(num_tokens, *pool.shape[2:])


@st.composite
def paged(draw):
    """A pool, a table that may name a block twice, and how many of its tokens to read."""
    num_blocks, block_size = draw(st.integers(1, 6)), draw(st.integers(1, 5))
    inner = draw(st.sampled_from([(), (1, 1), (2, 3), (1, 8)]))
    dtype = draw(st.sampled_from([f16, f32, np.float64, np.int8, np.uint16]))
    pool = random_pool(np.random.default_rng(0), (num_blocks, block_size, *inner), dtype)
    table = draw(st.lists(st.integers(0, num_blocks - 1), max_size=5))
    return pool, table, draw(st.integers(0, len(table) * block_size))


def test_the_worked_case():
    # Blocks of 2 tokens: block 2 holds 4, 5; block 0 holds 0, 1. Three tokens: 4, 5, 0.
    assert gather_kv(np.arange(8).reshape(4, 2), np.array([2, 0]), 3).tolist() == [4, 5, 0]


@given(paged())
def test_gather_is_the_definition(case):
    pool, table, num_tokens = case
    expected = one_by_one(pool, table, num_tokens)
    got = gather_kv(pool, np.array(table, np.int32), num_tokens)
    assert got.dtype == pool.dtype
    np.testing.assert_array_equal(got, expected)
    out = np.full_like(expected, 77)
    assert gather_kv(pool, table, num_tokens, out=out) is out
    np.testing.assert_array_equal(out, expected)


@given(paged(), st.data())
def test_what_is_written_is_read_back_and_nothing_else_changes(case, pick):
    pool, _, _ = case
    table = pick.draw(st.permutations(range(len(pool))))
    first = pick.draw(st.integers(0, pool.shape[0] * pool.shape[1]))
    num_tokens = pick.draw(st.integers(0, pool.shape[0] * pool.shape[1] - first))
    values = random_pool(np.random.default_rng(1), (num_tokens, *pool.shape[2:]), pool.dtype)
    before = gather_kv(pool, table, pool.shape[0] * pool.shape[1])
    write_tokens(pool, table, first, values)
    after = gather_kv(pool, table, len(before))
    np.testing.assert_array_equal(after[first : first + num_tokens], values)
    after[first : first + num_tokens] = before[first : first + num_tokens]
    np.testing.assert_array_equal(after, before)


def test_views_are_read_and_written_in_place():
    both = random_pool(np.random.default_rng(0), (5, 2, 4, 2, 8))  # keys and values side by side
    keys = both[:, 0]
    table, expected = [3, 1], one_by_one(keys, [3, 1], 7)
    np.testing.assert_array_equal(gather_kv(keys, table, 7), expected)
    backwards = np.zeros((14, 2, 8), f16)
    gather_kv(keys, table, 7, out=backwards[::-2])
    np.testing.assert_array_equal(backwards[::-2], expected)
    assert not backwards[::2].any()
    values = both[:, 1].copy()
    write_tokens(keys, [4, 0], 1, expected[:5])
    copy_blocks(keys, [4], [2])
    np.testing.assert_array_equal(gather_kv(keys, [2, 0], 6)[1:], expected[:5])
    np.testing.assert_array_equal(both[:, 1], values)


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_reading_back_is_gathering_what_is_read_back(scheme):
    # Five channels: packed rows end inside a byte, groups of two are short.
    values = random_pool(np.random.default_rng(0), (6, 3, 2, 5))
    pool = quantize(values, token_axis=1, **scheme)
    for table, num_tokens in (([4, 0, 5], 9), ([2, 2], 4), ([1], 0), ([], 0)):
        for dtype in (f32, f16, np.float64):
            whole = dequantize(pool, out=np.empty(values.shape, dtype))
            out = np.empty((num_tokens, 2, 5), dtype)
            assert gather_dequantize(pool, table, num_tokens, out=out) is out
            np.testing.assert_array_equal(out, one_by_one(whole, table, num_tokens))
    assert gather_dequantize(pool, [1], 2).dtype == f32


def test_many_blocks_are_read_back_in_several_parts():
    values = random_pool(np.random.default_rng(0), (9, 64, 4, 128))  # 128 KiB a block in float32
    pool = quantize(values, token_axis=1, granularity="token")
    table = np.random.default_rng(1).permutation(9)
    got = gather_dequantize(pool, table, 9 * 64 - 1)
    np.testing.assert_array_equal(got, one_by_one(dequantize(pool), table, 9 * 64 - 1))


@pytest.mark.parametrize("scheme", [s for s in SCHEMES if s["granularity"] == "token"], ids=str)
def test_tokens_written_one_by_one_equal_a_pool_quantized_at_once(scheme):
    tokens = random_pool(np.random.default_rng(0), (8, 2, 5))
    pool = quantize(np.zeros((4, 2, 2, 5), f16), token_axis=1, **scheme)
    table = [2, 0, 3, 1]
    for first, stop in ((0, 1), (1, 4), (4, 4), (4, 8)):
        write_tokens(pool, table, first, tokens[first:stop])
    at_once = quantize(tokens, token_axis=0, **scheme)
    np.testing.assert_array_equal(gather_kv(pool.data, table, 8), at_once.data)
    np.testing.assert_array_equal(gather_dequantize(pool, table, 8), dequantize(at_once))


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_a_copied_block_reads_back_alike(scheme):
    pool = quantize(random_pool(np.random.default_rng(0), (4, 3, 2, 5)), token_axis=1, **scheme)
    before = dequantize(pool)
    copy_blocks(pool, [1, 1], [3, 0])
    np.testing.assert_array_equal(dequantize(pool), before[[1, 1, 2, 1]])


def test_the_manager_reads_what_gather_reads():
    pool = KVPool(num_blocks=6, block_size=4, num_kv_heads=2, head_dim=3)
    manager, rng = PagedKVCacheManager(6, 4, pool=pool), np.random.default_rng(0)
    parent = manager.allocate_for_sequence("parent", 0)
    k, v = random_pool(rng, (2, 6, 2, 3))
    manager.append_kv(parent, k, v)
    child = manager.fork(parent, "child")
    manager.append_kv(child, k[:1] + 1, v[:1])  # the shared tail is copied first
    for seq in (parent, child):
        table = [block.block_id for block in seq.block_table]
        np.testing.assert_array_equal(
            gather_kv(pool.k, table, seq.num_tokens), manager.read_kv(seq)[0]
        )
    np.testing.assert_array_equal(gather_kv(pool.k, table, 6), k)


POOL = np.arange(8, dtype=f16).reshape(4, 2)
QUANTIZED = {
    granularity: quantize(np.ones((4, 2, 1, 3), f16), granularity=granularity, token_axis=1)
    for granularity in ("token", "channel")
}
REFUSED = [
    (gather_kv, (POOL, [1, 4], 4), ValueError, "block_table=4; blocks are 0 to 3. Fix"),
    (gather_kv, (POOL, [-1, 1], 3), ValueError, "block_table=-1; blocks are 0 to 3"),
    (gather_kv, (POOL, [1.0], 1), TypeError, "block_table=float64 of shape (1,); it must be int"),
    (gather_kv, (POOL, [[1]], 1), TypeError, "block_table=int64 of shape (1, 1); it must be int"),
    (gather_kv, (POOL, [True], 1), TypeError, "block_table=bool of shape (1,); it must be integ"),
    (gather_kv, (POOL, [1, 2], 5), ValueError, "num_tokens=5; 2 blocks of 2 hold 4 tokens. Pass"),
    (gather_kv, (POOL, [1], -1), ValueError, "num_tokens=-1; it must be at least 0"),
    (gather_kv, (POOL, [1], 1.0), TypeError, "num_tokens=1.0; it must be an integer. Write 1."),
    (gather_kv, (POOL, [1], 1, np.zeros(2, f16)), ValueError, "out=float16 of shape (2,); it must"),
    (gather_kv, (POOL, [1], 1, np.zeros(1, f32)), ValueError, "out=float32 of shape (1,); it must"),
    (gather_kv, (POOL, [1], 1, [0.0]), ValueError, "out=None of shape None; it must be float16"),
    (gather_kv, (POOL, [1], 1, POOL[0, :1]), ValueError, "out=memory of the pool; both would ch"),
    (gather_kv, ([[1, 2]], [0], 1), TypeError, "pool_array=list; it must be an array. Use np"),
    (gather_kv, (POOL[0], [0], 1), ValueError, "pool_array.shape=(2,); it must be (num_blocks, b"),
    (gather_kv, (POOL[:0], [], 0), ValueError, "pool_array.shape=(0, 2); it must be (num_blocks"),
    (
        gather_kv,
        (QUANTIZED["token"], [0], 1),
        TypeError,
        "or gather_dequantize for a quantized",
    ),
    (
        gather_dequantize,
        (POOL, [0], 1),
        TypeError,
        "pool=ndarray; it must be a Quantized",
    ),
    (gather_dequantize, (QUANTIZED["token"], [4], 1), ValueError, "block_table=4; blocks are 0"),
    (
        gather_dequantize,
        (QUANTIZED["token"], [0], 1, np.zeros((1, 1, 3), np.int8)),
        ValueError,
        "out=int8 of shape (1, 1, 3); it must be float16 or float32 or float64 of shape (1, 1, 3)",
    ),
    (
        gather_dequantize,
        (quantize(np.ones((4, 2, 1, 3), f16)), [0], 1),
        ValueError,
        "pool.token_axis=2, .axis=3; each block needs its own scales. Quantize with token_axis=1.",
    ),
    (
        gather_dequantize,
        (quantize(np.ones((4, 2, 3), f16), token_axis=None), [0], 1),
        ValueError,
        "pool.token_axis=None, .axis=2; each block needs its own scales",
    ),
    (write_tokens, (POOL, [0, 4], 1, POOL[0] + 1), ValueError, "block_table=4; blocks are 0 to 3"),
    (
        write_tokens,
        (POOL, [1, 1], 1, POOL[0] + 1),
        ValueError,
        "block_table=1; this block is there",
    ),
    (write_tokens, (POOL, [1], 1, POOL[0] + 1), ValueError, "num_tokens=3; 1 blocks of 2 hold 2"),
    (write_tokens, (POOL, [1], -1, POOL[0] + 1), ValueError, "first_token=-1; it must be at least"),
    (write_tokens, (POOL, [1], 0, POOL[0]), ValueError, "out=memory of the pool"),
    (write_tokens, (POOL, [1], 0, [1.0]), TypeError, "values=list of None; it must be numpy floa"),
    (write_tokens, (POOL, [1], 0, np.ones(1)), TypeError, "values=ndarray of float64; it must be"),
    (write_tokens, (POOL, [1], 0, np.ones((1, 1), f16)), ValueError, "values.shape=(1, 1); it mus"),
    (
        write_tokens,
        (QUANTIZED["channel"], [1], 0, np.ones((1, 1, 3), f16)),
        ValueError,
        "pool.granularity='channel'; tokens must not share scales. Use granularity='token'",
    ),
    (copy_blocks, (POOL, [0], [4]), ValueError, "targets=4; blocks are 0 to 3"),
    (copy_blocks, (POOL, [-1], [1]), ValueError, "sources=-1; blocks are 0 to 3"),
    (copy_blocks, (POOL, [0, 1], [2]), ValueError, "len(targets)=1; 2 sources need as many. Pass"),
    (copy_blocks, (POOL, [0, 1], [2, 2]), ValueError, "targets=2; this block is there twice. Name"),
    (copy_blocks, (POOL, [0, 1], [1, 2]), ValueError, "sources=1; this block is a target too. Cop"),
    (copy_blocks, (POOL, "a", [1]), TypeError, "it must be integers (n,)"),
]


@pytest.mark.parametrize(("function", "arguments", "error", "words"), REFUSED)
def test_bad_input_is_refused_and_changes_nothing(function, arguments, error, words):
    before = [np.copy(POOL), *(np.copy(pool.data) for pool in QUANTIZED.values())]
    with pytest.raises(error, match=re.escape(words)):
        function(*arguments)
    for kept, now in zip(before, [POOL, *(p.data for p in QUANTIZED.values())], strict=True):
        np.testing.assert_array_equal(kept, now)


def test_a_zero_point_that_does_not_fit_the_pool_is_refused():
    pool = quantize(np.zeros((2, 1, 1, 2), f32), token_axis=1, granularity="token", symmetric=False)
    far = np.array([[[3e38, 2.9999999e38]]], f32)  # a range far from 0: its zero point is wide
    far[0, 0, 1] = np.nextafter(far[0, 0, 0], f32(0))
    before = dequantize(pool)
    with pytest.raises(ValueError, match=r"zero_point=\d+; the pool's are int32. Use zero="):
        write_tokens(pool, [0], 0, far)
    np.testing.assert_array_equal(dequantize(pool), before)


def test_padding_behind_the_last_block_is_not_looked_at():
    assert gather_kv(POOL, [1, -1, 99], 2).tolist() == [2, 3]


@settings(max_examples=30)
@given(st.integers(1, 40), st.integers(1, 8), st.integers(0, 40))
def test_any_split_into_blocks_gives_the_same_tokens(num_tokens, block_size, seed):
    tokens, rng = np.arange(num_tokens), np.random.default_rng(seed)
    num_blocks = -(-num_tokens // block_size) + 2
    pool = np.zeros((num_blocks, block_size), tokens.dtype)
    table = rng.permutation(num_blocks)
    write_tokens(pool, table, 0, tokens)
    np.testing.assert_array_equal(gather_kv(pool, table, num_tokens), tokens)


def test_bytes_of_every_way():
    # int8 codes beside fp16 values, one of each: gather and dequantize 1+1 and 1+2, fused 1+2.
    assert gather_bytes("gather", 2, 2) == 4
    assert gather_bytes("gather, then dequantize", 1, 2) == 5
    assert gather_bytes("gather and dequantize fused", 1, 2) == 3
    assert gather_bytes("inside attention", 1, 2) == 0
    with pytest.raises(ValueError, match="path='fused'; it is not a known name"):
        gather_bytes("fused", 1, 2)
    with pytest.raises(ValueError, match="stored_bytes=-1"):
        gather_bytes("gather", -1, 2)


def test_time_of_a_step():
    # 4 GiB at 4.8e12 bytes/s: 4,294,967,296 / 4.8e12 = 0.000894...
    assert decode_seconds_per_token(0, 4 * 2**30, 4.8e12) == pytest.approx(0.00089478485)
    one, two = (decode_seconds_per_token(n * 10**9, n * 10**9, 10**12) for n in (1, 2))
    assert two == 2 * one == 0.004
    with pytest.raises(ValueError, match="bytes_per_second=0; it must be above 0"):
        decode_seconds_per_token(1, 1, 0)
