"""Quantization: worked integers, an exact oracle, the error bound on hostile data, a real model."""

import itertools
import json
import math
import types
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from kvlib import _data, quantization
from kvlib.quantization import (
    attention_output,
    attention_output_error,
    dequantize,
    load_kv_sample,
    quantization_error,
    quantize,
    quantize_per_channel_asymmetric,
    quantize_per_channel_symmetric,
)

f16, f32, f64 = np.float16, np.float32, np.float64
TOKEN = {"granularity": "token"}
SCHEMES = [
    {"symmetric": True},
    {"symmetric": False, "zero": "point"},
    {"symmetric": False, "zero": "minimum"},
]


def ulp(largest):
    """Spacing of float32 at a magnitude, as a float64 that cannot overflow."""
    return np.maximum(np.ldexp(1.0, np.frexp(np.asarray(largest, f64))[1] - 24), 2.0**-149)


def row(*values, dtype=f32):
    return np.array([values], dtype)


# ---- integers worked by hand ---------------------------------------------------------------------


def test_symmetric_int8_by_hand():
    # max|x| 127, q_max 127: scale 1. Ties go to even: 2.5 -> 2, -0.5 -> 0 (half away: 3 and -1).
    qt = quantize(row(127, 2.5, -0.5), **TOKEN)
    assert qt.scale == 1
    assert qt.zero_point is None
    assert qt.data.tolist() == [[127, 2, 0]]
    assert dequantize(qt).tolist() == [[127, 2, 0]]


def test_symmetric_int4_and_int2_by_hand():
    # int4: scale 7/7 = 1, -3.5 -> -4. int2: q_max 1, scale 7, only -1, 0, 1: 4/7 -> 1, -3.5/7 -> 0.
    assert quantize(row(7, 4, -3.5), bits=4, **TOKEN).codes().tolist() == [[7, 4, -4]]
    qt = quantize(row(7, 4, -3.5), bits=2, **TOKEN)
    assert qt.scale == 7
    assert qt.codes().tolist() == [[1, 1, 0]]


def test_zero_point_by_hand():
    # [0, 255]: scale 1, zero -128 - 0. 2.5 -> 2 - 128 = -126. Read back: q + 128.
    qt = quantize(row(0, 2.5, 255), symmetric=False, **TOKEN)
    assert (qt.scale, qt.zero_point) == (1, -128)
    assert qt.data.tolist() == [[-128, -126, 127]]
    assert dequantize(qt).tolist() == [[0, 2, 255]]
    # [1, 256]: zero -128 - 1. 3.5 -> 4 - 129 = -125; rounding 3.5 - 129 = -125.5 would give -126.
    qt = quantize(row(1, 3.5, 256), symmetric=False, **TOKEN)
    assert qt.zero_point == -129
    assert qt.data.tolist() == [[-128, -125, 127]]
    # [10, 11]: scale 1/255, zero = round(-128 - 10 * 255) = -2678; 10.25 * 255 = 2613.75 -> 2614.
    qt = quantize(row(10, 10.25, 11), symmetric=False, **TOKEN)
    assert qt.zero_point == -2678
    assert qt.zero_point.dtype == np.int32
    assert qt.data.tolist() == [[-128, -64, 127]]


def test_minimum_by_hand():
    # [-1, 2], 2 bits: scale 3/3 = 1; (0.5 + 1) / 1 = 1.5 -> 2. Read back: q - 1.
    qt = quantize(row(-1, 0.5, 2), bits=2, symmetric=False, zero="minimum", **TOKEN)
    assert (qt.scale, qt.zero_point) == (1, -1)
    assert qt.codes().tolist() == [[0, 2, 3]]
    assert qt.data.tolist() == [[0b11_10_00]]
    assert dequantize(qt).tolist() == [[-1, 1, 2]]


def test_float16_scale_is_rounded_once_and_used_as_stored():
    # 1/7 = 0.142857..; float16 has 0.142822..; 0.5 / 0.142822 = 3.5009 -> 4, with 1/7 a tie at 3.5.
    qt = quantize(row(1, 0.5, -1), bits=4, scale_dtype="float16", **TOKEN)
    assert qt.scale.dtype == f16
    assert qt.scale == f16(1 / 7)
    assert qt.codes().tolist() == [[7, 4, -7]]
    # 1e5 does not fit float16, 1e5 / 127 = 787.4 does: only the quotient may be rounded to it.
    assert quantize(row(1e5, -3e4), scale_dtype="float16", **TOKEN).scale == f16(1e5 / 127)
    # [0, 2.55], minimum: the scale 0.01 in float16 is 0.010002: 1.005 / 0.010002 = 100.48 -> 100.
    # A quotient taken with 0.01 itself would be 100.5.., and 101 from 1.0051 on.
    qt = quantize(
        row(0, 1.0051, 2.55), symmetric=False, zero="minimum", scale_dtype="float16", **TOKEN
    )
    assert qt.data.tolist() == [[0, 100, 255]]


def test_packing_puts_the_first_code_in_the_low_bits_and_pads_rows():
    # int4 stored as q + 8: 1, 8, 15 -> 0x81, 0x0F. int2 stored as q + 2: 1 2 3 1 | 3.
    values = row(-7, 0, 7)
    assert quantize(np.vstack([values] * 2), bits=4, **TOKEN).data.tolist() == [[0x81, 0x0F]] * 2
    qt = quantize(row(-1, 0, 1, -1, 1), bits=2, **TOKEN)
    assert qt.data.tolist() == [[0b01_11_10_01, 0b11]]
    assert dequantize(qt).tolist() == [[-1, 0, 1, -1, 1]]


def test_groups_by_hand():
    # Five tokens, groups of two: scales max/127 of tokens (0,1), (2,3) and the short (4,).
    values = np.array([[1, -254], [-127, 2], [254, 3], [0, 381], [635, -508]], f32)
    qt = quantize(values, group_size=2)
    assert qt.scale.tolist() == [[1, 2], [2, 3], [5, 4]]
    assert qt.data.tolist() == [[1, -127], [-127, 1], [127, 1], [0, 127], [127, -127]]
    # One token, groups of two channels, the last short.
    qt = quantize(row(1, -127, 254, 2, 381), group_size=2, **TOKEN)
    assert qt.scale.tolist() == [[1, 2, 3]]
    assert qt.data.tolist() == [[1, -127, 127, 1, 127]]
    # The whole tensor.
    assert quantize(values, granularity="tensor").scale.tolist() == [5]


