"""Chapter 7: its sentences against hand-worked integers, its pictures against the numbers drawn."""

import numpy as np
import pytest
from matplotlib.colors import to_hex

from kvlib import figures
from kvlib.figures import style

ROWS = [("A1", "A", 3, 6, 2000, 0), ("B1", "B", 12, 1, 40, 30), ("B2", "B", 13, 1, 100, 30)]
OUTCOMES = {
    "LRU": (["A1"], 2000, 4.0),
    "LFU": (["B1", "B2"], 110, 0.28),
    "Fair": (["A1"], 2000, 4.0),
    "Cost": (["B2", "B1"], 110, 0.28),
}
TENANTS = {"A": (2000, 1100.0), "B": (140, 1100.0)}


@pytest.fixture
def chapter(run_chapter):
    return run_chapter("07_eviction")


def drawn(missing=100, **changes):
    picture = figures.EvictionTable()
    numbers = {"rows": ROWS, "outcomes": OUTCOMES, "missing": missing, "tenants": TENANTS}
    picture.update("title", "sentence", **(numbers | changes))
    return picture


def words(picture):
    labels = [label.get_text() for label in picture._labels if label.get_text()]
    return labels + [said[2] for said in picture._stamps]


def boxes(picture, colour):
    """Return (width, height) of every box of a colour."""
    paths, colours = picture._boxes.get_paths(), picture._boxes.get_facecolor()
    corners = [path.vertices for path, c in zip(paths, colours, strict=True) if to_hex(c) == colour]
    return [tuple(np.ptp(vertices, axis=0).round(6)) for vertices in corners]


def test_bars_are_as_wide_as_their_blocks_and_shared_parts_are_neutral():
    purple, green = (colour.lower() for colour in style.OWNERS[:2])
    shared = boxes(drawn(), style.SHARED.lower())
    assert boxes(drawn(), purple)[0] == (200, 14)  # 2,000 blocks, the longest
    assert [width for width, _ in boxes(drawn(), green)[:2]] == [1, 7]  # 10 and 70 of their own
    assert [width for width, _ in shared] == [0, 3, 3]


def test_dots_number_the_victims_of_each_policy_in_order():
    picture = drawn()
    sizes = picture._dots.get_sizes().reshape(-1, 4)
    assert (sizes > 100).tolist()[:4] == [
        [True, False, True, False],
        [False, True, False, True],
        [False, True, False, True],
        [False] * 4,
    ]
    assert (sizes[len(ROWS) :] == 0).all()  # no dots without a row
    first, second = (
        [(x, y) for x, y, said, *look in picture._stamps if said == number and "bold" in look]
        for number in "12"
    )
    columns = figures.eviction._COLUMNS
    places = [96, 122, 148]
    assert first == [(columns[0], places[0]), (columns[1], places[1]), (columns[2], places[0]),
                     (columns[3], places[2])]  # fmt: skip
    assert second == [(columns[1], places[2]), (columns[3], places[1])]


def test_freed_bars_split_at_what_was_needed():
    needed = [height for _, height in boxes(drawn(), style.CACHE.lower())]
    spare = [height for _, height in boxes(drawn(), style.LIGHT.lower())]
    assert needed == [5, 5, 5, 5]  # 100 of 2,000 blocks, of 100 pixels
    assert spare == [95, 0.5, 95, 0.5]
    line = drawn()._marks.get_segments()[-1]
    assert set(line[:, 1]) == {figures.eviction._FLOOR - 5}


def test_quota_marks_stand_at_the_quota():
    marks = drawn()._marks.get_segments()[:2]
    assert [mark[0][0] for mark in marks] == [40 + 225 * 1100 / 2000] * 2
    moved = drawn(tenants=TENANTS | {"B": (140, 550.0)})._marks.get_segments()[1]
    assert moved[0][0] == 40 + 225 * 550 / 2000


def test_every_number_of_the_table_stands_in_words():
    shown = words(drawn())
    for text in ("A1", "2,000", "40, 30 of them shared", "2,000 of 1,100", "4.00 s", "0.28 s"):
        assert text in shown, text
    assert "blocks freed; 100 are needed" in shown


def test_old_words_go_when_a_state_has_fewer_rows():
    picture = drawn()
    picture.update(
        "t", "s", rows=ROWS[:1], outcomes=dict.fromkeys(OUTCOMES, ([], 0, 0.0)), missing=0,
        tenants={"A": (2000, 2200.0)},
    )  # fmt: skip
    assert "B1" not in words(picture)
    assert "0.28 s" not in words(picture)


def test_the_guess_stays_beside_the_truth():
    picture = figures.EvictionTable()
    picture.guess = ("five young",)
    picture.update("t", "s", rows=ROWS, outcomes=OUTCOMES, missing=100, tenants=TENANTS)
    assert "you said: five young" in words(picture)


