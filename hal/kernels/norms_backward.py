"""Gradients of rms_norm, add_rms_norm and layer_norm, from the statistics that their forward pass kept.

With x̂ the normed value and g = dy·scale, dx = rstd·(g − [mean g] − x̂·mean(g·x̂)) (+ d_total); the weight's gradient is
Σ dy·x̂ over the rows, the bias's Σ dy. Roundings of the forward pass that are part of its meaning count as the identity,
but the rounded x̂ and weight are what is multiplied.

Scope: x, residual, dy and d_total are (rows, features) with row strides of their own and unit last ones, float32,
float16 or bfloat16; parameters are (features,), contiguous; statistics float32, one a row; dx is contiguous. All
arithmetic is float32. A tile is BLOCK_R rows by BLOCK_F features. `norm_backward_kernel` takes tiles of whole rows in
turn (WHOLE), and sums what it has seen for the weight and the bias: one row of partial sums a program. Otherwise it
walks rows in blocks, and `norm_columns_kernel` makes the partial sums. `sum_rows_kernel` adds them. No sum depends on
which program is faster. With STAGES of 2 and more a program's next tiles are on their way while it sums one.

Limits: no float64.

Floor, s bytes an element: 3s·rows·features bytes (add_rms_norm 5s) at some 10 flops an element. WHOLE moves that and
8 bytes a partial sum: programs·features of them for each parameter. In blocks x and dy are read three times.

Shape suffixes: R rows of the tile, F its features.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hal.kernels.norms import parameter, rounded, scale_of, total_of
from hal.kernels.tiles import offsets, within

__all__ = ["norm_backward_kernel", "norm_columns_kernel", "sum_rows_kernel"]


@triton.jit
def _of_rows(statistic, first, rows, BLOCK_R: tl.constexpr):
    """A number of each row, as a column."""
    at_R = first + tl.arange(0, BLOCK_R)
    return tl.load(statistic + at_R, mask=at_R < rows, other=0.0)[:, None]


@triton.jit
def _normed(v_RF, mean, rstd_R1, first, rows, BLOCK_R: tl.constexpr):
    """What the forward pass multiplied with the weight, before any rounding."""
    if mean is not None:
        v_RF -= _of_rows(mean, first, rows, BLOCK_R)
    return v_RF * rstd_R1


@triton.jit
def _scaled(
    dy_RF, weight, weight_offset, start, features, dtype: tl.constexpr, ROUND: tl.constexpr, BLOCK_F: tl.constexpr
):
    """dy times weight + offset."""
    if weight is not None:
        dy_RF *= scale_of(parameter(weight, start, features, BLOCK_F), weight_offset, dtype, ROUND)
    return dy_RF


@triton.jit
def _partial(sums, at, value_RF, features, start, BLOCK_F: tl.constexpr):
    """The sum over the tile's rows, to row `at` of the partial sums."""
    at_F = start + tl.arange(0, BLOCK_F)
    tl.store(sums + at * tl.cast(features, tl.int64) + at_F, tl.sum(value_RF, 0), mask=at_F < features)


