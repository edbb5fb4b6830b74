"""For all tests: who shares a process, and a chapter's code, run once."""

import pytest


@pytest.hookimpl(wrapper=True)  # before pytest-xdist reads the marks
def pytest_collection_modifyitems(items):
    """Keep what shares fixtures in one process: a file's tests, in the browser a chapter's."""
    for item in items:
        group = item.path.name
        if "chapter" in getattr(item, "fixturenames", ()):
            group += item.callspec.id
        item.add_marker(pytest.mark.xdist_group(group))
    return (yield)


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
