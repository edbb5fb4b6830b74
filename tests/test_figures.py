"""Pictures: pixels depend on numbers only, labels stay apart, colours can be told apart."""

import io
import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from kvlib import figures


def tiles(num_kv_heads, guess=()):
    picture = figures.FactorTiles()
    picture.guess = guess
    bytes_per_token = 2 * 32 * num_kv_heads * 128 * 2
    sentence = picture.update(
        (2, 32, num_kv_heads, 128, 16.0), bytes_per_token, {"small": 70_272, "big": 131_072}, "f(8)"
    )
    return picture, sentence


def test_the_sentence_says_what_the_tiles_show():
    _, sentence = tiles(8)
    assert sentence == (
        "2 × 32 × 8 × 128 × 16 bits ÷ 8 = 131,072 bytes, 128.00 KiB for each token of context, "
        "whatever the number of parameters. `f(8)`"
    )


def test_png_has_the_stated_extent_at_both_scales():
    picture, _ = tiles(8)
    for scale in (1, 2, 1):
        image = Image.open(io.BytesIO(picture.png(scale)))
        assert image.size == (scale * picture.width, scale * picture.height)


def test_pixels_depend_on_the_numbers_only():
    first, again = tiles(8)[0], tiles(8)[0]
    again.update((2, 1, 1, 64, 4.0), 64, {"small": 1, "big": 2}, "")
    again.png(1)
    again.update((2, 32, 8, 128, 16.0), 131_072, {"small": 70_272, "big": 131_072}, "")
    assert first.png(1) == again.png(1)
    assert first.png(2) == again.png(2)
    assert first.png(1) != tiles(4)[0].png(1)


def test_a_guess_stays_drawn_beside_the_truth():
    assert tiles(8, guess=("big", "small"))[0].png(1) != tiles(8)[0].png(1)


def test_a_cover_hides_every_moving_artist():
    assert tiles(8)[0].png(1, cover="?") == tiles(4)[0].png(1, cover="?")


def test_the_background_is_opaque_white():
    picture, _ = tiles(8)
    for scale, darkest in ((1, 254), (2, 255)):  # the drag's palette may miss white by one
        image = Image.open(io.BytesIO(picture.png(scale)))
        assert "transparency" not in image.info
        assert min(image.convert("RGB").getpixel((0, 0))) >= darkest


@given(st.lists(st.floats(-100, 100), max_size=12), st.floats(0.01, 5))
def test_spread_keeps_order_and_distance(values, gap):
    placed = figures.spread(values, gap)
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
        (figures.WEIGHTS, figures.CACHE, figures.OTHER, figures.PAPER),
        (figures.CACHE, figures.LIMIT, figures.INK, figures.PAPER),
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