def test_leading_axes_stay_separate_unless_pooled():
    values = np.array([[[127], [1]], [[254], [2]]], f32)  # heads, tokens, channels
    assert quantize(values).scale.tolist() == [[[1]], [[2]]]
    assert quantize(values, granularity="token").scale.ravel().tolist() == pytest.approx(
        [1, 1 / 127, 2, 2 / 127]
    )
    pooled = quantize_per_channel_symmetric(values)
    assert pooled.scale.tolist() == [2]
    assert pooled.data.ravel().tolist() == [64, 0, 127, 1]  # 63.5 -> 64 and 0.5 -> 0: ties to even
    assert quantize_per_channel_symmetric(values, axis=0).scale.tolist() == [1, 2]


def test_per_channel_functions_match_the_formulas():
    values = np.random.default_rng(5).normal(3, 1, (40, 6)).astype(f32)
    symmetric, asymmetric = (
        function(values, bits=8)
        for function in (quantize_per_channel_symmetric, quantize_per_channel_asymmetric)
    )
    np.testing.assert_allclose(symmetric.scale, abs(values).max(axis=0) / 127, rtol=1e-6)
    span = values.max(axis=0) - values.min(axis=0)
    np.testing.assert_allclose(asymmetric.scale, span / 255, rtol=1e-6)
    zero = np.round(-128 - values.min(axis=0) / asymmetric.scale.astype(f64))
    assert asymmetric.zero_point.tolist() == zero.tolist()
    assert symmetric.scale.shape == asymmetric.zero_point.shape == (6,)


def test_an_int8_zero_point_would_wrap():
    channel = np.linspace(10, 11, 50, dtype=f32)[:, None]
    qt = quantize_per_channel_asymmetric(channel)
    assert qt.zero_point == -2678
    wrapped = int(qt.zero_point[0]) + 21 * 128  # -2678 + 2560 = -118: what int8 keeps
    assert np.int32(-2678).astype(np.int8) == wrapped - 128 == -118
    codes = np.clip(np.round(channel / qt.scale) - 118, -128, 127)  # 2550 - 118 and more
    assert set(codes.ravel()) == {127}
    assert float((127 + 118) * qt.scale[0]) == pytest.approx(0.96, abs=1e-3)
    assert abs(dequantize(qt) - channel).max() <= qt.scale[0] / 2 + ulp(11)


def test_constant_groups():
    for constant in (0, 3, -2.5, 0.1, 1e-30, -1e30):
        values = np.full((5, 3), constant, f32)
        for zero in ("point", "minimum"):
            qt = quantize(values, symmetric=False, zero=zero)
            assert (qt.scale == abs(values[0])).all()
            assert (dequantize(qt) == values).all()
        assert abs(dequantize(quantize(values)) - values).max() <= ulp(constant)
    halves = np.full((4, 2), 0.1, f16)
    qt = quantize(halves, symmetric=False, zero="minimum", scale_dtype="float16")
    assert (dequantize(qt) == halves).all()


# ---- an independent oracle -----------------------------------------------------------------------


def group_of(shape, granularity, group_size):
    """Say for each position of [heads, tokens, channels] which group it is in."""
    heads, tokens, channels = np.indices(shape)
    if granularity == "channel":
        return heads, tokens // (group_size or shape[1]), channels
    if granularity == "token":
        return heads, tokens, channels // (group_size or shape[2])
    return (np.zeros(shape, int),)


def round_half_even(fraction):
    whole, rest = divmod(fraction, 1)
    up = rest > Fraction(1, 2) or (rest == Fraction(1, 2) and whole % 2)
    return int(whole) + bool(up)


def check_against_exact_arithmetic(values, qt):
    """Recompute every scale, code and value of a 3-D tensor with Python's rationals."""
    index = group_of(values.shape, qt.granularity, qt.group_size)
    scales, codes, read = qt.scale[index], qt.codes(), dequantize(qt)
    zeros = np.zeros(values.shape, f64) if qt.zero is None else qt.zero_point[index].astype(f64)
    names = np.ravel_multi_index(index, tuple(int(i.max()) + 1 for i in index))
    half = 2 ** (qt.bits - 1)
    for name in np.unique(names):
        inside = names == name
        numbers = [Fraction(float(v)) for v in values[inside]]
        scale, zero = Fraction(float(scales[inside][0])), Fraction(float(zeros[inside][0]))
        largest, span = max(abs(v) for v in numbers), max(numbers) - min(numbers)
        one_ulp = Fraction(float(ulp(float(largest))))
        rounding = Fraction(float(np.finfo(qt.scale_dtype).eps)) / 2
        if qt.zero is None:
            exact = largest / (half - 1)
        else:
            base = zero if qt.zero == "minimum" else min(numbers)
            exact = (max(numbers) - base) / (2 * half - 1) if span else largest
        # Nearest, or (rarely) the next float up.
        quantum = 2 * Fraction(float(np.finfo(qt.scale_dtype).smallest_subnormal))
        assert exact * (1 - 2 * rounding) - quantum <= scale
        assert scale <= exact * (1 + 4 * rounding) + quantum
        if not scale:
            assert not read[inside].any()
            continue
        if qt.zero == "point":
            assert zero == -half - round_half_even(min(numbers) / scale)
        elif qt.zero == "minimum":  # at or below the lowest value, by two float steps at most
            steps_below = 2 * max(abs(zero) * 2 * rounding, Fraction(1, 2**24))
            assert zero <= min(numbers) <= zero + steps_below
        for number, code, value in zip(numbers, codes[inside], read[inside], strict=True):
            steps = (number - (zero if qt.zero == "minimum" else 0)) / scale
            expected = round_half_even(steps) + (int(zero) if qt.zero == "point" else 0)
            limits = {None: (1 - half, half - 1), "point": (-half, half - 1)}
            low, high = limits.get(qt.zero, (0, 2 * half - 1))
            expected = min(max(expected, low), high)
            # A float quotient may fall on a tie that the exact one misses by a hair.
            tie = abs((steps % 1) - Fraction(1, 2)) < abs(steps) * Fraction(1, 2**23) + Fraction(
                1, 2**40
            )
            assert int(code) == expected or (tie and abs(int(code) - expected) == 1)
            offset = (int(code) - int(zero)) * scale if qt.zero == "point" else int(code) * scale
            exact_value = offset + (zero if qt.zero == "minimum" else 0)
            assert value == f32(float(exact_value))  # float64 holds all but the last rounding
            assert abs(number - Fraction(float(value))) <= scale / 2 + one_ulp


