"""Operators over the rows of a matrix: how a tensor lies as one, and the tile that a program takes of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

__all__ = ["Rows", "options", "power_of_two", "tile", "tiles"]

# Float32 elements of a tile that fit a program's registers; longer rows are walked in blocks of it.
WHOLE_ROW = 16_384
TILE = 4096
NARROWEST = 16
MOST_ROWS = 16
ELEMENTS_PER_WARP = 512


def power_of_two(n: int) -> int:
    """The least power of two that is not below n (1 or more)."""
    return 1 << (n - 1).bit_length()


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
        stride, spanned = None, 1
        if features > 1 and x.stride(-1) != 1:
            return cls(rows, features, features, True)
        # The leading axes must be one axis of even steps: from the innermost out, each spans the ones within it.
        for size, step in zip(reversed(x.shape[:-1]), reversed(x.stride()[:-1]), strict=True):
            if size == 1:
                continue
            if stride is None:
                stride = step
            elif step != stride * spanned:
                return cls(rows, features, features, True)
            spanned *= size
        return cls(rows, features, features if stride is None else stride, False)

    def lay(self, x: Tensor) -> Tensor:
        """x itself, or the copy that lies so."""
        return x.contiguous() if self.copied else x


def tile(features: int) -> dict[str, Any]:
    """Rows and columns of the tile for rows of this length, and whether it holds whole rows.

    It depends on the length alone, so that a row's result does not depend on how many rows there are.
    """
    whole = features <= WHOLE_ROW
    columns = max(power_of_two(features), NARROWEST) if whole else TILE
    return {"BLOCK_R": max(1, min(TILE // columns // 2, MOST_ROWS)), "BLOCK_F": columns, "WHOLE": whole}


def tiles(rows: int, blocks: dict[str, Any]) -> int:
    """How many tiles of rows there are."""
    return -(-rows // int(blocks["BLOCK_R"]))


def options(blocks: dict[str, Any]) -> dict[str, int]:
    """The compiler's options for a tile: warps enough to keep its elements in registers."""
    elements = int(blocks["BLOCK_R"]) * int(blocks["BLOCK_F"])
    return {"num_warps": max(1, min(16, elements // ELEMENTS_PER_WARP))}
