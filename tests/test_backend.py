"""Which side a call runs on, and why a GPU cannot be used; CuPy is played by a stand-in."""

import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

from kvlib import backend
from tests.kernels.conftest import missing


class _DeviceArray:
    """Stands for cupy.ndarray."""

    def __init__(self, values):
        self.values = values

    def __mul__(self, factor):
        return _DeviceArray([value * factor for value in self.values])

    def sum(self):
        return sum(self.values)


def _stand_in(count=1, launch=_DeviceArray):
    """Build a module that answers what `backend` asks of CuPy."""
    cupy = ModuleType("cupy")
    cupy.ndarray = _DeviceArray
    cupy.arange = lambda stop, dtype: launch(range(stop))
    runtime = SimpleNamespace(
        getDeviceCount=lambda: count,
        getDeviceProperties=lambda device: {"name": b"Test GPU"},
    )
    cupy.cuda = SimpleNamespace(runtime=runtime)
    return cupy


@pytest.fixture(autouse=True)
def _ask_anew():
    backend.gpu_status.cache_clear()
    yield
    backend.gpu_status.cache_clear()


@pytest.fixture
def cupy(monkeypatch):
    module = _stand_in()
    monkeypatch.setitem(sys.modules, "cupy", module)
    return module


def _broken(*_):
    raise RuntimeError("driver too old")


def test_numpy_serves_numpy_arrays_and_everything_that_is_no_array():
    assert backend.array_module(np.zeros(3), np.arange(2)) is np
    assert backend.array_module() is np
    assert backend.array_module([1, 2], 3.0, None) is np


def test_asking_does_not_import_cupy(monkeypatch):
    monkeypatch.delitem(sys.modules, "cupy", raising=False)
    assert backend.array_module(np.zeros(1)) is np
    assert "cupy" not in sys.modules


def test_cupy_serves_its_own_arrays(cupy):
    assert backend.array_module(_DeviceArray([1])) is cupy
    assert backend.array_module(_DeviceArray([1]), 7, None) is cupy
    assert backend.array_module(np.zeros(1)) is np  # loaded, but not asked for


@pytest.mark.usefixtures("cupy")
@pytest.mark.parametrize("order", [1, -1])
def test_mixed_arrays_are_refused_rather_than_moved(order):
    arrays = [np.zeros(1), _DeviceArray([1])][::order]
    with pytest.raises(TypeError, match=r"NumPy and CuPy mixed; .*Use cupy\.asarray"):
        backend.array_module(*arrays)


def test_a_missing_cupy_is_a_reason(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)  # what makes `import cupy` fail
    usable, reason = backend.gpu_status()
    assert not usable
    assert "CuPy is not installed" in reason
    assert "NumPy" in reason
    assert "\n" not in reason


@pytest.mark.parametrize(
    ("module", "words"),
    [
        (_stand_in(count=0), "No CUDA device"),
        (_stand_in(launch=_broken), "RuntimeError: driver too old"),
        (_stand_in(launch=lambda values: _DeviceArray([1])), "gave 2 instead of 12"),
    ],
    ids=["no device", "no launch", "wrong sum"],
)
def test_a_gpu_must_compute_before_it_counts(monkeypatch, module, words):
    monkeypatch.setitem(sys.modules, "cupy", module)
    usable, reason = backend.gpu_status()
    assert not usable
    assert words in reason
    assert backend.device_name() == f"CPU (NumPy {np.__version__})"


@pytest.mark.usefixtures("cupy")
def test_a_working_gpu_is_named():
    assert backend.gpu_status() == (True, "Test GPU")
    assert backend.device_name() == "Test GPU"


@pytest.mark.gpu
def test_the_real_gpu_answers():
    usable, reason = backend.gpu_status()
    if not usable:
        missing(reason, "KVLIB_REQUIRE_GPU")
    import cupy

    assert backend.array_module(cupy.zeros(3)) is cupy
    assert backend.device_name() == reason
