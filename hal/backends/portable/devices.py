"""Which devices the portable backend finds."""

from __future__ import annotations

import torch

from hal.backends.portable import simdev
from hal.descriptor import DeviceDescriptor, describe
from hal.errors import DeviceError

__all__ = ["present"]


def present(device_type: str) -> list[DeviceDescriptor]:
    """Descriptors of all devices of a torch device type; without one, of the accelerators that torch sees.

    The simulated device exists only once asked for by its name.
    """
    if device_type == simdev.NAME:
        simdev.install()
    if not device_type:
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        device_type = "" if accelerator is None else accelerator.type
    if not device_type:
        return []
    if device_type == "cpu":
        return [describe("cpu")]
    try:
        count = torch.get_device_module(device_type).device_count()
    except (RuntimeError, AttributeError) as error:
        raise DeviceError(
            f"portable:{device_type} was asked for, but torch knows no device type {device_type!r} "
            "here; import the package that registers it first, or choose one that torch has"
        ) from error
    return [describe(torch.device(device_type, index)) for index in range(count)]
