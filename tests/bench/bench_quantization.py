"""Time quantization against copying its input, in one run on one core.

    python tests/bench/bench_quantization.py [--rows 65536] [--channels 1024] [--repeat 5]
                                             [--torch-threads 1]

Ratios, not seconds: a copy moves the same memory on the same machine in the same minute. The copy
goes to memory that is already mapped, the strictest choice; a copy to fresh memory (`x.copy()`) is
shown once. Naive NumPy stands beside every symmetric row, torch, optimum-quanto and hqq where they
can be imported. Time is this thread's, so that a busy machine disturbs less; torch's is the wall's
when it gets more threads, the rest stays on one core. Never a test.
"""

import argparse
import os
import platform
import time

for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(variable, "1")

import numpy as np  # noqa: E402

from kvlib.quantization import dequantize, load_kv_sample, quantization_error, quantize  # noqa: E402


def seconds(function, repeat, clock=time.thread_time):
    """Best and median of several calls."""
    times = []
    for _ in range(repeat):
        start = clock()
        result = function()
        times.append(clock() - start)
        del result
    return min(times), sorted(times)[len(times) // 2]


def naive_quantize(values, bits, granularity, group_size):
    """What one writes first: whole-array expressions, fresh memory for each."""
    rows, channels = values.shape
    if granularity == "channel":
        tiles, axis = values.reshape(-1, group_size or rows, channels), 1
    else:
        tiles, axis = values.reshape(rows, -1, group_size or channels), 2
    highest = 2 ** (bits - 1) - 1
    scale = np.abs(tiles).max(axis=axis, keepdims=True).astype(np.float32) / highest
    codes = np.clip(np.round(tiles / scale), -highest, highest).astype(np.int8)
    codes = codes.reshape(rows, channels)
    if bits == 4:
        unsigned = (codes + 8).astype(np.uint8)
        codes = unsigned[:, ::2] | unsigned[:, 1::2] << 4
    return codes, scale


def naive_dequantize(codes, scale, bits, rows, channels):
    if bits == 4:
        codes = np.stack([codes & 15, codes >> 4], axis=-1).astype(np.int8) - 8
    tiles = codes.reshape(scale.shape[0], -1, channels) if scale.shape[1] == 1 else None
    if tiles is None or scale.shape[2] != channels:
        tiles = codes.reshape(rows, scale.shape[1], -1)
    return (tiles * scale).reshape(rows, channels)


def torch_calls(values, bits, granularity, group_size, num_threads):
    """Return the same two operations in torch, or None without torch."""
    try:
        import torch
    except ImportError:
        return None
    torch.set_num_threads(num_threads)
    tensor = torch.from_numpy(values)
    rows, channels = tensor.shape
    if granularity == "channel":
        shape, dim = (-1, group_size or rows, channels), 1
    else:
        shape, dim = (rows, -1, group_size or channels), 2
    highest = 2 ** (bits - 1) - 1

    steps, codes = torch.zeros(rows, channels), torch.zeros(rows, channels, dtype=torch.int8)

    def forward():  # in reused memory, as a tuned program would
        if tensor.dtype == torch.float32:
            scale = torch.abs(tensor, out=steps).view(shape).amax(dim, keepdim=True) / highest
        else:
            scale = tensor.view(shape).abs().amax(dim, keepdim=True).float() / highest
        torch.div(tensor.view(shape), scale, out=steps.view(shape))
        codes.copy_(steps.round_().clamp_(-highest, highest))
        if bits == 8:
            return codes.view(shape), scale
        unsigned = codes.add_(8).view(torch.uint8)
        return unsigned[:, ::2] | unsigned[:, 1::2] << 4, scale

    stored, scale = forward()
    out = torch.zeros(rows, channels)

    def back():
        if bits == 8:
            return torch.mul(stored.view(shape), scale, out=out.view(shape))
        codes = torch.stack([stored & 15, stored >> 4], dim=-1).view(shape).to(torch.int8) - 8
        return torch.mul(codes, scale, out=out.view(shape))

    return forward, back


def quanto_call(values):
    """Return optimum-quanto's int8 per-channel quantization, or None without it."""
    try:
        import torch
        from optimum.quanto import AbsmaxOptimizer, qint8, quantize_weight
    except ImportError:
        return None
    tensor = torch.from_numpy(values)

    def forward():
        scale = AbsmaxOptimizer()(tensor, qtype=qint8, axis=-1)
        return quantize_weight(tensor, qtype=qint8, axis=-1, scale=scale, activation_qtype=None)

    return forward


def hqq_call(values, group_size):
    """Return hqq's int4 grouped quantization without its optimizer, or None without it."""
    try:
        import torch
        from hqq.core.quantize import Quantizer
    except ImportError:
        return None
    tensor = torch.from_numpy(values)
    return lambda: Quantizer.quantize(
        tensor, nbits=4, group_size=group_size, optimize=False, axis=1, device="cpu",
        compute_dtype=torch.float32,
    )  # fmt: skip


CASES = [
    ("int8 per channel", "float32", 4.0, {"bits": 8}),
    ("int8 per channel", "float16", 8.0, {"bits": 8}),
    ("int8 per token", "float32", None, {"bits": 8, "granularity": "token"}),
    ("int4 groups of 32 along tokens", "float32", 3.0, {"bits": 4, "group_size": 32}),
    ("int4 groups of 32 along tokens", "float16", None, {"bits": 4, "group_size": 32}),
    (
        "int4 groups of 32 along channels", "float32", 6.5,
        {"bits": 4, "group_size": 32, "granularity": "token"},
    ),
    (
        "int4 groups of 32, minimum", "float32", None,
        {"bits": 4, "group_size": 32, "symmetric": False, "zero": "minimum"},
    ),
]  # fmt: skip
BACK = {8: 2.1, 4: 2.3}


def line(name, aim, best, median, copies, peers):
    cells = [f"{best / copies[0]:6.2f} {median / copies[1]:6.2f}"]
    cells += ["     -" if peer is None else f"{peer[0] / copies[0]:6.1f}" for peer in peers]
    print(f"{name:50s} {'' if aim is None else f'<= {aim}':7s} {' '.join(cells)}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.strip().splitlines()[0])
    parser.add_argument("--rows", type=int, default=65536)
    parser.add_argument("--channels", type=int, default=1024)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--torch-threads", type=int, default=1)
    arguments = parser.parse_args()
    repeat, shape = arguments.repeat, (arguments.rows, arguments.channels)
    threads = arguments.torch_threads
    torch_clock = time.thread_time if threads == 1 else time.perf_counter
    print(f"{shape[0]} x {shape[1]} on one core of {platform.machine()}, NumPy {np.__version__};")
    if threads != 1:
        print(f"torch on {threads} threads;")
    print("times over copying the input (quantize) or the float32 output (dequantize)")
    print(
        f"{'':50s} {'aim':7s} {'best':>6s} {'median':>6s} {'naive':>6s} {'torch':>6s} {'other':>6s}"
    )
    values32 = np.random.default_rng(0).standard_normal(shape, np.float32)
    out = np.zeros_like(values32)
    for name, dtype, aim, scheme in CASES:
        values, again = values32.astype(dtype), np.zeros(shape, dtype)
        copies = seconds(lambda values=values, again=again: np.copyto(again, values), repeat)
        best, median = seconds(lambda values=values, s=scheme: quantize(values, **s), repeat)
        few, peers, back = max(1, repeat // 3), [None, None, None], [None, None, None]
        if scheme.get("symmetric", True):
            plain = (scheme["bits"], scheme.get("granularity", "channel"), scheme.get("group_size"))
            peers[0] = seconds(lambda v=values, p=plain: naive_quantize(v, *p), few)
            codes, scale = naive_quantize(values, *plain)
            back[0] = seconds(
                lambda c=codes, s=scale, b=plain[0]: naive_dequantize(c, s, b, *shape), few
            )
            calls = torch_calls(values, *plain, threads)
            if calls:
                peers[1], back[1] = (seconds(call, few, torch_clock) for call in calls)
        if name == "int8 per channel" and dtype == "float32":
            other, label = quanto_call(values), "quanto"
        elif name == "int4 groups of 32 along channels":
            other, label = hqq_call(values, 32), "hqq"
        else:
            other = None
        if other:
            peers[2], name = seconds(other, 1), f"{name} (other: {label})"
        line(f"{name}, {dtype}", aim, best, median, copies, peers)
        if dtype == "float32":
            qt = quantize(values, **scheme)
            copies = seconds(lambda: np.copyto(out, values32), repeat)
            best, median = seconds(lambda qt=qt: dequantize(qt, out=out), repeat)
            aim = BACK[scheme["bits"]] if scheme.get("symmetric", True) else None
            line("    and back", aim, best, median, copies, back)
    copies = seconds(lambda: np.copyto(out, values32), repeat)
    best, median = seconds(values32.copy, repeat)
    line("x.copy(): a copy to fresh memory, float32", None, best, median, copies, [])
    sample = load_kv_sample()[4]
    best, median = seconds(
        lambda: quantization_error(sample.k, quantize(sample.k, bits=4, group_size=32)), 20
    )
    print(f"the real sample, 3 x 1024 x 64, quantized and measured: {median * 1e3:.1f} ms")


if __name__ == "__main__":
    main()
