"""The tables that repeat what the chapters say: current, complete, and true about the tests."""

import re
from pathlib import Path

import tables  # notebooks/tables.py

ROOT = Path(__file__).parents[1]


def test_every_table_is_current():
    assert tables.refresh(check=True) == []


def test_a_changed_title_makes_the_tables_stale(monkeypatch):
    chapters = tables.read_chapters()
    chapters[0]["title"] = "1 · Another question?"
    monkeypatch.setattr(tables, "read_chapters", lambda: chapters)
    assert tables.refresh(check=True) == ["README.md", "notebooks/src/00_start.py"]


def test_every_numbered_formula_has_a_function_and_the_reverse():
    text = "".join(path.read_text() for path in (ROOT / "notebooks" / "src").glob("[0-9]*.py"))
    tags = set(re.findall(r"\\tag\{(\d+\.\d+)\}", text))
    assert tags == set(tables.FUNCTIONS)
    found = {tag for chapter in tables.read_chapters() for tag in chapter["formulas"]}
    assert found == tags


def test_the_named_test_uses_the_named_function():
    for tag, name in tables.FUNCTIONS.items():
        module, _, function = name.partition(".")
        test = (ROOT / "tests" / f"test_{module}.py").read_text()
        assert function.rpartition(".")[2] in test, (tag, name)
