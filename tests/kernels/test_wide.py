"""More elements than 32 bits can count, in memory that is reserved and never touched."""

import math
from dataclasses import replace

import numpy as np
import pytest

from kvlib.gather import copy_blocks, gather_dequantize, gather_kv, write_tokens
from kvlib.quantization import _launch_dequantize, _launch_quantize, quantize
from tests.kernels.conftest import require_cupy
from tests.kernels.simulator import Simulator, to_host


@pytest.fixture
def simulated(monkeypatch):
    require_cupy()
    simulated = Simulator()
    restore = simulated.install(monkeypatch)
    yield simulated
    restore()


def reserved(simulated, shape, dtype):
    """Zeros that take address space only: 10 GB of them fit anywhere."""
    import cupy

    simulated.filled = False
    array = cupy.empty(shape, dtype)
    simulated.filled = True
    assert array.nbytes > 2**31
    return array


@pytest.mark.parametrize(
    ("inner", "dtype"), [((16, 8, 128), np.float16), ((15, 7, 127), np.int8)], ids=["16", "1"]
)
def test_blocks_beyond_two_gigabytes(simulated, inner, dtype):
    # Moved by 16 and by single bytes; 2**18 blocks are more than 2**31 of either.
    pool, count = reserved(simulated, (2**18 + 3, *inner), dtype), 2 * inner[0] + 5
    values = np.random.default_rng(0).integers(1, 99, (count, *inner[1:])).astype(dtype)
    table = [2**18 + 1, 2**17 + 2, 2**16]
    write_tokens(pool, table, 3, simulated.to_device(values))
    np.testing.assert_array_equal(to_host(gather_kv(pool, table, count + 3))[3:], values)
    copy_blocks(pool, [table[0]], [2**18 + 2])
    np.testing.assert_array_equal(to_host(pool)[2**18 + 2, 3:], values[: inner[0] - 3])
    assert not to_host(pool)[:3].any()


def test_codes_beyond_four_gigabytes_are_read_back(simulated):
    small = quantize(np.ones((1, 16, 8, 128), np.float16), granularity="token", token_axis=1)
    shape = (2**18 + 2, 16, 8, 128)
    codes, scale = reserved(simulated, shape, np.int8), reserved(simulated, (*shape[:3], 32), "f4")
    pool = replace(small, shape=shape, data=codes, scale=scale[..., :1])
    table = [2**18 + 1, 2**17 + 1]
    for block in table:
        to_host(codes)[block], to_host(scale)[block] = block % 100, 0.5
    got = to_host(gather_dequantize(pool, table, 32))
    assert (got[:16] == table[0] % 100 / 2).all()
    assert (got[16:] == table[1] % 100 / 2).all()


@pytest.mark.parametrize("granularity", ["token", "channel"])
def test_the_last_values_of_a_wide_tensor(simulated, granularity):
    # 2**32 + 2**26 values; only the last block of threads is run.
    shape = (65, 2**20, 64)
    end = np.random.default_rng(0).standard_normal((32, 64)).astype(np.float16)
    group = {"group_size": 32} if granularity == "channel" else {}
    expected = quantize(end, granularity=granularity, **group)
    qt = replace(
        quantize(np.ones((1, 32, 64), np.float16), granularity=granularity, **group), shape=shape
    )
    values = reserved(simulated, shape, np.float16)
    to_host(values)[-1, -32:] = end
    codes, scale = reserved(simulated, shape, np.uint8), reserved(simulated, (*qt._grid, 16), "f4")
    scale = scale.reshape(-1)[: math.prod(qt._grid)].reshape(qt._grid)
    values, codes = values.reshape(qt._flat), codes.reshape(qt._flat)
    simulated.first_block = (2**20 * 65) // (64 if granularity == "token" else 32) - 1
    assert _launch_quantize(values, codes, scale, qt)
    np.testing.assert_array_equal(to_host(codes).view(np.int8)[-1, -32:], expected.data)
    last_scales = to_host(scale).ravel()[-expected.scale.size :]
    np.testing.assert_array_equal(last_scales, expected.scale.ravel())
    out = reserved(simulated, shape, np.float32).reshape(qt._flat)
    simulated.first_block = 65 * 2**20 // 128 - 1
    assert _launch_dequantize(codes[:, :, None], scale[:, :, None], out, qt)
    np.testing.assert_allclose(to_host(out)[-1, -32:], end, atol=0.02)
