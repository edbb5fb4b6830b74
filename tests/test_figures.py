"""Pictures: pixels depend on numbers only, labels stay apart, colours can be told apart."""

import io
import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from kvlib import figures
from kvlib.figures import style
from kvlib.figures.picture import spread


def tiles(num_kv_heads, guess=()):
    picture = figures.FactorTiles()
    picture.guess = guess
    show(picture, num_kv_heads)
    return picture


def show(picture, num_kv_heads):
    return picture.update(
        title=f"{num_kv_heads} heads",
        sentence=f"{num_kv_heads} heads, `f({num_kv_heads})`",
        factors=(2, 32, num_kv_heads, 128, 16.0),
        bytes_per_token=2 * 32 * num_kv_heads * 128 * 2,
        others={"small": 70_272, "big": 131_072},
    )


def test_update_shows_the_title_and_returns_the_sentence():
    picture = figures.FactorTiles()
    assert show(picture, 8) == "8 heads, `f(8)`"
    before = picture.png(1)
    picture._title.set_text("another title")
    assert picture.png(1) != before


def test_png_has_the_stated_extent_at_both_scales():
    picture = tiles(8)
    for scale in (1, 2, 1):
        image = Image.open(io.BytesIO(picture.png(scale)))
        assert image.size == (scale * picture.width, scale * picture.height)


def test_pixels_depend_on_the_numbers_only():
    first, again = tiles(8), tiles(8)
    show(again, 1)
    again.png(1)
    show(again, 8)
    assert first.png(1) == again.png(1)
    assert first.png(2) == again.png(2)
    assert first.png(1) != tiles(4).png(1)


def test_a_guess_stays_drawn_beside_the_truth():
    assert tiles(8, guess=("big", "small")).png(1) != tiles(8).png(1)


def test_a_cover_hides_every_moving_artist():
    assert tiles(8).png(1, cover="?") == tiles(4).png(1, cover="?")


def test_the_background_is_opaque_white():
    picture = tiles(8)
    for scale, darkest in ((1, 254), (2, 255)):  # the drag's palette may miss white by one
        image = Image.open(io.BytesIO(picture.png(scale)))
        assert "transparency" not in image.info
        assert min(image.convert("RGB").getpixel((0, 0))) >= darkest


@given(st.lists(st.floats(-100, 100), max_size=12), st.floats(0.01, 5))
def test_spread_keeps_order_and_distance(values, gap):
    placed = spread(values, gap)
    pairs = itertools.pairwise(sorted(range(len(values)), key=values.__getitem__))
    for low, high in pairs:
        assert placed[high] - placed[low] >= gap - 1e-6
    assert sum(placed) == pytest.approx(sum(values), abs=1e-6 * max(1, len(values)))


def _seen_with(matrix, colour):
    """Simulate dichromatic vision (Viénot, Brettel and Mollon 1999) on linear RGB."""
    rgb = np.array([int(colour[k : k + 2], 16) / 255 for k in (1, 3, 5)]) ** 2.2
    return np.clip(matrix @ rgb, 0, 1) ** (1 / 2.2)


@pytest.mark.parametrize(
    "palette",
    [
        (style.WEIGHTS, style.CACHE, style.OTHER, style.PAPER),
        (style.CACHE, style.LIMIT, style.INK, style.PAPER),
    ],
    ids=["bar", "lines"],
)
@pytest.mark.parametrize(
    "matrix",
    [
        np.array([[0.11238, 0.88762, 0], [0.11238, 0.88762, 0], [0.00401, -0.00401, 1]]),
        np.array([[0.29275, 0.70725, 0], [0.29275, 0.70725, 0], [-0.02234, 0.02234, 1]]),
    ],
    ids=["protanopia", "deuteranopia"],
)
def test_colours_that_meet_differ_for_colour_blind_readers(palette, matrix):
    for one, other in itertools.combinations(palette, 2):
        assert np.linalg.norm(_seen_with(matrix, one) - _seen_with(matrix, other)) > 0.15


