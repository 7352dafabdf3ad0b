"""softmax over rows too long for a program's registers, and its gradient: a program for each piece of a row.

`softmax_pieces_kernel` sums each piece relative to the piece's own maximum, `softmax_apply_kernel` puts a row's sums
together and makes its part of the result. One row keeps as many programs busy as it has pieces, and the order of a
row's sums depends on its length alone.

Scope: x, and dy for the gradient, are (rows, length), with any row strides and unit last ones, float32, float16 or
bfloat16; out is contiguous; sums are float32 (2, rows, pieces), or (3, rows, pieces) with dy. Arithmetic is float32.

A row of −inf throughout gives 0, and its gradient is 0; NaN or +inf anywhere in a row makes it NaN.

Limits: no float64.

Floor, s bytes an element: 2s·rows·length bytes, 3s with dy. The pieces read x (and dy) twice: 3s, or 5s.

Shape suffixes: L elements of a piece, P pieces of a row.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hal.kernels.softmax import base_of, factor_of

__all__ = ["softmax_apply_kernel", "softmax_pieces_kernel"]


@triton.jit(do_not_specialize=["rows"])  # 1 row is summed as it is among many
def softmax_pieces_kernel(x, dy, sums, rows, length, pieces, x_stride, dy_stride, BLOCK_L: tl.constexpr):
    """For each piece its maximum, Σ exp(x − maximum), and with dy Σ dy·exp(x − maximum)."""
    at = tl.program_id(0)
    row, start = at // pieces, at % pieces * BLOCK_L
    at_L = start + tl.arange(0, BLOCK_L)
    v_L = tl.load(x + row * tl.cast(x_stride, tl.int64) + at_L, mask=at_L < length, other=float("-inf")).to(tl.float32)
    top = tl.max(v_L, 0)
    weight_L = tl.exp(v_L - base_of(top))
    step = tl.cast(rows, tl.int64) * pieces
    tl.store(sums + at, top)
    tl.store(sums + step + at, tl.sum(weight_L, 0))
    if dy is not None:
        d_L = tl.load(dy + row * tl.cast(dy_stride, tl.int64) + at_L, mask=at_L < length, other=0.0).to(tl.float32)
        tl.store(sums + 2 * step + at, tl.sum(weight_L * d_L, 0))


@triton.jit(do_not_specialize=["rows"])  # 1 row is summed as it is among many
def softmax_apply_kernel(
    x,
    dy,
    sums,
    out,
    rows,
    length,
    pieces,
    x_stride,
    dy_stride,
    BLOCK_L: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """out = softmax of x; with dy, that of its result, out = the gradient of x."""
    row, start = tl.program_id(0) // pieces, tl.program_id(0) % pieces * BLOCK_L
    at_L = start + tl.arange(0, BLOCK_L)
    v_L = tl.load(x + row * tl.cast(x_stride, tl.int64) + at_L, mask=at_L < length, other=float("-inf")).to(tl.float32)
    step = tl.cast(rows, tl.int64) * pieces
    sums += row * tl.cast(pieces, tl.int64)
    top_P = tl.full((BLOCK_P,), float("-inf"), tl.float32)
    total_P = tl.zeros((BLOCK_P,), tl.float32)
    product_P = tl.zeros((BLOCK_P,), tl.float32)
    for first in range(0, pieces, BLOCK_P):
        at_P = first + tl.arange(0, BLOCK_P)
        more_P = tl.load(sums + at_P, mask=at_P < pieces, other=float("-inf"))
        risen_P = tl.maximum(top_P, more_P)
        fall_P, share_P = tl.exp(top_P - base_of(risen_P)), tl.exp(more_P - base_of(risen_P))
        total_P = total_P * fall_P + tl.load(sums + step + at_P, mask=at_P < pieces, other=0.0) * share_P
        if dy is not None:
            product_P = product_P * fall_P + tl.load(sums + 2 * step + at_P, mask=at_P < pieces, other=0.0) * share_P
        top_P = risen_P
    base = base_of(tl.max(top_P, 0))
    share_P = tl.exp(top_P - base)
    total = tl.sum(total_P * share_P, 0)
    factor = factor_of(total)
    value_L = tl.exp(v_L - base) * factor
    if dy is not None:
        d_L = tl.load(dy + row * tl.cast(dy_stride, tl.int64) + at_L, mask=at_L < length, other=0.0).to(tl.float32)
        value_L *= d_L - tl.sum(product_P * share_P, 0) * factor
        value_L = tl.where(total == 0.0, 0.0, value_L)
    tl.store(out + row * tl.cast(length, tl.int64) + at_L, value_L.to(out.dtype.element_ty), mask=at_L < length)
