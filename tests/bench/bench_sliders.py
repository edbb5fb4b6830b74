"""Measure key press to painted pixels, per slider of every chapter, in a real browser.

Beside it in the same run: the floor (a slider that changes a line of text, nothing drawn), alone in
a notebook and again at the end of every chapter, since a long page slows every frame; and what most
notebooks do (`interact` around an inline figure). Prints milliseconds and ratios to both floors.

python tests/bench/bench_sliders.py [chapter ...]
"""

import statistics
import sys
import tempfile
from pathlib import Path

import nbformat

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.browser import lab

PRESSES = 20
_FLOOR = """import ipywidgets as widgets
def text_only():  # a function, for the chapter's own names must stay
    slider, words = widgets.IntSlider(50, 0, 100), widgets.HTML("50")
    slider.observe(lambda change: setattr(words, "value", str(change.new)), "value")
    box = widgets.VBox([slider, words])
    box.add_class("kv-panel")
    return box
text_only()"""
_INTERACT = """import ipywidgets as widgets
import matplotlib.pyplot as plt
import numpy as np
tokens = np.linspace(1024, 131072, 400)
def draw_line(heads):
    figure, axes = plt.subplots(figsize=(7.2, 4.4))
    axes.plot(tokens, 2 * 32 * heads * 128 * 2 * tokens / 2**30)
    axes.set_title(f"{heads} heads")
    plt.show()
box = widgets.interactive(draw_line, heads=widgets.IntSlider(50, 1, 100))
box.add_class("kv-panel")
box"""
# What is on the page, and the time from the key to the frame that shows something else.
_WATCH = """(root) => {
  const seen = () => {
    const image = root.querySelector('img');
    if (image) return image.complete && image.naturalWidth ? image.src : null;
    return root.querySelector('.widget-html-content')?.innerHTML ?? null;
  };
  const before = seen(), started = performance.now();
  let pressed = null;
  const once = {capture: true, once: true};
  document.addEventListener('keydown', (event) => { pressed = event.timeStamp; }, once);
  window.painted = new Promise((resolve) => {
    const tick = () => {
      const now = seen();
      if (pressed !== null && now !== null && now !== before) {
        requestAnimationFrame(() => resolve(performance.now() - pressed));
      } else if (performance.now() - started > 5000) resolve(null);
      else requestAnimationFrame(tick);
    };
    tick();
  });
}"""


def milliseconds(page, root, slider):
    """Press arrow keys to one end and back, each after the last picture has settled."""
    times, forth = [], True
    slider.scroll_into_view_if_needed()
    slider.focus()
    for press in range(PRESSES + 3):
        value, first, last = (
            float(slider.get_attribute(f"aria-value{which}")) for which in ("now", "min", "max")
        )
        forth = value < last if forth else value <= first
        page.wait_for_timeout(450)  # until the last picture is sharp and nothing moves
        root.evaluate(_WATCH)
        page.keyboard.press("ArrowRight" if forth else "ArrowLeft")
        time = page.evaluate("() => window.painted")
        if press >= 3 and time is not None:
            times.append(time)
    return times


def report(name, times, *floors):
    median, p90 = statistics.median(times), sorted(times)[int(0.9 * len(times))]
    ratios = "".join(f"{median / floor:8.2f}" for floor in floors)
    print(f"{name:<58} {median:6.0f} {p90:6.0f} {ratios:<16} {len(times):3}", flush=True)
    return median


def small_notebook(folder, name, code):
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code)])
    notebook.metadata = {"kernelspec": {"name": "python3", "display_name": "Python 3"}}
    nbformat.write(notebook, folder / f"{name}.ipynb")


def with_floor(folder, name):
    """Copy a chapter with one more cell, the floor."""
    notebook = nbformat.read(lab.NOTEBOOKS / f"{name}.ipynb", as_version=4)
    notebook.cells.append(nbformat.v4.new_code_cell(_FLOOR))
    nbformat.write(notebook, folder / f"{name}.ipynb")


def measure_one(page, base_url, name, *floors):
    """Measure a notebook of one slider."""
    lab.open_chapter(page, base_url, name)
    page.wait_for_timeout(1000)
    root = page.locator(".kv-panel").last
    median = report(name, milliseconds(page, root, root.get_by_role("slider")), *floors)
    lab.stop_kernels(page)
    return median


def measure_chapter(page, base_url, name, floor):
    lab.open_chapter(page, base_url, name)
    *panels, last = page.locator(".kv-panel").all()
    for root in panels:
        lab.open_panel(root)
    page.wait_for_timeout(1000)
    slider = last.get_by_role("slider")
    here = report(f"{name}: floor on this page", milliseconds(page, last, slider), floor)
    for number, root in enumerate(panels, start=1):
        labels = [
            line.split('"')[1]
            for line in root.aria_snapshot().split("\n")
            if '- spinbutton "' in line
        ]
        sliders = root.get_by_role("slider").all()
        for label, slider in zip(labels, sliders, strict=True):
            times = milliseconds(page, root, slider)
            report(f"{name} panel {number}: {label}", times, floor, here)
    lab.stop_kernels(page)


def main(chapters):
    from playwright.sync_api import sync_playwright

    chapters = chapters or lab.CHAPTERS
    with tempfile.TemporaryDirectory() as home, sync_playwright() as playwright:
        folder = Path(home) / "notebooks"
        folder.mkdir()
        small_notebook(folder, "floor", _FLOOR)
        small_notebook(folder, "interact", _INTERACT)
        for name in chapters:
            with_floor(folder, name)
        chromium = lab.launch(playwright)
        page = chromium.new_page(viewport={"width": 1300, "height": 1100})
        print(f"{'key press to painted pixels [ms]':<58} median    p90  ÷floor  ÷here     n")
        with lab.lab_server(home, folder) as base_url:
            floor = measure_one(page, base_url, "floor")
            measure_one(page, base_url, "interact", floor)
            for name in chapters:
                measure_chapter(page, base_url, name, floor)
        chromium.close()


if __name__ == "__main__":
    if lab.chromium_path() is None:
        sys.exit("no Chromium found: install it, or set KVLIB_CHROMIUM to its path")
    main(sys.argv[1:])
