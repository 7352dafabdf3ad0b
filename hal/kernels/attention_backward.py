"""Attention, backward: δ and the gradient of q, from the saved o and log-sum-exp.

Scope: as for hal.kernels.attention. With P recomputed from the saved lse, dP = do·vᵀ, δ = Σ do·o − dlse and
dS = P·(dP − δ), times the cap's slope: dq = scale·dS·k, dk = scale·dSᵀ·q, dv = Pᵀ·do. P and dS are rounded to the
inputs' dtype for their products. Two kernels, one over queries here, one over keys (`attention_backward_keys`), each
with all that its result needs: no atomics, and the same sums in the same order on every run. attention_delta_kernel
finds δ first. A query's heads are rows beside one another in both, so the heads of a kv head are added up where dk and
dv are.

Rows of q and do that no key of a tile is seen by, and keys that no query of a tile sees, are not read or read as zeros.

Limits: as for hal.kernels.attention. A row whose lse has lost the number of its keys (all biased by the lowest number)
has no gradient to speak of.

Floor, s bytes an element: 2·pairs·(3·D + 2·E) flops for five products, of which the scores and dP are taken twice
here, in both kernels: 2·pairs·(4·D + 3·E). Saved: o and 4 bytes a row and head; δ takes 4 more while it lasts.

Shape suffixes: M rows of queries, N keys, D and E widths of q·k and of v, 1 and 2 their parts (`attention_tiles`).
"""

from __future__ import annotations

import triton
import triton.language as tl

from hal.kernels.attention_tiles import (
    INFINITY,
    LOG2E,
    biased,
    dot,
    exponent,
    logit,
    packed,
    part,
    place,
    put,
    rows_of,
    sequence,
    slope,
    span,
    visible,
    zero_tail,
)

__all__ = ["attention_delta_kernel", "attention_dq_kernel", "statistics"]


