"""How a kernel is launched: found, specialised and bound once for a plan, then run with nothing but tensors.

Triton's own `kernel[grid](…)` works out the specialisation of every argument on each call. Here a plan fixes all that
it depends on but one thing, whether each pointer is a multiple of 16 bytes: a `Launch` keeps one compiled kernel for
the aligned call and finds others by their alignment. The kernels are hal.kernels'; their pointers come first.
"""

from __future__ import annotations

import importlib
from functools import cache
from typing import Any

import torch
from torch import Tensor

__all__ = ["Launch", "capability", "kernel", "multiprocessors"]

ALIGNMENT = 16
# torch is built without CUDA where kernels are interpreted or only compiled.
_current_device = getattr(torch._C, "_cuda_getDevice", lambda: -1)


@cache
def kernel(name: str) -> Any:
    """The kernel `module.function` of hal.kernels; only now is triton imported."""
    module, _, function = name.partition(".")
    return getattr(importlib.import_module(f"hal.kernels.{module}"), function)


@cache
def multiprocessors(device: torch.device) -> int:
    """How many multiprocessors the device has."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@cache
def capability(device: torch.device) -> int:
    """The device's compute capability as one number: 80, 90, 100."""
    chip = torch.cuda.get_device_properties(device)
    return int(chip.major) * 10 + int(chip.minor)


class Launch:
    """A kernel with its grid, numbers and constants, to be called with its tensors: all pointers, in order.

    A pointer may be None, in every call or in none. `options` are the compiler's (num_warps, num_stages, …); `values`
    are the kernel's numbers and constants by name. Calls run on the current stream of the device, which need not be
    the current one.
    """

    __slots__ = ("_aligned", "_grid", "_index", "_kernel", "_options", "_others", "_pointers", "_rest")

    def __init__(
        self, name: str, grid: tuple[int, ...], device: torch.device, options: dict[str, int], **values: Any
    ) -> None:
        self._kernel = kernel(name)
        self._grid = (*grid, 1, 1)[:3]
        self._index = device.index if device.type == "cuda" else _current_device()
        self._options = options
        names = self._kernel.arg_names
        self._pointers = len(names) - len(values)
        missing = [n for n in names[self._pointers :] if n not in values]
        if missing:
            raise TypeError(f"{name} is launched without {', '.join(missing)}")
        self._rest = tuple(values[n] for n in names[self._pointers :])
        self._aligned: Any = None
        self._others: dict[tuple[bool, ...], Any] = {}

    def __call__(self, *tensors: Tensor | None) -> None:
        if _current_device() != self._index:
            with torch.cuda.device(self._index):
                return self._run(tensors)
        return self._run(tensors)

    def _run(self, tensors: tuple[Tensor | None, ...]) -> None:
        pointers = [None if t is None else t.data_ptr() for t in tensors]
        together = 0
        for pointer in pointers:
            if pointer is not None:
                together |= pointer
        ready = self._aligned
        if ready is None or together % ALIGNMENT:
            ready = self._specialised(tensors, pointers)
            if ready is None:
                return
        run, stream, function, metadata = ready
        run(*self._grid, stream(self._index), function, metadata, None, None, None, *pointers, *self._rest)

    def _specialised(self, tensors: tuple[Tensor | None, ...], pointers: list[int | None]) -> Any:
        """The compiled kernel for these pointers; None if it was interpreted instead, and has run."""
        aligned = tuple(pointer is None or pointer % ALIGNMENT == 0 for pointer in pointers)
        found = self._aligned if all(aligned) else self._others.get(aligned)
        if found is not None:
            return found
        if len(tensors) != self._pointers:
            raise TypeError(f"{self._kernel.__name__} takes {self._pointers} pointers, not {len(tensors)}")
        if not hasattr(self._kernel, "device_caches"):  # TRITON_INTERPRET=1
            self._kernel[self._grid](*tensors, *self._rest, **self._options)
            return None
        found = _compiled(self._kernel, self._grid, (*tensors, *self._rest), self._options)
        if all(aligned):
            self._aligned = found
        else:
            self._others[aligned] = found
        return found


def _compiled(kernel: Any, grid: tuple[int, ...], arguments: tuple[Any, ...], options: dict[str, int]) -> Any:
    """(run, stream of a device, function, metadata): what a launch needs, specialised by Triton to these arguments."""
    from triton.runtime import driver

    made = kernel.run(*arguments, grid=grid, warmup=True, **options)
    return made.run, driver.active.get_current_stream, made.function, made.packed_metadata
