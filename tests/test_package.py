"""The package as a stranger gets it: light to import, intact, agreeing with itself, installable."""

import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

import kvlib
from kvlib import _data

ROOT = Path(__file__).parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
# Widgets, pictures and what chapters check with; everything else is NumPy only.
FRONT_END = {"panel", "figures", "checks", "__main__"}


def run_python(code, cwd, **variables):
    """Run code in a fresh interpreter and return what it prints as JSON."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=cwd,
        env=os.environ | variables,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


# --- imports ---

LOADED_BY = """
import sys
import numpy
before = set(sys.modules)
{imports}
import json
print(json.dumps(sorted({{name.split(".")[0] for name in set(sys.modules) - before}})))
"""


def core_modules():
    names = {path.stem for path in (ROOT / "kvlib").glob("*.py")} - FRONT_END - {"__init__"}
    return ["kvlib", *(f"kvlib.{name}" for name in sorted(names))]


@pytest.mark.parametrize(
    "modules",
    [["kvlib"], ["kvlib.memory"], core_modules()],
    ids=["kvlib", "kvlib.memory", "core modules"],
)
def test_importing_loads_numpy_and_the_standard_library_only(modules):
    imports = "\n".join(f"import {name}" for name in modules)
    loaded = run_python(LOADED_BY.format(imports=imports), ROOT)
    assert "kvlib" in loaded
    assert set(loaded) - set(sys.stdlib_module_names) - {"kvlib", "numpy"} == set()


def test_the_version_is_the_packages():
    assert kvlib.__version__ == PYPROJECT["project"]["version"]


# --- data files ---


def listed_digests():
    lines = (ROOT / "data" / "SHA256SUMS").read_text().splitlines()
    return {name: digest for digest, name in (line.split() for line in lines)}


def test_every_data_file_is_listed():
    skipped = {"SHA256SUMS", "README.md"}
    files = {
        path.relative_to(ROOT / "data").as_posix()
        for path in (ROOT / "data").rglob("*")
        if path.is_file() and path.suffix != ".py" and path.name not in skipped
    }
    # Fetched by readers, never shipped, and checked by the script that fetches them.
    files = {name for name in files if not name.startswith(("traces/", "__pycache__/"))}
    assert files == listed_digests().keys()


@pytest.mark.parametrize("name", listed_digests())
def test_every_digest_is_right(name):
    content = (ROOT / "data" / name).read_bytes()
    assert hashlib.sha256(content).hexdigest() == listed_digests()[name]
    assert _data.read_bytes(name) == content


@pytest.fixture
def data_copy(tmp_path, monkeypatch):
    """Let the package read its data from a copy that a test may damage."""
    folder = tmp_path / "data"
    shutil.copytree(ROOT / "data", folder, ignore=shutil.ignore_patterns("traces"))
    monkeypatch.setattr(_data, "_FOLDERS", (folder,))
    _data._checksums.cache_clear()
    _data.read_json.cache_clear()
    yield folder
    _data._checksums.cache_clear()
    _data.read_json.cache_clear()


def test_an_intact_copy_reads_alike(data_copy):
    assert _data.read_json("gpus.json") == json.loads((data_copy / "gpus.json").read_text())


@pytest.mark.parametrize("damage", ["changed", "cut", "unlisted"])
def test_a_damaged_file_is_refused_by_name(data_copy, damage):
    path = data_copy / "gpus.json"
    if damage == "changed":
        path.write_text(path.read_text().replace("79.11", "80.00"))
    elif damage == "cut":
        path.write_bytes(path.read_bytes()[:-1])
    else:
        sums = data_copy / "SHA256SUMS"
        lines = sums.read_text().splitlines(keepends=True)
        sums.write_text("".join(line for line in lines if "gpus.json" not in line))
    with pytest.raises(ValueError, match=r"gpus\.json has sha256 .*; .*restore it"):
        _data.read_json("gpus.json")
    assert _data.read_json("model_configs.json")


@pytest.mark.usefixtures("data_copy")
def test_a_missing_file_is_refused_by_name():
    with pytest.raises(FileNotFoundError, match=r"name='none\.json'; .*Clone the repository"):
        _data.read_bytes("none.json")


# --- environment.yml and pyproject.toml ---

REQUIREMENT = re.compile(r"([A-Za-z][\w-]*)(?:\[[\w,-]+\])?\s*((?:[<>]=?\s*[\d.]+\s*,?\s*)*)")
USERS_PACKAGES = {"jupyterlab", "numpy", "ipywidgets", "matplotlib", "nbval", "cupy"}


def read_requirement(text):
    """Split ``name>=a,<b`` into the name and its range, both ends as tuples of numbers."""
    match = REQUIREMENT.fullmatch(text.strip())
    assert match, f"{text!r} is not of the form name>=a,<b"
    name, bounds = match.groups()
    low, high = (0,), (float("inf"),)
    for sign, version in re.findall(r"([<>]=?)\s*([\d.]+)", bounds):
        assert sign in (">=", "<"), f"{text!r}: use >= and < only"
        numbers = tuple(int(part) for part in version.split("."))
        low, high = (numbers, high) if sign == ">=" else (low, numbers)
    return name.lower(), (low, high)


def environment():
    """Read the lines ``- name>=a,<b``; an editable install of the project is no requirement."""
    lines = (ROOT / "environment.yml").read_text().splitlines()
    section, entries = None, []
    for line in lines:
        code = line.split("#")[0].rstrip()
        if re.match(r"\w", code):
            section = code.partition(":")[0]
        elif section == "dependencies" and code.strip():
            entries.append(code.strip().removeprefix("- ").strip("\"' "))
    named = [entry for entry in entries if entry not in ("pip", "pip:") and entry[:2] != "-e"]
    return dict(map(read_requirement, named))


def declared():
    """Every package of pyproject.toml, CuPy under its conda name."""
    project = PYPROJECT["project"]
    extras = project["optional-dependencies"].values()
    texts = [*project["dependencies"], *(text for extra in extras for text in extra)]
    found = {}
    for name, bounds in map(read_requirement, texts):
        name = "cupy" if name.startswith("cupy-cuda") else name
        assert found.setdefault(name, bounds) == bounds, f"{name} has two ranges"
    return found


def test_the_environment_holds_the_users_packages():
    assert USERS_PACKAGES | {"python"} <= environment().keys()


def test_the_environment_allows_nothing_that_the_package_does_not():
    ranges = environment()
    assert (
        ranges.pop("python")
        == read_requirement("python" + PYPROJECT["project"]["requires-python"])[1]
    )
    wanted = declared()
    assert ranges.keys() <= wanted.keys()
    for name, (low, high) in ranges.items():
        assert wanted[name][0] <= low < high <= wanted[name][1], name


def test_the_range_reader_itself():
    assert read_requirement("numpy>=1.26,<3") == ("numpy", ((1, 26), (3,)))
    assert read_requirement("cupy-cuda12x[ctk]>=14,<15") == ("cupy-cuda12x", ((14,), (15,)))
    assert read_requirement("python >=3.11") == ("python", ((3, 11), (float("inf"),)))
    assert read_requirement("nbval") == ("nbval", ((0,), (float("inf"),)))
    with pytest.raises(AssertionError, match="not of the form"):
        read_requirement("numpy==2.0")


# --- the wheel ---

USE_THE_WHEEL = """
import sys
sys.path.insert(0, {folder!r})
import json
import kvlib.models
import kvlib.plan
models, devices = kvlib.models.load_models(), kvlib.models.load_devices()
fitting = kvlib.plan.plan("llama-3.1-8b", "L4 24GB", "azure-conversations").num_sequences
print(json.dumps([kvlib.__file__, len(models), len(devices), fitting]))
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    if not importlib.util.find_spec("hatchling"):
        pytest.skip("hatchling, which builds the wheel, is not installed")
    folder = tmp_path_factory.mktemp("wheel")
    done = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (path,) = folder.glob("kvlib-*.whl")
    return path


def test_the_wheel_carries_the_presets_and_nothing_else(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    top = {name.split("/")[0] for name in names}
    shipped = {"kvlib/data/model_configs.json", "kvlib/data/gpus.json", "kvlib/kernels.cu"}
    assert shipped <= set(names)
    assert {name for name in top if not name.endswith(".dist-info")} == {"kvlib"}
    assert not [name for name in names if "tests/" in name or "raw_configs" in name]


def test_the_wheel_works_outside_the_checkout(wheel, tmp_path):
    site, elsewhere = tmp_path / "site", tmp_path / "elsewhere"
    elsewhere.mkdir()
    zipfile.ZipFile(wheel).extractall(site)
    found = run_python(USE_THE_WHEEL.format(folder=str(site)), elsewhere, PYTHONPATH="")
    where, num_models, num_devices, fitting = found
    assert Path(where).is_relative_to(site)
    assert num_models >= 51
    assert num_devices == 13
    assert fitting > 0
