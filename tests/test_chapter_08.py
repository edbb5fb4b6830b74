"""Facts of chapter 8: its sentences against numbers worked by hand, and the replay on demand."""

import gzip
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from kvlib import eviction, replay

PUBLIC = {"eviction": eviction, "replay": replay}


@pytest.fixture
def chapter(run_chapter):
    return run_chapter("08_replay")


@pytest.fixture(autouse=True)
def as_in_the_text(chapter):
    for each in chapter["panels"]:
        each.reset()


def test_the_first_bar_at_ten_thousand_and_at_a_thousand_blocks(chapter):
    # Of 288,500: LRU 60,921, Belady and an unlimited cache 105,710.
    # 60,921 -> 21.1 %; 44,789 -> 15.5; 0; 182,790 -> 63.4.
    sentence = chapter["panels"][0].sentence
    for words in ("LRU finds 60,921 of 288,500 blocks, 21.1 %", "at most 15.5 points more",
                  "more memory 0.0 on top", "63.4 % were never seen"):  # fmt: skip
        assert words in sentence
    # 10,000 blocks of 512 * 131,072 bytes = 64 MiB each: 625 GiB.
    assert "625.00 GiB of llama-3.1-8b in bf16" in sentence
    # 12,831 -> 4.4 %; Belady 54,994, so 42,163 -> 14.6; 105,710 - 54,994 = 50,716 -> 17.6.
    chapter["panels"][0].set(capacity=1000)
    sentence = chapter["panels"][0].sentence
    for words in ("12,831", "4.4 %", "at most 14.6 points", "more memory 17.6 on top"):
        assert words in sentence


@pytest.mark.parametrize(
    ("number", "values"),
    [
        (0, {"capacity": 182_790, "traffic": "generated"}),
        (0, {"capacity": 12_345, "traffic": "merged", "order": "engine"}),
        (0, {"capacity": 101, "traffic": "synthetic", "dtype": "int4/g64"}),
        (1, {"capacity": 29_999, "rate": 12_000, "seconds": "with attention"}),
        (1, {"capacity": 100, "traffic": "merged", "order": "engine"}),
        (2, {"minute": 58, "policy": "LFU", "capacity": "3,000 blocks"}),
        (3, {"alpha": 0, "beta": 3.0, "gamma": 0.1, "capacity": 150_000, "order": "engine"}),
        (4, {"capacity": 30_000}),
        (4, {"capacity": 17_001}),
    ],
)
def test_the_code_of_a_sentence_gives_a_number_of_the_sentence(chapter, number, values):
    chapter["panels"][number].set(**values)
    *_, words, code, _ = chapter["panels"][number].sentence.split("`")
    assert f" {eval(code, dict(PUBLIC)):,}" in words


def test_the_four_lots_add_up_everywhere(chapter):
    for traffic, order in chapter["found"]:
        for capacity in (100, 777, 10_000, 43_210, 182_790):
            shown = chapter["lose"](capacity, traffic, "llama-3.1-8b", "bf16", order)
            shares = list(shown["parts"].values())
            assert sum(shares) == pytest.approx(100)
            assert min(shares) >= 0
            assert shown["capacity"] <= capacity


def test_the_gpu_mark_by_hand(chapter):
    # 0.9 * 84,986,665,370 - 16,060,522,496 bytes of weights = 60,427,476,337; / 64 MiB = 900.4.
    assert chapter["blocks_on_gpu"]("llama-3.1-8b", "bf16") == 900
    assert chapter["blocks_on_gpu"]("llama-3.1-70b", "bf16") == 0
    chapter["panels"][0].set(model="llama-3.1-70b")
    assert "holds 0 blocks beside the weights" in chapter["panels"][0].sentence


def test_belady_is_interpolated_within_the_stated_points(chapter):
    """Leave one recorded capacity out: twice the step, and still within 0.9 points."""
    for name in ("conversation", "synthetic", "merged"):
        capacities, found = chapter["found"][name, "file"]["Belady"]
        for k in range(1, len(found) - 1):
            outer = [k - 1, k + 1]
            guessed = np.interp(np.log(capacities[k]), np.log(capacities[outer]), found[outer])
            assert guessed == pytest.approx(found[k], abs=0.9)


def test_one_policy_is_fair_and_one_is_lru_with_one_tenant(chapter):
    for name in ("conversation", "synthetic"):
        columns = chapter["recorded"][name]["file_order"]
        assert columns["fair"]["block_hits"] == columns["lru"]["block_hits"]
        assert "Fair" not in chapter["found"][name, "file"]