def quantize_if_representable(values, **scheme):
    """Return None where some group's scale cannot be stored, which is an error of its own."""
    try:
        return quantize(values, **scheme)
    except ValueError as error:
        if "must hold all scales" not in str(error):
            raise
        return None


@st.composite
def tensors(draw, dtypes=(f16, f32, f64)):
    dtype = draw(st.sampled_from(dtypes))
    shape = draw(st.tuples(st.integers(1, 2), st.integers(1, 7), st.integers(1, 7)))
    width = {f16: 16, f32: 32, f64: 32}[dtype]
    magnitude = draw(st.sampled_from([2.0**-10, 1.0, 256.0]))
    elements = st.floats(-magnitude, magnitude, width=width).map(
        lambda v: v if abs(v) > 1e-4 * magnitude else 0.0
    )
    offset = draw(st.sampled_from([0.0, 0.0, 10 * magnitude]))
    return (draw(hnp.arrays(dtype, shape, elements=elements)) + offset).astype(dtype)


@st.composite
def schemes(draw):
    granularity = draw(st.sampled_from(["channel", "token", "tensor"]))
    return {
        "bits": draw(st.sampled_from([8, 4, 2])),
        "granularity": granularity,
        "group_size": None
        if granularity == "tensor"
        else draw(st.sampled_from([None, 1, 2, 3, 9])),
        **draw(st.sampled_from(SCHEMES)),
    }


@settings(max_examples=100, deadline=None)
@given(tensors(), schemes())
def test_codes_scales_and_values_are_exact(values, scheme):
    check_against_exact_arithmetic(values, quantize(values, **scheme))


@settings(max_examples=60, deadline=None)
@given(tensors(), schemes())
def test_float16_scales_keep_the_same_bound(values, scheme):
    qt = quantize_if_representable(values, scale_dtype="float16", **scheme)
    if qt is not None:
        check_against_exact_arithmetic(values, qt)


@settings(max_examples=60, deadline=None)
@given(tensors(), schemes(), st.sampled_from(["float32", "float16"]))
def test_every_group_follows_the_definition(values, scheme, scale_dtype):
    qt = quantize_if_representable(values, scale_dtype=scale_dtype, **scheme)
    if qt is None:
        return
    index = group_of(values.shape, qt.granularity, qt.group_size)
    names = np.ravel_multi_index(index, tuple(int(i.max()) + 1 for i in index))
    for name in np.unique(names):
        inside = names == name
        codes, scale, zero = quantization._definition(values[inside], qt)
        assert (qt.codes()[inside] == codes).all()
        assert (qt.scale[index][inside] == scale).all()
        assert zero is None or (qt.zero_point[index][inside] == zero).all()


# ---- hostile data --------------------------------------------------------------------------------

HOSTILE = {
    "denormal float32": np.array([[1e-45, 3e-44], [1.9e-43, -2.5e-43], [7e-42, 1e-44]], f32),
    "denormal float16": np.array([[6e-8, 3e-6], [-6e-5, 5e-7], [1.2e-7, 6e-8]], f16),
    "huge": np.array([[1e30, -3e38], [-2e30, 3.4e38], [5e29, 1.0]], f32),
    "largest float32": np.full((3, 2), np.finfo(f32).max, f32),
    "both ends": np.array([[-3.4e38], [3.4e38], [0.0]], f32),
    "constant": np.full((4, 3), -7.3, f32),
    "constant zero": np.zeros((4, 3), f32),
    "in [10, 11]": np.linspace(10, 11, 60, dtype=f32).reshape(20, 3),
    "in [1e4, 1e4 + 1]": np.linspace(1e4, 1e4 + 1, 512, dtype=f32).reshape(-1, 1),
    "one ulp wide": np.array([[1], [np.nextafter(f32(1), f32(0))]], f32),
    "float16 maxima": np.array([[65504, -65504], [1, 65504], [-3, 2]], f16),
    "one element": np.array([[-0.37]], f32),
    "symmetric range": np.array([[-1.9999], [1.9999], [0.3]], f32),
    "float64": np.array([[1e-30, 1 / 3], [2e-30, -1e9]], f64),
    "one vector": np.array([0.1, -7.0, 3.3], f32),
    "not contiguous": np.arange(-60, 60, dtype=f32).reshape(4, 5, 6)[::-1, ::2, 1::2],
}


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("bits", [8, 4, 2])
def test_the_bound_holds_on_hostile_data(name, scheme, bits):
    values = HOSTILE[name]
    for granularity in ("channel", "token", "tensor"):
        qt = quantize_if_representable(values, bits=bits, granularity=granularity, **scheme)
        if qt is None:  # a few denormals apart: no float32 scale can say that
            assert name == "denormal float32"
            continue
        read = dequantize(qt)
        assert read.dtype == f32
        assert np.isfinite(read).all()
        # Every group's own bound: bring the groups' scale and largest value to the values' shape.
        axis = {"channel": -2 if values.ndim > 1 else None, "token": -1, "tensor": None}[
            granularity
        ]
        magnitudes = abs(values.astype(f64))
        if granularity == "channel" and values.ndim == 1:
            largest = magnitudes
        else:
            largest = np.broadcast_to(magnitudes.max(axis=axis, keepdims=True), values.shape)
        scale = np.broadcast_to(qt.scale.astype(f64), values.shape)
        bound = scale / 2 + ulp(largest)
        assert (abs(read.astype(f64) - values.astype(f64)) <= bound).all()


