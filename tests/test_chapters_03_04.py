"""The block pool and its relatives draw the numbers they are given; chapters 3 and 4 say them."""

import numpy as np
import pytest

from kvlib import figures
from kvlib.figures import style
from kvlib.scenario import play


def pool_of(script, num_blocks=24, block_size=16, **more):
    picture = figures.BlockPool()
    frame = play(script, num_blocks, block_size)[-1]
    picture.update("title", "sentence", frame=frame, block_size=block_size, **more)
    return picture


def boxes(picture, face=None, edge=None):
    """Return [x, y, width, height] of the rectangles of one look."""
    found = []
    for (_, one_face, one_edge), corners in picture._rectangles.items():
        if face in (None, one_face) and edge in (None, one_edge):
            for points in corners:
                x, y = np.min(points, axis=0)
                found.append([x, y, *(np.max(points, axis=0) - (x, y))])
    return np.array(found)


def words(picture):
    return [said[2] for said in picture._stamps]


def test_fill_levels_owners_counts_and_the_next_free_block():
    # A: 0 1 2 3 (8 of 16), C shares them; B: 4 5 6 (8 of 16). 7 is next.
    picture = pool_of("A=56 B=40 A>C")
    purple, green = style.OWNERS[:2]
    assert boxes(picture, face=purple).size == 0  # all of A's blocks are shared
    assert sorted(boxes(picture, face=style.SHARED)[:, 3]) == [22, 44, 44, 44]
    assert sorted(boxes(picture, face=green)[:, 3]) == [22, 44, 44]
    said = words(picture)
    assert [said.count(text) for text in ("AC", "x2", "B", "next")] == [4, 4, 3, 1]
    assert {"24 blocks, 17 free", "A   56 tokens", "C   56 tokens"} <= set(said)
    assert "free list, next first: 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, …" in said


def test_what_a_step_wrote_has_a_thick_edge():
    picture = pool_of("A=56 A>C C+1")
    thick = boxes(picture, edge=style.INK)
    assert len(thick) == 2  # the copy, in the pool and in C's table
    assert thick[0].tolist() == [16 + 43 * 4, 92, 36, 44]


def test_above_four_sequences_only_the_selected_one_is_coloured():
    four = "A=16 B=16 C=16 D=16"
    assert all(boxes(pool_of(four), face=colour).size for colour in style.OWNERS)
    eight = pool_of(f"{four} E=16 F=16 G=16 H=16 C+1")
    assert len(boxes(eight, face=style.OWNERS[0])) == 2  # C's
    assert not any(boxes(eight, face=colour).size for colour in style.OWNERS[1:])
    assert {*"ABDEFGH"} <= set(words(eight))


def test_a_colour_stays_with_its_sequence_when_another_leaves():
    assert len(boxes(pool_of("A=16 B=32 -A"), face=style.OWNERS[1])) == 2


def test_eight_sequences_and_64_blocks_stay_inside_the_picture():
    script = " ".join(
        f"{name}={tokens}" for name, tokens in zip("ABCDEFGH", range(97, 137, 5), strict=True)
    )
    picture = pool_of(script, num_blocks=64)
    right, bottom = (boxes(picture)[:, :2] + boxes(picture)[:, 2:]).max(axis=0)
    assert right <= picture.width
    assert bottom <= picture.height - 42  # the free list stands below
    assert (
        words(picture).count("60") == 2
    )  # the 61st block, in the pool and at the end of H's table


def test_a_long_table_leaves_out_its_middle():
    said = words(pool_of("A=320", num_blocks=24))  # 20 blocks: 0, then 13 left out, then 14 to 19
    assert "+13" in said
    assert said.count("13") == 1  # in the pool only
    assert said.count("14") == 2


def test_only_a_part_of_a_large_pool_is_drawn():
    picture = figures.ForkSaving()
    frame = play("A=1000 A>B", 80, 16)[-1]
    picture.update("t", "s", frame=frame, block_size=16, first_block=40, saved=[63, 62, 62],
                   formula=62.5, num_written=1)  # fmt: skip
    assert "40 to 71 of 80 blocks, 17 free" in words(picture)
    assert picture._here.get_xydata().tolist() == [[1, -0.5]]
    assert picture._dots.get_xydata()[:, 1].tolist() == [0.5, -0.5, -0.5]


