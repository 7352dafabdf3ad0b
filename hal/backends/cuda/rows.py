"""Operators over the rows of a matrix: how a tensor lies as one, and the tile that a program takes of it.

A tile is sized so that a thread holds 32 elements: at 16 bits four loads of 16 bytes that are under way together. Some
1,000 threads fit a multiprocessor, which so waits for 64 KiB at a time, twice what 4 TB/s and 1 µs ask of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hal.backends.cuda.tactics import Tactic

__all__ = ["Rows", "one_axis", "parameter", "power_of_two", "tile", "tiles"]

# Elements of a tile that fit a program's registers; longer rows are walked in blocks of TILE.
WHOLE_ROW = 16_384
TILE = 4096
# A warp's elements: 32 lanes of 32. A row of as many is summed within a warp, without shared memory.
WARP = 1024
# Rows of at most as many elements lie in fewer lanes than a warp has, and the warps of a program take rows each.
NARROW = 256
NARROWEST = 16
MOST_ROWS = 64


def power_of_two(n: int) -> int:
    """The least power of two that is not below n (1 or more)."""
    return 1 << (n - 1).bit_length()


def one_axis(shape: Sequence[int], strides: Sequence[int]) -> int | None:
    """The even step of these axes taken as one: from the innermost out, each spans the ones within it. None if not.

    0 for axes of one element, which take no step.
    """
    stride, spanned = None, 1
    for size, step in zip(reversed(shape), reversed(strides), strict=True):
        if size == 1:
            continue
        if stride is None:
            stride = step
        elif step != stride * spanned:
            return None
        spanned *= size
    return 0 if stride is None else stride


@dataclass(frozen=True)
class Rows:
    """A tensor as (rows, features) with a unit last stride, rows `stride` apart; `copied` if only a copy lies so."""

    rows: int
    features: int
    stride: int
    copied: bool

    @classmethod
    def of(cls, x: Tensor) -> Rows:
        features = x.shape[-1]
        rows = x.numel() // features if features else 0
        stride = one_axis(x.shape[:-1], x.stride()[:-1])
        if stride is None or (features > 1 and x.stride(-1) != 1):
            return cls(rows, features, features, True)
        return cls(rows, features, stride if rows > 1 else features, False)

    def lay(self, x: Tensor) -> Tensor:
        """x itself, or the copy that lies so."""
        return x.contiguous() if self.copied else x


def tile(features: int, warp: int = WARP) -> Tactic:
    """The tile for rows of this length, of which a warp takes so many elements.

    It depends on the length alone, so that a row's result does not depend on how many rows there are.
    """
    whole = features <= WHOLE_ROW
    columns = max(power_of_two(features), NARROWEST) if whole else TILE
    warps = 4 if columns <= NARROW else max(1, min(16, columns // warp))
    rows = max(1, min(warps * warp // columns, MOST_ROWS))
    return Tactic({"BLOCK_R": rows, "BLOCK_F": columns, "WHOLE": whole}, {"num_warps": warps})


def tiles(rows: int, taken: Tactic) -> int:
    """How many tiles of rows there are."""
    return -(-rows // taken.constants["BLOCK_R"])


def parameter(p: Tensor | None) -> Callable[[Tensor | None], Tensor | None]:
    """What makes a weight or a bias that lies as p does contiguous, of a dtype that the kernels have.

    They have no float64, and their statistics none of its digits.
    """
    if p is None or (p.is_contiguous() and p.dtype is not torch.float64):
        return _itself
    return _readied


def _itself(p: Tensor | None) -> Tensor | None:
    return p


def _readied(p: Tensor | None) -> Tensor | None:
    assert p is not None
    return (p.float() if p.dtype is torch.float64 else p).contiguous()
