"""Compiles what the host side would launch with the real compilers, as far as they go without CANN.

Triton IR, by triton-ascend, is lowered to linalg (triton-adapter-opt, in its wheel) and on to HIVM with planned memory
(bishengir-compile, in the package ascendnpu-ir). There CANN's closed hivmc would take over: a stand-in that only tells
its version ends the run. So every error of the open compilers is real, and nothing is shown of device code.
"""

from __future__ import annotations

import contextlib
import importlib.util
import math
import os
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from triton._C.libtriton import ir
from triton.backends.ascend import compiler
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import ASTSource

from hal.backends.ascend.triton import launch

# Targets of the compiler: unified buffer in KiB, vector cores.
TARGETS = {"Ascend910B3": (192, 40), "Ascend950PR_9579": (248, 56)}
GRID_LIMIT = 65_535
HIVMC_VERSION = "1.2.0"
BYTES = {"i1": 1, "i8": 1, "i16": 2, "f16": 2, "bf16": 2, "i32": 4, "f32": 4, "i64": 8}
POINTERS = {
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.int64: "*i64",
    torch.int32: "*i32",
}


@dataclass(frozen=True)
class Launch:
    """One launch that the host side asked for: the kernel, its grid, and its arguments by name."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any]

    def specialised(self) -> tuple[dict[str, str], dict[str, Any]]:
        """Types of the arguments and values of the constants, as the JIT tells them apart."""
        signature, constants = {}, {}
        for parameter in self.kernel.params:
            value = self.arguments[parameter.name]
            one = type(value) is int and value == 1 and not parameter.do_not_specialize
            if parameter.is_constexpr or value is None or one:
                constants[parameter.name] = value
            elif isinstance(value, torch.Tensor):
                signature[parameter.name] = POINTERS[value.dtype]
            elif isinstance(value, float):
                signature[parameter.name] = "fp32"
            else:
                signature[parameter.name] = "i32" if -(2**31) <= value < 2**31 else "i64"
        return signature, constants


@dataclass(frozen=True)
class Compiled:
    """What the compilers made: IR on the way, IR at the end (None if they failed), and what they said."""

    target: str
    linalg: str
    hivm: str | None
    said: str


@contextlib.contextmanager
def recorded(cores: int) -> Iterator[list[Launch]]:
    """Launches within the block are noted, not run, as on a device with this many vector cores."""
    launches: list[Launch] = []

    class Recorder:
        def __init__(self, kernel: Any) -> None:
            self.kernel = kernel

        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            def note(*arguments: Any, **constants: Any) -> None:
                named = dict(zip(self.kernel.arg_names, arguments, strict=False)) | constants
                launches.append(Launch(self.kernel, grid, named))

            return note

    real = launch.kernel
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "kernel", lambda name: Recorder(real(name)))
        patch.setattr(launch, "vector_cores", lambda device: cores)
        patch.setattr(launch, "on", lambda device: contextlib.nullcontext())
        yield launches


def compiled(asked: Launch, target: str) -> Compiled:
    """The launch's kernel, specialised to its arguments, compiled for the target."""
    signature, constants = asked.specialised()
    newer = target.startswith("Ascend950")
    device = GPUTarget("npu", target, 0)
    backend = compiler.AscendBackend(device)
    options = backend.parse_options({"compile_on_910_95": newer})
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    source = ASTSource(fn=asked.kernel, signature=signature, constants=constants)
    module = source.make_ir(options, backend.get_codegen_implementation(), backend.get_module_map(), context)
    metadata = {"target": device, **vars(options)}
    module = compiler.make_ttir(module, metadata, options)
    linalg = compiler.ttir_to_linalg(module, metadata, options, named_ops=True)
    linalg, _ = compiler._parse_linalg_metadata(linalg, metadata)
    hivm, said = _planned(linalg, target, newer, options.multibuffer)
    return Compiled(target, linalg, hivm, said)


