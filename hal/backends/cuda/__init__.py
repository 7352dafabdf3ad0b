"""The CUDA backend: Triton kernels on NVIDIA GPUs from compute capability 8.0 on, and libraries beside them.

Importing it imports neither triton nor a device's runtime.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from hal.hookspec import Backend, Tuner, hookimpl

if TYPE_CHECKING:
    from hal.capability import Implementation
    from hal.descriptor import DeviceDescriptor

NAME = "cuda"
OLDEST = (8, 0)  # bfloat16 arithmetic, and asynchronous copies into shared memory


def serves(device: torch.device) -> bool:
    """Whether this device is one of the backend's: an NVIDIA chip that its kernels are compiled for."""
    from hal.backends.cuda.offers import missing
    from hal.descriptor.flavour import cuda_flavour

    if missing() is not None or not torch.cuda.is_available():
        return False
    chip = torch.cuda.get_device_properties(device)
    return cuda_flavour(chip.name) == "nvidia" and (chip.major, chip.minor) >= OLDEST


@hookimpl
def hal_backend() -> Backend:
    # Asked for by name alone until the conformance of every operator is recorded on a GPU.
    return Backend(NAME, ("cuda",), "Triton kernels, and libraries, on NVIDIA GPUs", claims=lambda device: False)


@hookimpl
def hal_devices(backend: str) -> Sequence[DeviceDescriptor]:
    if backend != NAME or not torch.cuda.is_available():
        return []
    from hal.descriptor import describe

    present = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    return [describe(device) for device in present if serves(device)]


@hookimpl
def hal_implementations(backend: str) -> Sequence[Implementation]:
    if backend != NAME:
        return []
    from hal.backends.cuda.implementations import IMPLEMENTATIONS

    return IMPLEMENTATIONS


@hookimpl
def hal_tuner(backend: str) -> Tuner | None:
    if backend != NAME:
        return None
    from hal.backends.cuda.tactics import TUNER

    return TUNER