def test_denormals_whose_scale_is_one_quantum_are_not_clipped():
    # 190 quanta: 190 / 127 rounds to a scale of 1 quantum, which would clip 190 to 127.
    quantum = np.finfo(f32).smallest_subnormal
    qt = quantize(np.array([[190], [5]], f32) * quantum)
    assert qt.scale == 2 * quantum
    assert abs(dequantize(qt) - np.array([[190], [5]]) * quantum).max() <= quantum


def test_the_zero_point_gets_as_wide_as_it_must():
    qt = quantize(HOSTILE["one ulp wide"], symmetric=False)
    # scale 2**-24 / 255: the zero point is about -255 * 2**24 = -4.28e9, past int32.
    lowest, scale = 1 - Fraction(1, 2**24), Fraction(float(qt.scale[0, 0]))
    assert qt.zero_point.dtype == np.int64
    assert qt.zero_point == -128 - round(lowest / scale)
    assert abs(int(qt.zero_point[0, 0]) + 255 * 2**24) < 1000
    assert (dequantize(qt) == HOSTILE["one ulp wide"]).all()


@pytest.mark.parametrize("offset", [1e2, 1e4, 1e5, 1e6, 1e7, 1e9])
def test_offsets_far_from_zero_are_read_back_exactly(offset):
    """From 2**24 steps on float32 no longer holds code - zero point."""
    values = (offset + np.linspace(0, 1, 11)).astype(f64).reshape(1, 11, 1)
    for bits in (8, 4):
        for single in (values, values.astype(f32)):
            for scheme in SCHEMES[1:]:
                check_against_exact_arithmetic(single, quantize(single, bits=bits, **scheme))


def test_float16_output_is_clamped():
    # 65504 / 127 = 515.8 becomes 516 in float16; 127 * 516 = 65532 rounds to infinity in float16.
    values = row(65504, -65504, 516, dtype=f16)
    qt = quantize(values, scale_dtype="float16", **TOKEN)
    assert dequantize(qt).tolist() == [[65532, -65532, 516]]
    out = np.empty((1, 3), f16)
    assert dequantize(qt, out=out) is out
    assert out.tolist() == [[65504, -65504, 516]]


@pytest.mark.parametrize("shape", [(0, 4), (4, 0), (2, 0, 3), (0,)])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_empty_tensors(shape, scheme):
    for granularity in ("channel", "token", "tensor"):
        values = np.empty(shape, f32)
        qt = quantize(values, bits=4, granularity=granularity, **scheme)
        assert dequantize(qt).shape == qt.codes().shape == shape
        assert qt.data.size == 0
        assert quantization_error(values, qt)["rmse"] == 0