def error_maps(view=0, by_token=1.0, guess=()):
    maps = {name: np.full((2, 4, 8), k) for k, name in enumerate("KV")}
    picture = figures.ErrorMaps(maps, num_tokens=16)
    picture.guess = guess
    lines = [("per channel", [2, 3, 4, 5], [3] * 8), ("per token", [1] * 4, [by_token] * 8)]
    picture.update("title", "sentence", view=view, errors={"K": lines, "V": lines}, answer="K")
    return picture


def test_error_maps_show_the_view_and_each_way_of_sharing():
    (image, ways), _ = error_maps(view=1)._halves
    assert image.get_ylim() == (7.5, 3.5)  # rows 4 to 7 are the second view's four channels
    (beside, below, text), (_, other, _) = ways
    assert beside.get_xydata().tolist() == [[2, 0], [3, 1], [4, 2], [5, 3]]
    assert below.get_xdata().tolist() == [1, 3, 5, 7, 9, 11, 13, 15]  # middles of two tokens each
    assert text.get_text() == "per channel"
    assert list(other.get_ydata()) == [1] * 8
    assert error_maps(by_token=50).png(1) != error_maps().png(1)
    assert error_maps(guess=("V",))._said.get_text() == "you said V; here: K"
    assert error_maps()._said.get_text() == ""


def integer_grid(step, extra=0):
    picture = figures.IntegerGrid()
    codes = np.arange(-round(12 / step), round(12 / step) + 1)
    values = np.array([-3.0, 0.2, 0.9, 2.9] * 40)
    indices = np.rint(values / step).astype(int) - codes[0]
    numbers = {"values": values, "indices": indices, "levels": codes * step, "codes": codes}
    picture.update("title", "sentence", **numbers, extra=extra)
    return picture


def test_the_integer_grid_draws_levels_codes_and_how_often_each_is_used():
    picture = integer_grid(step=1.0, extra=40)
    assert picture._axes.get_ylim() == (-4, 4)
    heights = [segment[0][1] for segment in picture._grids[0].get_segments()]
    assert heights == list(range(-4, 5))  # of -12 to 12 those in view
    shown = [text.get_text() for text in picture._codes if text.get_visible()]
    assert list(map(int, shown)) == heights  # a step of 1: code and level agree
    assert picture._read.get_ydata()[:4].tolist() == [-3, 0, 1, 3]
    used = {segment[1][1]: segment[1][0] for segment in picture._often.get_segments()}
    assert used == {-3: 1, 0: 1, 1: 1, 3: 1}  # each 40 times: all as long as the longest
    assert picture._extra.get_text() == "◇ one more at 40 ↑"
    assert integer_grid(step=1.0, extra=-9)._extra.get_text() == "◇ one more at -9 ↓"
    assert integer_grid(step=1.0, extra=2).png(1) != integer_grid(step=1.0, extra=3).png(1)


def test_a_fine_grid_is_neither_labelled_nor_a_wall():
    fine, finest = integer_grid(step=0.25), integer_grid(step=0.0625)
    assert len(fine._grids[0].get_segments()) == 33
    assert not any(text.get_visible() for text in fine._codes)
    assert not finest._grids[0].get_segments()  # 129 lines


def tradeoff(chosen):
    picture = figures.Tradeoff("bytes", "error", (0, 100), [1, 10, 100], ("a", "b"))
    points = [
        np.array([[10, 50], [40, 20], [40, 5]]),
        np.array([[20, 60], [60, 5], [80, 0.5], [80, 500]]),
    ]
    picture.update("title", "sentence", points=points, chosen=chosen, tag=f"{chosen[0]} bytes")
    return picture


def test_the_tradeoff_joins_the_best_and_rings_the_chosen():
    picture = tradeoff((40, 20))
    # 20 with 60 is worse than 10 with 50, 60 with 5 no better than 40; 0.5 is off the axis.
    assert picture._best.get_xydata().tolist() == [[10, 50], [40, 5], [80, 1]]
    assert picture._groups[1].get_ydata().tolist() == [60, 5, 1, 100]
    assert picture._here.get_xydata().tolist() == [[40, 20]]
    assert picture._tag.get_text() == "○ 40 bytes"
    assert tradeoff((80, 0.5))._here.get_xydata().tolist() == [[80, 1]]
    assert tradeoff((40, 5)).png(1) != picture.png(1)
