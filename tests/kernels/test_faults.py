"""Each fault that a kernel is likely to have, planted: some gate must turn red."""

from unittest import mock

import numpy as np
import pytest

from kvlib import quantization
from kvlib.gather import gather_kv
from kvlib.quantization import dequantize, quantize
from tests.kernels import test_compile, test_wide
from tests.kernels.conftest import require_cupy
from tests.kernels.simulator import SOURCE, KernelFault, Simulator, to_host


def check(simulated, shape=(2, 9, 64), factor=1, **scheme):
    """Quantize and read back on both sides."""
    values = (np.random.default_rng(0).standard_normal(shape) * factor).astype(np.float16)
    expected = quantize(values, **scheme)
    with mock.patch.object(quantization, "_quantize_rows", side_effect=AssertionError("no kernel")):
        got = quantize(simulated.to_device(values), **scheme)
    np.testing.assert_array_equal(to_host(got.data), expected.data)
    np.testing.assert_array_equal(to_host(got.scale), expected.scale)
    np.testing.assert_array_equal(to_host(dequantize(got)), dequantize(expected))


def check_gather(simulated, num_tokens=11, shape=(5, 4, 1, 8)):
    pool = np.random.default_rng(0).standard_normal(shape).astype(np.float16)
    got = gather_kv(simulated.to_device(pool), [4, 0, 2], num_tokens)
    np.testing.assert_array_equal(to_host(got), gather_kv(pool, [4, 0, 2], num_tokens))


def check_ties(simulated):
    ties = np.concatenate([[89.0], (np.arange(127) + 0.5) * (89 / 127)]).astype(np.float32)[None]
    near = [np.nextafter(ties, side * np.float32(np.inf)) for side in (-1, 1)]
    rows = np.concatenate([np.concatenate([ties[:, :1], each[:, 1:]], 1) for each in (ties, *near)])
    expected = quantize(rows, granularity="token")
    got = quantize(simulated.to_device(rows), granularity="token")
    np.testing.assert_array_equal(to_host(got.data), expected.data)


