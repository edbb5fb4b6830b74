"""Find the project's data files, in a checkout or inside a wheel, and prove they are intact."""

import functools
import hashlib
import json
from pathlib import Path

_PACKAGE = Path(__file__).parent
_FOLDERS = (_PACKAGE / "data", _PACKAGE.parent / "data")


def data_path(name):
    """Return the path of a data file of the project."""
    for folder in _FOLDERS:
        if (folder / name).is_file():
            return folder / name
    raise FileNotFoundError(f"name={name!r}; no such data file. Clone the repository for it.")


@functools.cache
def _checksums():
    lines = data_path("SHA256SUMS").read_text().split("\n")
    return {name: digest for digest, name in (line.split() for line in lines if line)}


def read_bytes(name):
    """Return a data file's bytes after checking them against data/SHA256SUMS."""
    content = data_path(name).read_bytes()
    digest = hashlib.sha256(content).hexdigest()
    if digest != _checksums().get(name):
        raise ValueError(
            f"{name} has sha256 {digest[:12]}...; data/SHA256SUMS does not list it so. "
            "The file was changed or cut: restore it, or after a wanted change list it anew."
        )
    return content


@functools.cache
def read_json(name):
    """Return a data file's parsed JSON; callers must not change it."""
    return json.loads(read_bytes(name))
