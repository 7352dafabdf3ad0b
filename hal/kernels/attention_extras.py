"""Attention, backward: gradients of an additive mask and of sinks.

Scope: as for hal.kernels.attention_backward. The gradient of a bias is P·(dP − δ), before the cap's slope, summed over
the axes along which the mask is one for all (OVER_…): each program owns a tile of the mask and walks what shares it,
so the sums are the same on every run and nothing of size S·L but the gradient itself is written. That of a sink is
−Σ p·δ over its head's rows, p = exp(sink − lse).

Limits: as for hal.kernels.attention; a mask that is one for all in most of its axes keeps few programs busy.

Floor, s bytes an element: 2·pairs·(D + E) flops and the mask twice, which the first kernel does, but tile by tile whole
at the edges; 8 bytes a row and head for the second.

Shape suffixes: M rows of queries, N keys, D and E widths of q·k and of v, 1 and 2 their parts (`attention_tiles`).
"""

from __future__ import annotations

import triton
import triton.language as tl

from hal.kernels.attention_backward import statistics
from hal.kernels.attention_tiles import INFINITY, LOG2E, biased, dot, exponent, logit, part, visible

__all__ = ["attention_bias_kernel", "attention_sinks_kernel"]


@triton.jit
def _ds(
    q,
    k,
    v,
    do,
    lse,
    delta,
    mask,
    i_M,
    j_N,
    queries,
    keys,
    q_s,
    q_d,
    k_s,
    k_d,
    v_s,
    v_d,
    do_s,
    do_d,
    lse_s,
    mask_s,
    mask_l,
    left,
    right,
    before,
    unit,
    SOFTCAP: tl.constexpr,
    NATURAL: tl.constexpr,
    PRECISION: tl.constexpr,
    D: tl.constexpr,
    D1: tl.constexpr,
    D2: tl.constexpr,
    E: tl.constexpr,
    E1: tl.constexpr,
    E2: tl.constexpr,
):
    """P·(dP − δ) of a tile of one head, 0 where hidden."""
    exist_M, exist_N = i_M < queries, j_N < keys
    i_M, j_N = i_M.to(tl.int64), j_N.to(tl.int64)
    q_M, k_N, v_N, do_M = q + i_M * q_s, k + j_N * k_s, v + j_N * v_s, do + i_M * do_s
    product_MN = dot(
        part(q_M, q_d, exist_M, 0, D, D1, True), part(k_N, k_d, exist_N, 0, D, D1, True).T, None, PRECISION
    )
    dp_MN = dot(part(do_M, do_d, exist_M, 0, E, E1, True), part(v_N, v_d, exist_N, 0, E, E1, True).T, None, PRECISION)
    if D2 > 0:
        product_MN = dot(
            part(q_M, q_d, exist_M, D1, D, D2, True), part(k_N, k_d, exist_N, D1, D, D2, True).T, product_MN, PRECISION
        )
    if E2 > 0:
        dp_MN = dot(
            part(do_M, do_d, exist_M, E1, E, E2, True), part(v_N, v_d, exist_N, E1, E, E2, True).T, dp_MN, PRECISION
        )
    x_MN = logit(product_MN, before, unit, SOFTCAP, NATURAL)
    seen_MN = visible(i_M[:, None], j_N[None, :], keys, keys - queries, left, right) & exist_M[:, None]
    at_MN = mask + (i_M * mask_s)[:, None] + (j_N * mask_l)[None, :]
    x_MN, seen_MN = biased(x_MN, seen_MN, at_MN, exist_M[:, None] & exist_N[None, :])
    m_M, delta_M = statistics(lse + i_M * lse_s, delta + i_M * lse_s, exist_M, NATURAL)
    p_MN = tl.exp2(exponent(x_MN, m_M[:, None], unit, NATURAL))
    return tl.where(seen_MN, p_MN * (dp_MN - delta_M[:, None]), 0.0)


