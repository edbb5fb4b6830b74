"""Which array library serves a call. The only module that imports CuPy, and only when asked."""

import functools
import sys
from pathlib import Path

import numpy as np

THREADS = 256  # threads of a CUDA block, as in kernels.cu
OPTIONS = ("--std=c++17", "--fmad=false")  # no fused multiply-add: NumPy rounds twice, so do we


def array_module(*arrays):
    """Return the module that the arrays belong to [module].

    Parameters
    ----------
    *arrays : numpy.ndarray or cupy.ndarray
        Arrays of one call, all on the same side; other objects are ignored.

    Returns
    -------
    module
        ``numpy`` or ``cupy``.

    Raises
    ------
    TypeError
        If NumPy and CuPy arrays are mixed: nothing is moved between CPU and GPU silently.

    Notes
    -----
    CuPy is never imported just to ask: an array can be CuPy's only if CuPy is loaded already.

    Examples
    --------
    >>> array_module(np.zeros(3)).__name__
    'numpy'
    """
    cupy = sys.modules.get("cupy")
    on_gpu = [cupy is not None and isinstance(array, cupy.ndarray) for array in arrays]
    on_cpu = [isinstance(array, np.ndarray) for array in arrays]
    if any(on_gpu) and any(on_cpu):
        raise TypeError(
            "arrays=NumPy and CuPy mixed; one call works on one side. "
            "Use cupy.asarray(...) or cupy.asnumpy(...) first."
        )
    return cupy if any(on_gpu) else np


@functools.cache
def gpu_status():
    """Say whether a GPU can be used, and if not why.

    Returns
    -------
    usable : bool
        True only after a tiny kernel was compiled, launched and gave the right answer.
    reason : str
        The device's name, or what is missing in words.

    Examples
    --------
    >>> usable, reason = gpu_status()
    >>> isinstance(usable, bool) and bool(reason)
    True
    """
    try:
        import cupy
    except ImportError as error:
        return False, f"CuPy is not installed ({error}); NumPy does everything."
    runtime = cupy.cuda.runtime
    # CuPy fails in many ways on a broken driver; each is a reason to report, none a crash.
    try:
        if not runtime.getDeviceCount():
            return False, "No CUDA device is visible; NumPy does everything."
        answer = int((cupy.arange(4, dtype="int32") * 2).sum())
        name = runtime.getDeviceProperties(0)["name"].decode()
    except Exception as error:
        return False, f"The GPU cannot be used ({type(error).__name__}: {error}); NumPy does all."
    if answer != 12:
        return False, f"A test kernel gave {answer} instead of 12; NumPy does everything."
    return True, name


def device_name():
    """Name what a call without arrays of its own runs on.

    Returns
    -------
    str
        The GPU's name, or ``'CPU (NumPy ...)'``.

    Examples
    --------
    >>> device_name() != ""
    True
    """
    usable, reason = gpu_status()
    return reason if usable else f"CPU (NumPy {np.__version__})"


def default_module():
    """Return CuPy if a GPU is usable, else NumPy [module].

    Returns
    -------
    module
        ``cupy`` or ``numpy``.

    Examples
    --------
    >>> default_module().__name__ in ("numpy", "cupy")
    True
    """
    if gpu_status()[0]:
        import cupy

        return cupy
    return np


def wait(xp):
    """Wait until the GPU has done what was asked of it; NumPy is done at once.

    Parameters
    ----------
    xp : module
        ``cupy`` or ``numpy``.
    """
    if xp is not np:
        xp.cuda.Device().synchronize()


def launch(name, num_blocks, arguments, width=THREADS):
    """Run a kernel of kernels.cu on the GPU that holds its arrays.

    Parameters
    ----------
    name : str
        A kernel with its template arguments, such as ``'move_blocks<uint4>'``.
    num_blocks : int
        CUDA blocks; none: nothing is run.
    arguments : tuple
        CuPy arrays (the first one at least), ints, and None for no array.
    width : int, optional
        Threads along a row, a power of two of at most `THREADS`.
    """
    if num_blocks:
        with arguments[0].device as device:
            kernel, shape = _kernel(name, device.id), (width, THREADS // width)
            kernel((num_blocks,), shape, tuple(0 if a is None else a for a in arguments))


@functools.cache
def _kernel(name, device_id):
    """Compile one kernel for one device; CuPy keeps the result on disk."""
    import cupy

    code = Path(__file__).with_name("kernels.cu").read_text(encoding="utf-8")
    module = cupy.RawModule(code=code, options=OPTIONS, name_expressions=[name])
    return module.get_function(name)