def _planned(linalg: str, target: str, newer: bool, multibuffer: bool) -> tuple[str | None, str]:
    """HIVM with planned memory, and what the compiler said."""
    with tempfile.TemporaryDirectory() as folder:
        given, kept = Path(folder, "kernel.mlir"), Path(folder, "kept")
        given.write_text(linalg)
        program = "bishengir-compile-a5" if newer else "bishengir-compile"
        run = subprocess.run(
            [
                str(_programs() / program),
                str(given),
                f"--target={target}",
                "--enable-hfusion-compile=true",
                "--enable-hivm-compile=true",
                "--enable-triton-kernel-compile=true",
                f"--enable-auto-multi-buffer={str(multibuffer).lower()}",
                f"--save-temps={kept}",
                "-o",
                str(Path(folder, "kernel")),
            ],
            capture_output=True,
            text=True,
            env=os.environ | {"PATH": f"{_stand_in()}:{os.environ['PATH']}"},
            check=False,
        )
        found = list(kept.glob("*.hivm*.mlir"))
        hivm = found[0].read_text() if run.returncode == 0 and found else None
        return hivm, run.stdout + run.stderr


def _programs() -> Path:
    found = importlib.util.find_spec("ascendnpuir")
    assert found is not None and found.origin is not None, "the package ascendnpu-ir is not installed"
    return Path(found.origin).parent / "bin"


@cache
def _stand_in() -> str:
    """A folder with what stands for CANN's hivmc."""
    folder = tempfile.mkdtemp(prefix="hal-no-cann-")
    for name in ("hivmc", "hivmc-a5"):
        program = Path(folder, name)
        program.write_text(f'#!/bin/sh\n[ "$1" != --version ] || echo "hivmc {HIVMC_VERSION}"\n')
        program.chmod(0o755)
    return folder


def problems(asked: Launch, made: Compiled) -> list[str]:
    """Everything that is wrong with a launch and what was made of it; empty for a good one."""
    found = []
    size = math.prod(asked.grid)
    if size > GRID_LIMIT:
        found.append(f"grid: {size} programs, the most is {GRID_LIMIT}")
    if made.hivm is None:
        errors = re.findall(r"error: (.*?overflow.*?)[!(]|(Assertion .*)", made.said)
        told = "; ".join(dict.fromkeys(a or b for a, b in errors)) or made.said[-600:]
        return [*found, f"compiler: {told.strip()}"]
    found += [f"retried: {line}" for line in made.said.splitlines() if line.startswith("[NOTE]")]
    if "ExtractedLoadOrStore" in made.linalg or "DiscreteMemAccess" in made.linalg:
        found.append("scalar: loads or stores that the compiler takes element by element")
    found += [f"scalar: integer comparison of a tile, {line.strip()}" for line in _integer_comparisons(made.linalg)]
    found += [f"scalar: a loop over elements, {line.strip()}" for line in _element_loops(made.hivm)]
    used, most = unified_buffer(made.hivm), TARGETS[made.target][0] * 1024
    if not 0 < used <= most:
        found.append(f"unified buffer: {used} bytes, the target has {most}")
    return found


def _integer_comparisons(linalg: str) -> list[str]:
    return re.findall(r"arith\.cmpi .*: tensor<.*", linalg)


def _element_loops(hivm: str) -> list[str]:
    """Loads and stores whose index is the counter of a loop."""
    counters = set(re.findall(r"scf\.for (%\w+) = ", hivm)) | set(re.findall(r"\^bb\d+\((%\w+): index", hivm))
    found = []
    for line in hivm.splitlines():
        access = re.search(r"memref\.(?:load|store) .*?\[([^\]]*)\]", line)
        if access and counters & set(access[1].replace(",", " ").split()):
            found.append(line)
    return found


def unified_buffer(hivm: str) -> int:
    """Bytes of the unified buffer that the plan reaches up to."""
    top = 0
    for function in hivm.split("func.func "):
        values = dict(re.findall(r"(%\w+) = (?:arith\.constant |llvm\.mlir\.constant\()(-?\d+) : i64", function))
        for names, shape, dtype in re.findall(r"pointer_cast\(([^)]*)\) : memref<((?:\d+x)*)(\w+),[^>]*<ub>", function):
            size = math.prod(int(n) for n in shape.split("x") if n) * BYTES[dtype]
            # One buffer may have several places, which are used in turn.
            top = max(top, *(int(values[name]) + size for name in names.split(", ")))
    return top


def narrowings(made: Compiled) -> tuple[int, int]:
    """Casts of float32 tiles to 16 bits: those that the kernel asks for, and those that HIVM still has."""
    assert made.hivm is not None
    asked = len(re.findall(r"arith\.truncf .*tensor<\S*f32> to tensor", made.linalg))
    return asked, len(re.findall(r"call @vcast_float_to_(?:half|bfloat16_t)|vcvtff\.f322b?f16", made.hivm))
