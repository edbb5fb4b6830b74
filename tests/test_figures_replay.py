"""Pictures of replays: what their artists hold, and that every number moves them."""

import numpy as np
import pytest

from kvlib import figures
from kvlib.figures.replay import POLICY_LOOK

CURVES = {
    "LRU": (np.array([100, 1000, 100_000]), np.array([5.0, 10.0, 40.0])),
    "Belady": (np.array([100, 1000]), np.array([20.0, 40.0])),
    "LFU": (np.array([100, 1000, 100_000]), np.array([4.0, 9.0, 40.0])),
}


def hit_ratio(guess=(), **changed):
    picture = figures.HitRatio()
    picture.guess = guess
    numbers = {
        "capacity": 1000,
        "parts": {"found by LRU": 10.0, "better order, at most": 30.0, "more memory": 1.0}
        | {"never seen before": 59.0},
        "curves": CURVES,
        "at_capacity": {"ceiling": 41.0, "LRU": 10.0, "Belady": 40.0, "LFU": 9.0},
        "gpu_blocks": 500,
        "gpu": "one GPU",
        "tick_texts": ["1 GiB", "10 GiB", "100 GiB", "1 TiB"],
    }
    assert picture.update(title="a title", sentence="words", **numbers | changed) == "words"
    return picture


def words_of(picture):
    return [text.get_text() for text in picture._labels if text.get_visible()]


def test_the_bar_is_cut_where_the_shares_say():
    bars = [patch for patch, _ in hit_ratio()._parts]
    assert [(bar.get_x(), bar.get_width()) for bar in bars] == [
        (0, 10), (10, 30), (40, 1), (41, 59)
    ]  # fmt: skip
    texts = [text.get_text() for _, text in hit_ratio()._parts]
    # 10 % is too narrow for the name, 1 % for any word.
    assert texts == ["10.0", "better order\nat most\n30.0 %", "", "never seen before\n59.0 %"]


def test_areas_lie_between_the_curves():
    picture = hit_ratio()
    order, memory, never = (area.get_path().vertices for area in picture._areas)
    at = np.argmin(np.abs(order[:120, 0] - 1000))
    assert order[at, 1] == pytest.approx(10, abs=0.5)
    assert order[239 - at, 1] == memory[at, 1] == pytest.approx(40, abs=1)
    assert memory[239 - at, 1] == never[at, 1] == 41
    assert {"better order", "more memory"} <= set(words_of(picture))


def test_marks_stand_at_their_capacities_and_hide_when_off_the_axis():
    picture = hit_ratio()
    assert list(picture._here.get_xdata()) == [1000, 1000]
    assert list(picture._gpu.get_xdata()) == [500, 500]
    assert "one GPU" in words_of(picture)
    assert "one GPU" not in words_of(hit_ratio(gpu_blocks=0))
    assert not hit_ratio(gpu_blocks=0)._gpu.get_visible()


def test_policies_that_are_absent_are_not_drawn():
    picture = hit_ratio()
    line, tag = picture._lines["LFU"]
    assert line.get_xydata().tolist() == [[100, 4], [1000, 9], [100_000, 40]]
    assert tag.get_text() == "▲ LFU 9.0"
    assert not any(artist.get_visible() for artist in picture._lines["Fair"])
    # LRU 10.0 and LFU 9.0 would overlap: their labels are pushed apart, in order.
    heights = [picture._lines[name][1].get_position()[1] for name in ("LFU", "LRU", "Belady")]
    assert heights == sorted(heights)
    assert min(np.diff(heights)) >= picture._axes.get_ylim()[1] / 19 - 1e-9


def test_the_guess_stays_under_its_part():
    said = hit_ratio(guess=("better order",))._said
    assert (said.get_text(), said.get_position()[0]) == ("▲ you said", 25)
    assert hit_ratio()._said.get_text() == ""


@pytest.mark.parametrize(
    "changed",
    [
        {"capacity": 2000},
        {"gpu_blocks": 5000},
        {"tick_texts": ["2 GiB", "20 GiB", "200 GiB", "2 TiB"]},
        {"curves": CURVES | {"LRU": (CURVES["LRU"][0], CURVES["LRU"][1] / 2)}},
    ],
)
def test_every_number_of_the_hit_ratio_moves_its_picture(changed):
    assert hit_ratio(**changed).png(1) != hit_ratio().png(1)


def bars(rows):
    picture = figures.PolicyBars("share [%]", "found", "lost")
    picture.update(title="t", sentence="s", rows=rows, right=10)
    return picture


def test_bars_and_dots_and_policies_that_were_not_replayed():
    picture = bars({"LRU": (2.5, 7.0), "cost": (1.0, None)})
    drawn = dict(zip(POLICY_LOOK, picture._rows, strict=True))
    patch, point, end = drawn["LRU"]
    assert (patch.get_width(), list(point.get_xdata())) == (2.5, [7.0])
    assert end.get_text() == "2.50 ● 7.00"
    assert drawn["cost"][2].get_text() == "1.00"
    assert not drawn["cost"][1].get_visible()
    assert drawn["LFU"][2].get_text() == "not replayed"
    assert drawn["LFU"][0].get_width() == 0


def test_usage_shows_each_tenant_at_the_chosen_minute():
    picture = figures.TenantUsage()
    minutes, usage = np.array([0.0, 2.0, 4.0]), {"a": [0, 30, 60], "b": [9, 70, 40]}
    numbers = {"minutes": minutes, "usage": usage, "quota": 50, "end": (2, "b leaves")}
    # At minute 3 the latest record is that of minute 2.
    picture.update(title="t", sentence="s", minute=3, **numbers)
    assert [tag.get_text() for _, tag in picture._lines] == ["A a\n   30", "B b\n   70"]
    assert [line.get_ydata() for line, _ in picture._lines] == [[0, 30, 60], [9, 70, 40]]
    assert list(picture._quota.get_ydata()) == [50, 50]
    assert {"- - quota of each\n      50", "b leaves"} <= set(words_of(picture))
    picture.update(title="t", sentence="s", minute=4, **numbers)
    assert picture._lines[0][1].get_text() == "A a\n   60"


def test_the_map_colours_and_names_the_winner_of_every_cell():
    picture = figures.PolicyMap()
    # Two columns, two labelled rows of three each: LRU below LFU on the left, Fair on the right.
    winners = np.array([[0, 3], [0, 3], [0, 3], [0, 3], [1, 3], [1, 3]])
    picture.update(
        title="t", sentence="s", columns=["1K", "2K"], rows=["0", "50"], winners=winners,
        here=(1, 0.4),
    )  # fmt: skip
    words = [line.get_xydata().tolist() for line in picture._words]
    assert words == [[[0, 0]], [[0, 1]], [], [[1, 0], [1, 1]], []]
    boxes = [path.get_extents().bounds for path in picture._cells.get_paths()]
    # x, y, width, height: four of the six fine rows are LRU's.
    assert boxes[0] == pytest.approx((-0.5, -0.5, 1, 4 / 3))
    assert boxes[1] == pytest.approx((-0.5, 5 / 6, 1, 2 / 3))
    assert boxes[2] == pytest.approx((0.5, -0.5, 1, 2))
    assert len({tuple(colour) for colour in picture._cells.get_facecolor()}) == 3
    assert picture._here.get_xydata().tolist() == [[1, 0.4]]