@triton.jit
def attention_delta_kernel(
    o,
    do,
    dlse,
    delta,
    cu_q,
    batch,
    queries,
    rows,
    do_b,
    do_s,
    do_h,
    do_d,
    dlse_b,
    dlse_s,
    dlse_h,
    lse_b,
    lse_s,
    lse_h,
    cu_q_s,
    HEADS: tl.constexpr,
    E: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """δ = Σ do·o − dlse of each row and head, in the layout of the lse; 0 past the last sequence. dlse may be None."""
    r_M = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    exist_M = r_M < rows
    t_M, h_M = r_M // HEADS, (r_M % HEADS).to(tl.int64)
    b_M, i_M = (t_M // queries).to(tl.int64), (t_M % queries).to(tl.int64)
    if cu_q is not None:
        owned_M = exist_M & (t_M < tl.load(cu_q + batch * cu_q_s))
    else:
        owned_M = exist_M
    o_ME = part(o + r_M.to(tl.int64) * E, 1, owned_M, 0, E, BLOCK_E, False).to(tl.float32)
    do_M = do + b_M * do_b + i_M * do_s + h_M * do_h
    do_ME = part(do_M, do_d, owned_M, 0, E, BLOCK_E, True).to(tl.float32)
    delta_M = tl.sum(o_ME * do_ME, 1)
    # A row that sees nothing is 0 whatever comes in.
    delta_M = tl.where(tl.max(tl.where(o_ME == 0.0, 0, 1), 1) > 0, delta_M, 0.0)
    if dlse is not None:
        delta_M -= tl.load(dlse + b_M * dlse_b + i_M * dlse_s + h_M * dlse_h, mask=owned_M, other=0.0)
    tl.store(delta + b_M * lse_b + i_M * lse_s + h_M * lse_h, delta_M, mask=exist_M)


@triton.jit
def statistics(lse_M, delta_M, exist_M, NATURAL: tl.constexpr):
    """(m, δ) of rows: what is taken from their exponents, and from dP."""
    if exist_M is None:
        m_M, d_M = tl.load(lse_M), tl.load(delta_M)
    else:
        m_M, d_M = tl.load(lse_M, mask=exist_M, other=0.0), tl.load(delta_M, mask=exist_M, other=0.0)
    m_M = tl.where(m_M == -INFINITY, 0.0, m_M)
    if not NATURAL:
        m_M *= LOG2E
    return m_M, d_M


@triton.jit
def _over_keys(
    dq1_MD,
    dq2_MD,
    q1_MD,
    q2_MD,
    do1_ME,
    do2_ME,
    m_M,
    delta_M,
    k,
    v,
    mask_M,
    i_M,
    exist_M,
    start,
    stop,
    first_key,
    last_key,
    keys,
    shift,
    left,
    right,
    k_s,
    k_d,
    v_s,
    v_d,
    mask_l,
    before,
    unit,
    EDGE: tl.constexpr,
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
    BLOCK_N: tl.constexpr,
):
    """dq/scale over the keys start … stop; EDGE: not every row sees all of them."""
    for j in tl.range(start, stop, BLOCK_N):
        j_N = j + tl.arange(0, BLOCK_N)
        exist_N = None
        if EDGE:
            within_N = (j_N >= first_key) & (j_N < last_key)
            exist_N = within_N
        k_N, v_N = rows_of(k, j, BLOCK_N, k_s, WIDE), rows_of(v, j, BLOCK_N, v_s, WIDE)
        k1_ND = part(k_N, k_d, exist_N, 0, D, D1, WIDE)
        product_MN = dot(q1_MD, k1_ND.T, None, PRECISION)
        if D2 > 0:
            k2_ND = part(k_N, k_d, exist_N, D1, D, D2, WIDE)
            product_MN = dot(q2_MD, k2_ND.T, product_MN, PRECISION)
        capped_MN = logit(product_MN, before, unit, SOFTCAP, NATURAL)
        x_MN = capped_MN
        if EDGE:
            seen_MN = visible(i_M[:, None], j_N[None, :], keys, shift, left, right)
            if mask_M is not None:
                at_MN = mask_M[:, None] + (j_N.to(tl.int64) * mask_l)[None, :]
                x_MN, seen_MN = biased(x_MN, seen_MN, at_MN, exist_M[:, None] & within_N[None, :])
        p_MN = tl.exp2(exponent(x_MN, m_M[:, None], unit, NATURAL))
        dp_MN = dot(do1_ME, part(v_N, v_d, exist_N, 0, E, E1, WIDE).T, None, PRECISION)
        if E2 > 0:
            dp_MN = dot(do2_ME, part(v_N, v_d, exist_N, E1, E, E2, WIDE).T, dp_MN, PRECISION)
        ds_MN = p_MN * (dp_MN - delta_M[:, None])
        if SOFTCAP:
            ds_MN *= slope(capped_MN, unit, SOFTCAP, NATURAL)
        if EDGE:
            ds_MN = tl.where(seen_MN, ds_MN, 0.0)
        ds_MN = ds_MN.to(k1_ND.dtype)
        if mask_M is not None:
            seen_N1 = (tl.max(seen_MN.to(tl.int32), 0) > 0)[:, None]
            k1_ND = tl.where(seen_N1, k1_ND, 0.0)
            if D2 > 0:
                k2_ND = tl.where(seen_N1, k2_ND, 0.0)
        dq1_MD = dot(ds_MN, k1_ND, dq1_MD, PRECISION)
        if D2 > 0:
            dq2_MD = dot(ds_MN, k2_ND, dq2_MD, PRECISION)
    return dq1_MD, dq2_MD


@triton.jit
def attention_dq_kernel(
    q,
    k,
    v,
    do,
    lse,
    delta,
    dq,
    cu_q,
    cu_k,
    mask,
    batch,
    kv_heads,
    queries,
    keys,
    tiles,
    together,
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
    EDGE_N: tl.constexpr,
):
    """dq, contiguous. Programs and tiles as in attention_kernel."""
    heads = kv_heads * GROUP
    if cu_q is not None:
        zero_tail(dq, cu_q, cu_q_s, batch, queries, heads * D, 1024)
        if batch == 0:
            return
    tile, pair = place(tl.program_id(0), tiles, batch * kv_heads, together)
    b, kv_head = (pair // kv_heads).to(tl.int64), (pair % kv_heads).to(tl.int64)
    first_q, S = sequence(cu_q, cu_q_s, b, queries)
    first_k, L = sequence(cu_k, cu_k_s, b, keys)
    if tile * BLOCK_M >= S * GROUP:
        return
    shift = L - S
    first_i, last_i = tile * BLOCK_M // GROUP, tl.minimum((tile * BLOCK_M + BLOCK_M - 1) // GROUP, S - 1)
    i_M, g_M = packed(tile * BLOCK_M, GROUP, BLOCK_M)
    h_M = kv_head * GROUP + g_M
    exist_M = i_M < S

    row_M = tl.cast(first_q, tl.int64) + i_M
    q_M = q + b * q_b + h_M * q_h + row_M * q_s
    do_M = do + b * do_b + h_M * do_h + row_M * do_s
    q1_MD = part(q_M, q_d, exist_M, 0, D, D1, WIDE)
    do1_ME = part(do_M, do_d, exist_M, 0, E, E1, WIDE)
    dq1_MD = tl.zeros((BLOCK_M, D1), tl.float32)
    q2_MD, do2_ME, dq2_MD = None, None, tl.zeros((BLOCK_M,), tl.float32)
    if D2 > 0:
        q2_MD = part(q_M, q_d, exist_M, D1, D, D2, WIDE)
        dq2_MD = tl.zeros((BLOCK_M, D2), tl.float32)
    if E2 > 0:
        do2_ME = part(do_M, do_d, exist_M, E1, E, E2, WIDE)
    at_M = b * lse_b + h_M * lse_h + row_M * lse_s
    m_M, delta_M = statistics(lse + at_M, delta + at_M, exist_M, NATURAL)
    k += b * k_b + tl.cast(first_k, tl.int64) * k_s + kv_head * k_h
    v += b * v_b + tl.cast(first_k, tl.int64) * v_s + kv_head * v_h
    mask_M = None
    if mask is not None:
        mask_M = mask + b * mask_b + h_M * mask_h + i_M.to(tl.int64) * mask_s

    first_key, last_key, whole_from, whole_to = span(first_i, last_i, L, shift, left, right, BLOCK_N)
    start = first_key // BLOCK_N * BLOCK_N
    if mask is not None:
        whole_to = start
    elif left is not None:
        dq1_MD, dq2_MD = _over_keys(
            dq1_MD, dq2_MD, q1_MD, q2_MD, do1_ME, do2_ME, m_M, delta_M, k, v, mask_M, i_M, exist_M, start,
            tl.minimum(whole_from, last_key), first_key, last_key, L, shift, left, right, k_s, k_d, v_s, v_d, mask_l,
            before, unit, True, SOFTCAP, NATURAL, WIDE, PRECISION, D, D1, D2, E, E1, E2, EDGE_N,
        )  # fmt: skip
    if mask is None:
        dq1_MD, dq2_MD = _over_keys(
            dq1_MD, dq2_MD, q1_MD, q2_MD, do1_ME, do2_ME, m_M, delta_M, k, v, mask_M, i_M, exist_M, whole_from,
            whole_to, first_key, last_key, L, shift, left, right, k_s, k_d, v_s, v_d, mask_l,
            before, unit, False, SOFTCAP, NATURAL, WIDE, PRECISION, D, D1, D2, E, E1, E2, BLOCK_N,
        )  # fmt: skip
    dq1_MD, dq2_MD = _over_keys(
        dq1_MD, dq2_MD, q1_MD, q2_MD, do1_ME, do2_ME, m_M, delta_M, k, v, mask_M, i_M, exist_M, whole_to,
        last_key, first_key, last_key, L, shift, left, right, k_s, k_d, v_s, v_d, mask_l,
        before, unit, True, SOFTCAP, NATURAL, WIDE, PRECISION, D, D1, D2, E, E1, E2, EDGE_N,
    )  # fmt: skip
    row = tl.cast(first_q, tl.int64)
    if cu_q is None:
        row = b * queries
    dq_M = dq + ((row + i_M) * heads + h_M) * D
    put(dq_M, dq1_MD * scale, exist_M, 0, D, D1)
    if D2 > 0:
        put(dq_M, dq2_MD * scale, exist_M, D1, D, D2)