@triton.jit
def norm_backward_kernel(
    x,
    residual,
    weight,
    mean,
    rstd,
    dy,
    d_total,
    dx,
    dw,
    db,
    rows,
    features,
    x_stride,
    residual_stride,
    dy_stride,
    d_total_stride,
    weight_offset,
    BLOCK_R: tl.constexpr,
    BLOCK_F: tl.constexpr,
    WHOLE: tl.constexpr,
    STAGES: tl.constexpr,
    ROUND_BEFORE_WEIGHT: tl.constexpr,
    ROUND_RESIDUAL: tl.constexpr,
):
    """dx, and (WHOLE) partial sums of the gradients of weight and bias; all but x, rstd and dy may be None.

    mean is layer_norm's, and makes this its gradient.
    """
    dtype: tl.constexpr = x.dtype.element_ty
    dw_RF = tl.zeros((BLOCK_R, BLOCK_F), tl.float32)
    db_RF = tl.zeros((BLOCK_R, BLOCK_F), tl.float32)
    for first in tl.range(tl.program_id(0) * BLOCK_R, rows, tl.num_programs(0) * BLOCK_R, num_stages=STAGES):
        rstd_R1 = _of_rows(rstd, first, rows, BLOCK_R)
        if WHOLE:
            mask_RF = within(first, rows, 0, features, BLOCK_R, BLOCK_F)
            v_RF = total_of(x, residual, first, x_stride, residual_stride, 0, mask_RF, BLOCK_R, BLOCK_F)
            dy_RF = total_of(dy, None, first, dy_stride, 0, 0, mask_RF, BLOCK_R, BLOCK_F)
            normed_RF = _normed(rounded(v_RF, dtype, ROUND_RESIDUAL), mean, rstd_R1, first, rows, BLOCK_R)
            if dw is not None:
                dw_RF += dy_RF * rounded(normed_RF, dtype, ROUND_BEFORE_WEIGHT)
            if db is not None:
                db_RF += dy_RF
            if dx is not None:
                g_RF = _scaled(dy_RF, weight, weight_offset, 0, features, dtype, ROUND_BEFORE_WEIGHT, BLOCK_F)
                share_R1 = (tl.sum(g_RF * normed_RF, 1) / features)[:, None]
                if mean is not None:
                    g_RF -= (tl.sum(g_RF, 1) / features)[:, None]
                dx_RF = (g_RF - normed_RF * share_R1) * rstd_R1
                if d_total is not None:
                    dx_RF += total_of(d_total, None, first, d_total_stride, 0, 0, mask_RF, BLOCK_R, BLOCK_F)
                tl.store(dx + offsets(first, features, 0, BLOCK_R, BLOCK_F), dx_RF.to(dtype), mask=mask_RF)
        else:
            products_RF = tl.zeros((BLOCK_R, BLOCK_F), tl.float32)
            sums_RF = tl.zeros((BLOCK_R, BLOCK_F), tl.float32)
            for start in range(0, features, BLOCK_F):
                mask_RF = within(first, rows, start, features, BLOCK_R, BLOCK_F)
                v_RF = total_of(x, residual, first, x_stride, residual_stride, start, mask_RF, BLOCK_R, BLOCK_F)
                dy_RF = total_of(dy, None, first, dy_stride, 0, start, mask_RF, BLOCK_R, BLOCK_F)
                normed_RF = _normed(rounded(v_RF, dtype, ROUND_RESIDUAL), mean, rstd_R1, first, rows, BLOCK_R)
                g_RF = _scaled(dy_RF, weight, weight_offset, start, features, dtype, ROUND_BEFORE_WEIGHT, BLOCK_F)
                products_RF += g_RF * normed_RF
                if mean is not None:
                    sums_RF += g_RF
            share_R1 = (tl.sum(products_RF, 1) / features)[:, None]
            shift_R1 = (tl.sum(sums_RF, 1) / features)[:, None]
            for start in range(0, features, BLOCK_F):
                mask_RF = within(first, rows, start, features, BLOCK_R, BLOCK_F)
                v_RF = total_of(x, residual, first, x_stride, residual_stride, start, mask_RF, BLOCK_R, BLOCK_F)
                dy_RF = total_of(dy, None, first, dy_stride, 0, start, mask_RF, BLOCK_R, BLOCK_F)
                normed_RF = _normed(rounded(v_RF, dtype, ROUND_RESIDUAL), mean, rstd_R1, first, rows, BLOCK_R)
                g_RF = _scaled(dy_RF, weight, weight_offset, start, features, dtype, ROUND_BEFORE_WEIGHT, BLOCK_F)
                if mean is not None:
                    g_RF -= shift_R1
                dx_RF = (g_RF - normed_RF * share_R1) * rstd_R1
                if d_total is not None:
                    dx_RF += total_of(d_total, None, first, d_total_stride, 0, start, mask_RF, BLOCK_R, BLOCK_F)
                tl.store(dx + offsets(first, features, start, BLOCK_R, BLOCK_F), dx_RF.to(dtype), mask=mask_RF)
    if WHOLE:
        if dw is not None:
            _partial(dw, tl.program_id(0), dw_RF, features, 0, BLOCK_F)
        if db is not None:
            _partial(db, tl.program_id(0), db_RF, features, 0, BLOCK_F)


