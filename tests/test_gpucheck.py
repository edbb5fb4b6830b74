"""gpucheck without a GPU: the dry run, what it stores, and how it ends when something is wrong."""

import itertools
import json
from types import SimpleNamespace

import numpy as np
import pytest

from kvlib import backend, gather, gpucheck, quantization


def run(folder, *arguments):
    ended = gpucheck.main(["--dry-run", "--out", str(folder), *arguments])
    return ended, json.loads((folder / "gpucheck.json").read_text())


def test_the_dry_run_checks_everything_and_times_nothing(tmp_path):
    ended, table = run(tmp_path / "new folder")
    assert ended == 0
    assert table["dry_run"]
    names = [row["operation"] for row in table["rows"]]
    assert len(names) == len(set(names)) == 16  # 3 moves, 5 schemes there and back, 3 fused reads
    for row in table["rows"]:
        assert row["status"] == "ok"
        assert row["equals_array_code"]
        assert row["equals_numpy"]
        assert not [key for key in row if "ms" in key or "percent" in key]


def test_bytes_needed_are_counted_by_hand(tmp_path):
    rows = {row["operation"]: row["bytes_needed"] for row in run(tmp_path)[1]["rows"]}
    values = 2**15  # of 2 bytes; 256 rows of 128
    assert rows["gather_kv"] == 2 * 2 * values
    assert rows["quantize int8 per token"] == 2 * values + values + 256 * 4
    assert rows["dequantize int4 per token"] == values // 2 + 256 * 4 + 2 * values
    assert rows["quantize int8 per channel"] == 2 * 2 * values + values + 8 * 128 * 4
    # 32 tokens of 8 heads: one group of each channel.
    assert rows["quantize int8 per channel and 32 tokens"] == 2 * values + values + 8 * 128 * 4
    # Each of the 2 blocks has its own scales.
    assert rows["gather_dequantize int8 per channel"] == values + 2 * 8 * 128 * 4 + 2 * values


def test_a_difference_ends_in_failure_and_the_rest_is_still_checked(tmp_path, monkeypatch):
    turn, gather_kv = itertools.count(), gpucheck.gather_kv
    monkeypatch.setattr(gpucheck, "gather_kv", lambda *a, **k: gather_kv(*a, **k) + next(turn))
    ended, table = run(tmp_path)
    assert ended == 1
    status = {row["operation"]: row["status"] for row in table["rows"]}
    assert status.pop("gather_kv") == "MISMATCH"
    assert set(status.values()) == {"ok"}


def test_a_crash_is_a_row(tmp_path, monkeypatch):
    def broken(*_):
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(gpucheck, "write_tokens", broken)
    monkeypatch.setattr(gpucheck, "COMPARED_WITH_NUMPY", 0)
    ended, table = run(tmp_path)
    assert ended == 1
    assert "no such kernel" in table["rows"][1]["error"]
    assert table["rows"][2]["status"] == "ok"


def test_what_was_measured_before_a_kill_is_stored(tmp_path, monkeypatch):
    check, turn = gpucheck._check, itertools.count()

    def killed(*arguments):
        if next(turn) == 3:
            raise KeyboardInterrupt
        return check(*arguments)

    monkeypatch.setattr(gpucheck, "_check", killed)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path)
    assert len(json.loads((tmp_path / "gpucheck.json").read_text())["rows"]) == 3


def test_no_row_starts_when_time_is_up(tmp_path):
    ended, table = run(tmp_path, "--seconds", "0")
    assert ended == 0
    assert {row["status"] for row in table["rows"]} == {"skipped: out of time"}


def test_without_a_gpu_nothing_is_measured(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(backend, "gpu_status", lambda: (False, "No CUDA device is visible."))
    assert gpucheck.main(["--out", str(tmp_path)]) == 3
    assert "No CUDA device is visible. Use --dry-run" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_equality_is_bit_for_bit():
    one = np.array([1.0, 2.0], np.float32)
    assert gpucheck._equal([one, None], [one.copy(), None])
    assert not gpucheck._equal([one], [np.nextafter(one, 3)])
    assert not gpucheck._equal([one], [one.astype(np.float64)])
    assert not gpucheck._equal([one], [None])
    halves = gpucheck.quantize(one[None], granularity="token")
    assert gpucheck._equal([halves], [gpucheck.quantize(one[None], granularity="token")])
    assert not gpucheck._equal([halves], [gpucheck.quantize(one[None] * 2, granularity="token")])


def test_array_code_is_what_runs_inside_its_context_only():
    kernels = quantization._launch_quantize, gather._launch_dequantize, gather._launch_move
    context = gpucheck._array_code()
    assert (quantization._launch_quantize, gather._launch_dequantize) == kernels[:2]
    with context:
        assert quantization._launch_quantize() is gather._launch_move() is False
    assert gather._launch_move is kernels[2]


def test_times_are_of_each_way(monkeypatch):
    def seconds(_, call, repeat):
        return 1.0 if gather._launch_move is kernel else 4.0

    kernel, not_numpy = gather._launch_move, SimpleNamespace()
    monkeypatch.setattr(gpucheck, "_median_seconds", seconds)
    monkeypatch.setattr(gpucheck, "_free", lambda _: None)
    row = gpucheck._check(not_numpy, lambda: [np.zeros(3)], [np.zeros(3)], 80, 100.0)
    assert (row["fused_ms"], row["array_code_ms"]) == (1e3, 4e3)
    # 80 bytes in 1 s and in 4 s, where a copy reaches 100 bytes/s.
    assert (row["fused_percent_of_copy"], row["array_code_percent_of_copy"]) == (80, 20)
