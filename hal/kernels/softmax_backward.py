"""The gradient of softmax over the rows of matrices, or over their columns, from its input.

dx = y·(dy − Σ dy·y). y is made again from x, unrounded, which costs no more bytes than the 16-bit y that came out,
whose roundings would spread over a whole row.

Scope: x and dy are (outer, rows, length), with strides of their own, of which softmax runs over length, and dx
likewise; float32, float16 or bfloat16. Arithmetic is float32. AXIS and WHOLE are those of hal.kernels.softmax: a row in
blocks is walked twice, with a running maximum and sums.

A row of −inf throughout gets 0, whatever comes in.

Limits: no float64. Long rows with a program for each piece: hal.kernels.softmax_pieces.

Floor, s bytes an element: 3s·outer·rows·length bytes at 8 flops an element. WHOLE meets it; blocks read x and dy
twice (5s).

Shape suffixes: R rows of the tile, L its part of the length; A and B stand for (R, L) or (L, R), as AXIS says.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hal.kernels.softmax import base_of, factor_of

__all__ = ["softmax_backward_kernel"]


@triton.jit
def softmax_backward_kernel(
    x,
    dy,
    dx,
    outer,
    rows,
    length,
    x_outer_stride,
    x_row_stride,
    x_stride,
    dy_outer_stride,
    dy_row_stride,
    dy_stride,
    dx_outer_stride,
    dx_row_stride,
    dx_stride,
    BLOCK_R: tl.constexpr,
    BLOCK_L: tl.constexpr,
    AXIS: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """dx = the gradient of x, where dy is that of softmax of x over length."""
    dtype: tl.constexpr = dx.dtype.element_ty
    across = tl.cdiv(rows, BLOCK_R)
    x_step, dy_step, dx_step = tl.cast(x_stride, tl.int64), tl.cast(dy_stride, tl.int64), tl.cast(dx_stride, tl.int64)
    for tile in range(tl.program_id(0), outer * across, tl.num_programs(0)):
        row_AB = tl.expand_dims(tile % across * BLOCK_R + tl.arange(0, BLOCK_R), AXIS)
        x_AB = x + tile // across * tl.cast(x_outer_stride, tl.int64) + row_AB * tl.cast(x_row_stride, tl.int64)
        dy_AB = dy + tile // across * tl.cast(dy_outer_stride, tl.int64) + row_AB * tl.cast(dy_row_stride, tl.int64)
        dx_AB = dx + tile // across * tl.cast(dx_outer_stride, tl.int64) + row_AB * tl.cast(dx_row_stride, tl.int64)
        if WHOLE:
            at_AB = tl.expand_dims(tl.arange(0, BLOCK_L), 1 - AXIS)
            mask_AB = (row_AB < rows) & (at_AB < length)
            v_AB = tl.load(x_AB + at_AB * x_step, mask=mask_AB, other=float("-inf")).to(tl.float32)
            d_AB = tl.load(dy_AB + at_AB * dy_step, mask=mask_AB, other=0.0).to(tl.float32)
            weight_AB = tl.exp(v_AB - tl.expand_dims(base_of(tl.max(v_AB, AXIS)), AXIS))
            total_R = tl.sum(weight_AB, AXIS)
            y_AB = weight_AB * tl.expand_dims(factor_of(total_R), AXIS)
            d_AB = y_AB * (d_AB - tl.expand_dims(tl.sum(y_AB * d_AB, AXIS), AXIS))
            d_AB = tl.where(tl.expand_dims(total_R, AXIS) == 0.0, 0.0, d_AB)
            tl.store(dx_AB + at_AB * dx_step, d_AB.to(dtype), mask=mask_AB)
        else:
            top_R = tl.full((BLOCK_R,), float("-inf"), tl.float32)
            total_R = tl.zeros((BLOCK_R,), tl.float32)
            product_R = tl.zeros((BLOCK_R,), tl.float32)
            for start in range(0, length, BLOCK_L):
                at_AB = tl.expand_dims(start + tl.arange(0, BLOCK_L), 1 - AXIS)
                mask_AB = (row_AB < rows) & (at_AB < length)
                v_AB = tl.load(x_AB + at_AB * x_step, mask=mask_AB, other=float("-inf")).to(tl.float32)
                d_AB = tl.load(dy_AB + at_AB * dy_step, mask=mask_AB, other=0.0).to(tl.float32)
                risen_R = tl.maximum(top_R, tl.max(v_AB, AXIS))
                base_R = base_of(risen_R)
                weight_AB, fall_R = tl.exp(v_AB - tl.expand_dims(base_R, AXIS)), tl.exp(top_R - base_R)
                total_R = total_R * fall_R + tl.sum(weight_AB, AXIS)
                product_R = product_R * fall_R + tl.sum(weight_AB * d_AB, AXIS)
                top_R = risen_R
            base_AB, factor_R = tl.expand_dims(base_of(top_R), AXIS), factor_of(total_R)
            factor_AB, mean_AB = tl.expand_dims(factor_R, AXIS), tl.expand_dims(product_R * factor_R, AXIS)
            dead_AB = tl.expand_dims(total_R, AXIS) == 0.0
            for start in range(0, length, BLOCK_L):
                at_AB = tl.expand_dims(start + tl.arange(0, BLOCK_L), 1 - AXIS)
                mask_AB = (row_AB < rows) & (at_AB < length)
                v_AB = tl.load(x_AB + at_AB * x_step, mask=mask_AB, other=float("-inf")).to(tl.float32)
                d_AB = tl.load(dy_AB + at_AB * dy_step, mask=mask_AB, other=0.0).to(tl.float32)
                d_AB = tl.exp(v_AB - base_AB) * factor_AB * (d_AB - mean_AB)
                tl.store(dx_AB + at_AB * dx_step, tl.where(dead_AB, 0.0, d_AB).to(dtype), mask=mask_AB)