VECTORS = "  if ({}) {{\n    typedef typename Word<WIDE>"
TOKEN, INT4 = {"granularity": "token"}, {"granularity": "token", "bits": 4}
LATE = {"shape": (1, 600, 64)}  # in several parts
FAULTS = {
    "no barrier before the reduction": ("    __syncthreads();\n  }\n", "  }\n", check, {}),
    "no barrier before the scales are read": ("  __syncthreads();\n  codes", "  codes", check, {}),
    "a barrier that half the threads skip": (
        "    __syncthreads();\n  }\n", "    if (threadIdx.y) __syncthreads();\n  }\n", check, {},
    ),
    "lanes leave before the shuffle": (
        "  Unit<T> held[HELD];\n", "  if (!units) return;\n  Unit<T> held[HELD];\n", check, TOKEN,
    ),
    "a shuffle too few": ("step = width / 2", "step = width / 4", check, TOKEN),
    "one element past a row's end": (
        "if (i < count) to[i]", "if (i <= count) to[i]", check, {"shape": (1, 1, 13), **TOKEN},
    ),
    "one code past a row's end": (
        "if (i * 8 < count * BITS) to[i]", "if (i * 8 <= count * BITS) to[i]",
        check, {"shape": (1, 1, 13), **TOKEN},
    ),
    "one token too many read back": (
        "if (row >= rows) break;", "if (row > rows) break;", check, {"shape": (1, 5, 64), **TOKEN},
    ),
    "one token too few in a group": (
        "stop = min(start + run, tokens)", "stop = min(start + run - 1, tokens)", check, {},
    ),
    "one word too many gathered": ("if (p < high) to", "if (p <= high) to", check_gather, {}),
    "one word too few gathered": ("if (p < high) to", "if (p < high - 1) to", check_gather, {}),
    "vectors where rows are not aligned": (
        VECTORS.format("ALIGNED"), VECTORS.format("true"),
        check, {"shape": (2, 3, 13), **TOKEN},
    ),
    "swapped nibbles stored": ("& mask) << BITS * i;", "& mask) << BITS * (i ^ 1);", check, INT4),
    "swapped nibbles read": (
        "codes_from_0 >> BITS * i", "codes_from_0 >> BITS * (i ^ 1)", check, INT4,
    ),
    "a padding nibble that is not 0": (
        "codes &= (1ull << count * BITS) - 1", "codes &= ~0ull",
        check, {"shape": (1, 2, 13), **INT4},
    ),
    "near-ties decided by a product": ("sure &= fabsf", "sure |= fabsf", check_ties, {}),
    "the scale of a rounded scale": (
        "if (largest_bits > magnitude", "if (0 > magnitude", check,
        {"factor": 1e-4, "scale_dtype": "float16", **TOKEN},
    ),
    "a maximum of one part only": (
        "atomicMax(&all_largest[group], most)", "all_largest[group] = most", check, LATE,
    ),
    "32-bit offsets of blocks": (
        "from_ids[place] * from_stride", "(int)(from_ids[place] * from_stride)",
        test_wide.test_blocks_beyond_two_gigabytes, {"inner": (15, 7, 127), "dtype": np.int8},
    ),
    "32-bit offsets of codes": (
        "block * code_block", "(unsigned)(block * code_block)",
        test_wide.test_codes_beyond_four_gigabytes_are_read_back, {},
    ),
    "32-bit offsets of rows": (
        "values += row * channels", "values += (int)(row * channels)",
        test_wide.test_the_last_values_of_a_wide_tensor, TOKEN,
    ),
    "32-bit offsets of channels": (
        "values += (batch * tokens + token) * channels",
        "values += (int)((batch * tokens + token) * channels)",
        test_wide.test_the_last_values_of_a_wide_tensor, {"granularity": "channel"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_the_simulator_notices(monkeypatch, fault):
    require_cupy()
    old, new, run, given = FAULTS[fault]
    source = SOURCE.read_text()
    assert old in source

    def in_every_order():
        for order in range(2):
            with monkeypatch.context() as patch:
                simulated = Simulator(order, source.replace(old, new))
                restore = simulated.install(patch)
                try:
                    run(simulated, **given)
                finally:
                    restore()

    with pytest.raises(AssertionError):
        in_every_order()


def test_the_simulator_notices_a_caller_that_promises_alignment(monkeypatch):
    require_cupy()
    simulated = Simulator()
    restore = simulated.install(monkeypatch)
    monkeypatch.setattr(quantization, "_is_aligned", lambda unit_bytes, array: True)
    odd = simulated.to_device(np.ones((3, 17), np.float16)).reshape(51)[1:49].reshape(3, 16)
    try:
        with pytest.raises(KernelFault, match="misaligned"):
            quantize(odd, granularity="token")
    finally:
        restore()


CHANNEL, BACK = "quantize_channel<u16, 8, true, LARGEST>", "dequantize<u16, 8, true>"


@pytest.mark.parametrize(
    ("name", "old", "new", "words"),
    [
        (CHANNEL, VECTORS.format("ALIGNED"), VECTORS.format("false"), "no vector loads"),
        (CHANNEL, "ROWS = 8 / sizeof(T)", "ROWS = 32 / sizeof(T)", "registers|spilled"),
        (BACK, "factors[i] =", "factors[i & at[0]] =", "a stack frame of"),
        (BACK, "BITS == 8 ? held", "BITS == eight ? held", '"eight" is undefined'),
    ],
    ids=["narrow loads", "too many registers", "an index only known at run time", "a typing error"],
)
def test_the_compiler_gate_notices(name, old, new, words):
    source = SOURCE.read_text()
    assert old in source
    with pytest.raises(AssertionError, match=words):
        test_compile.inspect(test_compile.build(source.replace(old, new), "90", [name]))
