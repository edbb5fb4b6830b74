"""Pictures: pixels depend on numbers only, labels stay apart, colours can be told apart."""

import io
import itertools

import matplotlib
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


def error_curves(picture, **more):
    x = np.array([2.0, 20.0, 100.0])
    picture.update(
        title="errors",
        sentence="`f()`",
        curves=[(x, [90.0, level, 0.0]) for level in (50.0, 12.0, 9.0, 9.5)],
        points=[(20, level) for level in (50.0, 12.0, 9.0, 9.5)],
        tags=["a 50.0 %", "b 12.0 %", "c 9.0 %", "d 9.5 %"],
        **more,
    )
    return picture


def test_error_curves_mark_the_point_and_the_best():
    picture = error_curves(figures.ErrorCurves())
    assert picture._dots.get_offsets().tolist() == [[20, 50], [20, 12], [20, 9], [20, 9.5]]
    assert [tag.get_weight() for tag in picture._tags] == ["normal", "normal", "bold", "normal"]
    heights = sorted(np.log(tag.get_position()[1]) for tag in picture._tags)
    assert min(np.diff(heights)) > 0.2  # close errors, labels apart
    # An error of 0 has no place on a logarithmic axis: the curve leaves through the bottom.
    lowest = picture._axes.get_ylim()[0]
    assert all(segment[-1, 1] < lowest for segment in picture._lines.get_segments())


def test_a_guessed_error_is_drawn_where_it_was_said():
    picture = figures.ErrorCurves()
    picture.guess = ("about 60 %",)
    error_curves(picture, guess_at=20)
    assert picture._said.get_xydata().tolist() == [[20, 60]]
    assert picture._said_tag.get_text() == "you said 60 %"


class Grid(figures.Picture):
    """The same cells drawn by kvlib or by matplotlib; axes of 10 by 4, the first row on top."""

    def __init__(self, colours, extent, drawn_by):
        self.given = colours, extent, drawn_by
        super().__init__()

    def build(self):
        colours, extent, drawn_by = self.given
        axes = self.figure.add_axes((0.13, 0.17, 0.71, 0.61))
        axes.set(xlim=(0, 10), ylim=(4, 0))
        axes.axis("off")
        if drawn_by == "kvlib":
            self.cells(axes, extent).colours = colours
        else:
            x, x_end, y, y_end = extent
            place = {"extent": (x, x_end, y_end, y), "origin": "upper", "aspect": "auto"}
            self.moving(axes.imshow(colours, interpolation="nearest", **place))
            axes.set(xlim=(0, 10), ylim=(4, 0))


@pytest.mark.parametrize("scale", [1, 2])
@pytest.mark.parametrize("extent", [(0, 10, 0, 4), (0, 13, 0, 4), (-2, 7, 1, 3), (3, 3.1, 0, 9)])
def test_cells_are_drawn_as_matplotlib_draws_an_image(extent, scale):
    colours = np.random.default_rng(5).integers(0, 256, (3, 7, 3), dtype=np.uint8)
    ours, theirs = (
        np.array(Grid(colours, extent, drawn_by)._image(scale)) for drawn_by in ("kvlib", "Agg")
    )
    assert (ours < 255).any()
    # Before 3.11 matplotlib puts some edges of cells one pixel further.
    is_old = matplotlib.__version_info__ < (3, 11)
    if is_old and scale == 1 and extent == (3, 3.1, 0, 9):
        pytest.skip("seven cells in five pixels: an edge further is another cell")
    reach = range(-1, 2) if is_old else range(1)
    shifted = [np.roll(theirs, (down, right), (0, 1)) for down in reach for right in reach]
    assert np.any([(ours == each).all(axis=2) for each in shifted], axis=0).all()


def test_cells_outside_the_axes_or_not_yet_filled_draw_nothing():
    colours = np.zeros((1, 1, 3), np.uint8)
    for cells in ((colours, (11, 12, 0, 4)), (colours[:0], (0, 10, 0, 4))):
        assert (np.array(Grid(*cells, "kvlib")._image(1)) == 255).all()


