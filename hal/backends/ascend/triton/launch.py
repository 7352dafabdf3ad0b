"""How kernels are launched on an Ascend device: tiles that its unified buffer holds, grids of its vector cores.

A program is run by one vector core, and programs beyond the number of cores wait, so the grid has one program per
core and each walks its tiles. A grid may have 65,535 programs at most.
"""

from __future__ import annotations

import contextlib
import importlib
from functools import cache
from typing import Any

import torch
from torch import Tensor

__all__ = ["matrix", "power_of_two", "run", "tile"]

GRID_LIMIT = 65_535
# Float32 elements of a tile. The compiler shows what fits: tests/ascend/triton/test_compile.py.
TILE = 4096
WHOLE_ROW = 8192
# 16 elements of 16 bits are the 32 bytes to which the last axis of a tile is padded; more rows gain nothing.
NARROWEST, MOST_ROWS = 16, 64


def power_of_two(n: int) -> int:
    """The least power of two that is not below n (1 or more)."""
    return 1 << (n - 1).bit_length()


def tile(features: int) -> dict[str, Any]:
    """Rows and columns of the tile for rows of this length, and whether it holds whole rows.

    It depends on the length alone, so that a row's result does not depend on how many rows there are.
    """
    whole = features <= WHOLE_ROW
    columns = max(power_of_two(features), NARROWEST) if whole else TILE
    return {"BLOCK_R": max(1, min(TILE // columns, MOST_ROWS)), "BLOCK_F": columns, "WHOLE": whole}


def matrix(x: Tensor) -> Tensor:
    """x as (rows, features) with a unit last stride, without a copy where its strides allow it."""
    x = x.reshape(-1, x.shape[-1])
    return x if x.stride(-1) == 1 else x.contiguous()


def run(name: str, tiles: int, device: torch.device, *arguments: Any, **constants: Any) -> None:
    """Run the kernel `module.function` of hal.kernels on the device's current stream, for this many tiles."""
    programs = min(tiles, vector_cores(device), GRID_LIMIT)
    with on(device):
        kernel(name)[(programs,)](*arguments, **constants)


@cache
def kernel(name: str) -> Any:
    """The kernel; only now is triton imported."""
    module, _, function = name.partition(".")
    return getattr(importlib.import_module(f"hal.kernels.{module}"), function)


@cache
def vector_cores(device: torch.device) -> int:
    """How many vector cores the device has."""
    return int(torch.get_device_module(device).get_device_properties(device).vector_core_num)


def on(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Makes the device current."""
    guard: contextlib.AbstractContextManager[Any] = torch.get_device_module(device).device(device)
    return guard
