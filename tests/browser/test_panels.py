"""Every panel of every chapter, as a reader with a keyboard meets it."""

import importlib
import json
import pkgutil
import re
from pathlib import Path

import pytest

import kvlib

from . import lab

pytestmark = pytest.mark.browser

CHAPTERS = sorted(path.stem for path in lab.NOTEBOOKS.glob("[0-9]*.ipynb"))
SHOTS = Path(__file__).parent / "shots"
_PUBLIC = [info.name for info in pkgutil.iter_modules(kvlib.__path__) if info.name[0] != "_"]
_PICTURE_DIGEST = """async (image) => {
  const bytes = await (await fetch(image.src)).arrayBuffer();
  const digest = await crypto.subtle.digest('SHA-256', bytes);
  return image.naturalWidth + ':' + Array.from(new Uint8Array(digest)).join();
}"""


@pytest.fixture(scope="module")
def namespace():
    """What a sentence's code needs: the public modules by name."""
    names = [name for name in _PUBLIC if name not in ("__main__", "gpucheck")]
    return {name: importlib.import_module(f"kvlib.{name}") for name in names}


@pytest.fixture(scope="module", params=CHAPTERS)
def chapter(request, browser, server):
    """A chapter that has run, in a window as wide as a small laptop's."""
    page = browser.new_page(viewport={"width": 1024, "height": 900})
    lab.open_chapter(page, server, request.param)
    page.chapter_name = request.param
    yield page
    lab.stop_kernels(page)
    page.close()


class Panel:
    """What a reader sees of one panel."""

    def __init__(self, root):
        self.root, self.page = root, root.page
        lab.open_panel(root)

    @property
    def sentence(self):
        return self.root.locator(".kv-sentence .widget-html-content").inner_text()

    @property
    def picture(self):
        return self.root.locator("img.kv-picture").evaluate(_PICTURE_DIGEST)

    def until(self, condition, what):
        for _ in range(800):
            if condition():
                return
            self.page.wait_for_timeout(25)
        raise AssertionError(f"waited 20 s for {what}; sentence: {self.sentence!r}")

    def press(self, slider, key="ArrowRight"):
        """Press a key on a slider; wait for a new picture and a new sentence."""
        sentence, picture = self.sentence, self.picture
        slider.press(key)
        self.until(lambda: self.sentence != sentence, f"a sentence other than {sentence!r}")
        self.until(lambda: self.picture != picture, "another picture")

    def settle(self):
        self.page.wait_for_timeout(600)


def panels_of(page):
    found = [Panel(root) for root in page.locator(".kv-panel").all()]
    assert found, "the chapter has no panel"
    return found


def check_code(panel, namespace):
    """The code in the sentence gives a number that stands in the sentence."""
    code = panel.root.locator(".kv-sentence code").last.inner_text()
    value = eval(code, dict(namespace))
    words = panel.sentence.replace(code, "")
    assert re.search(rf"(?<![\d.,]){re.escape(f'{value:,}')}(?![\d]|[.,]\d)", words), (value, words)


def position(slider):
    return int(float(slider.get_attribute("aria-valuenow")))


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


def test_number_box_takes_a_number_between_the_steps(chapter):
    for panel in panels_of(chapter):
        box = panel.root.get_by_role("spinbutton").first
        sentence, value = panel.sentence, int(float(box.input_value()))
        box.fill(str(value + 1))
        box.press("Enter")
        panel.until(lambda now=panel, before=sentence: now.sentence != before, "a new sentence")
        assert float(box.input_value()) == value + 1
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


def test_panel_stays_inside_a_narrow_window_and_keeps_its_size(chapter):
    SHOTS.mkdir(exist_ok=True)
    for number, panel in enumerate(panels_of(chapter)):
        picture = panel.root.locator("img.kv-picture")
        before = picture.bounding_box()
        notebook = chapter.locator(".jp-Notebook").bounding_box()
        assert before["x"] + before["width"] <= notebook["x"] + notebook["width"]
        assert panel.root.evaluate("e => e.scrollWidth - e.clientWidth") <= 1
        panel.press(panel.root.get_by_role("slider").first, "ArrowLeft")
        after = picture.bounding_box()
        assert (after["width"], after["height"]) == (before["width"], before["height"])
        panel.settle()
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


