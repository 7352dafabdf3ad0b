"""Attention, forward: dense batches and ragged ones, with everything that the contract knows but pages.

Scope: q is (B, S, H, D) or, with prefix sums cu_q and cu_k, (T, H, D) packed; k and v likewise with K heads, v of
width E; any strides, float32, float16 or bfloat16. left and right bound the keys around i + (L − S), both included,
None for no bound (a causal mask is right = 0). mask is a bool or any float bias with strides over (B, H, S, L), sinks a
logit a head of any float dtype. o is contiguous; lse, which may be None, has strides. Rows past the last sequence
come out zero. A program takes BLOCK_M rows, which are the queries of the GROUP heads that share a kv head, in turn of
heads: so few queries fill a tile, and the tile's queries are few, which leaves less to mask. Keys are walked in blocks
from the first that a row of the tile sees to the last; between the edges there is no mask arithmetic.

Keys that no query of a tile sees by length or window are not read, or read as zeros; those that a mask hides from the
whole tile have zeros for values. So what is stored there has no influence.

Limits: no float64; D and E up to 1,024. Scores of float32 are products in float32, or in tf32 where asked for.

Floor, s bytes an element: 2·pairs·(D + E) flops, pairs the visible (query, key) ones of all heads, and
s·(queries·H + keys·K)·(D + E) bytes. What is done is BLOCK_M by BLOCK_N whole at the edges; k and v are read once for
each BLOCK_M rows, from the cache where that holds `together` heads.

Shape suffixes: M rows of the tile, N keys of a block, D and E widths of q·k and of v, 1 and 2 their parts
(`attention_tiles`).
"""

from __future__ import annotations

import triton
import triton.language as tl

from hal.kernels.attention_tiles import (
    INFINITY,
    LN2,
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
    span,
    visible,
    zero_tail,
)

__all__ = ["attention_kernel"]