@triton.jit
def norm_columns_kernel(
    x,
    residual,
    mean,
    rstd,
    dy,
    dw,
    db,
    rows,
    features,
    x_stride,
    residual_stride,
    dy_stride,
    BLOCK_R: tl.constexpr,
    BLOCK_F: tl.constexpr,
    ROUND_BEFORE_WEIGHT: tl.constexpr,
    ROUND_RESIDUAL: tl.constexpr,
):
    """Partial sums of the gradients of weight and bias: program (i, j) adds tiles j, j + J, … of columns i."""
    dtype: tl.constexpr = x.dtype.element_ty
    start = tl.program_id(0) * BLOCK_F
    dw_RF = tl.zeros((BLOCK_R, BLOCK_F), tl.float32)
    db_RF = tl.zeros((BLOCK_R, BLOCK_F), tl.float32)
    for first in range(tl.program_id(1) * BLOCK_R, rows, tl.num_programs(1) * BLOCK_R):
        mask_RF = within(first, rows, start, features, BLOCK_R, BLOCK_F)
        dy_RF = total_of(dy, None, first, dy_stride, 0, start, mask_RF, BLOCK_R, BLOCK_F)
        if dw is not None:
            v_RF = total_of(x, residual, first, x_stride, residual_stride, start, mask_RF, BLOCK_R, BLOCK_F)
            rstd_R1 = _of_rows(rstd, first, rows, BLOCK_R)
            normed_RF = _normed(rounded(v_RF, dtype, ROUND_RESIDUAL), mean, rstd_R1, first, rows, BLOCK_R)
            dw_RF += dy_RF * rounded(normed_RF, dtype, ROUND_BEFORE_WEIGHT)
        if db is not None:
            db_RF += dy_RF
    if dw is not None:
        _partial(dw, tl.program_id(1), dw_RF, features, start, BLOCK_F)
    if db is not None:
        _partial(db, tl.program_id(1), db_RF, features, start, BLOCK_F)


@triton.jit
def _added(sums, total, rows, features, start, BLOCK_R: tl.constexpr, BLOCK_F: tl.constexpr):
    """The sum over the rows of a tile of columns."""
    sum_RF = tl.zeros((BLOCK_R, BLOCK_F), tl.float32)
    for first in range(0, rows, BLOCK_R):
        mask_RF = within(first, rows, start, features, BLOCK_R, BLOCK_F)
        sum_RF += tl.load(sums + offsets(first, features, start, BLOCK_R, BLOCK_F), mask=mask_RF, other=0.0)
    at_F = start + tl.arange(0, BLOCK_F)
    tl.store(total + at_F, tl.sum(sum_RF, 0).to(total.dtype.element_ty), mask=at_F < features)


@triton.jit
def sum_rows_kernel(dw_sums, db_sums, dw, db, rows, features, BLOCK_R: tl.constexpr, BLOCK_F: tl.constexpr):
    """dw, db = the sums over the rows of the partial sums (rows, features), float32; a pair may be None."""
    start = tl.program_id(0) * BLOCK_F
    if dw is not None:
        _added(dw_sums, dw, rows, features, start, BLOCK_R, BLOCK_F)
    if db is not None:
        _added(db_sums, db, rows, features, start, BLOCK_R, BLOCK_F)
