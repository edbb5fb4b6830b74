"""CuPy arrays through the public functions, bit for bit what NumPy gives."""

import re

import numpy as np
import pytest

from kvlib import quantization
from kvlib.gather import copy_blocks, gather_dequantize, gather_kv, write_tokens
from kvlib.gpucheck import operations
from kvlib.quantization import QuantizedTensor, dequantize, quantize

f16, f32 = np.float16, np.float32

# What each scheme and shape must run; a CuPy array that took another way would be slow, not wrong.
CASES = [
    # Token scales: one lane, a part of a warp, a warp, more than a warp; short last runs.
    ((3, 5, 8), {"granularity": "token"}, "quantize_token<{}, true>"),
    ((2, 7, 128), {"granularity": "token"}, "quantize_token<{}, true>"),
    ((1, 3, 1160), {"granularity": "token"}, "quantize_token<{}, true>"),
    ((3, 5, 13), {"granularity": "token"}, "quantize_token<{}, false>"),
    ((1, 1, 1), {"granularity": "token"}, "quantize_token<{}, false>"),
    ((5, 300), {"granularity": "token"}, "quantize_token<{}, false>"),
    ((4, 9, 96), {"granularity": "token", "group_size": 32}, "quantize_token<{}, true>"),
    ((4, 3, 80), {"granularity": "token", "group_size": 32}, "quantize_token<{}, true>"),
    ((4, 3, 72), {"granularity": "token", "group_size": 20}, "quantize_token<{}, false>"),
    # Channel scales: all tokens in registers; in several parts; groups of tokens, the last short.
    ((2, 9, 64), {}, "quantize_channel<{}, true, FUSED>"),
    ((3, 40, 13), {}, "quantize_channel<{}, false, FUSED>"),
    ((1, 700, 128), {}, "quantize_channel<{}, true, APPLY>"),
    ((2, 600, 44), {}, "quantize_channel<{}, false, APPLY>"),
    ((2, 75, 264), {"group_size": 32}, "quantize_channel<{}, true, FUSED>"),
    ((2, 11, 10), {"group_size": 4}, "quantize_channel<{}, false, FUSED>"),
    ((13, 3, 1, 8), {"token_axis": 1}, "quantize_channel<{}, true, FUSED>"),
    ((40, 24), {"token_axis": None}, "quantize_channel<{}, true, FUSED>"),
    ((0, 4, 8), {"granularity": "token"}, None),
    ((2, 0, 8), {}, None),
]


def values_of(shape, dtype, seed=0):
    """Values of all magnitudes, exact ties among them, and a group of zeros."""
    rng = np.random.default_rng(seed)
    values = rng.standard_normal(shape) * 10.0 ** rng.integers(-3, 4, shape)
    flat = values.reshape(-1)
    flat[::3] = rng.integers(-127, 128, flat[::3].shape) / 2  # with a 63.5 in the group, ties
    flat[::97] = 63.5
    if values.size and values.shape[0] > 1:
        values[0] = 0
    return values.astype(dtype)


def same(device, got, expected):
    """Compare two quantized tensors bit for bit."""
    for name in ("data", "scale", "zero_point"):
        one, other = getattr(got, name), getattr(expected, name)
        assert (one is None) == (other is None)
        if other is not None:
            assert (one.dtype, one.shape) == (other.dtype, other.shape)
            np.testing.assert_array_equal(device.back(one), other)


