"""Every panel of every chapter, as a reader with a keyboard meets it."""

import json
import re

import pytest

from . import lab
from .lab import CHAPTERS, SHOTS, check_code, panels_of, position

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def fresh_server(tmp_path_factory):
    """A server of its own, for JupyterLab saves the chapters that other tests have run."""
    with lab.lab_server(tmp_path_factory.mktemp("fresh")) as base_url:
        yield base_url


@pytest.fixture(scope="module", params=CHAPTERS)
def chapter(request, browser, fresh_server):
    """A chapter that has run, in a window as wide as a small laptop's."""
    page = browser.new_page(viewport={"width": 1024, "height": 900})
    page.chapter_name = request.param
    lab.open_chapter(page, fresh_server, request.param, run=False)
    page.wait_for_function(_ALL_SHOWN, arg=_stored_pictures(request.param), timeout=60_000)
    page.words_before_a_run = page.locator(".jp-Notebook").inner_text()
    lab.run_all(page)
    yield page
    lab.stop_kernels(page)
    page.close()


def _stored_pictures(name):
    notebook = json.loads((lab.NOTEBOOKS / f"{name}.ipynb").read_text())
    outputs = (o for cell in notebook["cells"] for o in cell.get("outputs", ()))
    return sum("image/png" in output.get("data", ()) for output in outputs)


_ALL_SHOWN = """(number) => {
  const pictures = [...document.querySelectorAll('.jp-OutputArea-output img')];
  return pictures.length === number && pictures.every((image) => image.naturalWidth > 0);
}"""


def test_a_fresh_open_shows_every_picture_without_a_run(chapter):
    assert _stored_pictures(chapter.chapter_name) > 0  # and the fixture saw them all
    assert "Error displaying widget" not in chapter.words_before_a_run


def test_every_slider_moves_picture_and_sentence(chapter, namespace):
    for panel in panels_of(chapter):
        check_code(panel, namespace)
        sliders = panel.root.get_by_role("slider")
        for k in range(sliders.count()):
            slider = sliders.nth(k)
            at_end = slider.get_attribute("aria-valuenow") == slider.get_attribute("aria-valuemax")
            panel.press(slider, "ArrowLeft" if at_end else "ArrowRight")
            check_code(panel, namespace)
    lab.check_no_traceback(chapter)


def test_every_list_moves_the_sentence(chapter, namespace):
    for panel in panels_of(chapter):
        lists = panel.root.get_by_role("combobox")
        for k in range(lists.count()):
            sentence, chosen = panel.sentence, lists.nth(k).input_value()
            options = lists.nth(k).locator("option").all_inner_texts()
            lists.nth(k).select_option(next(text for text in options[::-1] if text != chosen))
            panel.until(lambda before=sentence, now=panel: now.sentence != before, "a sentence")
        panel.root.get_by_role("button", name="Reset").click()
        panel.settle()
        check_code(panel, namespace)
    lab.check_no_traceback(chapter)


def test_reset_returns_to_the_text(chapter):
    for panel in panels_of(chapter):
        reset = panel.root.get_by_role("button", name="Reset")
        reset.click()
        panel.settle()
        sentence, picture = panel.sentence, panel.picture
        panel.press(panel.root.get_by_role("slider").first)
        reset.click()
        panel.until(lambda now=panel, want=sentence: now.sentence == want, "the first sentence")
        panel.until(lambda now=panel, want=picture: now.picture == want, "the first picture")


def test_number_box_takes_a_number_between_the_steps_or_the_next_step(chapter):
    for panel in panels_of(chapter):
        box, slider = (panel.root.get_by_role(role).first for role in ("spinbutton", "slider"))
        sentence, value, step = panel.sentence, int(float(box.input_value())), position(slider)
        box.fill(str(value + 1))
        box.press("Enter")
        panel.until(lambda now=panel, before=sentence: now.sentence != before, "a new sentence")
        panel.settle()
        shown = float(box.input_value())
        assert shown == value + 1 or (shown > value and position(slider) == step + 1)
        panel.root.get_by_role("button", name="Reset").click()
        panel.settle()


def test_every_box_list_and_button_has_a_name(chapter):
    for panel in panels_of(chapter):
        seen = panel.root.aria_snapshot()
        for role in ("spinbutton", "combobox", "button"):
            names = re.findall(rf'- {role} "(.+?)"', seen)
            assert len(names) == panel.root.get_by_role(role).count(), seen
            assert len(set(names)) == len(names), f"two of one name: {names}"
            assert "null" not in names, f"ipywidgets' name for what has none: {names}"
        sliders = panel.root.get_by_role("slider").count()
        assert sliders == panel.root.get_by_role("spinbutton").count(), "a slider without its box"


