"""Chapter 6: its sentences against numbers worked by hand, its pictures against what they draw."""

import re

import numpy as np
import pytest

from kvlib import figures, gather

GATHERED = ("fp16, gather", "int8/g128, gather,\nthen dequantize")


@pytest.fixture
def chapter(run_chapter):
    names = run_chapter("06_reading")
    for panel in names["panels"]:
        panel.reset()
    names["panels"][0].reveal("4")
    return names


def test_the_first_panel_at_the_values_of_the_text(chapter):
    # Weights 16,060,522,496; a cache 32,768 * 131,072 = 4 GiB: 4 caches are heavier, 3 are not.
    # H200: 139.80 GiB - 14.96 GiB = 124.84 GiB = 31 caches.
    # Eight: (16.06e9 + 34.36e9) / 4.8e12 = 10.5 ms; 8 tokens in 10.5 ms = 762 a second.
    sentence = chapter["panels"][0].sentence
    for words in ("14.96 GiB of weights", "32.00 GiB of cache", "at least 10.5 ms", "762 tokens",
                  "From 4 on", "at most 31 fit"):  # fmt: skip
        assert words in sentence


def test_a_batch_that_does_not_fit_is_said_not_to_fit(chapter):
    panel = chapter["panels"][0]
    panel.set(batch=64)
    # 16.06 + 64 * 4.294967 = 290.9 GB
    assert "They do not fit: weights and caches are 290.9 GB" in panel.sentence
    assert panel.picture._title.get_text() == "Batch 64 does not fit: 31 do"
    panel.set(model="llama-3.1-70b", gpu="L4 24GB")
    assert "leave no room" in panel.picture._title.get_text()


def test_the_step_draws_its_numbers(chapter):
    panel = chapter["panels"][0]
    picture = panel.picture
    assert picture._here.get_xdata()[0] == 8
    assert picture._here.get_ydata()[0] == pytest.approx(10.504, abs=0.001)
    assert picture._cross.get_xdata()[0] == 4
    assert picture._full.get_xdata()[0] == 31
    assert picture._guess.get_text() == "you said 4"
    panel.set(reached=50)
    assert picture._here.get_ydata()[0] == pytest.approx(21.008, abs=0.001)


def test_alone_a_sequence_lies_in_one_piece_and_in_company_it_does_not(chapter):
    panel = chapter["panels"][1]
    panel.set(num_others=0)
    assert "200 tokens stand in 13 blocks of 16, in 1 piece of the pool" in panel.sentence
    assert "the last block holds 8" in panel.sentence
    panel.set(num_others=3)
    pieces = int(re.search(r"in (\d+) pieces", panel.sentence)[1])
    assert pieces > 6


def test_the_scatter_draws_the_gathered_order():
    picture = figures.PageScatter()
    table = np.array([20, 3, 40])
    picture.draw(table, others={5}, order=np.array([20, 3, 40]), last_share=0.5)
    from_, to = np.array(picture._ways.get_segments()).transpose(1, 0, 2)
    assert from_[:, 0].tolist() == [20 % 16 + 0.5, 3.5, 40 % 16 + 0.5]
    assert (np.diff(to[:, 0]) > 0).all()
    pool, strip = picture._pool.get_facecolor(), picture._strip.get_facecolor()
    assert (pool[table] == strip).all()
    assert len({tuple(colour) for colour in strip}) == 3
    widths = [np.ptp(path.vertices[:, 0]) for path in picture._strip.get_paths()]
    assert widths[2] == pytest.approx(widths[0] / 2)
    picture.draw(table, others={5}, order=np.array([3, 20, 40]), last_share=0.5)  # a wrong gather
    assert not (picture._strip.get_facecolor() == strip).all()


def test_two_steps_are_slower_than_plain_fp16_and_fused_is_faster(chapter):
    panel = chapter["panels"][2]
    # int8 with a 16-bit scale for 128 values: 8.125 bits, 2,181,038,080 bytes of 32,768 tokens;
    # fused 2,181,038,080 + 4,294,967,296; with attention's read 10,770,972,672 / 4.8e12 = 2.24 ms.
    assert "the gather moves 6,476,005,376 bytes" in panel.sentence
    assert "fused 2.24 ms" in panel.sentence
    assert "in two steps 3.15 ms" in panel.sentence
    # 3 * 8.125 + 16 + 16 = 56.375 of fp16's 48 bits; 8.125 + 32 = 40.125 of 48.
    assert panel.picture._title.get_text().endswith("takes 1.17 of fp16's time; fused 0.84")


@pytest.mark.parametrize("stored", ["int8/g128", "int8/g32", "int4/g128", "int4/g32"])
def test_what_the_text_says_of_two_steps_and_of_copies(chapter, stored):
    shape = chapter["models"].find_model("llama-3.1-8b")
    *copies, plain, inside = (sum(parts) for parts in chapter["ways"](shape, 1024, stored).values())
    gathered, two_steps, _ = copies
    assert (two_steps < gathered) == stored.startswith("int4")
    assert min(copies) > plain > inside


def test_bars_are_bytes_over_bandwidth():
    picture = figures.ReadPaths()
    paths = dict.fromkeys("abcde", (4 * 10**9, 2 * 10**9))
    picture.draw(paths, 10**12, {"a": 0.005}, "this CPU")
    (gathered, read), _, end, beside = picture._rows[0]
    assert (gathered.get_width(), read.get_x(), read.get_width()) == pytest.approx((4, 4, 2))
    assert end.get_text() == " 6 ms"
    assert beside.get_text() == "5 ms"
    assert picture._rows[1][3].get_text() == "not measured"


def test_the_button_measures_every_way_a_library_can_take(chapter):
    values = chapter["panels"][2].values | {"stored": "int4/g32"}
    seen = []
    result = chapter["measure"](values, lambda done, total: seen.append(done / total) or True)
    assert result["stored"] == "int4/g32"
    assert set(result["seconds_per_byte"]) == {
        path for path in gather._MOVES if "inside" not in path
    }
    assert all(seconds > 0 for seconds in result["seconds_per_byte"].values())
    assert seen == [0.25, 0.5, 0.75]
    assert chapter["measure"](values, lambda done, total: False) is None


def test_the_two_measured_ways_give_the_same_values(chapter):
    num_bytes, works = chapter["works_on"](np, "int8/g128")
    results = {path: work().reshape(-1).copy() for path, work in works.items()}
    fused, steps = results["gather and dequantize fused"], results["gather, then dequantize"]
    assert fused.nbytes == num_bytes
    assert (fused == steps).all()
    assert np.abs(fused - results["gather"]).max() < 0.05
