"""Facts of chapter 9: its sentences against the plans they speak of."""

import re

import pytest

from kvlib.plan import plan


@pytest.fixture
def evicting(run_chapter):
    panel = run_chapter("09_plan")["panels"][2]
    panel.reset()
    return panel


@pytest.mark.parametrize("turns", [0.5, 1.0, 3.0])
def test_from_the_named_number_on_gpus_only_prefill(evicting, turns):
    evicting.set(turns=turns)
    said = int(re.search(r"from ([\d,]+) conversations on", evicting.sentence)[1].replace(",", ""))
    place = ("qwen3-32b", "H100 80GB", 8192)
    before, there = (
        plan(*place, num_gpus=2, dtype="q8_0", turns_per_minute=turns, concurrency=many)
        for many in (said - 1, said)
    )
    assert before.recompute_seconds_per_minute < 60 <= there.recompute_seconds_per_minute