def test_a_far_away_server_keeps_the_last_value_and_the_thumb(browser, server):
    with lab.delayed(server, seconds=0.15) as far_url:
        page = browser.new_page(viewport={"width": 1024, "height": 900})
        lab.open_chapter(page, far_url, CHAPTERS[0])
        panel = panels_of(page)[0]
        slider = panel.root.get_by_role("slider").first
        start = position(slider)
        slider.focus()
        page.evaluate("""() => {
          window.seen = [];
          const thumb = document.activeElement;
          window.sampler = setInterval(
            () => window.seen.push(Number(thumb.getAttribute('aria-valuenow'))), 10);
        }""")
        for _ in range(20):
            slider.press("ArrowRight")
            page.wait_for_timeout(30)
        box = panel.root.get_by_role("spinbutton").first
        panel.until(lambda: box.input_value() in panel.sentence, "the last value in the sentence")
        page.wait_for_timeout(1000)
        seen = page.evaluate("() => { clearInterval(window.sampler); return window.seen; }")
        assert seen == sorted(seen), "the thumb jumped back"
        assert seen[-1] == start + 20
        lab.stop_kernels(page)
        page.close()


def test_a_drag_that_overtakes_reset_leaves_thumb_and_box_together(browser, server):
    with lab.delayed(server, seconds=0.15) as far_url:
        page = browser.new_page(viewport={"width": 1024, "height": 900})
        lab.open_chapter(page, far_url, CHAPTERS[0])
        panel = panels_of(page)[0]
        slider, box = (panel.root.get_by_role(role).first for role in ("slider", "spinbutton"))
        start, first = position(slider), int(box.input_value())
        for presses in (3, 5):
            panel.root.get_by_role("button", name="Reset").click()
            slider.focus()
            for _ in range(presses):
                page.keyboard.press("ArrowRight")
            page.wait_for_timeout(1500)
            # This slider visits every number, so thumb and box are equally far from the start.
            assert position(slider) - start == int(box.input_value()) - first
            assert box.input_value() in panel.sentence
        lab.stop_kernels(page)
        page.close()


def _stored_pictures(name):
    notebook = json.loads((lab.NOTEBOOKS / f"{name}.ipynb").read_text())
    outputs = (o for cell in notebook["cells"] for o in cell.get("outputs", ()))
    return sum("image/png" in output.get("data", ()) for output in outputs)


def test_a_fresh_open_shows_every_picture_without_a_kernel(browser, tmp_path):
    # A server of its own: JupyterLab saves the chapters that other tests have run.
    page = browser.new_page(viewport={"width": 1024, "height": 900})
    with lab.lab_server(tmp_path) as server:
        for name in CHAPTERS:
            lab.open_chapter(page, server, name, run=False)
            pictures = page.locator(".jp-OutputArea-output img")
            pictures.nth(_stored_pictures(name) - 1).wait_for(state="attached", timeout=60_000)
            page.wait_for_function(
                "[...document.querySelectorAll('.jp-OutputArea-output img')]"
                ".every(image => image.naturalWidth > 0)",
                timeout=60_000,
            )
            assert "Error displaying widget" not in page.locator(".jp-Notebook").inner_text()
            lab.stop_kernels(page)
    page.close()


_RUN_LAST = """async () => {
  const app = window.jupyterapp;
  await app.restored;
  const panel = app.shell.currentWidget;
  await panel.context.ready;
  await panel.sessionContext.ready;
  await panel.sessionContext.session.kernel.info;
  const cells = panel.content.widgets;
  panel.content.activeCellIndex = cells.findLastIndex((cell) => cell.model.type === 'code');
  await app.commands.execute('notebook:run-cell');
}"""
_RESTART = """() => {
  const context = window.jupyterapp.shell.currentWidget.sessionContext;
  window.restarted = context.session.kernel.restart().then(() => context.ready);
}"""


