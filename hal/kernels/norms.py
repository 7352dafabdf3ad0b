"""rms_norm, add_rms_norm and layer_norm over the last axis of a matrix, forward.

Scope: x is (rows, features) with any row stride and a unit last one, float32, float16 or bfloat16; parameters are
(features,), contiguous, of any of these dtypes; results are contiguous. Statistics are float32; the variance of
layer_norm is centred, in two passes. A tile is BLOCK_R rows by BLOCK_F features; WHOLE says that it holds whole rows,
otherwise rows are walked in blocks. Programs take tiles of rows in turn, so any number of programs will do. For a
backward pass the statistics go out too, float32, one a row: rstd, and layer_norm's mean.

Limits: no float64; fewer than 2²⁴ features (`tiles.inside`). Backward: hal.kernels.norms_backward.

Floor, s bytes an element, parameters read once in all: rms_norm moves 2s·rows·features bytes at 4 flops an element,
add_rms_norm 4s at 5, layer_norm 2s at 7; a statistic is 4 bytes a row. WHOLE meets it. In blocks rms_norm reads x
twice (3s), add_rms_norm x and residual twice (6s), layer_norm x three times (4s), where a cache may serve the later
reads.

Shape suffixes: R rows of the tile, F its features.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hal.kernels.tiles import inside, offsets, within

__all__ = ["layer_norm_kernel", "rms_norm_kernel"]


@triton.jit
def total_of(
    x, residual, first, x_stride, residual_stride, start, mask_RF, BLOCK_R: tl.constexpr, BLOCK_F: tl.constexpr
):
    """x, or x + residual, in float32."""
    total_RF = tl.load(x + offsets(first, x_stride, start, BLOCK_R, BLOCK_F), mask=mask_RF, other=0.0).to(tl.float32)
    if residual is not None:
        at_RF = offsets(first, residual_stride, start, BLOCK_R, BLOCK_F)
        total_RF += tl.load(residual + at_RF, mask=mask_RF, other=0.0).to(tl.float32)
    return total_RF


@triton.jit
def rounded(t, dtype: tl.constexpr, ROUND: tl.constexpr):
    """t (float32) as it would be stored in this dtype, if asked for."""
    if ROUND:
        t = t.to(dtype).to(tl.float32)
    return t


@triton.jit
def parameter(p, start, features, BLOCK_F: tl.constexpr):
    """A block of a weight or a bias as a row.

    Still in its own dtype: where it is loaded before a row is summed, it waits in as few registers as it needs.
    """
    at_F = start + tl.arange(0, BLOCK_F)
    return tl.load(p + at_F, mask=at_F < features, other=0.0)[None, :]


@triton.jit
def scale_of(weight_1F, weight_offset, dtype: tl.constexpr, ROUND: tl.constexpr):
    """weight + offset, in float32, or (ROUND) as it would be stored in this dtype."""
    return rounded(weight_1F.to(tl.float32) + weight_offset, dtype, ROUND)


@triton.jit
def _weighed(normed_RF, weight_1F, weight_offset, dtype: tl.constexpr, ROUND: tl.constexpr):
    """The normed values times weight + offset, in float32, or (ROUND) as a product in this dtype."""
    # Products of two 16-bit values are exact in float32: rounding one later is multiplying in that dtype.
    y_RF = rounded(normed_RF, dtype, ROUND)
    if weight_1F is not None:
        y_RF *= scale_of(weight_1F, weight_offset, dtype, ROUND)
    return y_RF


@triton.jit
def _affine(normed_RF, weight, bias, start, features, BLOCK_F: tl.constexpr):
    """The normed values times weight plus bias, in float32."""
    if weight is not None:
        normed_RF *= parameter(weight, start, features, BLOCK_F).to(tl.float32)
    if bias is not None:
        normed_RF += parameter(bias, start, features, BLOCK_F).to(tl.float32)
    return normed_RF


@triton.jit
def _keep(statistic, value_R, first, rows, BLOCK_R: tl.constexpr):
    """A number of each row, if it is asked for."""
    if statistic is not None:
        at_R = first + tl.arange(0, BLOCK_R)
        tl.store(statistic + at_R, value_R, mask=at_R < rows)


@triton.jit(do_not_specialize=["rows"])  # 1 row is summed as it is among many
def rms_norm_kernel(
    x,
    residual,
    weight,
    y,
    total,
    rstd,
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
    """y = the rms norm of x, or of x + residual, which goes to total; residual and total, weight, rstd may be None."""
    dtype: tl.constexpr = y.dtype.element_ty
    for first in range(tl.program_id(0) * BLOCK_R, rows, tl.num_programs(0) * BLOCK_R):
        if WHOLE:
            mask_RF = within(first, rows, 0, features, BLOCK_R, BLOCK_F)
            at_RF = offsets(first, features, 0, BLOCK_R, BLOCK_F)
            total_RF = total_of(x, residual, first, x_stride, residual_stride, 0, mask_RF, BLOCK_R, BLOCK_F)
            weight_1F = weight
            if weight is not None:
                weight_1F = parameter(weight, 0, features, BLOCK_F)
            if total is not None:
                tl.store(total + at_RF, total_RF.to(dtype), mask=mask_RF)
            v_RF = rounded(total_RF, dtype, ROUND_RESIDUAL)
            rstd_R = tl.rsqrt(tl.sum(v_RF * v_RF, 1) / features + eps)
            _keep(rstd, rstd_R, first, rows, BLOCK_R)
            y_RF = _weighed(v_RF * rstd_R[:, None], weight_1F, weight_offset, dtype, ROUND_BEFORE_WEIGHT)
            tl.store(y + at_RF, y_RF.to(dtype), mask=mask_RF)
        else:
            squares_RF = tl.zeros((BLOCK_R, BLOCK_F), tl.float32)
            for start in range(0, features, BLOCK_F):
                mask_RF = within(first, rows, start, features, BLOCK_R, BLOCK_F)
                total_RF = total_of(x, residual, first, x_stride, residual_stride, start, mask_RF, BLOCK_R, BLOCK_F)
                v_RF = rounded(total_RF, dtype, ROUND_RESIDUAL)
                squares_RF += v_RF * v_RF
            rstd_R = tl.rsqrt(tl.sum(squares_RF, 1) / features + eps)
            _keep(rstd, rstd_R, first, rows, BLOCK_R)
            for start in range(0, features, BLOCK_F):
                mask_RF = within(first, rows, start, features, BLOCK_R, BLOCK_F)
                at_RF = offsets(first, features, start, BLOCK_R, BLOCK_F)
                total_RF = total_of(x, residual, first, x_stride, residual_stride, start, mask_RF, BLOCK_R, BLOCK_F)
                if total is not None:
                    tl.store(total + at_RF, total_RF.to(dtype), mask=mask_RF)
                v_RF = rounded(total_RF, dtype, ROUND_RESIDUAL)
                weight_1F = weight
                if weight is not None:
                    weight_1F = parameter(weight, start, features, BLOCK_F)
                y_RF = _weighed(v_RF * rstd_R[:, None], weight_1F, weight_offset, dtype, ROUND_BEFORE_WEIGHT)
                tl.store(y + at_RF, y_RF.to(dtype), mask=mask_RF)


@triton.jit(do_not_specialize=["rows"])  # 1 row is summed as it is among many
def layer_norm_kernel(
    x,
    weight,
    bias,
    y,
    mean,
    rstd,
    rows,
    features,
    x_stride,
    eps,
    BLOCK_R: tl.constexpr,
    BLOCK_F: tl.constexpr,
    WHOLE: tl.constexpr,
    EXACT: tl.constexpr,
):
    """y = the layer norm of x; weight and bias, mean and rstd may be None. EXACT: a row is as long as a WHOLE tile."""
    dtype: tl.constexpr = y.dtype.element_ty
    for first in range(tl.program_id(0) * BLOCK_R, rows, tl.num_programs(0) * BLOCK_R):
        if WHOLE:
            mask_RF = within(first, rows, 0, features, BLOCK_R, BLOCK_F)
            v_RF = total_of(x, None, first, x_stride, 0, 0, mask_RF, BLOCK_R, BLOCK_F)
            mean_R = tl.sum(v_RF, 1) / features
            v_RF -= mean_R[:, None]
            if not EXACT:
                v_RF = tl.where(inside(0, features, BLOCK_F)[None, :], v_RF, 0.0)
            rstd_R = tl.rsqrt(tl.sum(v_RF * v_RF, 1) / features + eps)
            _keep(mean, mean_R, first, rows, BLOCK_R)
            _keep(rstd, rstd_R, first, rows, BLOCK_R)
            y_RF = _affine(v_RF * rstd_R[:, None], weight, bias, 0, features, BLOCK_F)
            tl.store(y + offsets(first, features, 0, BLOCK_R, BLOCK_F), y_RF.to(dtype), mask=mask_RF)
        else:
            sums_RF = tl.zeros((BLOCK_R, BLOCK_F), tl.float32)
            for start in range(0, features, BLOCK_F):
                mask_RF = within(first, rows, start, features, BLOCK_R, BLOCK_F)
                sums_RF += total_of(x, None, first, x_stride, 0, start, mask_RF, BLOCK_R, BLOCK_F)
            mean_R = tl.sum(sums_RF, 1) / features
            squares_RF = tl.zeros((BLOCK_R, BLOCK_F), tl.float32)
            for start in range(0, features, BLOCK_F):
                mask_RF = within(first, rows, start, features, BLOCK_R, BLOCK_F)
                v_RF = total_of(x, None, first, x_stride, 0, start, mask_RF, BLOCK_R, BLOCK_F)
                v_RF = tl.where(inside(start, features, BLOCK_F)[None, :], v_RF - mean_R[:, None], 0.0)
                squares_RF += v_RF * v_RF
            rstd_R = tl.rsqrt(tl.sum(squares_RF, 1) / features + eps)
            _keep(mean, mean_R, first, rows, BLOCK_R)
            _keep(rstd, rstd_R, first, rows, BLOCK_R)
            for start in range(0, features, BLOCK_F):
                mask_RF = within(first, rows, start, features, BLOCK_R, BLOCK_F)
                v_RF = total_of(x, None, first, x_stride, 0, start, mask_RF, BLOCK_R, BLOCK_F) - mean_R[:, None]
                y_RF = _affine(v_RF * rstd_R[:, None], weight, bias, start, features, BLOCK_F)
                tl.store(y + offsets(first, features, start, BLOCK_R, BLOCK_F), y_RF.to(dtype), mask=mask_RF)
