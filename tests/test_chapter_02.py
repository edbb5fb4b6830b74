"""Chapter 2: its pictures draw their numbers, its sentences say what one works out by hand."""

import numpy as np
import pytest

from kvlib import figures


def corners(boxes):
    """Left, right, top and bottom of each box."""
    return [
        (*path.vertices[[0, 1], 0].tolist(), *path.vertices[[0, 2], 1].tolist())
        for path in boxes.get_paths()
    ]


def request_rows(guess=(), reserved=1000):
    picture = figures.RequestRows()
    picture.guess = guess
    picture.draw(
        lengths=np.array([100, 400]),
        slots=np.array([112, 400]),
        reserved=reserved,
        mean=250,
        notes=("90 % empty", "1 % lost"),
    )
    return picture


def test_rows_are_shares_of_a_reservation():
    picture = request_rows()
    # 100 of 1,000 slots is 10 %; two rows share the height.
    assert corners(picture._held) == [(0, 10, 0.3, 49.7), (0, 40, 50.3, 99.7)]
    assert corners(picture._tails)[0] == pytest.approx((0, 11.2, 0.3, 49.7))
    assert corners(request_rows(reserved=2000)._held)[0][1] == 5
    mean, said = picture._marks
    assert mean[0].get_xdata()[0] == 25
    assert mean[1].get_text() == "on average 25.0 % is used"
    assert said[1].get_text() == ""
    assert [note.get_text() for note in picture._notes] == ["90 % empty", "1 % lost"]


def test_a_guess_of_the_empty_share_is_drawn_where_the_used_share_ends():
    line, tag = request_rows(guess=("70 %",))._marks[1]
    assert line.get_xdata()[0] == 30
    assert tag.get_text() == "you said 70 % empty"
    assert request_rows(guess=("10 %",))._marks[1][1].get_ha() == "right"  # would leave the page


def sequence(num_tokens, block_size, num_blocks, guess=()):
    picture = figures.SequenceBlocks()
    picture.guess = guess
    picture.draw(num_tokens, block_size, num_blocks, ("some tokens", "some empty", "the mean"))
    return picture


def test_a_sequence_is_cut_into_blocks_and_its_tail_is_what_they_hold_beyond_it():
    picture = sequence(100, 16, 7)
    assert corners(picture._fill) == [(0, 100, 0, 1), (100, 112, 0, 1)]
    assert [box[:2] for box in corners(picture._cuts)] == [
        (start, start + 16) for start in range(0, 112, 16)
    ]
    assert picture._waste.get_ydata() == [100, 112]
    assert picture._mean.get_ydata() == [7.5, 167.5]
    stairs = [path.vertices[:3].tolist() for path in picture._stairs.get_paths()]
    assert len(stairs) == 10  # 160 / 16
    assert stairs[1] == [[16, 16], [16, 32], [32, 32]]


def test_the_guess_of_the_mean_lies_beside_the_mean():
    assert sequence(100, 16, 7, guess=("8 slots",))._guess.get_ydata() == [8, 168]
    assert max(sequence(100, 16, 7)._guess.get_ydata()) <= 0  # no guess, no line


def test_small_curves_draw_what_they_get():
    picture = figures.SmallCurves(*[("x", (0, 4), "y", ends, "z") for ends in ((-1, 3), "%") * 2])
    pane = ("7 things", ([1, 2], [0, 7]), ([1, 2], [3, 4]), ([2], [7]))
    picture.draw([pane] * 4)
    for words, *lines in picture._artists:
        assert words.get_text() == "7 things"
        assert tuple((line.get_xdata(), line.get_ydata()) for line in lines) == pane[1:]
    picture.png(1)  # zero on a logarithmic axis draws nothing and warns of nothing


@pytest.fixture
def panels(run_chapter):
    return run_chapter("02_blocks")["panels"]


def test_reserving_against_blocks_in_words(panels):
    panels[0].reset()
    # 1 - 1,365.82 / 14,089 = 0.903; 14,089 / (1,365.82 + 7.47) = 10.26; 7.47 * 128 KiB = 956 KiB
    for words in ("14,089 slots", "90.3 %", "leave 0.54 %", "955.8", "10.3 times as many"):
        assert words in panels[0].sentence
    panels[0].set(traffic="azure-code", block_size=2048)
    assert "leave 36.62 %" in panels[0].sentence
    panels[0].set(model="opt-13b", block_size=1)
    assert "leave 0.0 %, 0 B a request" in panels[0].sentence


@pytest.mark.parametrize(
    ("num_tokens", "block_size", "words"),
    [
        # 6 * 16 = 96 < 100 <= 112; 12 slots of 128 KiB
        (100, 16, ("100 tokens in 7 blocks of 16, 112 slots", "12 empty, 1.50 MiB", "= 7.5 empty")),
        (96, 16, ("6 blocks of 16, 96 slots", "0 empty, 0 B")),
        (
            1,
            32,
            ("1 token in 1 block of 32, 32 slots", "31 empty, 3.88 MiB", "= 15.5 empty"),
        ),  # 31/8 MiB
    ],
)
def test_one_sequence_in_words(panels, num_tokens, block_size, words):
    panels[1].set(num_tokens=num_tokens, block_size=block_size)
    for each in words:
        assert each in panels[1].sentence


def test_the_trade_off_in_words(panels):
    panels[2].reset()
    for words in ("7.47 empty slots", "random lengths: 7.5", "0.54 % of all", "85.8 table entries"):
        assert words in panels[2].sentence
    panels[2].set(block_size=2048)
    for words in ("1,155.52 empty slots", "45.83 %", "1.2 table entries"):
        assert words in panels[2].sentence
    panels[2].controls["length"].value = 1000  # makes the requests custom
    panels[2].set(block_size=16)
    # 62 * 16 = 992 < 1,000 <= 1,008; 8 / 1,008 = 0.79 %; 8 slots of 128 KiB
    for words in ("Requests of length 1,000", "8.00 empty", "0.79 %", "1.00 MiB", "63.0 table"):
        assert words in panels[2].sentence
