"""softmax over the rows of matrices, or over their columns.

Scope: x is (outer, rows, length), of which softmax runs over length; one of rows and length has stride 1, and AXIS says
which axis of a tile length is, so that loads run along memory: 1 where length is the last axis of x, 0 where it is an
inner one. x is float32, float16 or bfloat16, y has strides of its own. Arithmetic is float32. WHOLE says that a tile
of BLOCK_L holds a row; otherwise rows are walked in blocks, twice, with a running maximum and sum. Programs take tiles
in turn, so any number of programs will do.

A row of −inf throughout gives 0; NaN or +inf anywhere in a row makes it NaN.

Limits: no float64. Backward: hal.kernels.softmax_backward; long rows with a program for each piece:
hal.kernels.softmax_pieces.

Floor, s bytes an element: 2s·outer·rows·length bytes at 5 flops an element. WHOLE meets it; blocks read x twice (3s).

Shape suffixes: R rows of the tile, L its part of the length; A and B stand for (R, L) or (L, R), as AXIS says.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["base_of", "factor_of", "softmax_kernel", "softmax_rows_kernel"]


@triton.jit
def base_of(maximum):
    """What to subtract: the maximum, but 0 for a row of −inf, in which the difference would be NaN."""
    return tl.where(maximum == float("-inf"), 0.0, maximum)


@triton.jit
def factor_of(total):
    """What to multiply with: the reciprocal of the sum, but 1 for a row of −inf, in which every weight is 0."""
    return 1.0 / tl.where(total == 0.0, 1.0, total)


@triton.jit(do_not_specialize=["outer"])
def softmax_kernel(
    x,
    y,
    outer,
    rows,
    length,
    x_outer_stride,
    x_row_stride,
    x_stride,
    y_outer_stride,
    y_row_stride,
    y_stride,
    BLOCK_R: tl.constexpr,
    BLOCK_L: tl.constexpr,
    AXIS: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """y = softmax of x over length."""
    dtype: tl.constexpr = y.dtype.element_ty
    across = tl.cdiv(rows, BLOCK_R)
    x_step, y_step = tl.cast(x_stride, tl.int64), tl.cast(y_stride, tl.int64)
    for tile in range(tl.program_id(0), outer * across, tl.num_programs(0)):
        row_AB = tl.expand_dims(tile % across * BLOCK_R + tl.arange(0, BLOCK_R), AXIS)
        x_AB = x + tile // across * tl.cast(x_outer_stride, tl.int64) + row_AB * tl.cast(x_row_stride, tl.int64)
        y_AB = y + tile // across * tl.cast(y_outer_stride, tl.int64) + row_AB * tl.cast(y_row_stride, tl.int64)
        if WHOLE:
            at_AB = tl.expand_dims(tl.arange(0, BLOCK_L), 1 - AXIS)
            mask_AB = (row_AB < rows) & (at_AB < length)
            v_AB = tl.load(x_AB + at_AB * x_step, mask=mask_AB, other=float("-inf")).to(tl.float32)
            weight_AB = tl.exp(v_AB - tl.expand_dims(base_of(tl.max(v_AB, AXIS)), AXIS))
            share_AB = weight_AB * tl.expand_dims(factor_of(tl.sum(weight_AB, AXIS)), AXIS)
            tl.store(y_AB + at_AB * y_step, share_AB.to(dtype), mask=mask_AB)
        else:
            top_R = tl.full((BLOCK_R,), float("-inf"), tl.float32)
            total_R = tl.zeros((BLOCK_R,), tl.float32)
            for start in range(0, length, BLOCK_L):
                at_AB = tl.expand_dims(start + tl.arange(0, BLOCK_L), 1 - AXIS)
                mask_AB = (row_AB < rows) & (at_AB < length)
                v_AB = tl.load(x_AB + at_AB * x_step, mask=mask_AB, other=float("-inf")).to(tl.float32)
                risen_R = tl.maximum(top_R, tl.max(v_AB, AXIS))
                base_R = base_of(risen_R)
                weight_AB = tl.exp(v_AB - tl.expand_dims(base_R, AXIS))
                total_R = total_R * tl.exp(top_R - base_R) + tl.sum(weight_AB, AXIS)
                top_R = risen_R
            base_AB, factor_AB = tl.expand_dims(base_of(top_R), AXIS), tl.expand_dims(factor_of(total_R), AXIS)
            for start in range(0, length, BLOCK_L):
                at_AB = tl.expand_dims(start + tl.arange(0, BLOCK_L), 1 - AXIS)
                mask_AB = (row_AB < rows) & (at_AB < length)
                v_AB = tl.load(x_AB + at_AB * x_step, mask=mask_AB, other=float("-inf")).to(tl.float32)
                tl.store(y_AB + at_AB * y_step, (tl.exp(v_AB - base_AB) * factor_AB).to(dtype), mask=mask_AB)


# For rows along a last axis, whose number is the caller's affair: 1 row is summed as it is among many. Along an inner
# axis rows lie side by side, and how many there are says how wide a load may be.
softmax_rows_kernel = triton.jit(softmax_kernel.fn, do_not_specialize=["outer", "rows"])
