"""A simulated accelerator: a real PrivateUse1 device stack of torch, made in Python.

Its tensors are true device tensors (device type, index, storage, dispatch key, autograd) whose bytes lie in
host memory: DLPack's device type for extensions is imported by torch as PrivateUse1, so re-tagging a
capsule lets a CPU tensor and a device tensor share bytes. Every ATen kernel runs on the CPU alias through a
boxed fallback; metadata-only kernels run on the device tensor itself, so that views share its storage. Like
a real device it refuses operands on other devices, and `trace()` counts what real hardware would charge
for: transfers and synchronisations.

It shows dispatch, device handling and the absence of hidden host work; never numerics or speed of any chip.
Limits of torch's Python device guards: no streams, events, generators of its own, autocast, deepcopy or
torch.load, and backward passes must run on the thread that called `install`. One stack a process (torch
renames PrivateUse1 once).
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hal.backends.portable.simdev_kernels import register
from hal.errors import DeviceError

__all__ = ["NAME", "SimulatedDevices", "Trace", "install", "installed"]

NAME = "simdev"

_UNRENAMED = "privateuseone"


@dataclass
class Trace:
    """What ran while tracing: ATen kernels by name, and which of them moved data or made the host wait."""

    kernels: list[str] = field(default_factory=list)
    uploads: list[str] = field(default_factory=list)
    downloads: list[str] = field(default_factory=list)
    synchronisations: list[str] = field(default_factory=list)


class SimulatedDevices(types.ModuleType):
    """The module that torch knows as `torch.simdev`; it holds all state there is."""

    simulated = True
    vendor = "hal"

    def __init__(self, name: str, count: int) -> None:
        super().__init__(f"torch.{name}", __doc__)
        self.device_name = name
        self._count = count
        self._current = 0
        self._traces: list[Trace] = []
        self._libraries: list[torch.library.Library] = []

    # The functions that torch and its users look up on a device module.
    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return True

    def device_count(self) -> int:
        return self._count

    def current_device(self) -> int:
        return self._current

    def set_device(self, device: int | str | torch.device) -> None:
        self._current = self._index(device)

    def get_device_name(self, device: int | str | torch.device | None = None) -> str:
        return self.device_name

    def synchronize(self, device: int | str | torch.device | None = None) -> None:
        """Nothing to wait for: every kernel has finished when it returns."""

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16]

    def manual_seed_all(self, seed: int) -> None:
        """Random kernels draw from the host's generator, which torch.manual_seed has seeded."""

    def _is_in_bad_fork(self) -> bool:
        return False

    @contextmanager
    def device(self, device: int | str | torch.device) -> Iterator[None]:
        """Make `device` the current one inside the block."""
        previous, self._current = self._current, self._index(device)
        try:
            yield
        finally:
            self._current = previous

    @contextmanager
    def trace(self) -> Iterator[Trace]:
        """Record kernels, transfers and synchronisations inside the block."""
        trace = Trace()
        self._traces.append(trace)
        try:
            yield trace
        finally:
            self._traces.remove(trace)

    def _index(self, device: int | str | torch.device) -> int:
        index = device if isinstance(device, int) else torch.device(device).index
        index = self._current if index is None else index
        if not 0 <= index < self._count:
            raise DeviceError(
                f"{self.device_name}:{index} was asked for; there are {self._count} simulated devices, "
                f"0 to {self._count - 1}"
            )
        return index

    def _note(self, kernel: str, kind: str = "kernels") -> None:
        for trace in self._traces:
            getattr(trace, kind).append(kernel)

    def holds(self, value: object) -> bool:
        """Whether `value` is a tensor on one of these devices."""
        return isinstance(value, Tensor) and value.device.type == self.device_name


def installed() -> SimulatedDevices | None:
    """The stack of this process, if there is one."""
    module = getattr(torch, torch._C._get_privateuse1_backend_name(), None)
    return module if isinstance(module, SimulatedDevices) else None


def install(devices: int = 2) -> SimulatedDevices:
    """Register `devices` simulated devices with torch as `simdev:0`, `simdev:1` …

    A second call changes nothing and returns the same stack.

    Raises DeviceError where another device stack (such as torch_npu) already has torch's PrivateUse1 slot.
    """
    if (stack := installed()) is not None:
        return stack
    if (taken := torch._C._get_privateuse1_backend_name()) != _UNRENAMED:
        raise DeviceError(
            f"{NAME} was asked for, but torch has one PrivateUse1 slot a process and {taken} holds it; "
            f"run it in a process (or environment) that does not load the package behind {taken}"
        )
    stack = SimulatedDevices(NAME, devices)
    torch.utils.backend_registration._setup_privateuseone_for_python_backend(NAME, stack, _hooks(), _guard())
    stack._libraries += register(stack)
    # torch's Python guard reports one device, so the engine has no thread for the second: run on the caller's.
    torch.autograd.set_multithreading_enabled(False)
    return stack


def _hooks() -> Any:
    class Hooks(torch._C._acc.PrivateUse1Hooks):
        def is_available(self) -> bool:
            return True

        def is_built(self) -> bool:
            return True

        def has_primary_context(self, index: int) -> bool:
            return True

    return Hooks()


def _guard() -> Any:
    class Guard(torch._C._acc.DeviceGuard):
        def type_(self) -> Any:
            return torch._C._autograd.DeviceType.PrivateUse1

    return Guard()