def test_the_break_even_line_hides_when_copying_always_wins():
    picture = figures.WaysBack()
    lengths = np.array([2**10, 2**20])
    numbers = {
        "context": 2048, "contexts": lengths, "here": {"a": 1.0, "b": 2.0},
        "curves": {"a": lengths / 100, "b": lengths / 50},
    }  # fmt: skip
    picture.update("t", "s", break_even=0.0, **numbers)
    assert not picture._even.get_visible()
    picture.update("t", "s", break_even=65_829.0, **numbers)
    assert picture._even.get_visible()
    assert picture._even.get_xdata()[0] == 65_829
    assert "even at 65,829" in words(picture)


def test_the_hook_costs_four_seconds_or_four_tenths(chapter):
    told = chapter["choose"](incoming=200, budget=2200, rate=8000, block_size=16)
    # 2,000 blocks * 16 tokens / 8,000 tokens/s = 4 s; five of 40 blocks: 0.4 s.
    assert told["outcomes"]["LRU"] == (["A1"], 2000, 4.0)
    assert told["outcomes"]["Cost"] == (["B1", "B2", "B3", "B4", "B5"], 200, 0.4)
    assert "200 must go" in told["sentence"]
    assert told["title"] == "200 blocks are missing: LRU costs 4.0 s of prefill, Cost 0.4 s"
    half = chapter["choose"](incoming=200, budget=2300, rate=4000, block_size=16)
    # Only 100 are missing: three of 40 blocks, 3 * 40 * 16 / 4,000 s.
    assert half["outcomes"]["Cost"] == (["B1", "B2", "B3"], 120, 0.48)
    assert chapter["choose"](200, 2400, 8000, 16)["title"] == "Everything fits: nobody leaves"


def weigh(chapter, state="three tenants", weights=(1, 1, 1), incoming=120, wording=0):
    wording = list(chapter["wordings"])[wording]
    return chapter["weigh"](state, *weights, incoming, 1000, 8000, wording)


def test_a_dragged_weight_moves_the_victim_to_another_tenant(chapter):
    even = weigh(chapter)
    assert even["outcomes"]["Fair"] == (["B1"], 260, 0.52)
    assert even["title"] == "B holds 87 blocks above its quota: B1 leaves first"
    heavy = weigh(chapter, weights=(1, 2, 1))
    # Quotas 250, 500, 250: A is 50 above, C 30. A3 frees 80; now A holds 220, C is 30 above: C1.
    assert heavy["outcomes"]["Fair"] == (["A3", "C1"], 230, 0.46)
    assert heavy["title"] == "A holds 50 blocks above its quota: A3 leaves first"
    for policy in ("LRU", "LFU", "Cost"):
        assert heavy["outcomes"][policy] == even["outcomes"][policy]


def test_an_unlisted_tenant_weighs_one(chapter):
    told = weigh(chapter, "four, D not listed")
    assert told["tenants"]["D"] == (200, 250.0)
    assert told["outcomes"]["Fair"][0] == ["B1"]  # B holds 350 of 250


def test_the_two_wordings_pick_different_victims(chapter):
    second = weigh(chapter, "nobody above quota")
    first = weigh(chapter, "nobody above quota", wording=1)
    # 930 of 1,000 are used, 50 missing; A holds 480 and B 450 of 500. B1 is the oldest.
    assert second["missing"] == first["missing"] == 50
    assert (second["outcomes"]["Fair"][0], first["outcomes"]["Fair"][0]) == (["B1"], ["A1"])
    assert "nearest" in first["title"]
    assert "oldest of all" in second["title"]


def test_shared_blocks_return_with_the_last_holder(chapter):
    told = weigh(chapter, "a shared prefix")
    assert told["missing"] == 120  # 60 + 500 + 440 = 1,000 used: the shared 40 count once
    assert told["outcomes"]["LRU"][:2] == (["A1", "A2", "B1"], 260)  # 10 + 50 + 200


def test_all_weights_zero_is_said(chapter):
    with pytest.raises(ValueError, match="all weights are zero"):
        weigh(chapter, weights=(0, 0, 0))


def test_the_way_back_against_hand_worked_seconds(chapter):
    told = chapter["way_back"](32_768, 25.0, 8000, "llama-3.1-8b", 30_000)
    # 32,768 / 8,000 * (1 + 32,768 / 60,000) = 6.333 s; 4 GiB / 25 GB/s = 0.1718 s.
    assert told["here"]["recomputing"] == pytest.approx(6.33299, rel=1e-5)
    assert told["here"]["copying back"] == pytest.approx(2**32 / 25e9)
    assert "at 0 tokens: copying wins at every length" in told["sentence"]
    slow = chapter["way_back"](32_768, 0.5, 8000, "llama-3.1-8b", 30_000)
    # 60,000 * (8,000 * 131,072 / 0.5e9 - 1) = 65,829 tokens
    assert "even at 65,829 tokens: below, recomputing is faster" in slow["sentence"]
    assert slow["title"] == "32,768 tokens: recomputing is 1.4 times as fast as copying back"
