"""What must hold for every chapter: its panels bear any values, its rows come from SYMBOLS.md."""

import contextlib
import html
import random
import re
from pathlib import Path

import build
import jupytext
import nbformat
import pytest
from nbconvert import HTMLExporter

from kvlib import panel

NOTEBOOKS = Path(__file__).parents[1] / "notebooks"
SOURCES = sorted((NOTEBOOKS / "src").glob("[0-9]*.py"))
_ROW = re.compile(r"^\| (\$.+?\$) \| (.+?) \| (.+?) \| (.+?) \| (.+?) \|$", re.MULTILINE)


@pytest.fixture(scope="module", params=SOURCES, ids=lambda path: path.stem)
def source(request):
    return request.param


@pytest.fixture(scope="module")
def panels(source, run_chapter):
    found = run_chapter(source.stem)["panels"]
    assert found, "a chapter has at least one panel"
    return found


def test_no_combination_of_values_ends_in_a_traceback(panels, monkeypatch):
    rng = random.Random(1)
    for each in panels:
        png = each.picture.png  # one pixel per CSS pixel: the same artists in less time
        monkeypatch.setattr(each.picture, "png", lambda scale, png=png, **more: png(1, **more))
        for _ in range(60):
            values = {}
            for name, control in each.controls.items():
                if isinstance(control, panel.Choice):
                    values[name] = rng.choice(control.list.options)
                elif isinstance(control, panel.Text):
                    values[name] = rng.choice([control.start, "", "?", "x" * 999])
                elif isinstance(control, panel.Slider):
                    low, high = control.box.min, control.box.max
                    ends = [low, high, rng.choice(control.steps.tolist())]
                    values[name] = rng.choice([*ends, type(low)(rng.uniform(low, high))])
            each.set(**values)
            assert each.sentence
        each.reset()


def test_every_control_moves_the_sentence(panels):
    for each in panels:
        each.reset()
        for name, control in each.controls.items():
            before = each.sentence
            if isinstance(control, panel.Slider):
                at_end = control.thumb.value == control.thumb.max
                control.thumb.value += -1 if at_end else 1
            elif isinstance(control, panel.Text):
                control.line.value = ""
            elif isinstance(control, panel.Job):
                continue
            else:
                options = [option for option in control.list.options if option != control.value]
                control.list.value = options[-1]
            assert each.sentence != before, name
            each.reset()


def test_a_background_kept_in_parts_is_the_whole(panels):
    for each in panels:
        sliders = [name for name, c in each.controls.items() if isinstance(c, panel.Slider)]
        for name in sliders:  # one at its end after the other: most axes change their limits
            values = each.values | {name: each.controls[name].steps[-1].item()}
            with contextlib.suppress(ValueError):  # values without an answer
                each.picture.update(**each._compute(**values))
            each.picture.png(scale=1)
            kept = each.picture._background(scale=1)
            each.picture.canvas.draw()
            assert (kept == each.picture.canvas.buffer_rgba()).all(), name
        each.reset()


def test_at_most_four_controls_are_in_view(panels):
    for each in panels:
        in_view = each.children[1].children[:-1]  # the last one is Reset
        assert len(in_view) <= 4


def test_symbol_rows_are_copied_from_the_symbol_table(source):
    listed = {row[0]: row[1:4] for row in _ROW.findall((NOTEBOOKS / "SYMBOLS.md").read_text())}
    text = "\n".join(cell.source for cell in jupytext.read(source).cells)
    rows = _ROW.findall(text)
    assert rows, "a chapter explains its symbols in a table"
    for symbol, *rest, _today in rows:
        assert tuple(rest) == listed.get(symbol), symbol


@pytest.mark.parametrize("source", SOURCES[1:], ids=lambda path: path.stem)
def test_a_chapter_has_its_parts_in_order(source):
    text = "\n".join(cell.source for cell in jupytext.read(source).cells)
    parts = [
        "# ",
        "In a hurry",
        r"\tag{",
        "## Exercises",
        "## What the formula leaves out",
        "## References",
    ]
    positions = [text.find(part) for part in parts]
    assert -1 not in positions
    assert positions == sorted(positions)
    assert re.search(r"^[^\n]*[\u4e00-\u9fff]", text.split("\n\n")[1]), "one line in Chinese"


def test_panels_of_a_chapter_share_nothing(panels):
    for each in panels:
        each.reset()
        if each._is_veiled:
            each.reveal()
    before = [(each.sentence, each.values, each._image.value) for each in panels]
    for k, each in enumerate(panels):
        slider = next(c for c in each.controls.values() if isinstance(c, panel.Slider))
        slider.thumb.value += 1 if slider.thumb.value < slider.thumb.max else -1
        for other in {*range(len(panels))} - {k}:
            now = panels[other]
            assert (now.sentence, now.values, now._image.value) == before[other]
        each.reset()


def test_a_stored_chapter_becomes_html_with_every_picture_and_no_widget(source):
    notebook = nbformat.read(NOTEBOOKS / f"{source.stem}.ipynb", as_version=4)
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    stored = [output for output in outputs if "image/png" in output.get("data", {})]
    page, _ = HTMLExporter(template_name="classic").from_notebook_node(notebook)
    assert stored
    assert "widget-view" not in page
    assert "widget-state" not in page
    dense, readable = "".join(page.split()), " ".join(html.unescape(page).split())
    for output in stored:
        assert "".join(output.data["image/png"].split()) in dense
        assert " ".join(output.metadata["image/png"]["alt"].split()) in readable


@pytest.mark.parametrize(
    ("cells", "problem"),
    [
        (
            ["tokens = 1", "for tokens in range(2):\n    pass"],
            "cell 1 assigns 'tokens', which cell 0",
        ),
        (["def f(tokens):\n    one = tokens", "f = 2"], "cell 1 assigns 'f', which cell 0 does"),
        (["a = 1\n" * 16], "cell 0 has 16 lines, the limit is 15"),
        (["import sys\nsys.path.append('..')"], "write plain Python"),
        (
            ["def f(t):\n    k = t\n    return k", "g = [k for k in range(3)]", "k = lambda t: t"],
            None,
        ),
    ],
)
def test_the_rules_for_cells(cells, problem, tmp_path):
    source = tmp_path / "chapter.py"
    source.write_text("".join(f"# %%\n{cell}\n\n" for cell in cells))
    found = build.broken_rules(source)
    assert [problem in line for line in found] == [True] if problem else not found
