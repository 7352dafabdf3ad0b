"""What is known about devices: sourced figures, the data sheets that ship, and what live ones answer."""

from __future__ import annotations

from hal.descriptor.flavour import Flavour, TorchBuild, cuda_flavour
from hal.descriptor.live import describe, is_simulated
from hal.descriptor.model import (
    UNITS,
    ComputeUnit,
    DeviceDescriptor,
    Figure,
    Figures,
    Link,
    MemoryLevel,
    Rate,
    pick,
)
from hal.descriptor.sheets import Finding, audit, find, sheets

__all__ = [
    "UNITS",
    "ComputeUnit",
    "DeviceDescriptor",
    "Figure",
    "Figures",
    "Finding",
    "Flavour",
    "Link",
    "MemoryLevel",
    "Rate",
    "TorchBuild",
    "audit",
    "cuda_flavour",
    "describe",
    "find",
    "is_simulated",
    "pick",
    "sheets",
]