def test_the_objective_by_hand(chapter):
    # Fair at 10,000 blocks of the merged trace, weights alike: (1 - 65,858/410,377 = 0.839518;
    # p99 6.528 of 9.897 s = 0.659595; 0.000214) / 3 = 0.499776.
    assert "Fair has the smallest J, 0.5 " in chapter["panels"][3].sentence
    chapter["panels"][3].set(gamma=0)
    # LRU: (0.785548 + 0.620795) / 2 = 0.703172.
    assert "LRU has the smallest J, 0.703 " in chapter["panels"][3].sentence
    chapter["panels"][3].set(alpha=0, beta=0)
    assert "alpha=beta=gamma=0" in chapter["panels"][3].sentence


def test_the_map_has_the_winner_of_the_sentence_under_its_dot(chapter):
    for gamma in (0, 0.1, 0.3, 0.7, 3.0):
        for capacity in chapter["map_columns"]:
            shown = chapter["weigh"](1.0, 0.5, gamma, capacity, "linear", "file")
            column, y = shown["here"]
            row = int((y + 0.5) * 21)
            near = shown["winners"][max(0, row - 1) : row + 2, column]
            names = [chapter["contenders"][k] for k in near]
            assert shown["title"].split()[0] in names


def test_who_wins_on_the_map_as_the_text_says(chapter):
    winners = chapter["weigh"](1.0, 1.0, 1.0, 10_000, "linear", "file")["winners"]
    names = [chapter["contenders"][k] for k in np.unique(winners)]
    assert names == ["LRU", "LFU", "Fair"]
    fair, lfu = (chapter["contenders"].index(name) for name in ("Fair", "LFU"))
    assert (winners[chapter["fine_shares"][:, 0, 0] > 0.25] == fair).all()
    assert np.unique(np.nonzero(winners == lfu)[1]).tolist() == [0]


def test_in_engine_order_cost_takes_the_smallest_caches(chapter):
    winners = chapter["weigh"](1.0, 1.0, 1.0, 10_000, "linear", "engine")["winners"]
    cost, at_row = chapter["contenders"].index("cost"), (np.arange(11) * 21) + 10
    assert chapter["map_columns"][:2] == [100, 300]
    assert not (winners[:, 2:] == cost).any()
    shares = chapter["map_shares"]
    assert shares[winners[at_row, 0] == cost].min() == 0.02
    assert shares[winners[at_row, 1] == cost].min() == 0.08


def test_a_replay_on_demand_equals_the_library(chapter):
    live, steps = chapter["panels"][4], []
    values = {"capacity": 700, "traffic": "generated, 2,000 requests"}
    done = chapter["replay_all"](values, lambda *step: steps.append(step) or True)
    assert steps[-1][0] == steps[-1][1]
    assert [part for part, _ in steps] == sorted(part for part, _ in steps)
    fair = replay.replay(chapter["small"], 700, "fair")
    assert done[2]["Fair"] == (100 * fair.block_hit_ratio, 100 * fair.unfairness)
    assert chapter["replay_all"](values, lambda *_: False) is None
    live.set(capacity=700)
    assert "press Replay for the others" in live.sentence
    live.set(replayed=done)
    assert "Belady's bound" in live.sentence
    live.set(capacity=1000)  # the result is of other values: it must not be shown as theirs
    assert "press Replay for the others" in live.sentence


def test_without_the_files_the_panel_says_how_to_get_them(chapter, tmp_path, monkeypatch):
    (tmp_path / "notebooks").mkdir()
    monkeypatch.chdir(tmp_path / "notebooks")
    live = chapter["panels"][4]
    live.set(traffic="merged, from both files")
    assert "Press Replay. The files come with python data/fetch_traces.py." in live.sentence
    with pytest.raises(ValueError, match=r"python data/fetch_traces\.py brings it"):
        chapter["replay_all"](live.values, lambda *_: True)


def test_with_the_files_a_live_replay_gives_the_recorded_figures(chapter, tmp_path, monkeypatch):
    folder = Path(os.environ.get("KVLIB_TRACES", Path(__file__).parents[2] / "shared" / "data"))
    packed = folder / "mooncake_synthetic_trace.jsonl.gz"
    if not packed.is_file():
        pytest.skip(f"{folder} has no public traces (set KVLIB_TRACES)")
    for name in ("notebooks", "data/traces"):
        (tmp_path / name).mkdir(parents=True)
    with gzip.open(packed) as file, open(tmp_path / "data/traces" / packed.stem, "wb") as copy:
        shutil.copyfileobj(file, copy)
    monkeypatch.chdir(tmp_path / "notebooks")
    values = {"capacity": 3000, "traffic": "synthetic, from its file"}
    *_, rows = chapter["replay_all"](values, lambda *_: True)
    columns = chapter["recorded"]["synthetic"]
    at = columns["capacity_blocks"].index(3000)
    for label, (found, _) in rows.items():
        hits = columns["file_order"][label.lower()]["block_hits"][at]
        assert found == pytest.approx(100 * hits / columns["num_blocks"])
