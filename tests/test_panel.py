"""The panel without a browser: controls, presets, veil, stored output, bad values."""

import base64
import io
import random
import re
import sys
import threading
import time

import pytest
from PIL import Image

from kvlib import figures
from kvlib.panel import Choice, Guess, Job, Panel, Slider, Text, as_python


class Strip(figures.Picture):
    """A bar whose length is the number."""

    width, height = 300, 100

    def build(self):
        self.axes = self.figure.add_axes((0.1, 0.3, 0.8, 0.5))
        self.axes.set_xlim(0, 100)
        self.line = self.moving(self.axes.plot([0, 1], [0, 0], lw=6)[0])
        self.words = self.label(0.1, 0.9)

    def draw(self, total):
        self.line.set_xdata([0, total])
        self.words.set_text(f"total {total}")


def add(a, b, kind):
    if a + b > 150:
        raise ValueError(f"a={a}; a + b must stay at or below 150. Use a smaller a.")
    total = a + b + (1 if kind == "odd" else 0)
    return {
        "title": kind,
        "sentence": f"total {total} `memory.f({total})`",
        "total": total,
    }


def make_panel(**more):
    return Panel(
        Strip(),
        add,
        a=Slider("first", 10, range(101)),
        b=Slider("second", 20, [1, 2, 4, 8, 20, 100]),
        kind=Choice("kind", "even", ["even", "odd", "custom"]),
        **more,
    )


def shown(panel):
    return base64.b64decode(re.search('base64,([^"]+)', panel._image.value)[1])


def test_the_picture_has_the_sentence_as_its_alternative():
    panel = make_panel(guess=Guess("How <long>?", ("short", "long")))
    assert 'alt="How &lt;long&gt;?"' in panel._image.value
    assert panel.sentence not in panel._image.value
    panel.reveal("long")
    assert 'alt="total 30 memory.f(30)"' in panel._image.value


def test_a_drag_moves_box_value_sentence_and_picture():
    panel = make_panel()
    before = panel._image.value
    panel.controls["b"].thumb.value = 5
    assert panel.controls["b"].box.value == 100
    assert panel.values == {"a": 10, "b": 100, "kind": "even"}
    assert panel.sentence == "total 110 `memory.f(110)`"
    assert panel._image.value != before
    assert "<code>memory.f(110)</code>" in panel._words.value


def test_the_box_takes_a_number_between_the_steps():
    panel = make_panel()
    panel.controls["b"].box.value = 15
    assert panel.values["b"] == 15
    assert (
        panel.controls["b"].thumb.value == 4
    )  # 20 is the nearest step, and stays beside the value
    assert panel.sentence.startswith("total 25")


def test_where_nothing_lies_between_the_steps_the_box_goes_on_to_the_next():
    slider = Slider("layer", 4, [4, 14, 26], only_steps=True)
    for typed, expected in ((5, 14), (13, 4), (9, 14), (20, 26), (15, 14), (26, 26), (4, 4)):
        slider.box.value = typed
        assert slider.value == expected, typed
        slider.show()
        assert (slider.box.value, slider.steps[slider.thumb.value]) == (expected, expected)


def test_the_sentence_s_room_grows_with_the_longest_and_never_shrinks():
    """Else the picture below it would move up and down in a drag."""

    def say(n):
        return {"title": "", "sentence": "word " * n, "total": n}

    panel, rooms = Panel(Strip(), say, n=Slider("n", 1, range(1, 101))), []
    for n in (1, 10, 100, 10, 1):
        panel.set(n=n)
        rooms.append(float(re.search(r"min-height:([\d.]+)em", panel._words.value)[1]))
    # 4 lines; 500 letters of 6.6 pixels, 300 pixels wide: 12 lines of 1.45 em.
    assert rooms == [5.8, 5.8, 17.4, 17.4, 17.4]


