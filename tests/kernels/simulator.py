"""Run the kernels without a GPU: the same source for the CPU, real CuPy arrays in host memory.

Every array lies between two pages that must not be touched, its last byte next to the second one
(or its first byte next to the first one). CuPy's own kernels cannot run, so the few that the
dispatch code uses are NumPy's, on the same memory.
"""

import ctypes
import functools
import hashlib
import mmap
import os
import re
import subprocess
import tempfile
from pathlib import Path

import numpy as np

from kvlib import backend

HEADER = Path(__file__).with_name("cuda_on_cpu.h")
SOURCE = Path(backend.__file__).with_name("kernels.cu")
# A misaligned vector, an index outside a fixed array or an int that overflows traps.
FLAGS = "-std=c++17 -O1 -shared -fPIC -fno-stack-protector -U_FORTIFY_SOURCE -ffp-contract=off -w"
TRAPS = "-fsanitize=alignment,bounds,signed-integer-overflow -fsanitize-undefined-trap-on-error"
POINTEES = {"u8": 1, "u16": 2, "unsigned": 4, "float": 4, "i64": 8, "u64": 8, "uint4": 16}
TYPES = [("u16", bits) for bits in (8, 4, 2)] + [("float", bits) for bits in (8, 4, 2)]
ALL_NAMES = (
    *(f"move_blocks<{word}>" for word in ("uint4", "u64", "unsigned", "u16", "u8")),
    *(
        name
        for kind, bits in TYPES
        for given in (f"{kind}, {bits}, true", f"{kind}, {bits}, false")
        for name in (
            f"quantize_token<{given}>",
            f"dequantize<{given}>",
            *(f"quantize_channel<{given}, {step}>" for step in ("FUSED", "LARGEST", "APPLY")),
        )
    ),
)
METHODS = ("all", "any", "argmax", "astype", "clip", "copy", "max", "min", "sum", "tolist")
FUNCTIONS = (
    *("arange", "argwhere", "asarray", "ascontiguousarray", "bincount", "bitwise_and"),
    *("concatenate", "divide", "stack"),
    *(
        "isfinite",
        "maximum",
        "minimum",
        "pad",
        "rint",
        "subtract",
        "tile",
        "where",
        "zeros",
        "zeros_like",
    ),
)
OPERATORS = (
    *("add", "sub", "mul", "truediv", "floordiv", "mod", "and", "or", "xor", "lshift", "rshift"),
    *("lt", "gt", "le", "ge", "eq", "ne"),
)
PAGE, FILL = mmap.PAGESIZE, 0xAB

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, *[ctypes.c_size_t] * 5]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class KernelFault(AssertionError):
    """What a kernel did that a GPU would punish, or not even notice."""