@pytest.mark.parametrize("bits", [8, 4, 2])
@pytest.mark.parametrize("dtype", [f16, f32])
@pytest.mark.parametrize(("shape", "scheme", "kernel"), CASES, ids=str)
def test_quantize_and_back(device, monkeypatch, shape, scheme, kernel, dtype, bits):
    values = values_of(shape, dtype)
    scale_dtype = "float16" if bits == 4 else "float32"
    scheme = {"bits": bits, "scale_dtype": scale_dtype, **scheme}
    expected = quantize(values, **scheme)
    if kernel:  # one that found a scale wrong would leave the work to array code
        monkeypatch.setattr(quantization, "_quantize_rows", None)
    got = quantize(device.to_device(values), **scheme)
    same(device, got, expected)
    launched = getattr(device, "launched", None)
    if launched is not None:
        names = [kernel.format(f"{'u16' if dtype == f16 else 'float'}, {bits}")] if kernel else []
        assert [n for n in launched if "LARGEST" not in n] == names
    back = dequantize(got)
    assert back.dtype == f32
    np.testing.assert_array_equal(device.back(back), dequantize(expected))
    out = device.to_device(np.zeros(shape, f16))
    assert dequantize(got, out=out) is out
    np.testing.assert_array_equal(device.back(out), dequantize(expected, out=np.zeros(shape, f16)))
    if launched is not None and values.size:
        # Groups that end inside a unit are read back by CuPy's own array code.
        num_launches = 0 if scheme.get("group_size") == 20 else 2
        assert sum(name.startswith("dequantize") for name in launched) == num_launches


@pytest.mark.parametrize("granularity", ["token", "channel"])
def test_views_are_quantized_like_copies(device, granularity):
    both = values_of((2, 6, 3, 2, 16), f16)
    moved = device.to_device(both)
    for view in (lambda a: a[1], lambda a: a[0, 1:, :, 1], lambda a: a[0, :, :, :, 3:11]):
        expected = quantize(view(both), granularity=granularity)
        same(device, quantize(view(moved), granularity=granularity), expected)


@pytest.mark.parametrize("dtype", [f16, f32, np.float64])
@pytest.mark.parametrize("zero", [None, "point", "minimum"])
def test_what_has_no_kernel_is_array_code_on_the_same_side(device, dtype, zero):
    values = values_of((2, 9, 12), dtype)
    for granularity in ("token", "channel", "tensor"):
        scheme = {"symmetric": zero is None, "zero": zero or "point", "granularity": granularity}
        expected = quantize(values, **scheme)
        got = quantize(device.to_device(values), **scheme)
        same(device, got, expected)
        out = np.zeros(values.shape, np.float64)
        back = dequantize(got, out=device.to_device(out))
        np.testing.assert_array_equal(device.back(back), dequantize(expected, out=out))
    if zero and hasattr(device, "launched"):
        assert not device.launched


@pytest.mark.parametrize("scale_dtype", ["float32", "float16"])
def test_extreme_values(device, scale_dtype):
    largest = np.finfo(f32).max
    rows = np.array([[1, 2, 3], [65504, -1, 0], [1e-4, 3e-5, 0], [0, 0, 0]], f32)
    if scale_dtype == "float32":
        far = [[largest, -largest, 1], [1e-38, -5e-39, 1e-39], [3e-42, 1e-45, 0], [2e-37, 1e-39, 0]]
        rows = np.concatenate([rows, np.array(far, f32)])
    for bits in (8, 4):
        scheme = {"bits": bits, "granularity": "token", "scale_dtype": scale_dtype}
        expected = quantize(rows, **scheme)
        got = quantize(device.to_device(rows), **scheme)
        same(device, got, expected)
        np.testing.assert_array_equal(device.back(dequantize(got)), dequantize(expected))
        halves = [np.zeros(rows.shape, f16)] * 2
        out = dequantize(got, out=device.to_device(halves[0]))
        np.testing.assert_array_equal(device.back(out), dequantize(expected, out=halves[1]))


def test_every_near_tie_rounds_as_division_does(device):
    # (n + 1/2) * scale and its neighbours: a product with the inverse often errs there.
    scale = np.array([[1.0], [0.7], [3.3], [1e-3]], f32)
    ties = (np.arange(-127, 127, dtype=f32) + f32(0.5)) * scale
    rows = np.concatenate(
        [scale * f32(127), ties, np.nextafter(ties, f32(0)), np.nextafter(ties, f32(np.inf))],
        axis=1,
    ).astype(f32)
    expected = quantize(rows, granularity="token")
    same(device, quantize(device.to_device(rows), granularity="token"), expected)