@triton.jit
def _attend(
    acc1_ME,
    acc2_ME,
    m_M,
    l_M,
    q1_MD,
    q2_MD,
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
    """The running softmax over the keys start … stop; EDGE: not every row sees all of them."""
    for j in tl.range(start, stop, BLOCK_N):
        j_N = j + tl.arange(0, BLOCK_N)
        exist_N = None
        if EDGE:
            within_N = (j_N >= first_key) & (j_N < last_key)
            exist_N = within_N
        k_N = rows_of(k, j, BLOCK_N, k_s, WIDE)
        product_MN = dot(q1_MD, part(k_N, k_d, exist_N, 0, D, D1, WIDE).T, None, PRECISION)
        if D2 > 0:
            product_MN = dot(q2_MD, part(k_N, k_d, exist_N, D1, D, D2, WIDE).T, product_MN, PRECISION)
        x_MN = logit(product_MN, before, unit, SOFTCAP, NATURAL)
        if EDGE:
            seen_MN = visible(i_M[:, None], j_N[None, :], keys, shift, left, right)
            if mask_M is not None:
                at_MN = mask_M[:, None] + (j_N.to(tl.int64) * mask_l)[None, :]
                x_MN, seen_MN = biased(x_MN, seen_MN, at_MN, exist_M[:, None] & within_N[None, :])
            x_MN = tl.where(seen_MN, x_MN, -INFINITY)
        top_M = tl.max(x_MN, 1)
        if not NATURAL:
            top_M *= unit
        top_M = tl.maximum(m_M, top_M)
        # A row that has seen nothing yet has no maximum to take out.
        base_M = tl.where(top_M == -INFINITY, 0.0, top_M)
        p_MN = tl.exp2(exponent(x_MN, base_M[:, None], unit, NATURAL))
        shrink_M = tl.exp2(exponent(m_M, base_M, 1.0, NATURAL))
        m_M = top_M
        l_M = l_M * shrink_M + tl.sum(p_MN, 1)
        v_N = rows_of(v, j, BLOCK_N, v_s, WIDE)
        v1_NE = part(v_N, v_d, exist_N, 0, E, E1, WIDE)
        p_MN = p_MN.to(v1_NE.dtype)
        if mask_M is not None:
            seen_N1 = (tl.max(seen_MN.to(tl.int32), 0) > 0)[:, None]
            v1_NE = tl.where(seen_N1, v1_NE, 0.0)
        acc1_ME = dot(p_MN, v1_NE, acc1_ME * shrink_M[:, None], PRECISION)
        if E2 > 0:
            v2_NE = part(v_N, v_d, exist_N, E1, E, E2, WIDE)
            if mask_M is not None:
                v2_NE = tl.where(seen_N1, v2_NE, 0.0)
            acc2_ME = dot(p_MN, v2_NE, acc2_ME * shrink_M[:, None], PRECISION)
    return acc1_ME, acc2_ME, m_M, l_M


# A sequence is computed as it is among many, whatever their number and their tokens together.
@triton.jit(do_not_specialize=["batch", "queries", "keys"])
def attention_kernel(
    q,
    k,
    v,
    o,
    lse,
    cu_q,
    cu_k,
    mask,
    sinks,
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
    lse_b,
    lse_s,
    lse_h,
    mask_b,
    mask_h,
    mask_s,
    mask_l,
    cu_q_s,
    cu_k_s,
    sinks_s,
    left,
    right,
    before,
    unit,
    GROUP: tl.constexpr,
    SOFTCAP: tl.constexpr,
    NATURAL: tl.constexpr,
    NEGATIVE: tl.constexpr,
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
    """o, and lse; `queries` and `keys` are those of a dense sequence, or of all ragged ones together.

    Grid: tiles · batch · K, or one program if that is 0.
    """
    heads = kv_heads * GROUP
    if cu_q is not None:
        zero_tail(o, cu_q, cu_q_s, batch, queries, heads * E, 1024)
        if lse is not None:
            zero_tail(lse, cu_q, cu_q_s, batch, queries, heads, 1024)
        if batch == 0:
            return
    tile, pair = place(tl.program_id(0), tiles, batch * kv_heads, together)
    b, kv_head = (pair // kv_heads).to(tl.int64), pair % kv_heads
    first_q, S = sequence(cu_q, cu_q_s, b, queries)
    first_k, L = sequence(cu_k, cu_k_s, b, keys)
    if tile * BLOCK_M >= S * GROUP:
        return
    shift = L - S
    first_i, last_i = tile * BLOCK_M // GROUP, tl.minimum((tile * BLOCK_M + BLOCK_M - 1) // GROUP, S - 1)
    i_M, g_M = packed(tile * BLOCK_M, GROUP, BLOCK_M)
    h_M = kv_head.to(tl.int64) * GROUP + g_M
    exist_M = i_M < S

    q_M = q + (b * q_b + tl.cast(first_q, tl.int64) * q_s) + h_M * q_h + i_M.to(tl.int64) * q_s
    q1_MD, q2_MD = part(q_M, q_d, exist_M, 0, D, D1, WIDE), None
    if NEGATIVE:
        q1_MD = -q1_MD
    if D2 > 0:
        q2_MD = part(q_M, q_d, exist_M, D1, D, D2, WIDE)
        if NEGATIVE:
            q2_MD = -q2_MD
    k += b * k_b + tl.cast(first_k, tl.int64) * k_s + kv_head.to(tl.int64) * k_h
    v += b * v_b + tl.cast(first_k, tl.int64) * v_s + kv_head.to(tl.int64) * v_h
    mask_M = None
    if mask is not None:
        mask_M = mask + b * mask_b + h_M * mask_h + i_M.to(tl.int64) * mask_s

    # A sink is a score that is there before all others, and has no value.
    m_M = tl.full((BLOCK_M,), -INFINITY, tl.float32)
    l_M = tl.zeros((BLOCK_M,), tl.float32)
    if sinks is not None:
        sink = tl.load(sinks + h_M * sinks_s).to(tl.float32)
        if not NATURAL:
            sink *= LOG2E
        m_M = tl.zeros((BLOCK_M,), tl.float32) + sink
        l_M += 1.0
    acc1_ME = tl.zeros((BLOCK_M, E1), tl.float32)
    acc2_ME = l_M
    if E2 > 0:
        acc2_ME = tl.zeros((BLOCK_M, E2), tl.float32)

    first_key, last_key, whole_from, whole_to = span(first_i, last_i, L, shift, left, right, BLOCK_N)
    start = first_key // BLOCK_N * BLOCK_N
    if mask is not None:
        whole_to = start
    elif left is not None:
        acc1_ME, acc2_ME, m_M, l_M = _attend(
            acc1_ME, acc2_ME, m_M, l_M, q1_MD, q2_MD, k, v, mask_M, i_M, exist_M, start,
            tl.minimum(whole_from, last_key), first_key, last_key, L, shift, left, right, k_s, k_d, v_s, v_d, mask_l,
            before, unit, True, SOFTCAP, NATURAL, WIDE, PRECISION, D, D1, D2, E, E1, E2, EDGE_N,
        )  # fmt: skip
    if mask is None:
        acc1_ME, acc2_ME, m_M, l_M = _attend(
            acc1_ME, acc2_ME, m_M, l_M, q1_MD, q2_MD, k, v, mask_M, i_M, exist_M, whole_from,
            whole_to, first_key, last_key, L, shift, left, right, k_s, k_d, v_s, v_d, mask_l,
            before, unit, False, SOFTCAP, NATURAL, WIDE, PRECISION, D, D1, D2, E, E1, E2, BLOCK_N,
        )  # fmt: skip
    acc1_ME, acc2_ME, m_M, l_M = _attend(
        acc1_ME, acc2_ME, m_M, l_M, q1_MD, q2_MD, k, v, mask_M, i_M, exist_M, whole_to,
        last_key, first_key, last_key, L, shift, left, right, k_s, k_d, v_s, v_d, mask_l,
        before, unit, True, SOFTCAP, NATURAL, WIDE, PRECISION, D, D1, D2, E, E1, E2, EDGE_N,
    )  # fmt: skip

    row = tl.cast(first_q, tl.int64)
    if cu_q is None:
        row = b * queries
    o_M = o + ((row + i_M) * heads + h_M) * E
    inverse_M1 = (1.0 / tl.where(l_M == 0.0, 1.0, l_M))[:, None]
    put(o_M, acc1_ME * inverse_M1, exist_M, 0, E, E1)
    if E2 > 0:
        put(o_M, acc2_ME * inverse_M1, exist_M, E1, E, E2)
    if lse is not None:
        lse_M = tl.log2(l_M)
        lse_M = m_M + lse_M * LN2 if NATURAL else (m_M + lse_M) * LN2
        lse_M = tl.where(l_M == 0.0, -INFINITY, lse_M)
        at_M = lse + b * lse_b + h_M * lse_h + (tl.cast(first_q, tl.int64) + i_M) * lse_s
        tl.store(at_M, lse_M, mask=exist_M)
