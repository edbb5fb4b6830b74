"""Where a kernel test runs: simulated on the CPU in several thread orders, and on a GPU."""

import os

import pytest

from kvlib import backend
from tests.kernels import simulator


def missing(words, variable):
    """Skip with the reason, or fail if this machine must be able to."""
    if os.environ.get(variable, "0") != "0":
        pytest.fail(f"{variable} is set, but {words}")
    pytest.skip(words)


class _Simulated(simulator.Simulator):
    def __init__(self, order):
        super().__init__(order, all_names=simulator.ALL_NAMES)

    back = staticmethod(simulator.to_host)


class _Gpu:
    def to_device(self, array):
        import cupy

        return cupy.asarray(array)

    def back(self, array):
        import cupy

        return cupy.asnumpy(array)


def require_cupy():
    try:
        import cupy  # noqa: F401
    except ImportError as error:
        missing(
            f"CuPy is not installed ({error}): pip install '.[kernels]'", "KVLIB_REQUIRE_KERNELS"
        )


@pytest.fixture(
    params=[0, 1, 2, pytest.param("gpu", marks=pytest.mark.gpu)], ids=lambda p: f"order{p}"
)
def device(request, monkeypatch):
    if request.param == "gpu":
        usable, reason = backend.gpu_status()
        if not usable:
            missing(reason, "KVLIB_REQUIRE_GPU")
        yield _Gpu()
        return
    require_cupy()
    simulated = _Simulated(request.param)
    restore = simulated.install(monkeypatch)
    yield simulated
    restore()
