"""rms_norm, add_rms_norm and layer_norm over the last axis of a matrix, forward.

Scope: x is (rows, features) with any row stride and a unit last one, float32, float16 or bfloat16; parameters are
(features,), contiguous, of any of these dtypes; results are contiguous. Statistics are float32; the variance of
layer_norm is centred, in two passes. A tile is BLOCK_R rows by BLOCK_F features; WHOLE says that it holds whole rows,
otherwise rows are walked in blocks. Programs take tiles of rows in turn, so any number of programs will do.

Limits: no float64; fewer than 2²⁴ features (`tiles.inside`); forward only.

Floor, s bytes an element, parameters read once in all: rms_norm moves 2s·rows·features bytes at 4 flops an element,
add_rms_norm 4s at 5, layer_norm 2s at 7. WHOLE meets it. In blocks rms_norm reads x twice (3s), add_rms_norm x and
residual twice (6s), layer_norm x three times (4s), where a cache may serve the later reads.

Shape suffixes: R rows of the tile, F its features.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hal.kernels.tiles import inside, offsets, within

__all__ = ["layer_norm_kernel", "rms_norm_kernel"]


@triton.jit
def _total(x, residual, first, x_stride, residual_stride, start, mask_RF, BLOCK_R: tl.constexpr, BLOCK_F: tl.constexpr):
    """x, or x + residual, in float32."""
    total_RF = tl.load(x + offsets(first, x_stride, start, BLOCK_R, BLOCK_F), mask=mask_RF, other=0.0).to(tl.float32)
    if residual is not None:
        at_RF = offsets(first, residual_stride, start, BLOCK_R, BLOCK_F)
        total_RF += tl.load(residual + at_RF, mask=mask_RF, other=0.0).to(tl.float32)
    return total_RF


@triton.jit
def _rounded(t, dtype: tl.constexpr, ROUND: tl.constexpr):
    """t (float32) as it would be stored in this dtype, if asked for."""
    if ROUND:
        t = t.to(dtype).to(tl.float32)
    return t


@triton.jit
def _parameter(p, start, features, BLOCK_F: tl.constexpr):
    """A block of a weight or a bias, float32, as a row."""
    at_F = start + tl.arange(0, BLOCK_F)
    return tl.load(p + at_F, mask=at_F < features, other=0.0).to(tl.float32)[None, :]


@triton.jit
def _weighed(
    normed_RF, weight, weight_offset, start, features, dtype: tl.constexpr, ROUND: tl.constexpr, BLOCK_F: tl.constexpr
):
    """The normed values times weight + offset, in float32, or (ROUND) as a product in this dtype."""
    # Products of two 16-bit values are exact in float32: rounding one later is multiplying in that dtype.
    y_RF = _rounded(normed_RF, dtype, ROUND)
    if weight is not None:
        y_RF *= _rounded(_parameter(weight, start, features, BLOCK_F) + weight_offset, dtype, ROUND)
    return y_RF


@triton.jit
def _affine(normed_RF, weight, bias, start, features, BLOCK_F: tl.constexpr):
    """The normed values times weight plus bias, in float32."""
    if weight is not None:
        normed_RF *= _parameter(weight, start, features, BLOCK_F)
    if bias is not None:
        normed_RF += _parameter(bias, start, features, BLOCK_F)
    return normed_RF


@triton.jit
def rms_norm_kernel(
    x,
    residual,
    weight,
    y,
    total,
    rows,
    features,
    x_stride,
    residual_stride,
    eps,
    weight_offset,
    BLOCK_R: tl.constexpr,
    BLOCK_F: tl.constexpr,
    WHOLE: tl.constexpr,
    ROUND_BEFORE_WEIGHT: tl.constexpr,
    ROUND_RESIDUAL: tl.constexpr,
):
    """y = the rms norm of x, or of x + residual, which goes to total; residual and total, and weight, may be None."""
    dtype: tl.constexpr = y.dtype.element_ty
    for first in range(tl.program_id(0) * BLOCK_R, rows, tl.num_programs(0) * BLOCK_R):
        if WHOLE:
            mask_RF = within(first, rows, 0, features, BLOCK_R, BLOCK_F)
            at_RF = offsets(first, features, 0, BLOCK_R, BLOCK_F)
            total_RF = _total(x, residual, first, x_stride, residual_stride, 0, mask_RF, BLOCK_R, BLOCK_F)
            if total is not None:
                tl.store(total + at_RF, total_RF.to(dtype), mask=mask_RF)
            v_RF = _rounded(total_RF, dtype, ROUND_RESIDUAL)
            rstd_R = tl.rsqrt(tl.sum(v_RF * v_RF, 1) / features + eps)
            y_RF = _weighed(
                v_RF * rstd_R[:, None], weight, weight_offset, 0, features, dtype, ROUND_BEFORE_WEIGHT, BLOCK_F
            )
            tl.store(y + at_RF, y_RF.to(dtype), mask=mask_RF)
        else:
            squares_RF = tl.zeros((BLOCK_R, BLOCK_F), tl.float32)
            for start in range(0, features, BLOCK_F):
                mask_RF = within(first, rows, start, features, BLOCK_R, BLOCK_F)
                total_RF = _total(x, residual, first, x_stride, residual_stride, start, mask_RF, BLOCK_R, BLOCK_F)
                v_RF = _rounded(total_RF, dtype, ROUND_RESIDUAL)
                squares_RF += v_RF * v_RF
            rstd_R = tl.rsqrt(tl.sum(squares_RF, 1) / features + eps)
            for start in range(0, features, BLOCK_F):
                mask_RF = within(first, rows, start, features, BLOCK_R, BLOCK_F)
                at_RF = offsets(first, features, start, BLOCK_R, BLOCK_F)
                total_RF = _total(x, residual, first, x_stride, residual_stride, start, mask_RF, BLOCK_R, BLOCK_F)
                if total is not None:
                    tl.store(total + at_RF, total_RF.to(dtype), mask=mask_RF)
                v_RF = _rounded(total_RF, dtype, ROUND_RESIDUAL)
                y_RF = _weighed(
                    v_RF * rstd_R[:, None], weight, weight_offset, start, features, dtype, ROUND_BEFORE_WEIGHT, BLOCK_F
                )
                tl.store(y + at_RF, y_RF.to(dtype), mask=mask_RF)


@triton.jit
def layer_norm_kernel(
    x,
    weight,
    bias,
    y,
    rows,
    features,
    x_stride,
    eps,
    BLOCK_R: tl.constexpr,
    BLOCK_F: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """y = the layer norm of x; weight and bias may be None."""
    dtype: tl.constexpr = y.dtype.element_ty
    for first in range(tl.program_id(0) * BLOCK_R, rows, tl.num_programs(0) * BLOCK_R):
        if WHOLE:
            mask_RF = within(first, rows, 0, features, BLOCK_R, BLOCK_F)
            v_RF = _total(x, None, first, x_stride, 0, 0, mask_RF, BLOCK_R, BLOCK_F)
            mean_R = tl.sum(v_RF, 1) / features
            v_RF = tl.where(inside(0, features, BLOCK_F)[None, :], v_RF - mean_R[:, None], 0.0)
            rstd_R = tl.rsqrt(tl.sum(v_RF * v_RF, 1) / features + eps)
            y_RF = _affine(v_RF * rstd_R[:, None], weight, bias, 0, features, BLOCK_F)
            tl.store(y + offsets(first, features, 0, BLOCK_R, BLOCK_F), y_RF.to(dtype), mask=mask_RF)
        else:
            sums_RF = tl.zeros((BLOCK_R, BLOCK_F), tl.float32)
            for start in range(0, features, BLOCK_F):
                mask_RF = within(first, rows, start, features, BLOCK_R, BLOCK_F)
                sums_RF += _total(x, None, first, x_stride, 0, start, mask_RF, BLOCK_R, BLOCK_F)
            mean_R = tl.sum(sums_RF, 1) / features
            squares_RF = tl.zeros((BLOCK_R, BLOCK_F), tl.float32)
            for start in range(0, features, BLOCK_F):
                mask_RF = within(first, rows, start, features, BLOCK_R, BLOCK_F)
                v_RF = _total(x, None, first, x_stride, 0, start, mask_RF, BLOCK_R, BLOCK_F)
                v_RF = tl.where(inside(start, features, BLOCK_F)[None, :], v_RF - mean_R[:, None], 0.0)
                squares_RF += v_RF * v_RF
            rstd_R = tl.rsqrt(tl.sum(squares_RF, 1) / features + eps)
            for start in range(0, features, BLOCK_F):
                mask_RF = within(first, rows, start, features, BLOCK_R, BLOCK_F)
                v_RF = _total(x, None, first, x_stride, 0, start, mask_RF, BLOCK_R, BLOCK_F) - mean_R[:, None]
                y_RF = _affine(v_RF * rstd_R[:, None], weight, bias, start, features, BLOCK_F)
                tl.store(y + offsets(first, features, start, BLOCK_R, BLOCK_F), y_RF.to(dtype), mask=mask_RF)
