"""Time paged gather against copying as many bytes, in one run on one core.

    python tests/bench/bench_gather.py [--blocks 4096] [--kib 32] [--repeat 15]

Ratios, not seconds: the copy moves the same bytes to memory that is already mapped. What one
writes first, `pool[table]`, and torch's `index_select`, where it can be imported, stand beside it.
Calls take turns, so that a busy minute hits all of them alike. Never a test.
"""

import argparse
import os
import platform
import time

for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(variable, "1")

import numpy as np  # noqa: E402

from kvlib.gather import gather_dequantize, gather_kv  # noqa: E402
from kvlib.quantization import quantize  # noqa: E402

BLOCK_SIZE, HEAD_DIM = 16, 128


def medians(calls, repeat):
    """Median time of every call, taken in turns."""
    times = {name: [] for name in calls}
    for _ in range(repeat):
        for name, call in calls.items():
            start = time.thread_time()
            call()
            times[name].append(time.thread_time() - start)
    return {name: sorted(taken)[repeat // 2] for name, taken in times.items()}


def torch_call(pool, table, out):
    """Return index_select into reused memory, on one thread, or None without torch."""
    try:
        import torch
    except ImportError:
        return None
    torch.set_num_threads(1)
    source, ids = torch.from_numpy(pool), torch.from_numpy(table)
    target = torch.from_numpy(out.reshape(-1, *pool.shape[1:]))
    return lambda: torch.index_select(source, 0, ids, out=target)


def main():
    parser = argparse.ArgumentParser(description=__doc__.strip().splitlines()[0])
    parser.add_argument("--blocks", type=int, default=4096)
    parser.add_argument("--kib", type=int, default=32)
    parser.add_argument("--repeat", type=int, default=15)
    arguments = parser.parse_args()
    heads = arguments.kib * 1024 // (BLOCK_SIZE * HEAD_DIM * 2)
    rng = np.random.default_rng(0)
    shape = (2 * arguments.blocks, BLOCK_SIZE, heads, HEAD_DIM)
    pool = rng.integers(0, 2**14, shape, np.uint16).view(np.float16)
    table = rng.permutation(len(pool))[: arguments.blocks]
    num_tokens = arguments.blocks * BLOCK_SIZE
    out = np.zeros((num_tokens, heads, HEAD_DIM), np.float16)
    contiguous = np.ones_like(out)
    print(f"{arguments.blocks} random blocks of {arguments.kib} KiB on one core of", end=" ")
    print(f"{platform.machine()}, NumPy {np.__version__}; times over copying as many bytes")
    calls = {
        "copy": lambda: np.copyto(out, contiguous),
        "gather_kv(out=)": lambda: gather_kv(pool, table, num_tokens, out=out),
        "pool[table]": lambda: pool[table],
        "torch.index_select(out=)": torch_call(pool, table, out),
    }
    times = medians({name: call for name, call in calls.items() if call}, arguments.repeat)
    aims = {"gather_kv(out=)": "<= 1.7"}
    for name, taken in times.items():
        print(f"{name:44s} {aims.get(name, ''):7s} {taken / times['copy']:6.2f}", flush=True)
    few, half = max(1, arguments.repeat // 3), arguments.blocks // 2
    wide = np.zeros((half * BLOCK_SIZE, heads, HEAD_DIM), np.float32)
    copied, values = np.ones_like(wide), pool[: arguments.blocks]
    for bits in (8, 4):
        codes = quantize(values, bits=bits, granularity="token", token_axis=1)
        ids = rng.permutation(arguments.blocks)[:half]
        times = medians(
            {
                "copy": lambda: np.copyto(wide, copied),
                "back": lambda codes=codes, ids=ids: gather_dequantize(
                    codes, ids, len(wide), out=wide
                ),
            },
            few,
        )
        name = f"gather_dequantize, int{bits}, over a float32 copy"
        print(f"{name:52s} {times['back'] / times['copy']:6.2f}", flush=True)


if __name__ == "__main__":
    main()
