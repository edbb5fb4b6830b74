"""Check and time every GPU operation: ``python -m kvlib.gpucheck --out DIR``.

Each row is one operation at one size: equal to CuPy's array code (small ones to NumPy too), the
median time of the public call, and how many of the bytes that the algorithm must move it moves per
second, as a share of what a plain copy of that size reaches in the same run. The table is written
after every row, so that a run that is stopped leaves what it measured.
"""

import argparse
import json
import platform
import statistics
import sys
import time
import traceback
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from unittest import mock

import numpy as np

from kvlib import backend, gather, quantization
from kvlib.gather import copy_blocks, gather_dequantize, gather_kv, write_tokens
from kvlib.quantization import QuantizedTensor, dequantize, quantize

SIZES = (2**20, 64 * 2**20, 2**30)  # of the float16 tensor [bytes]
COMPARED_WITH_NUMPY = 2**20
BLOCK = (16, 8, 128)  # tokens, heads, head_dim: 32 KiB
TOKEN, CHANNEL = {"granularity": "token"}, {"granularity": "channel", "axis": -1}
SCHEMES = {
    "int8 per token": {**TOKEN},
    "int4 per token": {**TOKEN, "bits": 4},
    "int8 per channel": {**CHANNEL},
    "int8 per channel and 32 tokens": {**CHANNEL, "group_size": 32},
    "int4 per channel and 32 tokens": {**CHANNEL, "group_size": 32, "bits": 4},
}


