"""Run a chapter's code in this process, once for all tests that look at it."""

import pytest


@pytest.fixture(scope="session")
def run_chapter():
    """Return a function: chapter file name -> its names, its panels in order under "panels"."""
    from build import run_here  # notebooks/build.py

    seen = {}

    def run(stem):
        if stem not in seen:
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("KVLIB_STRICT", "1")
                names, panels = run_here(stem)
            seen[stem] = names | {"panels": panels}
        return seen[stem]

    return run
