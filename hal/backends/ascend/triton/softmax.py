"""softmax by the kernel of hal.kernels.softmax."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from hal.backends.ascend.triton import launch
from hal.op import empty

__all__ = ["softmax"]


def _blocks(inner: int, length: int) -> dict[str, Any]:
    """The tile: along the length where it is the last axis, otherwise along the axes behind it."""
    if inner == 1:
        blocks = launch.tile(length)
        return {"BLOCK_R": blocks["BLOCK_R"], "BLOCK_L": blocks["BLOCK_F"], "AXIS": 1, "WHOLE": blocks["WHOLE"]}
    columns = min(max(launch.power_of_two(inner), launch.NARROWEST), launch.MOST_ROWS)
    whole = launch.power_of_two(length) * columns <= launch.WHOLE_ROW
    return {
        "BLOCK_R": columns,
        "BLOCK_L": launch.power_of_two(length) if whole else launch.TILE // columns,
        "AXIS": 0,
        "WHOLE": whole,
    }


def softmax(x: Tensor, dim: int = -1) -> Tensor:
    y = empty(x.shape, dtype=x.dtype, device=x.device)
    if not x.numel():
        return y
    dim %= x.dim()
    length, inner = x.shape[dim], math.prod(x.shape[dim + 1 :])
    # A length behind which nothing stands is the last axis, whatever follows it in the shape.
    x_RLI = x.reshape(-1, length) if inner == 1 else x.reshape(-1, length, inner)
    if x_RLI.stride(-1) != 1:
        x_RLI = x_RLI.contiguous()
    blocks = _blocks(inner, length)
    if inner == 1:
        outer, rows = 1, x_RLI.shape[0]
        x_strides, y_strides = (0, x_RLI.stride(0), 1), (0, length, 1)
    else:
        outer, rows = x_RLI.shape[0], inner
        x_strides, y_strides = (x_RLI.stride(0), 1, x_RLI.stride(1)), (length * inner, 1, inner)
    tiles = outer * -(-rows // blocks["BLOCK_R"])
    launch.run(
        "softmax.softmax_kernel", tiles, x.device, x_RLI, y, outer, rows, length, *x_strides, *y_strides, **blocks
    )
    return y