def operations(xp, num_bytes):
    """Yield a name, a call and the bytes it must move, for a float16 tensor of a size.

    Parameters
    ----------
    xp : module
        ``numpy`` or ``cupy``.
    num_bytes : int
        Size of the tensor [bytes].

    Yields
    ------
    tuple of str, callable and int
        The call needs no arguments and returns the arrays it wrote.

    Examples
    --------
    >>> next(operations(np, 2**16))[::2]
    ('gather_kv', 131072)
    """
    num_blocks, rng = num_bytes // (2 * int(np.prod(BLOCK))), np.random.default_rng(0)
    some = rng.standard_normal((min(num_blocks, 32), *BLOCK), np.float32).astype(np.float16)
    pool = xp.tile(xp.asarray(some), (num_blocks // len(some), 1, 1, 1))
    table = xp.asarray(rng.permutation(num_blocks))
    half, num_tokens = num_blocks // 2, num_blocks * BLOCK[0]
    out = xp.zeros((num_tokens, *BLOCK[1:]), np.float16)
    yield "gather_kv", lambda: [gather_kv(pool, table, num_tokens, out=out)], 2 * num_bytes
    written, copied = xp.zeros_like(pool), pool.copy()
    values = pool.reshape(out.shape)
    yield "write_tokens", lambda: [write_tokens(written, table, 0, values), written], 2 * num_bytes
    ids = table[:half], table[half : 2 * half]
    yield "copy_blocks", lambda: [copy_blocks(copied, *ids), copied], num_bytes
    tensor = pool.reshape(BLOCK[1], num_tokens, BLOCK[2])
    back = out.reshape(tensor.shape)
    for name, scheme in SCHEMES.items():
        qt = quantize(tensor, **scheme)
        # Without groups a channel's values are read twice: for the scale, then for the codes.
        reads = 2 if name == "int8 per channel" else 1
        needed = reads * num_bytes + qt.nbytes
        yield f"quantize {name}", lambda s=scheme: [quantize(tensor, **s)], needed
        call = lambda q=qt: [dequantize(q, out=back)]  # noqa: E731
        yield f"dequantize {name}", call, qt.nbytes + num_bytes
    for name in ("int8 per token", "int4 per token", "int8 per channel"):
        paged = quantize(pool, token_axis=1, **SCHEMES[name])
        call = lambda q=paged: [gather_dequantize(q, table, num_tokens, out=out)]  # noqa: E731
        yield f"gather_dequantize {name}", call, paged.nbytes + num_bytes


def check_wide(xp):
    """Compare the ends of tensors of more than 2**31 values with what the ends alone give.

    Parameters
    ----------
    xp : module
        ``cupy``; about 20 GiB must be free.

    Returns
    -------
    bool
        Whether all ends agree.
    """
    num_blocks = 2**17 + 8
    pool = xp.zeros((num_blocks, *BLOCK), np.float16)
    pool[-4:] = xp.asarray(np.random.default_rng(0).standard_normal((4, *BLOCK)).astype(np.float16))
    end, table = pool[-4:].copy(), [num_blocks - 1, 0, num_blocks - 3]
    equal = []
    for scheme in (SCHEMES["int8 per token"], SCHEMES["int8 per channel"]):
        wide, few = (quantize(a, token_axis=1, **scheme) for a in (pool, end))
        equal += [_equal(wide.data[-4:], few.data), _equal(wide.scale[-4:], few.scale)]
        got = gather_dequantize(wide, table[:1], BLOCK[0])
        equal.append(_equal(got, dequantize(few)[3]))
    got = gather_kv(pool, table, 3 * BLOCK[0]).reshape(3, *BLOCK)
    equal += [_equal(got[0], end[3]), _equal(got[2], end[1]), not bool(got[1].any())]
    return all(equal)


def main(arguments=None):
    """Run all checks, print and store the table.

    Parameters
    ----------
    arguments : list of str, optional
        Command line; by default that of the process.

    Returns
    -------
    int
        0: all equal; 1: a difference or an error; 3: no GPU can be used.

    Examples
    --------
    >>> main(["--help"])
    Traceback (most recent call last):
    SystemExit: 0
    """
    parser = argparse.ArgumentParser(prog="python -m kvlib.gpucheck", description=__doc__)
    parser.add_argument("--out", default=".", help="folder for gpucheck.json")
    parser.add_argument("--seconds", type=float, default=150, help="start no row after this time")
    parser.add_argument("--dry-run", action="store_true", help="small, on NumPy, without times")
    options = parser.parse_args(arguments)
    (usable, reason), start = backend.gpu_status(), time.monotonic()
    if not usable and not options.dry_run:
        print(f"{reason} Use --dry-run to try the program.", file=sys.stderr)
        return 3
    if options.dry_run:
        xp, sizes, about = np, (2**16,), {"dry_run": True}
    else:
        import cupy as xp

        runtime, sizes = xp.cuda.runtime, SIZES
        about = {"gpu": reason, "cupy": xp.__version__, "driver": runtime.driverGetVersion()}
        about["runtime"] = runtime.runtimeGetVersion()
    about |= {"date": time.strftime("%Y-%m-%d"), "python": platform.python_version()}
    table = {"schema": 1, **about, "numpy": np.__version__, "rows": []}
    path = Path(options.out) / "gpucheck.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    record = partial(_record, table, path, start)
    for num_bytes in sizes:
        if xp is not np and xp.cuda.runtime.memGetInfo()[0] < 24 * num_bytes:
            record({"bytes": num_bytes, "status": "skipped: too little GPU memory"})
            continue
        source, copy_rate = xp.ones(num_bytes // 2, np.float16), None
        target = xp.empty_like(source)
        if xp is not np:
            seconds = _median_seconds(xp, lambda s=source, t=target: xp.copyto(t, s))
            copy_rate = 2 * num_bytes / seconds
            record({"operation": "copy", "bytes": num_bytes, "GB_per_s": copy_rate / 1e9})
        del source, target
        on_numpy = operations(np, num_bytes) if num_bytes <= COMPARED_WITH_NUMPY else None
        for name, call, needed in operations(xp, num_bytes):
            row = {"operation": name, "bytes": num_bytes, "bytes_needed": needed}
            expected = next(on_numpy)[1]() if on_numpy else None
            if time.monotonic() - start > options.seconds:
                record({**row, "status": "skipped: out of time"})
                continue
            try:
                row |= _check(xp, call, expected, needed, copy_rate)
            except Exception:  # the other rows may still tell something
                row |= {"status": "error", "error": traceback.format_exc()[-1500:]}
            record(row)
    if xp is not np:
        _free(xp)
        if xp.cuda.runtime.memGetInfo()[0] > 20 * 2**30:
            status = "ok" if check_wide(xp) else "MISMATCH"
            record({"operation": "more than 2**31 values", "status": status})
    bad = [r for r in table["rows"] if r.get("status") in ("MISMATCH", "error")]
    print(f"{len(table['rows'])} rows, {len(bad)} bad, in {path}")
    return 1 if bad else 0


def _record(table, path, start, row):
    """Add a row to the table, and store it so that a kill leaves the last whole one."""
    table["rows"].append(row)
    table["seconds"] = round(time.monotonic() - start, 1)
    unfinished = path.with_suffix(".new")
    unfinished.write_text(json.dumps(table, indent=1) + "\n")
    unfinished.replace(path)
    print(json.dumps(row), flush=True)


def _check(xp, call, expected, needed, copy_rate):
    """Return the columns of a row: equality, and times unless it is a dry run."""
    row, got = {}, _copies(call())
    with _array_code():
        row["equals_array_code"] = _equal(got, _copies(call()))
    if expected is not None:
        row["equals_numpy"] = _equal(got, expected)
    row["status"] = "ok" if all(row.values()) else "MISMATCH"
    del got
    if xp is np:
        return row
    for name, way, repeat in (("fused", nullcontext, 20), ("array_code", _array_code, 5)):
        with way():
            seconds = _median_seconds(xp, call, repeat)
        row[f"{name}_ms"] = seconds * 1e3
        row[f"{name}_percent_of_copy"] = 100 * needed / seconds / copy_rate
    _free(xp)
    return row


@contextmanager
def _array_code():
    """Make every call take the way it takes where there is no kernel."""
    ways = [(module, "_launch_dequantize") for module in (quantization, gather)]
    with ExitStack() as stack:
        for module, name in (*ways, (quantization, "_launch_quantize"), (gather, "_launch_move")):
            stack.enter_context(mock.patch.object(module, name, return_value=False))
        yield


def _median_seconds(xp, call, repeat=20):
    """Time calls between two CUDA events each."""
    times = []
    for turn in range(repeat + 3):
        begin, end = xp.cuda.Event(), xp.cuda.Event()
        begin.record()
        call()
        end.record()
        end.synchronize()
        if turn >= 3:
            times.append(xp.cuda.get_elapsed_time(begin, end) / 1e3)
    return statistics.median(times)


def _copies(results):
    """Keep what a call returned from being overwritten by the next one."""
    return [a if a is None or isinstance(a, QuantizedTensor) else a.copy() for a in results]


def _equal(one, other):
    """Compare arrays, quantized tensors or lists of them bit for bit, wherever they lie."""
    if isinstance(one, list):
        return all(map(_equal, one, other))
    if isinstance(one, QuantizedTensor):
        return _equal([one.data, one.scale], [other.data, other.scale])
    if one is None or other is None:
        return one is other
    if isinstance(other, np.ndarray) and not isinstance(one, np.ndarray):
        one = one.get()
    return one.dtype == other.dtype and bool((one == other).all())


def _free(xp):
    """Give cached memory back before the next row needs it."""
    xp.get_default_memory_pool().free_all_blocks()


if __name__ == "__main__":
    sys.exit(main())
