"""Attention, backward, over keys: gradients of k and v.

What is computed, and its limits and floor: hal.kernels.attention_backward. A program takes a block of keys of one kv
head and walks the queries of all its heads. Where the two accumulators do not fit a program's registers, dk and dv are
found in two launches, at the price of one more product.

Shape suffixes: as in hal.kernels.attention_backward.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hal.kernels.attention_backward import statistics
from hal.kernels.attention_tiles import (
    biased,
    dot,
    exponent,
    logit,
    packed,
    part,
    put,
    sequence,
    slope,
    visible,
    zero_tail,
)

__all__ = ["attention_dkv_kernel"]


@triton.jit
def _over_queries(
    dk1_ND,
    dk2_ND,
    dv1_NE,
    dv2_NE,
    k1_ND,
    k2_ND,
    v1_NE,
    v2_NE,
    q,
    do,
    lse,
    delta,
    mask_N,
    j_N,
    exist_N,
    start,
    stop,
    first_row,
    last_row,
    keys,
    shift,
    left,
    right,
    q_s,
    q_h,
    q_d,
    do_s,
    do_h,
    do_d,
    lse_s,
    lse_h,
    mask_s,
    mask_h,
    before,
    unit,
    EDGE: tl.constexpr,
    WITH_DK: tl.constexpr,
    WITH_DV: tl.constexpr,
    GROUP: tl.constexpr,
    SOFTCAP: tl.constexpr,
    NATURAL: tl.constexpr,
    WIDE: tl.constexpr,
    PRECISION: tl.constexpr,
    D: tl.constexpr,
    D1: tl.constexpr,
    D2: tl.constexpr,
    E: tl.constexpr,
    E1: tl.constexpr,
    E2: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """(dk/scale, dv) over the packed rows start … stop of queries; EDGE: not every one of them sees all keys."""
    for r in tl.range(start, stop, BLOCK_M):
        i_M, g_M = packed(r, GROUP, BLOCK_M)
        exist_M = None
        if EDGE:
            within_M = (i_M >= first_row) & (i_M < last_row)
            exist_M = within_M
        wide_M, wide_g_M = i_M, g_M
        if WIDE:
            wide_M, wide_g_M = i_M.to(tl.int64), g_M.to(tl.int64)
        q_M = q + (wide_M * q_s + wide_g_M * q_h)
        do_M = do + (wide_M * do_s + wide_g_M * do_h)
        q1_MD = part(q_M, q_d, exist_M, 0, D, D1, WIDE)
        product_NM = dot(k1_ND, q1_MD.T, None, PRECISION)
        if D2 > 0:
            q2_MD = part(q_M, q_d, exist_M, D1, D, D2, WIDE)
            product_NM = dot(k2_ND, q2_MD.T, product_NM, PRECISION)
        at_M = i_M.to(tl.int64) * lse_s + g_M.to(tl.int64) * lse_h
        m_M, delta_M = statistics(lse + at_M, delta + at_M, exist_M, NATURAL)
        capped_NM = logit(product_NM, before, unit, SOFTCAP, NATURAL)
        x_NM = capped_NM
        if EDGE:
            seen_NM = visible(i_M[None, :], j_N[:, None], keys, shift, left, right) & within_M[None, :]
            if mask_N is not None:
                at_NM = mask_N[:, None] + (i_M.to(tl.int64) * mask_s + g_M.to(tl.int64) * mask_h)[None, :]
                x_NM, seen_NM = biased(x_NM, seen_NM, at_NM, exist_N[:, None] & within_M[None, :])
        p_NM = tl.exp2(exponent(x_NM, m_M[None, :], unit, NATURAL))
        do1_ME = part(do_M, do_d, exist_M, 0, E, E1, WIDE)
        if E2 > 0:
            do2_ME = part(do_M, do_d, exist_M, E1, E, E2, WIDE)
        if mask_N is not None:
            seen_M1 = (tl.max(seen_NM.to(tl.int32), 0) > 0)[:, None]
            q1_MD, do1_ME = tl.where(seen_M1, q1_MD, 0.0), tl.where(seen_M1, do1_ME, 0.0)
            if D2 > 0:
                q2_MD = tl.where(seen_M1, q2_MD, 0.0)
            if E2 > 0:
                do2_ME = tl.where(seen_M1, do2_ME, 0.0)
        if WITH_DV:
            weight_NM = p_NM
            if EDGE:
                weight_NM = tl.where(seen_NM, p_NM, 0.0)
            weight_NM = weight_NM.to(do1_ME.dtype)
            dv1_NE = dot(weight_NM, do1_ME, dv1_NE, PRECISION)
            if E2 > 0:
                dv2_NE = dot(weight_NM, do2_ME, dv2_NE, PRECISION)
        if WITH_DK:
            dp_NM = dot(v1_NE, do1_ME.T, None, PRECISION)
            if E2 > 0:
                dp_NM = dot(v2_NE, do2_ME.T, dp_NM, PRECISION)
            ds_NM = p_NM * (dp_NM - delta_M[None, :])
            if SOFTCAP:
                ds_NM *= slope(capped_NM, unit, SOFTCAP, NATURAL)
            if EDGE:
                ds_NM = tl.where(seen_NM, ds_NM, 0.0)
            ds_NM = ds_NM.to(q1_MD.dtype)
            dk1_ND = dot(ds_NM, q1_MD, dk1_ND, PRECISION)
            if D2 > 0:
                dk2_ND = dot(ds_NM, q2_MD, dk2_ND, PRECISION)
    return dk1_ND, dk2_ND, dv1_NE, dv2_NE


@triton.jit
def attention_dkv_kernel(
    q,
    k,
    v,
    do,
    lse,
    delta,
    dk,
    dv,
    cu_q,
    cu_k,
    mask,
    batch,
    kv_heads,
    queries,
    keys,
    tiles,
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
    cu_q_s,
    cu_k_s,
    left,
    right,
    before,
    unit,
    scale,
    GROUP: tl.constexpr,
    SOFTCAP: tl.constexpr,
    NATURAL: tl.constexpr,
    WIDE: tl.constexpr,
    PRECISION: tl.constexpr,
    D: tl.constexpr,
    D1: tl.constexpr,
    D2: tl.constexpr,
    E: tl.constexpr,
    E1: tl.constexpr,
    E2: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    EDGE_M: tl.constexpr,
):
    """dk and dv, contiguous, or one of them, the other being None.

    Grid: tiles · batch · K, or one program if that is 0; first tiles come first, for under a causal mask most see them.
    """
    if cu_k is not None:
        if dk is not None:
            zero_tail(dk, cu_k, cu_k_s, batch, keys, kv_heads * D, 1024)
        if dv is not None:
            zero_tail(dv, cu_k, cu_k_s, batch, keys, kv_heads * E, 1024)
        if batch == 0:
            return
    tile, pair = tl.program_id(0) % tiles, tl.program_id(0) // tiles
    b, kv_head = (pair // kv_heads).to(tl.int64), (pair % kv_heads).to(tl.int64)
    first_q, S = sequence(cu_q, cu_q_s, b, queries)
    first_k, L = sequence(cu_k, cu_k_s, b, keys)
    if tile * BLOCK_N >= L:
        return
    shift = L - S
    first_j, last_j = tile * BLOCK_N, tl.minimum(tile * BLOCK_N + BLOCK_N, L) - 1
    j_N = first_j + tl.arange(0, BLOCK_N)
    exist_N = j_N < L
    k_N = k + b * k_b + kv_head * k_h + (tl.cast(first_k, tl.int64) + j_N) * k_s
    v_N = v + b * v_b + kv_head * v_h + (tl.cast(first_k, tl.int64) + j_N) * v_s
    k1_ND, v1_NE = part(k_N, k_d, exist_N, 0, D, D1, WIDE), part(v_N, v_d, exist_N, 0, E, E1, WIDE)
    k2_ND, v2_NE = None, None
    if D2 > 0:
        k2_ND = part(k_N, k_d, exist_N, D1, D, D2, WIDE)
    if E2 > 0:
        v2_NE = part(v_N, v_d, exist_N, E1, E, E2, WIDE)
    nothing_N = tl.zeros((BLOCK_N,), tl.float32)
    dk1_ND, dk2_ND, dv1_NE, dv2_NE = nothing_N, nothing_N, nothing_N, nothing_N
    if dk is not None:
        dk1_ND = tl.zeros((BLOCK_N, D1), tl.float32)
        if D2 > 0:
            dk2_ND = tl.zeros((BLOCK_N, D2), tl.float32)
    if dv is not None:
        dv1_NE = tl.zeros((BLOCK_N, E1), tl.float32)
        if E2 > 0:
            dv2_NE = tl.zeros((BLOCK_N, E2), tl.float32)
    h = kv_head * GROUP
    q += b * q_b + tl.cast(first_q, tl.int64) * q_s + h * q_h
    do += b * do_b + tl.cast(first_q, tl.int64) * do_s + h * do_h
    at = b * lse_b + tl.cast(first_q, tl.int64) * lse_s + h * lse_h
    lse += at
    delta += at
    mask_N = None
    if mask is not None:
        mask_N = mask + b * mask_b + h * mask_h + j_N.to(tl.int64) * mask_l

    WITH_DK: tl.constexpr = dk is not None
    WITH_DV: tl.constexpr = dv is not None
    # The tile's queries: first_row … last_row see a key of it, whole_from … whole_to all of them; then packed rows.
    first_row, whole_from = 0, 0
    last_row, whole_to = S, S
    if right is not None:
        first_row = tl.minimum(tl.maximum(first_j - shift - right, 0), S)
        whole_from = tl.minimum(tl.maximum(last_j - shift - right, 0), S)
    if left is not None:
        last_row = tl.minimum(S, tl.maximum(last_j - shift + left + 1, 0))
        whole_to = tl.minimum(S, tl.maximum(first_j - shift + left + 1, 0))
    start, stop = first_row * GROUP // BLOCK_M * BLOCK_M, last_row * GROUP
    whole_from = tl.cdiv(whole_from * GROUP, BLOCK_M) * BLOCK_M
    whole_to = tl.maximum(whole_from, whole_to * GROUP // BLOCK_M * BLOCK_M)
    if mask is not None:
        whole_to = start
    elif right is not None:
        dk1_ND, dk2_ND, dv1_NE, dv2_NE = _over_queries(
            dk1_ND, dk2_ND, dv1_NE, dv2_NE, k1_ND, k2_ND, v1_NE, v2_NE, q, do, lse, delta, mask_N, j_N, exist_N, start,
            tl.minimum(whole_from, stop), first_row, last_row, L, shift, left, right, q_s, q_h, q_d, do_s, do_h, do_d,
            lse_s, lse_h, mask_s, mask_h, before, unit, True, WITH_DK, WITH_DV, GROUP, SOFTCAP, NATURAL, WIDE,
            PRECISION, D, D1, D2, E, E1, E2, EDGE_M,
        )  # fmt: skip
    if mask is None:
        dk1_ND, dk2_ND, dv1_NE, dv2_NE = _over_queries(
            dk1_ND, dk2_ND, dv1_NE, dv2_NE, k1_ND, k2_ND, v1_NE, v2_NE, q, do, lse, delta, mask_N, j_N, exist_N,
            whole_from, whole_to, first_row, last_row, L, shift, left, right, q_s, q_h, q_d, do_s, do_h, do_d,
            lse_s, lse_h, mask_s, mask_h, before, unit, False, WITH_DK, WITH_DV, GROUP, SOFTCAP, NATURAL, WIDE,
            PRECISION, D, D1, D2, E, E1, E2, BLOCK_M,
        )  # fmt: skip
    dk1_ND, dk2_ND, dv1_NE, dv2_NE = _over_queries(
        dk1_ND, dk2_ND, dv1_NE, dv2_NE, k1_ND, k2_ND, v1_NE, v2_NE, q, do, lse, delta, mask_N, j_N, exist_N, whole_to,
        stop, first_row, last_row, L, shift, left, right, q_s, q_h, q_d, do_s, do_h, do_d,
        lse_s, lse_h, mask_s, mask_h, before, unit, True, WITH_DK, WITH_DV, GROUP, SOFTCAP, NATURAL, WIDE,
        PRECISION, D, D1, D2, E, E1, E2, EDGE_M,
    )  # fmt: skip
    row = tl.cast(first_k, tl.int64)
    if cu_k is None:
        row = b * keys
    row_N = (row + j_N) * kv_heads + kv_head
    if dk is not None:
        put(dk + row_N * D, dk1_ND * scale, exist_N, 0, D, D1)
        if D2 > 0:
            put(dk + row_N * D, dk2_ND * scale, exist_N, D1, D, D2)
    if dv is not None:
        put(dv + row_N * E, dv1_NE, exist_N, 0, E, E1)
        if E2 > 0:
            put(dv + row_N * E, dv2_NE, exist_N, E1, E, E2)
