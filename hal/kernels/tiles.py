"""Addresses and masks of tiles, shared by the kernels.

A tile is BLOCK_R rows by BLOCK_F columns of a matrix whose rows lie `stride` elements apart. Addresses are 64-bit;
rows and columns are counted in 32 bits where their number fits, with room for a last step: fewer than 2³¹ − 2²³.

Compilers for vector units without integer comparison turn one on a whole tile into a scalar loop. A mask of positions
against a bound is recognised where it guards a load or a store, and only there; `inside` is for everything else.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["inside", "offsets", "within"]


@triton.jit
def offsets(first, stride, start, BLOCK_R: tl.constexpr, BLOCK_F: tl.constexpr):
    """Of each element of the tile at row `first`, column `start`: (BLOCK_R, BLOCK_F), from the matrix's first."""
    wide = tl.cast(stride, tl.int64)
    return first * wide + tl.arange(0, BLOCK_R)[:, None] * wide + (start + tl.arange(0, BLOCK_F))[None, :]


@triton.jit
def within(first, rows, start, columns, BLOCK_R: tl.constexpr, BLOCK_F: tl.constexpr):
    """Which elements of the tile exist: (BLOCK_R, BLOCK_F), to guard loads and stores."""
    return (first + tl.arange(0, BLOCK_R) < rows)[:, None] & (start + tl.arange(0, BLOCK_F) < columns)[None, :]


@triton.jit
def inside(start, columns, BLOCK_F: tl.constexpr):
    """Which columns of a tile exist: (BLOCK_F,), to choose values; exact for fewer than 2²⁴ columns."""
    return tl.arange(0, BLOCK_F).to(tl.float32) < tl.cast(columns - start, tl.float32)