@triton.jit
def attention_bias_kernel(
    q,
    k,
    v,
    do,
    lse,
    delta,
    mask,
    dmask,
    batch,
    kv_heads,
    queries,
    keys,
    rows,
    columns,
    q_b,
    q_s,
    q_h,
    q_d,
    k_b,
    k_s,
    k_h,
    k_d,
    v_b,
    v_s,
    v_h,
    v_d,
    do_b,
    do_s,
    do_h,
    do_d,
    lse_b,
    lse_s,
    lse_h,
    mask_b,
    mask_h,
    mask_s,
    mask_l,
    left,
    right,
    before,
    unit,
    OVER_B: tl.constexpr,
    OVER_H: tl.constexpr,
    OVER_S: tl.constexpr,
    OVER_L: tl.constexpr,
    GROUP: tl.constexpr,
    SOFTCAP: tl.constexpr,
    NATURAL: tl.constexpr,
    PRECISION: tl.constexpr,
    D: tl.constexpr,
    D1: tl.constexpr,
    D2: tl.constexpr,
    E: tl.constexpr,
    E1: tl.constexpr,
    E2: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """dmask, contiguous, of one size along the axes that are summed over. Grid: its tiles, sequences outermost.

    rows and columns are how many tiles it has along S and L.
    """
    column, row = tl.program_id(0) % columns, tl.program_id(0) // columns % rows
    pair = tl.program_id(0) // columns // rows
    heads = kv_heads * GROUP
    if OVER_H:
        b, first_h, last_h = pair, 0, heads
    else:
        b, first_h = pair // heads, pair % heads
        last_h = first_h + 1
    if OVER_B:
        first_b, last_b = 0, batch
    else:
        first_b, last_b = b, b + 1
    first_i, last_i = row * BLOCK_M, row * BLOCK_M + 1
    if OVER_S:
        last_i = queries
    first_j, last_j = column * BLOCK_N, column * BLOCK_N + 1
    if OVER_L:
        last_j = keys
    sum_MN = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for c in range(first_b, last_b):
        for h in range(first_h, last_h):
            wide_c, wide_h, kv_head = tl.cast(c, tl.int64), tl.cast(h, tl.int64), tl.cast(h // GROUP, tl.int64)
            at = wide_c * lse_b + wide_h * lse_h
            for i in range(first_i, last_i, BLOCK_M):
                for j in range(first_j, last_j, BLOCK_N):
                    sum_MN += _ds(
                        q + wide_c * q_b + wide_h * q_h,
                        k + wide_c * k_b + kv_head * k_h,
                        v + wide_c * v_b + kv_head * v_h,
                        do + wide_c * do_b + wide_h * do_h,
                        lse + at,
                        delta + at,
                        mask + wide_c * mask_b + wide_h * mask_h,
                        i + tl.arange(0, BLOCK_M),
                        j + tl.arange(0, BLOCK_N),
                        queries, keys, q_s, q_d, k_s, k_d, v_s, v_d, do_s, do_d, lse_s, mask_s, mask_l, left, right,
                        before, unit, SOFTCAP, NATURAL, PRECISION, D, D1, D2, E, E1, E2,
                    )  # fmt: skip
    i_M, S = first_i + tl.arange(0, BLOCK_M), queries
    if OVER_S:
        sum_MN = tl.sum(sum_MN, 0, keep_dims=True)
        i_M, S = tl.arange(0, 1), 1
    j_N, L = first_j + tl.arange(0, BLOCK_N), keys
    if OVER_L:
        sum_MN = tl.sum(sum_MN, 1, keep_dims=True)
        j_N, L = tl.arange(0, 1), 1
    at_MN = (pair.to(tl.int64) * S + i_M)[:, None] * L + j_N[None, :]
    tl.store(dmask + at_MN, sum_MN.to(dmask.dtype.element_ty), mask=(i_M < S)[:, None] & (j_N < L)[None, :])


@triton.jit
def attention_sinks_kernel(
    lse,
    delta,
    sinks,
    dsinks,
    rows,
    queries,
    lse_b,
    lse_s,
    lse_h,
    sinks_s,
    BLOCK_M: tl.constexpr,
):
    """dsinks, contiguous, a program to a head; rows are those of all sequences."""
    h = tl.program_id(0).to(tl.int64)
    sink = tl.load(sinks + h * sinks_s).to(tl.float32)
    sum_M = tl.zeros((BLOCK_M,), tl.float32)
    for start in range(0, rows, BLOCK_M):
        t_M = start + tl.arange(0, BLOCK_M)
        exist_M = t_M < rows
        at_M = (t_M // queries).to(tl.int64) * lse_b + (t_M % queries).to(tl.int64) * lse_s + h * lse_h
        lse_M = tl.load(lse + at_M, mask=exist_M, other=0.0)
        delta_M = tl.load(delta + at_M, mask=exist_M, other=0.0)
        # A sink of −inf, alone: nothing.
        p_M = tl.exp2((sink - tl.where(lse_M == -INFINITY, 0.0, lse_M)) * LOG2E)
        # Rows past the last sequence have no δ, and no lse to hold the exponential down.
        sum_M -= tl.where(delta_M == 0.0, 0.0, p_M * delta_M)
    tl.store(dsinks + h, tl.sum(sum_M, 0).to(dsinks.dtype.element_ty))
