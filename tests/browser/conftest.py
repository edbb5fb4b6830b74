"""One JupyterLab and one Chromium for all browser tests."""

import importlib
import os
import pkgutil

import pytest

import kvlib

from . import lab

_PUBLIC = [info.name for info in pkgutil.iter_modules(kvlib.__path__) if info.name[0] != "_"]


def pytest_collection_modifyitems(items):
    missing = None
    try:
        import playwright  # noqa: F401
    except ImportError:
        missing = "playwright is not installed: pip install -e .[test]"
    if lab.chromium_path() is None:
        missing = "no Chromium found: install it, or set KVLIB_CHROMIUM to its path"
    for item in items:
        if item.get_closest_marker("browser") and missing:
            if os.environ.get("KVLIB_REQUIRE_BROWSER") == "1":
                raise pytest.UsageError(missing)
            item.add_marker(pytest.mark.skip(reason=missing))


@pytest.fixture(scope="session")
def server(tmp_path_factory):
    with lab.lab_server(tmp_path_factory.mktemp("lab")) as base_url:
        yield base_url


@pytest.fixture(scope="session")
def browser():
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        chromium = lab.launch(playwright)
        yield chromium
        chromium.close()


@pytest.fixture(scope="session")
def namespace():
    """What a sentence's code needs: the public modules by name."""
    names = [name for name in _PUBLIC if name not in ("__main__", "gpucheck")]
    return {name: importlib.import_module(f"kvlib.{name}") for name in names}
