"""For all tests: who shares a process, and a chapter's code, run once."""

import pytest


@pytest.hookimpl(optionalhook=True)  # pytest-xdist's
def pytest_xdist_make_scheduler(config, log):
    """Keep what shares fixtures in one process: a file's tests, in the browser a chapter's."""
    from xdist.scheduler import LoadScopeScheduling

    class ByFileAndChapter(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            file, _, test = nodeid.partition("::")
            return file + (test.partition("[")[2] if file.endswith("test_panels.py") else "")

    return ByFileAndChapter(config, log)


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