def test_the_guess_is_written_beside_the_truth():
    picture = pool_of("A=56", answer="62")
    assert not any("you said" in text for text in words(picture))
    before = picture.png(1)
    picture.guess = ("63",)
    picture.update("title", "sentence", frame=play("A=56", 24, 16)[-1], block_size=16, answer="62")
    assert "you said 63; it is 62" in words(picture)
    assert picture.png(1) != before


def test_a_cover_hides_words_and_boxes():
    assert pool_of("A=56").png(1, cover="?") == pool_of("A=16 B=4").png(1, cover="?")


def test_the_prompt_bar_shows_three_spans_and_the_blocks():
    picture = figures.PromptBar()
    picture.update("t", "s", reused=784, prefix_tokens=800, prompt_tokens=2_000, block_size=784)
    edges = [path.vertices[:, 0].max() for path in picture._parts.get_paths()]
    assert edges == [784 / 2_000, 800 / 2_000, 1.0]
    assert [line[0][0] for line in picture._cuts.get_segments()] == [784 / 2_000, 1_568 / 2_000]
    assert [text.get_text() for text in picture._key] == [
        "reused: 784 tokens",
        "seen, but computed again: 16 tokens",
        "new: 1,200 tokens",
    ]


@pytest.fixture
def panels(run_chapter):
    """The panels of chapters 3 and 4, in order."""
    return [*run_chapter("03_lifecycle")["panels"], *run_chapter("04_sharing")["panels"]]


def test_the_steps_say_hand_worked_numbers(panels):
    life, script = panels[0], "A=60 B=40 A+4 A+40 B>C C+1 -B A+9 B=0"
    # 8 blocks of 16: A 4 blocks with 4 slots left, B 3 with 8 left.
    expected = {
        0: "nothing has happened yet: 0 blocks change. In use: 0 of 8 blocks, 0.0 %",
        1: "A starts with 60 tokens: ⌈60 / 16⌉ = 4 blocks. In use: 4 of 8 blocks, 6.2 % of their",
        3: "the tail of A had 4 free slots, so ⌈max(0, 4 − 4) / 16⌉ = 0 blocks. In use: 7 of 8",
        4: "⌈max(0, 40 − 0) / 16⌉ = 3 blocks. Blocks: 3 needed, 1 free; refused, and nothing",
        5: "C copies the 3 table entries of B; the blocks' counts rise by 1, and no block is taken",
        6: "⌈max(0, 1 − 8) / 16⌉ = 0 blocks, and a copy of the shared block 6. In use: 8 of 8",
        7: "B leaves: 3 table entries walked, 1 block freed, 2 kept by others; no other table is",
        99: "Step 63: the scenario ended at 9: B starts with 0 tokens: ⌈0 / 16⌉ = 0 blocks",
    }
    for step, sentence in expected.items():
        life.set(script=script, num_blocks=8, step=min(step, 63))
        assert sentence in life.sentence
    life.set(script="A=40 Q", step=1)
    assert life.sentence.startswith("step='Q'; a step is A=40")
    life.reset()


def test_playing_back_and_forth_gives_the_same_picture(panels):
    life = panels[0]
    life.reset()
    before = life.picture.png(1)
    life.set(step=30)
    assert life.picture.png(1) != before
    life.set(step=11)
    assert life.picture.png(1) == before


def test_the_saving_says_hand_worked_numbers(panels):
    saving = panels[1]
    # 1,000 = 62 x 16 + 8. A block of Llama-3.1-8B is 16 x 128 KiB = 2 MiB.
    saving.set(num_written=0)
    assert "none has written. 189 blocks are saved, 378.00 MiB" in saving.sentence
    assert "3 × 1,000 tokens, 187.5 blocks, 375.00 MiB" in saving.sentence
    saving.set(num_written=4, suffix_tokens=20)
    # Each table: 62 shared, and 28 tokens in 2 own blocks: 62 + 4 x 2 of 4 x 64.
    assert "186 blocks are saved, 372.00 MiB" in saving.sentence
    assert "Blocks in use: 70 instead of 256." in saving.sentence
    saving.set(num_branches=2, num_written=8)  # clamped to both
    assert "2 of them wrote" in saving.sentence
    saving.reset()


def test_full_blocks_only(panels):
    reuse = panels[2]
    assert "0 full blocks: 0 tokens are reused, 240 are computed again" in reuse.sentence
    reuse.set(prefix_tokens=800)
    assert "1 full blocks: 784 tokens are reused, 16 are computed again" in reuse.sentence
    reuse.set(prefix_tokens=3_000)
    assert reuse.sentence.startswith("prefix_tokens=3000; it must be at most prompt_tokens=2000")
    reuse.reset()