# ---- laws ----------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(tensors(), schemes())
def test_bytes_counted_are_bytes_held(values, scheme):
    qt = quantize(values, **scheme)
    heads, tokens, channels = values.shape
    group = scheme["group_size"]
    groups = {
        "channel": heads * -(-tokens // (group or tokens)) * channels,
        "token": heads * tokens * -(-channels // (group or channels)),
        "tensor": 1,
    }[qt.granularity]
    zero_bytes = 0 if qt.zero is None else 4 if qt.zero == "minimum" else qt.zero_point.itemsize
    assert qt.data.nbytes == heads * tokens * -(-channels * qt.bits // 8)
    assert qt.nbytes == qt.data.nbytes + groups * (4 + zero_bytes)
    ratio = quantization_error(values, qt)["compression_ratio"]
    assert ratio == values.size * values.itemsize / qt.nbytes


@settings(max_examples=60, deadline=None)
@given(tensors((f32,)), schemes(), st.integers(-20, 20))
def test_powers_of_two_only_scale(values, scheme, exponent):
    plain, scaled = quantize(values, **scheme), quantize(np.ldexp(values, exponent), **scheme)
    assert (plain.data == scaled.data).all()
    assert (np.ldexp(plain.scale, exponent) == scaled.scale).all()
    if plain.zero == "point":
        assert (plain.zero_point == scaled.zero_point).all()
    assert (np.ldexp(dequantize(plain), exponent) == dequantize(scaled)).all()


@settings(max_examples=60, deadline=None)
@given(tensors(), st.sampled_from([8, 4, 2]), st.sampled_from(["channel", "token"]))
def test_symmetric_requantization_changes_no_code(values, bits, granularity):
    first = quantize(values, bits=bits, granularity=granularity)
    again = quantize(dequantize(first), bits=bits, granularity=granularity)
    assert (first.data == again.data).all()
    assert (quantize(-values, bits=bits, granularity=granularity).codes() == -first.codes()).all()


@settings(max_examples=40, deadline=None)
@given(tensors(), st.sampled_from(SCHEMES), st.randoms(use_true_random=False))
def test_channels_can_be_permuted(values, scheme, random):
    order = random.sample(range(values.shape[2]), values.shape[2])
    plain = quantize(values, group_size=3, **scheme)
    moved = quantize(values[..., order], group_size=3, **scheme)
    assert (plain.data[..., order] == moved.data).all()
    assert (plain.scale[..., order] == moved.scale).all()


@settings(max_examples=60, deadline=None)
@given(tensors(), schemes(), st.permutations(range(3)))
def test_axes_may_lie_anywhere(values, scheme, order):
    plain = quantize(values, **scheme)
    token_axis, axis = order.index(1) - 3, order.index(2)
    moved = quantize(values.transpose(order), axis=axis, token_axis=token_axis, **scheme)
    assert (plain.codes().transpose(order) == moved.codes()).all()
    assert (dequantize(plain).transpose(order) == dequantize(moved)).all()
    assert plain.nbytes == moved.nbytes
    if scheme["granularity"] != "tensor":
        assert (plain.scale.transpose(order) == moved.scale).all()
        # bits < 8: the rows of channels are what is packed, wherever the channel axis is
        assert (plain.data.transpose(order) == moved.data).all()


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(-7, 7), min_size=1, max_size=40))
def test_packed_round_trip_of_any_length(codes):
    values = np.array([[7, *codes]], f32)  # scale 1: codes are the values
    qt = quantize(values, bits=4, **TOKEN)
    assert qt.codes().tolist() == values.astype(int).tolist()
    nibbles = [n - 8 for byte in qt.data[0].tolist() for n in (byte & 15, byte >> 4)]
    assert nibbles[: values.size] == values.astype(int)[0].tolist()
    assert nibbles[values.size :] in ([], [-8])


# ---- chunks and the path for other array libraries -----------------------------------------------


def all_schemes(rng, dtype):
    values = (rng.normal(size=(2, 35, 21)) * 3 + rng.choice([0, 40])).astype(dtype)
    for bits in (8, 4, 2):
        for scheme in SCHEMES:
            for granularity, group in (
                ("channel", None), ("channel", 8), ("channel", 20), ("token", None), ("token", 8),
                ("tensor", None),
            ):  # fmt: skip
                yield values, {
                    "bits": bits, "granularity": granularity, "group_size": group, **scheme,
                }  # fmt: skip


@pytest.mark.parametrize("dtype", [f16, f32, f64])
def test_chunks_change_nothing(monkeypatch, dtype):
    cases = list(all_schemes(np.random.default_rng(1), dtype))
    whole = [quantize(values, **scheme) for values, scheme in cases]
    read = [dequantize(qt) for qt in whole]
    # Rows of 21 values: chunks of 1, 3 or 13 rows, so that groups of 8 and 20 fit some, not all.
    # Then one chunk, in which groups of 8 tokens lie two side by side.
    for chunk_rows, buffered in ((1, 8192), (3, 8192), (13, 8192), (64, 40)):
        monkeypatch.setattr(quantization, "_CHUNK_BYTES", chunk_rows * 21 * 8)
        monkeypatch.setattr(quantization, "_BUFFERED", buffered)
        for (values, scheme), expected, expected_read in zip(cases, whole, read, strict=True):
            qt = quantize(values, **scheme)
            assert (qt.data == expected.data).all(), scheme
            assert (qt.scale == expected.scale).all(), scheme
            assert qt.zero is None or (qt.zero_point == expected.zero_point).all(), scheme
            assert (dequantize(qt) == expected_read).all(), scheme


@pytest.mark.parametrize("dtype", [f16, f32])
def test_another_array_module_computes_the_same(monkeypatch, dtype):
    """Any module that is not NumPy takes the whole-array path, as CuPy does."""
    cases = list(all_schemes(np.random.default_rng(2), dtype))
    expected = [(qt := quantize(values, **scheme), dequantize(qt)) for values, scheme in cases]
    other = types.SimpleNamespace(**{name: getattr(np, name) for name in np.__all__})
    monkeypatch.setattr(quantization, "array_module", lambda *arrays: other)
    for (values, scheme), (qt, read) in zip(cases, expected, strict=True):
        same = quantize(values, **scheme)
        assert (same.data == qt.data).all()
        assert (same.scale == qt.scale).all()
        assert (dequantize(same) == read).all()


# ---- out= ----------------------------------------------------------------------------------------


def test_out_receives_codes_and_values():
    values = np.random.default_rng(3).normal(size=(3, 10, 9)).astype(f32)
    for bits, granularity in ((8, "channel"), (4, "token"), (2, "tensor")):
        expected = quantize(values, bits=bits, granularity=granularity)
        codes = np.full_like(expected.data, 99)
        qt = quantize(values, bits=bits, granularity=granularity, out=codes)
        assert qt.data is codes
        assert (codes == expected.data).all()
        scattered = np.zeros((6, 10, 18), f32)[::2, :, ::2]
        for out in (np.empty((3, 10, 9), f32), np.empty((3, 10, 9), f64), scattered):
            assert dequantize(qt, out=out) is out
            assert (out == dequantize(qt)).all()


def test_the_input_is_left_alone_and_so_is_out_after_an_error():
    values = np.random.default_rng(3).normal(size=(300, 64)).astype(f32)
    before = values.copy()
    quantize(values, bits=4, symmetric=False)
    assert (values == before).all()
    values[299, 63] = np.nan
    out = np.full((300, 64), 77, np.int8)
    with pytest.raises(ValueError, match="finite"):
        quantize(values, group_size=2, out=out)
    assert (out == 77).all()


# ---- bad input -----------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", [f16, f32, f64])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_first_bad_value_is_named(bad, dtype, scheme):
    values = np.ones((2, 50, 7), dtype)
    values[1, 4, 2] = values[1, 20, 0] = bad
    for granularity in ("channel", "token", "tensor"):
        with pytest.raises(
            ValueError, match=r"tensor\[1, 4, 2\]=-?(nan|inf); .*finite.*nan_to_num"
        ):
            quantize(values, granularity=granularity, **scheme)


BAD = [
    ({"bits": 5}, ValueError, "bits=5; a code takes 8, 4 or 2 bits. Use one of them."),
    ({"bits": 16}, ValueError, "bits=16; it must be at most 8"),
    ({"bits": 8.0}, TypeError, "bits=8.0; it must be an integer. Write 8."),
    ({"granularity": "chanel"}, ValueError, "granularity='chanel'; .*Did you mean 'channel'"),
    ({"group_size": 0}, ValueError, "group_size=0; it must be at least 1"),
    ({"group_size": 2.5}, TypeError, "group_size=2.5; it must be an integer"),
    ({"group_size": 4, "granularity": "tensor"}, ValueError, "group_size=4; .*Leave it out"),
    ({"axis": 2}, ValueError, "axis=2; it must be at most 1"),
    ({"token_axis": -3}, ValueError, "token_axis=-3; it must be at least -2"),
    ({"token_axis": 1}, ValueError, "token_axis=1; it is the channel axis.*Name another"),
    ({"symmetric": False, "zero": "min"}, ValueError, "zero='min'; .*Did you mean 'minimum'"),
    ({"symmetric": "no"}, TypeError, "symmetric='no'; it must be a bool"),
    ({"scale_dtype": "bfloat16"}, ValueError, "scale_dtype='bfloat16'; .*Did you mean"),
    ({"out": np.empty((3, 4), f32)}, ValueError, "out=float32 .*it must be int8.*Allocate"),
    ({"out": np.empty((4, 3), np.int8)}, ValueError, r"out=int8 of shape \(4, 3\)"),
]


@pytest.mark.parametrize(("arguments", "error", "message"), BAD)
def test_bad_arguments(arguments, error, message):
    with pytest.raises(error, match=message):
        quantize(np.ones((3, 4), f32), **arguments)


def test_bad_tensors():
    with pytest.raises(TypeError, match=r"tensor=int64 .*float16.*astype"):
        quantize(np.ones((2, 2), np.int64))
    with pytest.raises(TypeError, match=r"tensor=float64 of shape \(\)"):
        quantize(3.5)
    with pytest.raises(TypeError, match=r"qt=ndarray; .*Call quantize"):
        dequantize(np.ones(3))
    qt = quantize(np.ones((2, 2), f32))
    with pytest.raises(ValueError, match=r"out=int8 .*float32.*Allocate"):
        dequantize(qt, out=np.empty((2, 2), np.int8))
    with pytest.raises(ValueError, match=r"original.shape=\(4,\); qt was made from.*Pass that"):
        quantization_error(np.ones(4, f32), qt)


@pytest.mark.parametrize(
    ("values", "scheme", "shown"),
    [
        (row(1e-7, 2e-7), {}, "1.57e-09"),  # 2e-7 / 127 vanishes in float16
        (row(1e8, -1e8), {}, "7.87e[+]05"),  # overflows
        (row(1e5, 1e5 + 1), {"symmetric": False, "zero": "minimum"}, "inf"),  # its minimum does
    ],
)
def test_a_scale_that_float16_cannot_hold_is_an_error(values, scheme, shown):
    with pytest.raises(
        ValueError, match=rf"scale=-?{shown}; float16 must hold.*scale_dtype='float32'"
    ):
        quantize(values, scale_dtype="float16", **scheme, **TOKEN)
    quantize(values, **scheme, **TOKEN)


def test_a_scale_that_float32_cannot_hold_is_an_error():
    with pytest.raises(ValueError, match="float32 must hold"):
        quantize(np.array([[1e-45, 1e-45]], f32), **TOKEN)
    with pytest.raises(ValueError, match="float32 must hold"):
        quantize(np.array([[1e300, 1.0]]), **TOKEN)


# ---- what an error costs -------------------------------------------------------------------------


def test_quantization_error_by_hand():
    # [127, 2.5, -0.5] reads back as [127, 2, 0]: errors 0, 0.5, 0.5. 12 bytes become 3 + 4.
    values = row(127, 2.5, -0.5)
    error = quantization_error(values, quantize(values, **TOKEN))
    assert list(error) == [
        "max_abs_error", "mean_abs_error", "rmse", "relative_rmse", "compression_ratio",
    ]  # fmt: skip
    assert error["max_abs_error"] == 0.5
    assert error["mean_abs_error"] == pytest.approx(1 / 3)
    assert error["rmse"] == pytest.approx((0.5 / 3) ** 0.5)
    assert error["relative_rmse"] == pytest.approx((0.5 / (127**2 + 2.5**2 + 0.5**2)) ** 0.5)
    assert error["compression_ratio"] == 12 / 7
    assert quantization_error(values.astype(f64), quantize(values, **TOKEN))[
        "compression_ratio"
    ] == 24 / 7  # fmt: skip


def naive_attention(q, k, v):
    out = np.zeros((q.shape[0], q.shape[1], v.shape[2]))
    for head in range(q.shape[0]):
        kv_head = head // (q.shape[0] // k.shape[0])
        for i in range(q.shape[1]):
            sees = k.shape[1] - q.shape[1] + i + 1
            scores = [q[head, i] @ k[kv_head, t] / q.shape[2] ** 0.5 for t in range(sees)]
            weights = np.exp(np.array(scores) - max(scores))
            out[head, i] = weights @ v[kv_head, :sees] / weights.sum()
    return out


def test_attention_error_against_loops():
    rng = np.random.default_rng(4)
    q, k = rng.normal(size=(6, 4, 8)), rng.normal(size=(2, 9, 8))
    v = rng.normal(size=(2, 9, 5))
    k_hat, v_hat = k + 0.1 * rng.normal(size=k.shape), v + 0.1 * rng.normal(size=v.shape)
    exact, read = naive_attention(q, k, v), naive_attention(q, k_hat, v_hat)
    expected = np.linalg.norm(read - exact) / np.linalg.norm(exact)
    assert attention_output_error(q, k, v, k_hat, v_hat) == pytest.approx(expected, rel=1e-12)
    single = [array.astype(f32) for array in (q, k, v, k_hat, v_hat)]
    assert attention_output_error(*single) == pytest.approx(expected, rel=1e-4)
    assert attention_output_error(q, k, v, k, v) == 0
    assert attention_output_error(q, k, v, k, 2 * v) == pytest.approx(1)


def test_attention_serves_several_versions_of_keys_and_values():
    rng = np.random.default_rng(7)
    q, k, v = (rng.normal(size=shape) for shape in ((4, 3, 8), (2, 9, 8), (2, 9, 5)))
    both = attention_output(q, k, np.concatenate([v, 3 * v], axis=2))
    assert both.shape == (4, 3, 10)
    np.testing.assert_allclose(both[..., :5], naive_attention(q, k, v), rtol=1e-12)
    np.testing.assert_allclose(both[..., 5:], 3 * naive_attention(q, k, v), rtol=1e-12)
    versions = attention_output(q, np.stack([k, 2 * k], axis=1), v)
    assert versions.shape == (4, 3, 2, 5)
    for i in (0, 1):
        expected = naive_attention(q, (i + 1) * k, v)
        np.testing.assert_allclose(versions[:, :, i], expected, rtol=1e-12)
    # A key that nobody looks at weighs nothing, though exp would leave a denormal.
    far = np.array([[[0.0], [-95.0]]], f32)
    seen = attention_output(np.ones((1, 1, 1), f32), far, np.array([[[1.0], [2.0**126]]], f32))
    assert seen.tolist() == [[[1.0]]]


def test_attention_error_refuses_what_does_not_fit():
    q, k = np.ones((4, 2, 8)), np.ones((2, 5, 8))
    for arrays in (
        (q, k, k[:, :4], k, k[:, :4]),
        (q[:3], k, k, k, k),
        (np.ones((4, 6, 8)), k, k, k, k),
        (q[..., :4], k, k, k, k),
        (q, k, k, k[:1], k),
        (q[:, :0], k, k, k, k),
        (q[:0], k[:0], k[:0], k[:0], k[:0]),
        (q[..., :0], k[..., :0], k, k[..., :0], k),
    ):
        with pytest.raises(ValueError, match=r"shape=.*Reshape them"):
            attention_output_error(*arrays)
    with pytest.raises(ValueError, match="not 0"):
        attention_output_error(q, k, 0 * k, k, k)


# ---- a real model --------------------------------------------------------------------------------

# Recorded independently with another implementation, on layers 4 and 26 of the shipped sample: the
# error of the attention output with int4 keys or values, then the relative RMSE of the values.
COLUMNS = [
    ("k", "token", None), ("k", "token", 32), ("k", "channel", 32),
    ("v", "token", 32), ("v", "channel", 32),
]  # fmt: skip
RECORDED = [
    ("minimum", "float16", 4, [0.1789, 0.1232, 0.0488, 0.0551, 0.1145], [0.0820, 0.0771]),
    ("minimum", "float16", 26, [0.2816, 0.1773, 0.0710, 0.0589, 0.1735], [0.0804, 0.0792]),
    ("point", "float32", 4, [0.1712, 0.1265, 0.0639, 0.0585, 0.1815], [0.0849, 0.0796]),
    ("point", "float32", 26, [0.3221, 0.1982, 0.1033, 0.0620, 0.1604], [0.0831, 0.0817]),
]


@pytest.mark.parametrize(("zero", "scale_dtype", "layer", "attention", "relative_rmse"), RECORDED)
def test_the_recorded_errors_of_a_real_model(zero, scale_dtype, layer, attention, relative_rmse):
    sample = load_kv_sample()[layer]
    found, rmse = [], []
    for name, granularity, group_size in COLUMNS:
        original = getattr(sample, name)
        qt = quantize(
            original, bits=4, symmetric=False, zero=zero, scale_dtype=scale_dtype,
            granularity=granularity, group_size=group_size,
        )  # fmt: skip
        read = {"k": sample.k, "v": sample.v, name: dequantize(qt)}
        found.append(attention_output_error(sample.q, sample.k, sample.v, read["k"], read["v"]))
        if name == "v":
            rmse.append(quantization_error(original, qt)["relative_rmse"])
    assert found == pytest.approx(attention, rel=0.02)
    assert rmse == pytest.approx(relative_rmse, rel=0.02)
    assert rmse[1] < rmse[0]  # per channel is closer to the values ...
    assert found[4] > 2 * found[3]  # ... and more than twice as far from the attention output


def test_true_bytes_of_a_layer_by_hand():
    # 3 heads x 1,024 tokens x 64 values: 98,304 bytes of int4; groups of 32 make 6,144 pairs of a
    # float16 scale and minimum, 24,576 bytes. Keys and values: 240 bytes a token, fp16 takes 768.
    sample = load_kv_sample()[4]
    schemes = {"bits": 4, "symmetric": False, "zero": "minimum", "scale_dtype": "float16"}
    for granularity in ("channel", "token"):
        qt = quantize(sample.k, granularity=granularity, group_size=32, **schemes)
        assert qt.nbytes == 98_304 + 24_576 == 120 * 1024
    # Without groups a channel's scale serves 1,024 tokens (192 of them), a token's 64 channels.
    assert quantize(sample.v, **schemes).nbytes == 98_304 + 192 * 4
    assert quantize(sample.v, granularity="token", **schemes).nbytes == 98_304 + 3072 * 4


def test_what_attention_looks_at_is_small_and_decides_about_values():
    # Chapter 5: int4 values per token beat those per channel at the attention output, until the 16
    # tokens that draw most attention are kept exact; then it is the other way round.
    for layer in load_kv_sample().values():
        k, v, q, received = layer
        drawn = np.argsort(-received.sum(axis=0, dtype=f64))[:16]
        found = []
        for granularity in ("channel", "token"):
            read = dequantize(
                quantize(
                    v, bits=4, symmetric=False, zero="minimum", scale_dtype="float16",
                    granularity=granularity, group_size=32,
                )
            )  # fmt: skip
            found.append(attention_output_error(q, k, v, k, read))
            read[:, drawn] = v[:, drawn]
            found.append(attention_output_error(q, k, v, k, read))
        per_channel, per_channel_exact, per_token, per_token_exact = found
        assert per_channel > 1.8 * per_token
        assert per_channel_exact < per_token_exact


def test_published_cache_sizes_follow_from_bytes_held():
    published = {entry["id"]: entry for entry in _data.read_json("published_numbers.json")}
    values = np.random.default_rng(6).normal(size=(64, 128)).astype(f16)

    def bits_per_value(bits, **scheme):
        blocks = {"granularity": "token", "group_size": 32, "scale_dtype": "float16"}
        return quantize(values, bits=bits, **blocks, **scheme).nbytes * 8 / values.size

    q8_0, q4_0 = bits_per_value(8), bits_per_value(4)
    assert (q8_0, q4_0) == (8.5, 4.5)  # 32 codes and one float16: 34 and 18 bytes
    for name, bits in (("q8_0", q8_0), ("q4_0", q4_0)):
        entry = published[f"llamacpp-21551-24b-{name}"]
        assert entry["inputs"]["f16_mib"] * bits / 16 == entry["expected"]
    for name, per_token in (("llamacpp-11200-q8", 2), ("llamacpp-11200-q8-k", 1)):
        sizes = published[name]["inputs"]
        count = sizes["L"] * sizes["H_kv"] * sizes["d_head"] * sizes["cells"] * per_token
        assert count * q8_0 / 8 / 2**20 == published[name]["expected"]
    entry = published["ollama-6276-q4"]
    sizes = entry["inputs"]
    count = 2 * sizes["L"] * sizes["H_kv"] * sizes["d_head"] * sizes["tokens"]
    assert round(count * q4_0 / 8 / 2**30, 1) == entry["expected"]
    assert q4_0 / 16 == pytest.approx(0.281, abs=1e-3)
    # KIVI, 2 bits in groups of 32 with a float16 scale and minimum: 3 bits, "5x to 6x" less.
    kivi = bits_per_value(2, symmetric=False, zero="minimum")
    assert kivi == 3
    assert 16 / kivi == pytest.approx(published["kivi-17-ratio"]["recomputed"])
    # The asymmetric q5_1 keeps a float16 minimum too: one more bit per value in blocks of 32.
    assert bits_per_value(4, symmetric=False, zero="minimum") == q4_0 + 0.5


def test_the_sample_is_checked_and_complete(monkeypatch):
    sample = load_kv_sample()
    assert sorted(sample) == [4, 14, 26]
    for layer in sample.values():
        assert (layer.k.shape, layer.v.shape) == ((3, 1024, 64), (3, 1024, 64))
        assert (layer.q.shape, layer.acc.shape) == ((9, 64, 64), (9, 1024))
        assert {array.dtype for array in layer} == {np.dtype(f16)}
        # Each of the 960 queries hands out one unit of attention; 64 keys came later.
        assert layer.acc.astype(f64).sum(axis=1) == pytest.approx([960] * 9, rel=2e-3)
        assert not layer.acc[:, 960:].any()
    with np.load(_data.data_path("smollm2_kv.npz"), allow_pickle=False) as arrays:
        about = json.loads(str(arrays["meta"]))
    assert about["head_dim"] == 64
    assert about["query_positions"] == [960, 1024]
    monkeypatch.setattr(_data, "_checksums", lambda: {"smollm2_kv.npz": "0" * 64})
    with pytest.raises(ValueError, match=r"smollm2_kv\.npz has sha256 .* restore it"):
        load_kv_sample()


@pytest.mark.parametrize("kind", [np.int64, np.int32, np.uint8])
def test_numpy_integers_name_bits_and_groups_too(kind):
    values = np.random.default_rng(8).normal(size=(5, 12)).astype(f32)
    for bits in (8, 4, 2):
        for scheme in ({}, {"symmetric": False}, {"symmetric": False, "zero": "minimum"}):
            mine = quantize(values, bits=kind(bits), group_size=kind(4), **scheme)
            same = quantize(values, bits=bits, group_size=4, **scheme)
            assert (mine.data == same.data).all()
            assert type(mine.bits) is type(mine.group_size) is int


@given(st.floats(-60000, 60000, width=32), st.floats(0.125, 1, width=32))
def test_a_stored_minimum_is_the_next_float16_at_or_below(low, width):
    values = np.array([[low, np.float32(low) + np.float32(width)]], f32)
    qt = quantize(
        values, granularity="token", symmetric=False, zero="minimum", scale_dtype="float16"
    )
    stored = qt.zero_point[0, 0]
    assert stored.dtype == f16
    assert stored <= values.min()
    assert np.nextafter(stored, f16(np.inf), dtype=f16) > values.min()


# ---- 8-bit floats --------------------------------------------------------------------------------


def fp8_numbers(exponent_bits, mantissa_bits, largest):
    """Every number of the format with the last bit of its mantissa, from the bits' meaning."""
    bias, numbers = 2 ** (exponent_bits - 1) - 1, {}
    for exponent in range(2**exponent_bits):
        for mantissa in range(2**mantissa_bits):
            lead = 1 if exponent else 0
            value = Fraction(2) ** (max(exponent, 1) - bias)
            value *= lead + Fraction(mantissa, 2**mantissa_bits)
            if value <= largest:
                numbers[value] = mantissa % 2
    return numbers


FP8 = {"e4m3": fp8_numbers(4, 3, 448), "e5m2": fp8_numbers(5, 2, 57344)}


def nearest_fp8(value, kind):
    numbers, size = FP8[kind], abs(Fraction(float(value)))
    best = min(numbers, key=lambda number: (abs(number - size), numbers[number]))
    return math.copysign(float(best), value)


def test_the_numbers_of_both_formats_by_hand():
    # 448 = 1.75 * 2**8, smallest 2**-9; 57,344 = 1.75 * 2**15, smallest 2**-16.
    assert [len(numbers) for numbers in FP8.values()] == [127, 124]
    assert [min(set(numbers) - {0}) for numbers in FP8.values()] == [2**-9, 2**-16]
    assert [max(numbers) for numbers in FP8.values()] == [448, 57344]


@pytest.mark.parametrize("kind", ["e4m3", "e5m2"])
@pytest.mark.parametrize("dtype", [f16, f32, f64])
def test_every_number_its_neighbours_and_midpoints_round_to_nearest_even(kind, dtype):
    numbers = sorted(map(float, FP8[kind]))
    middle = [(a + b) / 2 for a, b in itertools.pairwise(numbers)]
    points = np.array([*numbers, *middle, 2 * numbers[-1]]).clip(0, 65504)
    points = np.concatenate([points, *(np.nextafter(points, end) for end in (0, 65504))])
    points = np.unique(np.concatenate([points, -points]).astype(dtype))
    expected = [nearest_fp8(point, kind) for point in points.tolist()]
    assert quantization.round_to_fp8(points, kind).tolist() == expected


@given(st.floats(-(2**20), 2**20, width=32), st.sampled_from(["e4m3", "e5m2"]))
def test_fp8_of_any_number(value, kind):
    rounded = quantization.round_to_fp8(np.array([value], f32), kind)
    assert rounded.tolist() == [nearest_fp8(value, kind)]
    assert (quantization.round_to_fp8(rounded, kind) == rounded).all()
    by_four = quantization.round_to_fp8(np.array([value], f32), kind, scale=4)
    assert by_four.tolist() == [4 * nearest_fp8(value / 4, kind)]


def test_fp8_refuses_what_it_cannot_hold():
    for value in (math.nan, math.inf):
        with pytest.raises(ValueError, match=r"tensor\[0, 1\]=.*; every value must be finite"):
            quantization.round_to_fp8(np.array([[1.0, value]]))
    with pytest.raises(ValueError, match="scale=0"):
        quantization.round_to_fp8(np.ones(3), scale=0)
    with pytest.raises(ValueError, match="kind='fp8'; it is not a known name"):
        quantization.round_to_fp8(np.ones(3), "fp8")
    assert quantization.round_to_fp8(np.full(2, 1e300), scale=1e-300).tolist() == [0, 0]
    assert quantization.round_to_fp8(np.empty((0, 3))).shape == (0, 3)