def test_reset_returns_every_control():
    panel = make_panel()
    first = panel.sentence
    panel.set(a=77, b=8, kind="odd")
    assert panel.sentence.startswith("total 86")
    panel.reset()
    assert (panel.values, panel.sentence) == ({"a": 10, "b": 20, "kind": "even"}, first)


def test_a_preset_sets_others_and_moving_one_makes_it_custom():
    panel = make_panel(presets={"kind": {"odd": {"a": 3, "b": 4}, "even": {"a": 10}}})
    panel.controls["kind"].list.value = "odd"
    assert panel.values == {"a": 3, "b": 4, "kind": "odd"}
    panel.controls["a"].thumb.value = 5
    assert panel.values == {"a": 5, "b": 4, "kind": "custom"}


def test_values_without_an_answer_are_explained_over_a_bare_picture():
    panel = make_panel()
    panel.set(a=100, b=100)
    assert panel.sentence == "a=100; a + b must stay at or below 150. Use a smaller a."
    assert shown(panel) == panel.picture.png(2, cover=panel.sentence)
    panel.set(a=1)
    assert panel.sentence.startswith("total 101")


def test_a_mistake_in_a_picture_is_not_shown_as_the_reader_s():
    panel = make_panel()
    panel.picture.update = lambda **numbers: 1 / 0
    with pytest.raises(ZeroDivisionError):
        panel.set(a=2)


def test_the_veil_hides_numbers_until_a_guess_and_keeps_the_guess():
    panel = make_panel(guess=Guess("How long?", ("short", "long"), picks=2))
    assert panel._words.value == ""
    assert panel.controls["a"].box.disabled
    assert shown(panel) == panel.picture.png(2, cover="How long?")
    short, long = panel._question.children[1:3]
    long.click()
    assert panel._words.value == ""
    assert (long.description, long.disabled) == ("1. long", True)
    short.click()
    assert panel.picture.guess == ("long", "short")
    assert "total 30" in panel._words.value
    assert not panel.controls["a"].box.disabled


def test_just_show_me_reveals_without_a_guess():
    panel = make_panel(guess=Guess("How long?", ("short", "long")))
    panel._question.children[-1].click()
    assert (panel.picture.guess, panel._question.layout.display) == ((), "none")


def test_the_stored_cell_carries_picture_and_sentence_even_when_veiled():
    bundle, metadata = make_panel(guess=Guess("How long?", ("a",)))._repr_mimebundle_()
    assert bundle["text/plain"] == "total 30 memory.f(30)"
    stored = Image.open(io.BytesIO(base64.b64decode(bundle["image/png"])))
    assert stored.width == 600
    assert metadata["image/png"]["width"] == 300
    shown = Image.open(io.BytesIO(make_panel().picture.png(2)))
    assert stored.height > shown.height  # the sentence stands under the picture


def test_same_numbers_same_pixels_whatever_came_before():
    panel = make_panel()
    first = panel._image.value
    for value in (3, 99, 50):
        panel.controls["a"].thumb.value = value
    panel.reset()
    assert panel._image.value == first


def test_two_panels_share_nothing():
    one, two = make_panel(), make_panel()
    before = two._image.value
    one.controls["a"].thumb.value = 90
    assert (two.values["a"], two._image.value) == (10, before)