@pytest.mark.parametrize("granularity", ["token", "channel"])
@pytest.mark.parametrize("wrong", [np.nan, np.inf])
def test_values_that_are_not_finite_are_named(device, wrong, granularity):
    values = values_of((2, 5, 16), f16, seed=1)
    values[1, 2, 3] = wrong
    kept = device.to_device(np.full(values.shape, 77, np.int8))
    with pytest.raises(ValueError, match=rf"tensor\[1, 2, 3\]={wrong}; every value must be finite"):
        quantize(device.to_device(values), granularity=granularity, out=kept)
    assert (device.back(kept) == 77).all()


def test_a_scale_that_vanishes_is_refused(device):
    values = device.to_device(np.full((2, 8), 1e-7, f16))
    with pytest.raises(ValueError, match="float16 must hold all scales"):
        quantize(values, granularity="token", scale_dtype="float16")


# Words of 16, 8, 4, 2 and 1 bytes; blocks of one token; an odd number of tokens.
POOLS = [
    ((6, 16, 2, 64), f16, "uint4"),
    ((5, 4, 1, 4), f16, "u64"),
    ((5, 3, 1, 6), np.uint16, "unsigned"),
    ((7, 1, 3, 5), np.int16, "u16"),
    ((4, 3, 1, 7), np.int8, "u8"),
    ((5, 2, 3), f32, "unsigned"),
    ((9, 200, 1, 16), f32, "uint4"),
]


@pytest.mark.parametrize(("shape", "dtype", "word"), POOLS, ids=str)
def test_paged_copies(device, shape, dtype, word):
    pool = np.random.default_rng(0).integers(0, 100, shape).astype(dtype)
    moved, block_size = device.to_device(pool), shape[1]
    table = [3, 0, 2]
    ids = device.to_device(np.array(table, np.int32))
    for num_tokens in (3 * block_size, 3 * block_size - 1, 1, 0):
        got = gather_kv(moved, ids, num_tokens)
        np.testing.assert_array_equal(device.back(got), gather_kv(pool, table, num_tokens))
    out = device.to_device(np.zeros((1, *shape[2:]), dtype))
    assert gather_kv(moved, ids, 1, out=out) is out
    first, count = block_size // 2, block_size + 1
    values = np.arange(count * pool[0, 0].size, dtype=dtype).reshape(count, *shape[2:])
    free = [1, 4][: shape[0] - 3]
    for target, t, v in ((pool, table, values), (moved, ids, device.to_device(values))):
        write_tokens(target, t, first, v)
        write_tokens(target, t, 0, v[:0])
        copy_blocks(target, t[: len(free)], free)
    np.testing.assert_array_equal(device.back(moved), pool)
    if hasattr(device, "launched"):
        assert set(device.launched) == {f"move_blocks<{word}>"}
        assert len(device.launched) == 6


def test_blocks_of_a_view_are_moved_where_they_lie(device):
    both = values_of((5, 2, 4, 2, 8), f16)  # keys and values of a block side by side
    moved = device.to_device(both)
    got = gather_kv(moved[:, 1], [4, 2], 7)
    np.testing.assert_array_equal(device.back(got), gather_kv(both[:, 1], [4, 2], 7))
    across = gather_kv(moved[:, :, 0], [4, 2], 3)  # no block of this view is contiguous
    np.testing.assert_array_equal(device.back(across), gather_kv(both[:, :, 0], [4, 2], 3))
    shifted = gather_kv(moved.reshape(5, 16, 8)[:, 1:4], [4, 2], 5)
    np.testing.assert_array_equal(
        device.back(shifted), gather_kv(both.reshape(5, 16, 8)[:, 1:4], [4, 2], 5)
    )


