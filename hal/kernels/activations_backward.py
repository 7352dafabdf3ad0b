"""Gradients of silu_and_mul and gelu_and_mul, from their input.

With a(gate) the activation, dgate = dy·up·a′(gate) and dup = dy·a(gate).

Scope: x is (rows, 2·features), gate then up, and dy (rows, features), with any row strides and unit last ones, float32,
float16 or bfloat16; dx is like x, contiguous. All arithmetic is float32. Programs take tiles in turn, so any number
of programs will do; a row may be of any length.

Limits: no float64.

Floor, s bytes an element: 5s·rows·features bytes, which the kernels meet, and nothing kept from the forward pass but
its input; some 12 flops a result for silu, 15 for gelu.

Shape suffixes: R rows of the tile, F its features.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hal.kernels.activations import TWICE_SQRT_2_OVER_PI, clamped, gated, gelu_share, halves
from hal.kernels.tiles import offsets, within

__all__ = ["gelu_and_mul_backward_kernel", "silu_and_mul_backward_kernel"]

ONE_OVER_SQRT_2_PI = tl.constexpr(0.3989422804014327)
# Of squares of gates past this the tanh is 1 in float32, and its slope 0.
FLAT = tl.constexpr(1e4)


@triton.jit
def _upstream(dy, first, dy_stride, start, mask_RF, BLOCK_R: tl.constexpr, BLOCK_F: tl.constexpr):
    """dy of a tile, float32."""
    at_RF = offsets(first, dy_stride, start, BLOCK_R, BLOCK_F)
    return tl.load(dy + at_RF, mask=mask_RF, other=0.0).to(tl.float32)


@triton.jit
def _keep(dx, d_gate_RF, d_up_RF, first, start, features, mask_RF, BLOCK_R: tl.constexpr, BLOCK_F: tl.constexpr):
    """Both gradients of a tile, to the halves of dx."""
    dtype: tl.constexpr = dx.dtype.element_ty
    at_RF = offsets(first, 2 * features, start, BLOCK_R, BLOCK_F)
    tl.store(dx + at_RF, d_gate_RF.to(dtype), mask=mask_RF)
    tl.store(dx + features + at_RF, d_up_RF.to(dtype), mask=mask_RF)


@triton.jit
def silu_and_mul_backward_kernel(
    x,
    dy,
    dx,
    rows,
    features,
    x_stride,
    dy_stride,
    limit,
    alpha,
    up_offset,
    BLOCK_R: tl.constexpr,
    BLOCK_F: tl.constexpr,
):
    """dx of y = gate · sigmoid(alpha · gate) · (up + up_offset); past the limit, unless it is None, there is none."""
    across = tl.cdiv(features, BLOCK_F)
    for tile in range(tl.program_id(0), tl.cdiv(rows, BLOCK_R) * across, tl.num_programs(0)):
        first, start = tile // across * BLOCK_R, tile % across * BLOCK_F
        mask_RF = within(first, rows, start, features, BLOCK_R, BLOCK_F)
        raw_gate_RF, raw_up_RF = halves(x, first, x_stride, start, features, mask_RF, BLOCK_R, BLOCK_F)
        dy_RF = _upstream(dy, first, dy_stride, start, mask_RF, BLOCK_R, BLOCK_F)
        gate_RF, up_RF = clamped(raw_gate_RF, raw_up_RF, limit)
        share_RF = tl.sigmoid(alpha * gate_RF)
        slope_RF = share_RF * (1.0 + alpha * gate_RF * (1.0 - share_RF))
        d_gate_RF = dy_RF * (up_RF + up_offset) * slope_RF
        d_up_RF = gated(gate_RF * share_RF, gate_RF, dy_RF)
        if limit is not None:
            d_gate_RF = tl.where(raw_gate_RF <= limit, d_gate_RF, 0.0)
            d_up_RF = tl.where(tl.abs(raw_up_RF) <= limit, d_up_RF, 0.0)
        _keep(dx, d_gate_RF, d_up_RF, first, start, features, mask_RF, BLOCK_R, BLOCK_F)


@triton.jit
def gelu_and_mul_backward_kernel(
    x,
    dy,
    dx,
    rows,
    features,
    x_stride,
    dy_stride,
    TANH: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_F: tl.constexpr,
):
    """dx of y = gelu(gate) · up, by erf or by the tanh approximation."""
    across = tl.cdiv(features, BLOCK_F)
    for tile in range(tl.program_id(0), tl.cdiv(rows, BLOCK_R) * across, tl.num_programs(0)):
        first, start = tile // across * BLOCK_R, tile % across * BLOCK_F
        mask_RF = within(first, rows, start, features, BLOCK_R, BLOCK_F)
        gate_RF, up_RF = halves(x, first, x_stride, start, features, mask_RF, BLOCK_R, BLOCK_F)
        dy_RF = _upstream(dy, first, dy_stride, start, mask_RF, BLOCK_R, BLOCK_F)
        share_RF = gelu_share(gate_RF, TANH)
        if TANH:
            # sigmoid′ = σ(1 − σ); a square that overflowed would make NaN of its 0.
            square_RF = tl.minimum(gate_RF * gate_RF, FLAT)
            steep_RF = share_RF * (1.0 - share_RF) * TWICE_SQRT_2_OVER_PI * (1.0 + 3 * 0.044715 * square_RF)
        else:
            steep_RF = tl.exp(-0.5 * gate_RF * gate_RF) * ONE_OVER_SQRT_2_PI
        d_gate_RF = dy_RF * up_RF * (share_RF + gate_RF * steep_RF)
        d_up_RF = gated(gate_RF * share_RF, gate_RF, dy_RF)
        _keep(dx, d_gate_RF, d_up_RF, first, start, features, mask_RF, BLOCK_R, BLOCK_F)