def test_a_kernel_restarted_during_a_drag_recovers(first_chapter):
    panel = panels_of(first_chapter)[0]
    panel.root.get_by_role("slider").first.focus()
    for press in range(30):
        first_chapter.keyboard.press("ArrowRight")
        first_chapter.wait_for_timeout(30)
        if press == 10:
            first_chapter.evaluate(_RESTART)
    first_chapter.evaluate("() => window.restarted")
    lab.check_no_traceback(first_chapter)
    first_chapter.wait_for_timeout(1000)
    lab.run_all(first_chapter)
    panel = panels_of(first_chapter)[0]
    assert panel.root.get_by_role("spinbutton").first.input_value() == "32"
    panel.press(panel.root.get_by_role("slider").first)
    panel.settle()
    assert panel.root.get_by_role("spinbutton").first.input_value() == "33"


def test_a_cell_run_before_those_above_names_what_is_missing(browser, server):
    page = browser.new_page(viewport={"width": 1024, "height": 900})
    lab.open_chapter(page, server, "01_bytes_per_token", run=False)
    page.evaluate(_RUN_LAST)
    error = page.get_by_text(re.compile(r"NameError: name '\w+' is not defined"))
    error.wait_for(timeout=30_000)
    lab.run_all(page)  # and nothing of it is left
    lab.stop_kernels(page)
    page.close()


@pytest.fixture
def first_chapter(browser, server):
    page = browser.new_page(viewport={"width": 1300, "height": 1000})
    lab.open_chapter(page, server, "01_bytes_per_token")
    yield page
    lab.stop_kernels(page)
    page.close()


def test_the_guess_comes_first_and_stays(first_chapter):
    root = first_chapter.locator(".kv-panel").first
    assert root.locator(".kv-sentence .widget-html-content").inner_text() == ""
    assert root.get_by_role("spinbutton").first.is_disabled()
    veiled = root.locator("img.kv-picture").evaluate(_PICTURE_DIGEST)
    for name in ("qwen3-0.6b", "llama-3.1-8b", "deepseek-v3"):
        root.get_by_role("button", name=name).click()
    panel = Panel(root)
    panel.until(lambda: panel.picture != veiled, "the truth")
    assert not root.get_by_role("button", name="deepseek-v3").is_visible()
    assert root.get_by_role("spinbutton").first.is_enabled()
    panel.settle()
    SHOTS.mkdir(exist_ok=True)
    root.screenshot(path=SHOTS / "01_bytes_per_token_guessed.png")


def test_a_preset_moves_the_sliders_and_a_slider_makes_it_custom(first_chapter, namespace):
    panel = panels_of(first_chapter)[1]
    model = panel.root.get_by_role("combobox", name="model")
    model.select_option("qwen3-8b")
    panel.until(lambda: "qwen3-8b on one" in panel.sentence, "the preset in the sentence")
    shape = namespace["models"].find_model("qwen3-8b")
    boxes = {"layers": shape.num_layers, "KV heads": shape.num_kv_heads, "head_dim": shape.head_dim}
    for name, value in boxes.items():
        box = panel.root.get_by_role("spinbutton", name=name, exact=True)
        panel.until(lambda box=box, want=str(value): box.input_value() == want, f"{name}={value}")
    check_code(panel, namespace)
    box = panel.root.get_by_role("spinbutton", name="KV heads", exact=True)
    box.fill("4")
    box.press("Enter")
    panel.until(lambda: model.input_value() == "custom", "the preset to turn custom")
    panel.until(lambda: "custom on one" in panel.sentence, "custom in the sentence")
    check_code(panel, namespace)
    lab.check_no_traceback(first_chapter)