class Guarded:
    """Memory between two guard pages; bytes between the array and a guard must stay as they are."""

    def __init__(self, num_bytes, at_end=True, filled=True):
        pages = -(-max(num_bytes, 1) // PAGE) * PAGE
        self.length, flags = pages + 2 * PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000
        self.base = _libc.mmap(None, self.length, 3, flags, 2**64 - 1, 0)
        for guard in (self.base, self.base + PAGE + pages):
            assert not _libc.mprotect(guard, PAGE, 0)
        slack = (pages - num_bytes) // 16 * 16 if at_end else 0
        self.pointer, self.num_bytes = self.base + PAGE + slack, num_bytes
        rest = self.base + PAGE + pages - self.pointer - num_bytes
        self._slacks = [(self.pointer - slack, slack), (self.pointer + num_bytes, rest)]
        if filled:
            ctypes.memset(self.base + PAGE, FILL, pages)
        self.filled = filled

    def check(self):
        for start, count in self._slacks if self.filled else ():
            if ctypes.string_at(start, count) != bytes([FILL]) * count:
                raise KernelFault("a kernel wrote beside an array")

    def __del__(self):
        _libc.munmap(self.base, self.length)


@functools.cache
def _library(source, names):
    """Compile kernels for the CPU, once for each text."""
    text = re.sub(r"__shared__ (.+?) (\w+)\[(.+?)\];", _shared, source)
    wrappers = "".join(
        f'extern "C" int kernel_{i}(void** v, const unsigned* g, const unsigned* b, unsigned o, '
        f"char* m) {{ return cpu::launch(&{name}, v, g, b, o, m); }}\n"
        for i, name in enumerate(names)
    )
    text = f'#include "{HEADER}"\n#line 1 "kernels.cu"\n{text}\n{wrappers}'
    command = ["g++", *FLAGS.split(), *TRAPS.split()]
    digest = hashlib.sha256((text + HEADER.read_text() + " ".join(command)).encode()).hexdigest()
    folder = Path(tempfile.gettempdir()) / f"kvlib-kernels-{os.getuid()}"
    folder.mkdir(exist_ok=True)
    built = folder / f"{digest[:20]}.so"
    if not built.exists():
        unfinished = built.with_suffix(f".{os.getpid()}")
        done = subprocess.run(
            [*command, "-x", "c++", "-", "-o", unfinished],
            input=text, text=True, capture_output=True, check=False,
        )  # fmt: skip
        if done.returncode:
            raise RuntimeError(done.stderr[:3000])
        unfinished.rename(built)
    return ctypes.CDLL(str(built))


def _shared(declaration):
    kind, name, count = declaration.groups()
    return f"auto& {name} = cpu::shared<{kind}[{count}], __LINE__>();"


def _parameters(source, name):
    """Return the kinds of a kernel's parameters: bytes of what a pointer points to, or None."""
    template, _, given = name.rstrip(">").partition("<")
    head = rf"template <([^>]*)>\n__global__ void [^{{]*?{template}"
    found = re.search(rf"{head}\((.*?)\) {{", source, re.DOTALL)
    formal = [part.split()[-1] for part in found[1].split(",")]
    actual = dict(zip(formal, given.split(", "), strict=True))
    kinds = []
    for parameter in found[2].split(","):
        words = parameter.replace("const", "").replace("__restrict__", "").split()
        if not words[0].endswith("*"):
            assert words[0] == "i64", parameter
            kinds.append(None)
        else:
            pointee = words[0].rstrip("*")
            kinds.append(POINTEES.get(actual.get(pointee, pointee), 0))
    return kinds


class Simulator:
    """Stands in for a GPU while its `install` is in force."""

    def __init__(self, order=0, source=None, all_names=()):
        self.order, self.at_end = order, order % 2 == 0
        self.source = source or SOURCE.read_text()
        self.all_names, self.memory, self.launched = tuple(all_names), [], []
        self.filled, self.first_block = True, 0

    def allocate(self, num_bytes):
        import cupy

        memory = Guarded(num_bytes, self.at_end, self.filled)
        self.memory.append(memory)
        unowned = cupy.cuda.UnownedMemory(memory.pointer, num_bytes, memory, device_id=0)
        return cupy.cuda.MemoryPointer(unowned, 0)

    def kernel(self, name, _device_id):
        """What backend._kernel returns on a GPU; checks the arguments more strictly than CUDA."""
        names = self.all_names if name in self.all_names else (name,)
        function = getattr(_library(self.source, names), f"kernel_{names.index(name)}")
        kinds = _parameters(self.source, name)

        def run(grid, block, arguments):
            assert len(arguments) == len(kinds), f"{name}: {len(arguments)} arguments"
            assert block[0] * block[1] == backend.THREADS
            assert 0 <= self.first_block < grid[0] < 2**31
            values = []
            for position, (kind, value) in enumerate(zip(kinds, arguments, strict=True)):
                at = f"{name}, argument {position}: {getattr(value, 'dtype', value)}"
                if kind is None:
                    assert type(value) is int, at
                elif _is_cupy(value):
                    assert kind in (0, value.itemsize) or name.startswith("move_blocks"), at
                    # Packed codes travel as bytes, whatever the kernel calls them.
                    value = value.data.ptr
                else:
                    assert value == 0, at
                values.append(ctypes.c_int64(value))
            pointers = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))
            message, dims = ctypes.create_string_buffer(400), ctypes.c_uint * 2
            self.launched.append(name)
            blocks = dims(grid[0] - self.first_block, self.first_block)
            failed = function(pointers, blocks, dims(*block), ctypes.c_uint(self.order), message)
            if failed:
                raise KernelFault(f"{name}: {message.value.decode()}")
            for memory in self.memory:
                memory.check()

        return run

    def install(self, monkeypatch):
        """Put CuPy arrays into host memory, and NumPy in place of what CuPy would compile."""
        import cupy

        previous = cupy.cuda.get_allocator()
        cupy.cuda.set_allocator(self.allocate)
        monkeypatch.setattr(backend, "_kernel", self.kernel)
        monkeypatch.setattr(cupy.ndarray, "device", property(lambda _: _Device()))
        for method in METHODS:
            monkeypatch.setattr(cupy.ndarray, method, self._on_host(getattr(np.ndarray, method)))
        monkeypatch.setattr(
            cupy.ndarray, "__array_ufunc__", lambda *args, **named: self._ufunc(*args, **named)
        )
        for name in FUNCTIONS:
            monkeypatch.setattr(cupy, name, self._on_host(getattr(np, name)))
        for name in [f"__{kind}{name}__" for name in OPERATORS for kind in ("", "r", "i")]:
            if hasattr(np.ndarray, name):
                on_host = self._on_host(getattr(np.ndarray, name), name.startswith("__i"))
                monkeypatch.setattr(cupy.ndarray, name, on_host)
        for name in ("__abs__", "__invert__", "__neg__"):
            monkeypatch.setattr(cupy.ndarray, name, self._on_host(getattr(np.ndarray, name)))
        for name in ("__int__", "__float__", "__bool__"):
            monkeypatch.setattr(
                cupy.ndarray, name, lambda array, name=name: getattr(to_host(array), name)()
            )
        get, reshape = cupy.ndarray.__getitem__, cupy.ndarray.reshape
        monkeypatch.setattr(cupy.ndarray, "reshape", lambda *args: self._reshape(reshape, *args))
        monkeypatch.setattr(cupy.ndarray, "__getitem__", lambda *args: self._get(get, *args))
        monkeypatch.setattr(cupy.ndarray, "__setitem__", _put)
        return lambda: cupy.cuda.set_allocator(previous)

    def to_device(self, array):
        """Copy a NumPy array into CuPy memory."""
        import cupy

        array = np.asarray(array)
        moved = cupy.empty(array.shape, array.dtype)
        to_host(moved)[...] = array
        return moved

    def _on_host(self, function, in_place=False):
        @functools.wraps(function)
        def call(*arguments, **named):
            out = arguments[0] if in_place else named.get("out")
            result = function(*map(_host, arguments), **{k: _host(v) for k, v in named.items()})
            if out is not None:
                return out
            for argument in filter(_is_cupy, arguments):  # what NumPy returned as it was
                if isinstance(result, np.ndarray) and argument.data.ptr == result.ctypes.data:
                    kinds = [(a.shape, a.strides, a.dtype) for a in (argument, result)]
                    if kinds[0] == kinds[1]:
                        return argument
            return self.to_device(result) if isinstance(result, np.ndarray | np.generic) else result

        return call

    def _ufunc(self, _array, ufunc, method, *inputs, out=(None,), **named):
        return self._on_host(getattr(ufunc, method))(*inputs, out=out[0], **named)

    def _reshape(self, reshape, array, *shape):
        moved = to_host(array).reshape(*shape)
        if np.may_share_memory(moved, to_host(array)) or not array.size:
            return reshape(array, *shape)
        return self.to_device(moved)

    def _get(self, get, array, where):
        parts = where if isinstance(where, tuple) else (where,)
        if any(map(_is_cupy, parts)) or any(isinstance(part, np.ndarray | list) for part in parts):
            return self.to_device(to_host(array)[_host(where)])
        return get(array, where)


class _Device:
    id = 0

    def __enter__(self):
        return self

    def __exit__(self, *_):
        return None

    def __eq__(self, other):
        return isinstance(other, _Device)

    __hash__ = object.__hash__


def to_host(array):
    """View a CuPy array's memory as NumPy."""
    low = min((0, *((n - 1) * s for n, s in zip(array.shape, array.strides, strict=True) if s < 0)))
    assert not low
    spans = [(n - 1) * s for n, s in zip(array.shape, array.strides, strict=True)]
    num_bytes = 0 if 0 in array.shape else sum(spans) + array.itemsize
    memory = (ctypes.c_char * num_bytes).from_address(array.data.ptr)
    memory.owner = array.data
    flat = np.frombuffer(memory, np.uint8) if num_bytes else np.empty(0, np.uint8)
    return np.ndarray(array.shape, array.dtype, flat.data if num_bytes else None, 0, array.strides)


def _is_cupy(value):
    return hasattr(getattr(value, "data", None), "ptr")


def _host(value):
    if isinstance(value, list | tuple):
        return type(value)(map(_host, value))
    return to_host(value) if _is_cupy(value) else value


def _put(array, where, value):
    to_host(array)[_host(where)] = _host(value)