def test_the_strip_shows_every_kept_position():
    kept = np.zeros((4, 1024))
    kept[0, 7], kept[3, 1023] = 1, 0.5
    picture = error_curves(
        figures.RuleCurves(), kept=kept, drawn=np.full(1024, 0.001), words=[(7, "“Sir”")]
    )
    inked = np.argwhere((picture._kept.colours < 255).any(axis=-1)).tolist()
    assert inked == [[0, 3], [3, 511]]  # two positions a column
    assert [text.get_text() for text in picture._words] == ["“Sir”", "", "", "", ""]


def test_a_block_is_white_only_when_nothing_in_it_is_kept():
    stored = np.zeros((5, 1024), bool)
    stored[1, 17], stored[2, 16:32] = True, True
    picture = figures.KeptBlocks()
    for block_size, num_blocks in ((16, 64), (100, 11)):
        picture.update("t", "s", stored=stored, block_size=block_size, names="abcde", ends="vwxyz")
        shades = picture._blocks.colours[..., 0].astype(int)
        assert shades.shape == (5, num_blocks)
        inked = np.argwhere(shades < 200).tolist()
        assert inked == ([[1, 1], [2, 1]] if block_size == 16 else [[1, 0], [2, 0]])
        assert shades[2].min() < shades[1].min()


def test_the_background_is_opaque_white():
    picture = tiles(8)
    for scale in (1, 2):
        image = Image.open(io.BytesIO(picture.png(scale)))
        assert "transparency" not in image.info
        assert min(image.convert("RGB").getpixel((0, 0))) == 255


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


def test_a_waterfall_ends_at_zero_or_below_it():
    picture, gib = figures.Waterfall(), 2**30
    totals = [("1", "a"), ("2", "fit"), ("3", "c")]
    parts = [("gpu", 80), ("w", 60), ("r", 8), ("tails", 1), ("scales", 2), ("unused", 3)]
    rows = [(name, number * gib) for name, number in [*parts, ("cache", 6)]]
    picture.draw(rows=rows, totals=totals)
    bars = [(bar.get_x(), bar.get_width()) for bar, _, _ in picture._rows]
    assert bars == [(0, 80), (20, 60), (12, 8), (11, 1), (9, 2), (6, 3), (0, 6)]
    assert not picture._empty.get_visible()
    rows = [(name, 0) for name, _ in rows]
    rows[:3] = [("gpu", 80 * gib), ("w", 90 * gib), ("r", 8 * gib)]
    picture.draw(rows=rows, totals=totals)
    assert picture._rows[2][0].get_x() == -18
    assert picture._axes.get_xlim()[0] <= -18
    assert picture._empty.get_visible()
    picture.guess = ("39",)
    picture.draw(rows=rows, totals=totals)
    assert picture._totals[1][1].get_text() == "fit (you guessed 39)"


def test_levers_are_ranked_and_start_at_what_fits_now():
    picture = figures.Levers()
    levers = {
        name: (name, after) for name, after in zip("abcdef", (5, 9, 40, 5, 3, 7), strict=True)
    }
    picture.guess = ("b",)
    picture.draw(now=5, levers=levers)
    names = [name.get_text() for _, name, _ in picture._rows]
    assert names == ["c", "b\nyour guess", "f", "a", "d", "e"]
    assert [bar.get_width() for bar, _, _ in picture._rows] == [35, 4, 2, 0, 0, -2]
    assert {bar.get_x() for bar, _, _ in picture._rows} == {5}
    assert [end.get_text() for _, _, end in picture._rows] == ["+35", "+4", "+2", "+0", "+0", "-2"]
    assert picture._now.get_width() == 5


def test_eviction_costs_nothing_up_to_what_fits_and_the_dot_lies_on_its_line():
    picture = figures.EvictionCost()
    plans = [("a", 5, 182.0), ("b", 40, 112.0), ("c", 200, 0.0)]
    picture.draw(asked=96, plans=plans, per_sequence=2.0, parts=[("A", 48), ("B", 40), ("out", 8)])
    for (line, dot, _), (_, fitting, cost) in zip(picture._plans, plans, strict=True):
        assert np.interp([fitting, 96], *line.get_data()).tolist() == [0, cost]
        assert [part[0] for part in dot.get_data()] == [96, cost]
    assert picture._axes.get_ylim()[1] > 182
    assert [patch.get_width() for patch, _ in picture._parts] == [50, 100 * 40 / 96, 100 * 8 / 96]


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
