"""Measure key press to painted pixels, per slider of every chapter, in a real browser.

Beside it in the same run: the floor (a slider that changes a line of text, nothing drawn) and what
most notebooks do (`interact` around an inline figure). Prints milliseconds and ratios.

python tests/bench/bench_sliders.py [chapter ...]
"""

import statistics
import sys
import tempfile
from pathlib import Path

import nbformat

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.browser import lab

PRESSES = 30
_FLOOR = """import ipywidgets as widgets
slider, words = widgets.IntSlider(50, 0, 100), widgets.HTML("50")
slider.observe(lambda change: setattr(words, "value", str(change.new)), "value")
box = widgets.VBox([slider, words])
box.add_class("kv-panel")
box"""
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


def report(name, times, floor):
    median, p90 = statistics.median(times), sorted(times)[int(0.9 * len(times))]
    ratio = f"{median / floor:.2f}" if floor else "1.00"
    print(f"{name:<58} {median:6.0f} {p90:6.0f} {ratio:>6}  {len(times)}", flush=True)
    return median


def small_notebook(folder, name, code):
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code)])
    notebook.metadata = {"kernelspec": {"name": "python3", "display_name": "Python 3"}}
    nbformat.write(notebook, folder / f"{name}.ipynb")


def measure_chapter(page, base_url, name, floor=None):
    lab.open_chapter(page, base_url, name)
    median = None
    for number, root in enumerate(page.locator(".kv-panel").all()):
        if root.locator(".kv-sentence").count():  # neither the floor nor interact has one
            lab.open_panel(root)
            page.wait_for_timeout(500)
        boxes, sliders = root.get_by_role("spinbutton"), root.get_by_role("slider")
        labels = [
            line.split('"')[1]
            for line in root.aria_snapshot().split("\n")
            if '- spinbutton "' in line
        ]
        assert boxes.count() in (0, sliders.count())
        for k in range(sliders.count()):
            what = f"{name} panel {number + 1}: {labels[k]}" if labels else name
            median = report(what, milliseconds(page, root, sliders.nth(k)), floor)
    lab.stop_kernels(page)
    return median


def main(chapters):
    from playwright.sync_api import sync_playwright

    chapters = chapters or sorted(path.stem for path in lab.NOTEBOOKS.glob("[0-9]*.ipynb"))
    with tempfile.TemporaryDirectory() as home, sync_playwright() as playwright:
        extra = Path(home) / "extra"
        extra.mkdir()
        small_notebook(extra, "floor", _FLOOR)
        small_notebook(extra, "interact", _INTERACT)
        chromium = lab.launch(playwright)
        page = chromium.new_page(viewport={"width": 1300, "height": 1100})
        print(f"{'key press to painted pixels':<58} median    p90  ÷floor  n")
        with lab.lab_server(home, extra) as base_url:
            floor = measure_chapter(page, base_url, "floor")
            measure_chapter(page, base_url, "interact", floor)
        with lab.lab_server(home) as base_url:
            for name in chapters:
                measure_chapter(page, base_url, name, floor)
        chromium.close()


if __name__ == "__main__":
    if lab.chromium_path() is None:
        sys.exit("no Chromium found: install it, or set KVLIB_CHROMIUM to its path")
    main(sys.argv[1:])