@pytest.mark.parametrize("bits", [8, 4, 2])
@pytest.mark.parametrize(
    "shape", [(6, 4, 2, 64), (5, 3, 3, 10), (7, 1, 1, 8), (5, 40, 1, 16)], ids=str
)
@pytest.mark.parametrize(
    "scheme",
    [
        {"granularity": "token"},
        {"granularity": "token", "group_size": 8},
        {"granularity": "channel"},
        {"granularity": "channel", "group_size": 3, "scale_dtype": "float16"},
    ],
    ids=str,
)
def test_reading_a_quantized_pool(device, shape, bits, scheme):
    values = values_of(shape, f16)
    scheme = {"bits": bits, "token_axis": 1, **scheme}
    pool, moved = quantize(values, **scheme), quantize(device.to_device(values), **scheme)
    same(device, moved, pool)
    before = len(getattr(device, "launched", ()))
    for num_tokens in (3 * shape[1], 2 * shape[1] + 1, 1, 0):
        for dtype in (f16, f32):
            out = np.zeros((num_tokens, *shape[2:]), dtype)
            got = gather_dequantize(moved, [4, 0, 3], num_tokens, out=device.to_device(out))
            expected = gather_dequantize(pool, [4, 0, 3], num_tokens, out=out)
            np.testing.assert_array_equal(device.back(got), expected)
    if hasattr(device, "launched"):
        assert all(name.startswith("dequantize") for name in device.launched[before:])
        assert len(device.launched) - before == 6
    if scheme["granularity"] == "token":
        tokens = values_of((shape[1] + 1, *shape[2:]), f16, seed=3)
        for target, new in ((pool, tokens), (moved, device.to_device(tokens))):
            write_tokens(target, [2, 1], shape[1] // 2, new[: shape[1]])
    for target in (pool, moved):
        copy_blocks(target, [1, 2], [0, 4])
    same(device, moved, pool)


def test_bad_input_is_refused_before_any_launch(device):
    pool = device.to_device(np.zeros((4, 2, 1, 8), f16))
    host = np.zeros((4, 2, 1, 8), f16)
    quantized = quantize(pool, granularity="token", token_axis=1)
    launched = list(getattr(device, "launched", ()))
    refused = [
        (lambda: gather_kv(pool, [0, 4], 3), ValueError, "block_table=4; blocks are 0 to 3"),
        (lambda: gather_kv(pool, [0, -1], 3), ValueError, "block_table=-1; blocks are 0 to 3"),
        (lambda: gather_dequantize(quantized, [4], 1), ValueError, "block_table=4; blocks are"),
        (lambda: gather_kv(pool, [0], 3), ValueError, "num_tokens=3; 1 blocks of 2 hold 2"),
        (lambda: gather_kv(pool, [0], 1, pool[1, :1]), ValueError, "out=memory of the pool"),
        (lambda: gather_kv(pool, [0], 1, pool[:1, 0, :, :4]), ValueError, "out=float16 of shape"),
        (lambda: gather_kv(pool, np.array([0]), 1), TypeError, "NumPy and CuPy mixed"),
        (lambda: gather_kv(pool, [0], 1, host[:1, 0]), TypeError, "NumPy and CuPy mixed"),
        (lambda: gather_kv(host, device.to_device([0]), 1), TypeError, "NumPy and CuPy mixed"),
        (lambda: write_tokens(pool, [0], 0, host[0]), TypeError, "NumPy and CuPy mixed"),
        (lambda: write_tokens(host, [0], 0, pool[0]), TypeError, "NumPy and CuPy mixed"),
        (lambda: write_tokens(pool, [1, 1], 0, pool[0]), ValueError, "out=memory of the pool"),
        (lambda: copy_blocks(pool, [0], [4]), ValueError, "targets=4; blocks are 0 to 3"),
        (lambda: copy_blocks(pool, [0, 1], [2, 2]), ValueError, "targets=2; this block is there"),
        (lambda: copy_blocks(pool, [0], [0]), ValueError, "sources=0; this block is a target"),
        (lambda: dequantize(quantized, out=host), TypeError, "NumPy and CuPy mixed"),
    ]
    for call, error, words in refused:
        with pytest.raises(error, match=re.escape(words)):
            call()
    assert list(getattr(device, "launched", ())) == launched


def test_what_gpucheck_measures(device):
    import cupy

    pairs = zip(operations(cupy, 2**16), operations(np, 2**16), strict=True)
    for (name, call, needed), (_, expected_call, expected_needed) in pairs:
        assert needed == expected_needed
        before = len(getattr(device, "launched", "x"))
        for got, expected in zip(call(), expected_call(), strict=True):
            if isinstance(got, QuantizedTensor):
                same(device, got, expected)
            elif expected is not None:
                np.testing.assert_array_equal(device.back(got), expected)
        assert len(getattr(device, "launched", "xx")) > before, name
