"""What NVRTC makes of the kernels, with CuPy's options: no spills, few registers, wide loads."""

import re

import pytest

from kvlib import backend
from tests.kernels.conftest import missing, require_cupy
from tests.kernels.simulator import ALL_NAMES, SOURCE

CUPY_ADDS = ("-ftz=true", "--device-as-default-execution-space")
# Four blocks of 256 threads fit on a multiprocessor, two where rows are not aligned.
MOST_REGISTERS = {True: 64, False: 128}
# Compiling takes most of this folder's time: everything once, elsewhere what most calls run.
ALL = [name for name in ALL_NAMES if ", 2, " not in name and not re.search("float.*false", name)]
COMMON = ["move_blocks<uint4>", "move_blocks<u8>", "quantize_token<u16, 8, false>"]
COMMON += [name for name in ALL if re.search(r"<(u16, [84]|float, 8), true", name)]
NAMES = {"80": COMMON, "90": ALL, "100": COMMON, "120": COMMON}


def build(source, arch, names):
    """Compile for one architecture; return for each kernel what ptxas says, and its PTX."""
    require_cupy()
    from cupy_backends.cuda.libs import nvrtc

    try:
        nvrtc.getVersion()
    except RuntimeError as error:
        missing(f"NVRTC is not installed ({error})", "KVLIB_REQUIRE_KERNELS")
    program = nvrtc.createProgram(source, "kernels.cu", (), ())
    try:
        for name in names:
            nvrtc.addNameExpression(program, name)
        options = [f"--gpu-architecture=sm_{arch}", "--ptxas-options=-v"]
        try:
            nvrtc.compileProgram(program, [*options, *backend.OPTIONS, *CUPY_ADDS])
        except nvrtc.NVRTCError:
            raise AssertionError(nvrtc.getProgramLog(program)) from None
        assert nvrtc.getCUBIN(program)[:4] == b"\x7fELF"
        log, ptx = nvrtc.getProgramLog(program), nvrtc.getPTX(program)
        ptx = ptx if isinstance(ptx, str) else ptx.decode()
        lowered = {nvrtc.getLoweredName(program, name): name for name in names}
    finally:
        nvrtc.destroyProgram(program)
    numbers = re.findall(
        r"entry function '(\w+)'.*?(\d+) bytes stack frame, (\d+) bytes spill stores, "
        r"(\d+) bytes spill loads.*?Used (\d+) registers",
        log,
        re.DOTALL,
    )
    bodies = dict(re.findall(r"\.entry (\w+)\((.*?)\n\}\n", ptx, re.DOTALL))
    found = {lowered[name]: (*map(int, counts), bodies[name]) for name, *counts in numbers}
    assert set(found) == set(names)
    return found


def inspect(built):
    """Assert what must hold for every kernel."""
    for name, (stack, stores, loads, registers, ptx) in built.items():
        given = re.search(r"<(u16|float|uint4)(?:, (\d), true)?", name)
        if name.startswith("quantize") and ", true" in name:
            assert re.search(r"ld\.global(\.nc)?\.v[24]", ptx), f"{name}: no vector loads"
        if name.startswith("dequantize") and ", true" in name:
            width = {8: "u64", 4: "u32", 2: "u16"}[int(given[2])]
            assert re.search(rf"ld\.global(\.nc)?\.[bu]{width[1:]}", ptx), f"{name}: no wide loads"
            assert re.search(r"st\.global\.v4", ptx), f"{name}: no vector stores"
        if name == "move_blocks<uint4>":
            assert re.search(r"ld\.global(\.nc)?\.v4", ptx), f"{name}: no vector loads"
            assert re.search(r"st\.global\.v4", ptx), f"{name}: no vector stores"
        assert not stores + loads, f"{name}: {stores} + {loads} bytes spilled"
        assert not stack, f"{name}: a stack frame of {stack} bytes"
        assert registers <= MOST_REGISTERS["false" not in name], f"{name}: {registers} registers"


@pytest.mark.parametrize("arch", NAMES)
def test_every_architecture(arch, record_property):
    built = build(SOURCE.read_text(), arch, NAMES[arch])
    inspect(built)
    for name, (_, _, _, registers, _) in built.items():
        record_property(f"sm_{arch} {name} registers", registers)
