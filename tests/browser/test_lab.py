"""What happens around the panels: far networks, restarts, guesses and presets."""

import re

import pytest

from . import lab
from .lab import CHAPTERS, SHOTS, check_code, panels_of, position

pytestmark = pytest.mark.browser


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


def test_a_saved_chapter_keeps_its_pictures_without_a_kernel(browser, tmp_path):
    with lab.lab_server(tmp_path) as url:
        page = browser.new_page(viewport={"width": 1024, "height": 900})
        lab.open_chapter(page, url, "03_lifecycle")
        panel = panels_of(page)[0]
        panel.press(panel.root.get_by_role("slider").first)
        sentence = panel.sentence
        page.evaluate("() => window.jupyterapp.commands.execute('docmanager:save')")
        lab.stop_kernels(page)
        page.close()
        page = browser.new_page(viewport={"width": 1024, "height": 900})
        lab.open_chapter(page, url, "03_lifecycle", run=False)
        page.locator(".kv-panel img.kv-picture").wait_for(timeout=30_000)
        assert page.locator(".kv-sentence").inner_text() == sentence
        assert page.get_by_text("Error displaying widget").count() == 0
        page.close()


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
    lab.run_last(page)
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
    veiled = root.locator("img.kv-picture").evaluate(lab.PICTURE_DIGEST)
    for name in ("qwen3-0.6b", "llama-3.1-8b", "deepseek-v3"):
        root.get_by_role("button", name=name).click()
    panel = lab.Panel(root)
    panel.until(lambda: panel.picture != veiled, "the truth")
    assert not root.get_by_role("button", name="deepseek-v3").is_visible()
    assert root.get_by_role("spinbutton").first.is_enabled()
    panel.settle()
    SHOTS.mkdir(exist_ok=True)
    root.screenshot(path=SHOTS / "01_bytes_per_token_guessed.png")


_WATCH_THE_REST = """() => {
  window.changed = [];
  new MutationObserver((records) => {
    for (const {target} of records) {
      const place = target.nodeType === Node.ELEMENT_NODE ? target : target.parentElement;
      if (place?.offsetParent && !place.closest('.kv-panel')) window.changed.push(place.className);
    }
  }).observe(document, {subtree: true, childList: true, attributes: true, characterData: true});
}"""


def test_a_drag_redraws_its_panel_and_nothing_else_on_the_page(first_chapter):
    """A light for a busy kernel turns on and off at every step, which cost up to 15 ms of 80."""
    panel = panels_of(first_chapter)[0]
    slider = panel.root.get_by_role("slider").first
    panel.press(slider)
    panel.settle()
    first_chapter.wait_for_timeout(1000)
    first_chapter.evaluate(_WATCH_THE_REST)
    panel.press(slider)
    panel.settle()
    assert first_chapter.evaluate("() => window.changed") == []


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