def test_events_from_two_threads_never_mix():
    # JupyterLab answers widgets from the main thread and from a subshell's at the same time.
    panel = make_panel()
    want = {}
    for a in (1, 2):
        panel.set(a=a)
        want[a] = panel._image.value
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for _ in range(15):
            threads = [threading.Thread(target=panel.set, kwargs={"a": a}) for a in (1, 2, 1, 2)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert panel._image.value == want[panel.values["a"]]
    finally:
        sys.setswitchinterval(interval)


@pytest.mark.parametrize(
    ("value", "steps", "message"),
    [
        (5, [1], "steps=.*ascend"),
        (5, [3, 2], "steps=.*ascend"),
        (9, [1, 2], "value=9; it must lie from 1 to 2"),
    ],
)
def test_a_slider_refuses_steps_it_cannot_show(value, steps, message):
    with pytest.raises(ValueError, match=message):
        Slider("first", value, steps)


def test_any_combination_of_values_shows_a_picture_and_a_sentence():
    panel, rng = make_panel(), random.Random(0)
    for _ in range(50):
        panel.controls["a"].box.value = rng.randint(-10, 200)  # the box clamps to its range
        panel.controls["b"].thumb.value = rng.randint(0, 5)
        panel.controls["kind"].list.value = rng.choice(["even", "odd"])
        total = panel.values["a"] + panel.values["b"]
        assert panel.sentence.startswith("total" if total <= 150 else "a=")


def test_as_python_nests_calls_and_names_presets():
    from kvlib import memory, models

    budget = as_python(memory.kv_budget_bytes, 100, 1, memory_fraction=0.9)
    code = as_python(memory.max_sequences, budget, models.find_model("qwen3-0.6b"), 16)
    assert code == (
        "memory.max_sequences(memory.kv_budget_bytes(100, 1, memory_fraction=0.9), "
        "models.find_model('qwen3-0.6b'), 16)"
    )
    shape = models.ModelShape.from_groups([models.LayerGroup(1, 2, 3, 0)], name="mine")
    assert eval(str(as_python(dict, shape)).partition("(")[2][:-1], {"models": models}) == shape


def wait_for(condition):
    for _ in range(400):
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError("waited 4 s")


def make_job_panel(work):
    def show(first, words, job):
        return {"title": words, "sentence": f"{words} {first} {job}", "total": job or 0}

    return Panel(
        Strip(),
        show,
        first=Slider("first", 1, range(9)),
        words=Text("words", "hello"),
        job=Job("Work", work),
    )


def test_a_text_moves_the_sentence_and_reset_returns_it():
    panel = make_job_panel(lambda values, progress: 1)
    panel.controls["words"].line.value = "bye"
    assert panel.sentence == "bye 1 None"
    panel.reset()
    assert panel.controls["words"].line.value == "hello"


def test_a_job_gets_the_values_and_its_result_is_drawn():
    seen = []

    def work(values, progress):
        seen.append((values, progress(1, 2)))
        return 42

    panel = make_job_panel(work)
    panel.controls["first"].thumb.value = 3
    panel.controls["job"]._button.click()
    wait_for(lambda: panel.sentence == "hello 3 42")
    wait_for(lambda: "hello 3 42" in panel._words.value)
    assert Image.open(io.BytesIO(shown(panel))).width == 2 * panel.picture.width  # sharp
    assert seen == [({"first": 3, "words": "hello", "job": None}, True)]
    assert panel.controls["job"]._button.description == "Work"
    panel.reset()
    assert panel.sentence == "hello 1 None"


def test_a_second_press_cancels_a_job():
    started, ended = threading.Event(), threading.Event()

    def work(values, progress):
        while progress(1, 10):
            started.set()
            time.sleep(0.001)
        ended.set()
        return 42

    panel = make_job_panel(work)
    button = panel.controls["job"]._button
    button.click()
    assert started.wait(4)
    assert button.description == "Cancel"
    button.click()
    assert ended.wait(4)
    wait_for(lambda: button.description == "Work")
    assert panel.sentence == "hello 1 None"


def test_a_job_that_fails_says_why_and_can_run_again():
    outcomes = iter([ValueError("no trace"), KeyError("x"), 7])

    def work(values, progress):
        outcome = next(outcomes)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    panel = make_job_panel(work)
    job = panel.controls["job"]
    job._button.click()
    wait_for(lambda: job._problem.value == "no trace")
    wait_for(lambda: job._button.description == "Work")
    job._button.click()
    wait_for(lambda: job._problem.value == "KeyError: 'x'")
    wait_for(lambda: job._button.description == "Work")
    job._button.click()
    wait_for(lambda: panel.sentence == "hello 1 7")
    assert job._problem.value == ""
