"""A Triton driver without a device: launches of the real host side are compiled to machine code, noted, and not run.

What is compiled is what the launch would run: the same specialisation, by the same ptxas. Registers, spills, shared
memory and the instructions are read from the machine code. Nothing is shown of results.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.backends.nvidia.driver import ty_to_cpp
from triton.runtime import driver

from hal.backends.cuda import launch

# Bytes of shared memory that a program may ask for, by architecture (CUDA programming guide, compute capabilities).
SHARED = {80: 166_912, 90: 232_448, 100: 232_448}
MULTIPROCESSORS = {80: 108, 90: 132, 100: 148}
_BIN = os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin")


@dataclass(frozen=True)
class Launched:
    """One launch: the kernel's name, its grid, and what was compiled for it."""

    name: str
    grid: tuple[int, int, int]
    arguments: tuple[Any, ...]
    machine_code: bytes
    arch: int
    shared: int
    warps: int

    @property
    def usage(self) -> dict[str, int]:
        """REG (registers a thread), STACK, LOCAL (bytes a thread), SHARED."""
        return _usage(self.machine_code)

    @property
    def spilled(self) -> int:
        """Bytes a thread that did not fit its registers."""
        return self.usage["STACK"] + self.usage["LOCAL"]

    def counts(self, pattern: str) -> int:
        """How many instructions match."""
        return len(re.findall(pattern, _instructions(self.machine_code)))


@cache
def _usage(machine_code: bytes) -> dict[str, int]:
    said = _tool("cuobjdump", machine_code, "-res-usage")
    found = re.search(r"REG:\d+ STACK:\d+ SHARED:\d+ LOCAL:\d+", said)
    assert found is not None, said
    return {name: int(value) for name, value in re.findall(r"(\w+):(\d+)", found.group())}


@cache
def _instructions(machine_code: bytes) -> str:
    return _tool("nvdisasm", machine_code, "-c")


def _tool(name: str, machine_code: bytes, flag: str) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(machine_code)
        file.flush()
        done = subprocess.run([os.path.join(_BIN, name), flag, file.name], capture_output=True, text=True, check=True)
    return done.stdout + done.stderr


class CompileOnly(DriverBase):
    """Stands in for NVIDIA's driver of one architecture."""

    def __init__(self, arch: int) -> None:
        self.arch = arch
        self.launched: list[Launched] = []
        self.utils = _Utils(arch)
        launched = self.launched

        class Launcher:
            def __init__(self, source: Any, metadata: Any) -> None:
                self.metadata = metadata

            def __call__(self, x: int, y: int, z: int, stream: int, function: Any, *arguments: Any) -> None:
                name, machine_code = function
                data = self.metadata
                given = arguments[4:]  # after the kernel's metadata, the launch's, and two hooks
                launched.append(Launched(name, (x, y, z), given, machine_code, arch, data.shared, data.num_warps))

        self.launcher_cls = Launcher

    @classmethod
    def is_active(cls) -> bool:
        return True

    def map_python_to_cpp_type(self, ty: str) -> str:
        return str(ty_to_cpp(ty))

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.arch, 32)

    def get_current_device(self) -> int:
        return self.arch  # Triton keeps what it compiled by device

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_active_torch_device(self) -> Any:
        raise AssertionError("nothing is run here")

    def get_benchmarker(self) -> Callable[..., Any]:
        raise AssertionError("nothing is timed here")


class _Utils:
    def __init__(self, arch: int) -> None:
        self.arch = arch

    def load_binary(self, name: str, code: bytes, shared: int, device: int) -> tuple[Any, ...]:
        usage = _usage(code)
        threads = min(1024, 65_536 // max(usage["REG"], 1) // 32 * 32)
        return 1, (name, code), usage["REG"], (usage["STACK"] + usage["LOCAL"]) // 4, threads

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": SHARED[self.arch], "max_num_regs": 65_536, "warpSize": 32}

    def unload_module(self, *module: Any) -> None:
        pass


@cache
def _driver_of(arch: int) -> CompileOnly:
    return CompileOnly(arch)


@contextmanager
def compiling(arch: int) -> Iterator[list[Launched]]:
    """Launches within the block, of tensors on the device "meta", are compiled for sm_<arch> and listed."""
    mine = _driver_of(arch)
    mine.launched.clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "multiprocessors", lambda device: MULTIPROCESSORS[arch])
        patch.setattr(launch, "capability", lambda device: arch)
        patch.setattr(driver, "_active", mine)
        yield mine.launched
