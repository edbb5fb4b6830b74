"""kvlib.scenario: every frame is what playing the steps so far gives, and bad words are named."""

import itertools
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlib.scenario import parse, play

NAMES = "ABCDEFGH"


def test_hand_worked_life():
    # Blocks of 16: A=40 takes 0 1 2 (8 left free), B=20 takes 3 4, A+9 fills 8 and takes 5.
    frames = play("A=40 B=20 A+9 A>C C+1 -B -A", num_blocks=8, block_size=16)
    start, grow, fork, copy, leave, last = frames[1], *frames[3:]
    assert start.tables == {"A": (0, 1, 2)}
    assert start.filled == (16, 16, 8, 0, 0, 0, 0, 0)
    assert (grow.tail_free_slots, grow.taken, grow.written) == (8, (5,), (2, 5))
    assert grow.num_tokens == {"A": 49, "B": 20}
    assert (fork.walked, fork.taken, fork.tables["C"]) == (4, (), (0, 1, 2, 5))
    assert fork.ref_counts == (2, 2, 2, 1, 1, 2, 0, 0)
    # The tail 5 holds 1 token and is shared, so C's write copies it to 6, and A keeps 5.
    assert (copy.copied, copy.taken, copy.written) == ((5, 6), (6,), (6,))
    assert copy.filled[5:7] == (1, 2)
    assert (leave.walked, leave.freed, leave.free_list) == (2, (3, 4), (3, 4, 7))
    # A held 0 1 2 with C, and 5 alone.
    assert (last.walked, last.freed, last.tables) == (4, (5,), {"C": (0, 1, 2, 6)})
    assert last.fragmentation == 14 / 64  # only C: 50 of 64 slots


def test_repetition_is_written_out():
    assert [step.text for step in parse("A=1 A+2*3")] == ["A=1", "A+2", "A+2", "A+2"]
    assert [step.argument for step in parse("B=0 B>C -B")] == [0, "C", None]


def test_a_refused_step_changes_nothing_and_the_rest_goes_on():
    frames = play("A=60 A+40 A+4 B=99 B+1 B>C C+1 -B -A B=20", num_blocks=4, block_size=16)
    for before, frame in itertools.pairwise(frames):
        if not frame.refused:
            continue
        assert frame[1:7] == before[1:7]
        assert (frame.taken, frame.freed, frame.written, frame.walked) == ((), (), (), 0)
    refusals = [frame.refused for frame in frames]
    assert refusals[2:5] == ["3 needed, 0 free", "", "7 needed, 0 free"]  # 60 + 40 - 64 = 36: 3
    assert refusals[5:9] == ["B could not start"] * 2 + ["C could not start", "B could not start"]
    assert frames[-1].num_tokens == {"B": 20}


@st.composite
def scripts(draw):
    live, words = [], []
    for _ in range(draw(st.integers(1, 25))):
        kinds = (["="] if len(live) < 8 else []) + (["+", "-"] if live else [])
        kind = draw(st.sampled_from([*kinds, ">"] if live and len(live) < 8 else kinds))
        old = draw(st.sampled_from(live)) if live else ""
        new = next((name for name in NAMES if name not in live), "")
        tokens = draw(st.integers(1, 40))
        words.append(
            {"=": f"{new}={tokens}", "+": f"{old}+{tokens}", "-": f"-{old}", ">": f"{old}>{new}"}[
                kind
            ]
        )
        live += [new] if kind in "=>" else []
        live.remove(old) if kind == "-" else None
    return words


@given(scripts(), st.integers(4, 30), st.integers(1, 17), st.randoms(use_true_random=False))
def test_a_frame_is_what_the_steps_so_far_give(words, num_blocks, block_size, rng):
    frames = play(" ".join(words), num_blocks, block_size)
    assert len(frames) == len(words) + 1
    number = rng.randint(1, len(words))
    assert play(" ".join(words[:number]), num_blocks, block_size)[-1] == frames[number]


@given(scripts(), st.integers(4, 30), st.integers(1, 17))
def test_frames_add_up(words, num_blocks, block_size):
    frames = play(" ".join(words), num_blocks, block_size)
    for before, frame in itertools.pairwise(frames):
        entries = [block for table in frame.tables.values() for block in table]
        assert [entries.count(block) for block in range(num_blocks)] == list(frame.ref_counts)
        assert len(before.free_list) - len(frame.free_list) == len(frame.taken) - len(frame.freed)
        for name, table in frame.tables.items():
            assert sum(frame.filled[block] for block in table) == frame.num_tokens[name]


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("A=40 A?9", "step='A?9'; a step is A=40, A+9, A+1*12, A>C or -A, names A to H. Rewrite"),
        ("I=4", "step='I=4'; a step is"),
        ("A=40 A+0", "step='A+0'; a step is"),
        ("A=-1", "step='A=-1'; a step is"),
        ("A=1000000", "step='A=1000000'; at most 100,000 tokens. Write fewer."),
        ("", "script=''; a scenario has 1 to 200 steps, not 0. Start with A=40."),
        ("A=1 A+1*999999999", "script='A=1 A+1*999999999'; a scenario has 1 to 200 steps, not 202"),
        ("B+9", "step='B+9'; B is not there at this point. Start it before, B=40."),
        ("A=4 -A -A", "step='-A'; A is not there at this point."),
        ("A=4 A=5", "step='A=5'; A lives already. Use another letter."),
        ("A=4 B=5 A>B", "step='A>B'; B lives already."),
        ("A=4 A>A", "step='A>A'; A lives already."),
    ],
)
def test_a_bad_word_is_named_with_its_rule(script, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        play(script, 8, 16)


@given(st.one_of(st.text(max_size=40), st.text("ABH=+*>-019 ", max_size=40)))
def test_whatever_is_typed_is_played_or_refused_as_a_value(script):
    try:
        frames = play(script, 8, 16)
    except ValueError:
        return
    assert len(frames) > 1


def test_playing_again_gives_the_same_frames():
    assert play("A=40 A+1", 8, 16) is play("A=40 A+1", 8, 16)
    with pytest.raises(ValueError, match="num_blocks=0; it must be at least 1"):
        play("A=40", 0, 16)
