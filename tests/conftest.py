"""Run a chapter's code in this process, once for all tests that look at it."""

from pathlib import Path

import jupytext
import pytest

NOTEBOOKS = Path(__file__).parents[1] / "notebooks"


@pytest.fixture(scope="session")
def run_chapter():
    """Return a function: chapter file name -> its names, its panels in order under "panels"."""
    seen = {}

    def run(stem):
        if stem not in seen:
            seen[stem] = _run(stem)
        return seen[stem]

    return run


def _run(stem):
    from kvlib import panel

    names, found, build = {}, [], panel.Panel.__init__

    def record(self, *arguments, **keywords):
        build(self, *arguments, **keywords)
        found.append(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(panel.Panel, "__init__", record)
        patch.setenv("KVLIB_STRICT", "1")
        patch.chdir(NOTEBOOKS)
        for cell in jupytext.read(NOTEBOOKS / "src" / f"{stem}.py").cells:
            if cell.cell_type == "code":
                exec(compile(cell.source, f"{stem}.py", "exec"), names)
    return names | {"panels": found}
