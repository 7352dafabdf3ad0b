"""silu_and_mul and gelu_and_mul over the halves of a matrix's rows.

Scope: x is (rows, 2·features), gate then up, with any row stride and a unit last one, float32, float16 or bfloat16;
the result is (rows, features), contiguous. All arithmetic is float32. Programs take tiles in turn, so any number of
programs will do; a row may be of any length.

Limits: no float64. Backward: hal.kernels.activations_backward.

Floor, s bytes an element: 3s·rows·features bytes, which the kernel meets; 5 flops a result for silu and for gelu by
erf, 9 by tanh, up to 5 more for alpha, offset and the clamps of silu, and 4 to keep an infinite up from becoming NaN.

Shape suffixes: R rows of the tile, F its features.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hal.kernels.tiles import offsets, within

__all__ = ["gelu_and_mul_kernel", "silu_and_mul_kernel"]

SQRT_HALF = tl.constexpr(0.7071067811865476)
TWICE_SQRT_2_OVER_PI = tl.constexpr(1.5957691216057308)


@triton.jit
def halves(x, first, x_stride, start, features, mask_RF, BLOCK_R: tl.constexpr, BLOCK_F: tl.constexpr):
    """gate and up of a tile, float32."""
    at_RF = offsets(first, x_stride, start, BLOCK_R, BLOCK_F)
    gate_RF = tl.load(x + at_RF, mask=mask_RF, other=0.0).to(tl.float32)
    up_RF = tl.load(x + features + at_RF, mask=mask_RF, other=0.0).to(tl.float32)
    return gate_RF, up_RF


@triton.jit
def gated(activated_RF, gate_RF, up_RF):
    """activated · up; where an infinite up met a finite gate whose activation vanished, and so made NaN, gate · up."""
    y_RF = activated_RF * up_RF
    return tl.where((y_RF != y_RF) & (tl.abs(gate_RF) < float("inf")), gate_RF * up_RF, y_RF)


@triton.jit
def clamped(gate_RF, up_RF, limit):
    """gate ≤ limit and |up| ≤ limit, unless it is None."""
    if limit is not None:
        # Chosen by comparison, which is false for NaN: minimum and maximum may drop it.
        gate_RF = tl.where(gate_RF > limit, limit, gate_RF)
        up_RF = tl.where(up_RF > limit, limit, up_RF)
        up_RF = tl.where(up_RF < -limit, -limit, up_RF)
    return gate_RF, up_RF


@triton.jit
def gelu_share(gate_RF, TANH: tl.constexpr):
    """gelu(gate) / gate: the normal distribution's share below it, or its approximation by tanh."""
    if TANH:
        # (1 + tanh z) / 2 = sigmoid 2z, which cancels nowhere and which every backend of Triton has.
        share_RF = tl.sigmoid((gate_RF + 0.044715 * gate_RF * gate_RF * gate_RF) * TWICE_SQRT_2_OVER_PI)
    else:
        share_RF = 0.5 * (1.0 + tl.erf(gate_RF * SQRT_HALF))
    return share_RF


@triton.jit(do_not_specialize=["rows"])  # 1 row is computed as it is among many
def silu_and_mul_kernel(
    x, y, rows, features, x_stride, limit, alpha, up_offset, BLOCK_R: tl.constexpr, BLOCK_F: tl.constexpr
):
    """y = gate · sigmoid(alpha · gate) · (up + up_offset); gate ≤ limit and |up| ≤ limit first, unless it is None."""
    across = tl.cdiv(features, BLOCK_F)
    for tile in range(tl.program_id(0), tl.cdiv(rows, BLOCK_R) * across, tl.num_programs(0)):
        first, start = tile // across * BLOCK_R, tile % across * BLOCK_F
        mask_RF = within(first, rows, start, features, BLOCK_R, BLOCK_F)
        gate_RF, up_RF = halves(x, first, x_stride, start, features, mask_RF, BLOCK_R, BLOCK_F)
        gate_RF, up_RF = clamped(gate_RF, up_RF, limit)
        y_RF = gated(gate_RF * tl.sigmoid(alpha * gate_RF), gate_RF, up_RF + up_offset)
        tl.store(y + offsets(first, features, start, BLOCK_R, BLOCK_F), y_RF.to(y.dtype.element_ty), mask=mask_RF)


@triton.jit(do_not_specialize=["rows"])  # 1 row is computed as it is among many
def gelu_and_mul_kernel(
    x, y, rows, features, x_stride, TANH: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_F: tl.constexpr
):
    """y = gelu(gate) · up, by erf or by the tanh approximation."""
    across = tl.cdiv(features, BLOCK_F)
    for tile in range(tl.program_id(0), tl.cdiv(rows, BLOCK_R) * across, tl.num_programs(0)):
        first, start = tile // across * BLOCK_R, tile % across * BLOCK_F
        mask_RF = within(first, rows, start, features, BLOCK_R, BLOCK_F)
        gate_RF, up_RF = halves(x, first, x_stride, start, features, mask_RF, BLOCK_R, BLOCK_F)
        y_RF = gated(gate_RF * gelu_share(gate_RF, TANH), gate_RF, up_RF)
        tl.store(y + offsets(first, features, start, BLOCK_R, BLOCK_F), y_RF.to(y.dtype.element_ty), mask=mask_RF)