_CUT_LABELS = """(root) => [...root.querySelectorAll('.widget-label')]
  .filter((label) => label.scrollWidth > label.clientWidth)
  .map((label) => label.textContent)"""


def test_panel_stays_inside_a_narrow_window_and_keeps_its_size(chapter):
    SHOTS.mkdir(exist_ok=True)
    for number, panel in enumerate(panels_of(chapter)):
        before = panel.extent
        notebook = chapter.locator(".jp-Notebook").bounding_box()
        assert before["x"] + before["width"] <= notebook["x"] + notebook["width"]
        assert panel.root.evaluate("e => e.scrollWidth - e.clientWidth") <= 1
        assert panel.root.evaluate(_CUT_LABELS) == []
        panel.press(panel.root.get_by_role("slider").first, "ArrowLeft")
        after = panel.extent
        assert (after["width"], after["height"]) == (before["width"], before["height"])
        panel.settle()
        picture = panel.root.locator("img.kv-picture")
        assert picture.evaluate("image => image.naturalWidth") == 2 * 720  # sharp when idle
        panel.root.screenshot(path=SHOTS / f"{chapter.chapter_name}_{number + 1}.png")
        panel.root.get_by_role("button", name="Reset").click()
        panel.settle()


def test_panels_stay_usable_at_twice_the_size(chapter):
    # Zoom leaves a window of 1,300 pixels 650 in width; less height only means to scroll more.
    chapter.set_viewport_size({"width": 650, "height": 1400})
    try:
        for number, panel in enumerate(panels_of(chapter)):
            panel.root.scroll_into_view_if_needed()
            notebook = chapter.locator(".jp-Notebook").bounding_box()
            right = notebook["x"] + notebook["width"]
            assert panel.root.evaluate("e => e.scrollWidth - e.clientWidth") <= 1
            for part in ("img.kv-picture", "[role=slider]", "input[type=number]", "button"):
                for one in panel.root.locator(part).all():
                    if one.is_visible():
                        extent = one.bounding_box()
                        assert extent["x"] + extent["width"] <= right, part
            for slider in panel.root.locator(".widget-slider:visible").all():
                assert slider.bounding_box()["width"] >= 80, "too short to drag"
            panel.root.screenshot(path=SHOTS / f"{chapter.chapter_name}_{number + 1}_zoomed.png")
    finally:
        chapter.set_viewport_size({"width": 1024, "height": 900})


_COUNT_REDRAWS = """() => {
  window.redraws = 0;
  const picture = document.querySelector('img.kv-picture').parentElement;
  window.watcher = new MutationObserver(() => { window.redraws += 1; });
  window.watcher.observe(picture, {childList: true});
}"""


def test_picture_and_sentence_follow_the_drag(chapter):
    panel = panels_of(chapter)[0]
    slider, sentences = panel.root.get_by_role("slider").first, set()
    chapter.evaluate(_COUNT_REDRAWS)
    slider.focus()
    for _ in range(20):  # never still for as long as it takes to count as idle
        chapter.keyboard.press("ArrowRight")
        chapter.wait_for_timeout(100)
        sentences.add(panel.sentence)
    redraws = chapter.evaluate("() => { window.watcher.disconnect(); return window.redraws; }")
    assert redraws >= 5
    assert len(sentences) >= 5
    panel.root.get_by_role("button", name="Reset").click()
    panel.settle()


def test_a_burst_of_keys_is_answered_with_few_redraws_and_the_last_value(chapter):
    panel = panels_of(chapter)[0]
    slider = panel.root.get_by_role("slider").first
    start = position(slider)
    chapter.evaluate(_COUNT_REDRAWS)
    slider.focus()
    for _ in range(25):
        chapter.keyboard.down("ArrowRight")
    chapter.keyboard.up("ArrowRight")
    box = panel.root.get_by_role("spinbutton").first
    panel.until(lambda: position(slider) == start + 25, "25 steps")
    panel.settle()
    redraws = chapter.evaluate("() => { window.watcher.disconnect(); return window.redraws; }")
    assert 1 <= redraws < 25, redraws
    assert box.input_value() in panel.sentence.replace(",", "")
    panel.root.get_by_role("button", name="Reset").click()
    panel.settle()
