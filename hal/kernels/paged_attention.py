"""paged_attention: packed queries over keys and values in a paged cache; decode, chunked prefill and mixtures.

Scope: q is (T, H, D) with any strides, float32, float16 or bfloat16; caches are (N, P, K, D) and (N, P, K, E), any page
size P, any strides and a unit last one, of q's dtype, int8, or float8_e4m3fn, which may come as uint8 and is then
decoded by its bits. Lengths and the table stay on the device. Scores and sums are float32, in units of log2; P is
rounded to q's dtype, beside codes to float16 at most. A tile of queries holds BLOCK_M rows, which are the queries of
one sequence times the heads of one kv head's group, so that a group reads its keys once. Its keys may be divided among
several programs, whose partial results `combine_kernel` adds up.

A key's place is looked up by page for each row of a tile, one tile ahead of the loads that need it. No entry of the
table and no slot is read that no query of the tile sees.

Limits: no float64; forward only.

Floor, c bytes an element of the caches: K·(D + E)·c bytes a key that is seen, s·H·(D + E) a query and 4 a page, at
2·H·(D + E) flops a pair of query and key. Keys are read once for each tile of queries; a split adds 8·(E + 1) bytes a
row, written and read.

Shape suffixes: M rows of the tile of queries, N keys of a tile, D dims of q and k, E of v, S splits.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hal.kernels.kv_cache import as_bytes, decoded_fp8

__all__ = ["combine_kernel", "paged_attention_kernel"]

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _sequence(tile, cu, cu_stride, sequences, HALVINGS: tl.constexpr, GROUP: tl.constexpr, BLOCK_M: tl.constexpr):
    """(b, first row of the tile): sequence b has the tiles from cu[b]·GROUP // BLOCK_M + b on, enough of them."""
    b = tile * 0
    begins = b
    for i in tl.static_range(HALVINGS):
        later = b + (1 << (HALVINGS - 1 - i))
        cu_b = tl.load(cu + later * tl.cast(cu_stride, tl.int64), mask=later < sequences, other=0).to(tl.int64)
        later_begins = cu_b * GROUP // BLOCK_M + later
        found = (later < sequences) & (later_begins <= tile)
        b, begins = tl.where(found, later, b), tl.where(found, later_begins, begins)
    return b, (tile - begins) * BLOCK_M


@triton.jit
def _operand(x, FP8: tl.constexpr, dtype: tl.constexpr):
    """Elements or codes of a cache in the dtype of the product, exactly; FP8: the architecture converts fp8 codes."""
    if FP8:
        # Devices convert fp8 to float16 alone, and float16 to bfloat16 slowly unless by way of float32.
        x = x.to(tl.float8e4nv, bitcast=True).to(tl.float16)
        if dtype != tl.float16:
            x = x.to(tl.float32)
    elif x.dtype == tl.uint8:
        x = decoded_fp8(x)
    elif x.dtype == tl.int8:
        x = x.to(tl.float32)
    return x.to(dtype)


@triton.jit
def _scores(s, factor, cap):
    """Scaled and capped scores in units of log2; factor and cap hold log2(e)."""
    if cap is None:
        s *= factor
    else:
        # tanh by one exponential; what it errs by is small beside 1, hence beside the cap.
        s = cap * (1.0 - 2.0 / (1.0 + tl.exp2(s * factor)))
    return s


@triton.jit
def _blank_tail(o, lse, owned, tokens, heads, E: tl.constexpr, BLOCK_E: tl.constexpr):
    """Zeros in the rows past those owned, programs taking them in turn."""
    at_E = tl.arange(0, BLOCK_E)
    wide = tl.cast(heads, tl.int64)
    for row in range(owned * wide + tl.program_id(0), tokens * wide, tl.num_programs(0)):
        tl.store(o + row * E + at_E, tl.zeros((BLOCK_E,), o.dtype.element_ty), mask=at_E < E)
        if lse is not None:
            tl.store(lse + row, 0.0)


# Numbers that vary from call to call: a compilation for each kind of them would gain nothing.
@triton.jit(do_not_specialize=["tokens", "sequences", "splits", "table_stride"])
def paged_attention_kernel(
    q,
    k_cache,
    v_cache,
    table,
    lens,
    cu,
    sinks,
    k_scale,
    v_scale,
    o,
    lse,
    tokens,
    sequences,
    splits,
    factor,
    cap,
    q_token_stride,
    q_head_stride,
    q_stride,
    k_block_stride,
    k_slot_stride,
    k_head_stride,
    v_block_stride,
    v_slot_stride,
    v_head_stride,
    table_stride,
    entry_stride,
    lens_stride,
    cu_stride,
    sinks_stride,
    k_scale_stride,
    v_scale_stride,
    HALVINGS: tl.constexpr,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    P: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
    SINGLE: tl.constexpr,
    EDGES: tl.constexpr,
    ALIKE: tl.constexpr,
    DIVIDED: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """Attention of one tile of rows to one of `splits` parts of their keys.

    Programs: kv heads, then splits, then tiles: one for each of the sequences (HALVINGS None), or as `_sequence`
    has them. LEFT and RIGHT bound the window, None = not at all; RIGHT 0 is causal. SINGLE: no sequence has two
    queries. EDGES: tiles of which every row sees every key are taken without masks. ALIKE: both caches have the same
    strides of blocks and slots. o (T, H, E) and lse (T, H), or None, are the results, or, DIVIDED, float32
    parts (T, H, splits, E) and (T, H, splits), the latter in units of log2 and without the sinks. factor scales scores
    to units of log2, or with a cap to twice those of tanh; cap is in units of log2.
    """
    dtype: tl.constexpr = q.dtype.element_ty
    # Codes are numbers of float16, so P need not be rounded to bfloat16 beside them.
    coded: tl.constexpr = k_cache.dtype.element_ty.primitive_bitwidth == 8
    p_dtype: tl.constexpr = tl.float16 if coded and dtype == tl.bfloat16 else dtype
    FP8: tl.constexpr = k_cache.dtype.element_ty == tl.float8e4nv
    k_cache, v_cache = as_bytes(k_cache), as_bytes(v_cache)
    program = tl.program_id(0)
    kv_head = (program % K).to(tl.int64)
    split = program // K % splits
    tile = (program // K // splits).to(tl.int64)
    if HALVINGS is None:
        b, first = tile, tile * 0
    else:
        b, first = _sequence(tile, cu, cu_stride, sequences, HALVINGS, GROUP, BLOCK_M)
    begin = tl.load(cu + b * cu_stride).to(tl.int64)
    queries = tl.load(cu + (b + 1) * cu_stride) - begin.to(tl.int32)
    keys = tl.load(lens + b * lens_stride)
    if not DIVIDED:
        _blank_tail(o, lse, tl.load(cu + sequences * tl.cast(cu_stride, tl.int64)), tokens, K * GROUP, E, BLOCK_E)
    first = first.to(tl.int32)
    rows = queries * GROUP
    if first >= rows:
        return

    # The rows of the tile: query i of the sequence stands at position i + ahead.
    ahead = keys - queries
    m_M = first + tl.arange(0, BLOCK_M)
    mask_M = m_M < rows
    position_M = m_M // GROUP + ahead
    token_M = begin + m_M // GROUP
    head_M = kv_head * GROUP + m_M % GROUP
    at_D, at_E = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_E)
    q_at_MD = (token_M * q_token_stride + head_M * q_head_stride)[:, None] + at_D.to(tl.int64)[None, :] * q_stride
    q_MD = tl.load(q + q_at_MD, mask=mask_M[:, None] & (at_D < D)[None, :], other=0.0)

    # The keys that some row sees, from low on and below high, and this program's part of them, from start to stop;
    # between the edges lie the tiles of which every row sees every key.
    last = (tl.minimum(first + BLOCK_M, rows) - 1) // GROUP + ahead
    low, high, clear_low, clear_high = 0, keys, 0, keys
    if LEFT is not None:
        low, clear_low = tl.maximum(first // GROUP + ahead - LEFT, 0), tl.maximum(last - LEFT, 0)
    if RIGHT is not None:
        high = tl.minimum(high, last + RIGHT + 1)
        clear_high = tl.minimum(clear_high, first // GROUP + ahead + RIGHT + 1)
    start = low // BLOCK_N * BLOCK_N
    stop = high
    if DIVIDED:
        part = tl.cdiv(tl.cdiv(tl.maximum(high - start, 0), BLOCK_N), splits) * BLOCK_N
        start += split * part
        stop = tl.minimum(high, start + part)
    edges = (start, start, start, stop)
    if EDGES:
        clear_start = start
        if LEFT is not None:
            clear_start = tl.maximum(start, tl.minimum(tl.cdiv(clear_low, BLOCK_N) * BLOCK_N, stop))
        clear_stop = tl.maximum(tl.minimum(clear_high, stop) // BLOCK_N * BLOCK_N, clear_start)
        edges = (start, clear_start, clear_stop, stop)

    if k_scale is not None:
        factor *= tl.load(k_scale + kv_head * k_scale_stride)
    k_cache += kv_head * k_head_stride
    v_cache += kv_head * v_head_stride
    table += b * table_stride
    top_M = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total_M = tl.zeros((BLOCK_M,), tl.float32)
    o_ME = tl.zeros((BLOCK_M, BLOCK_E), tl.float32)
    key_N = start + tl.arange(0, BLOCK_N)
    page_N = tl.load(
        table + (key_N // P) * tl.cast(entry_stride, tl.int64), mask=(key_N >= low) & (key_N < stop), other=0
    )
    for phase in tl.static_range((1 if LEFT is None else 0) if EDGES else 2, 3):
        for at in range(edges[phase], edges[phase + 1], BLOCK_N):
            key_N = at + tl.arange(0, BLOCK_N)
            block_N, slot_N = page_N.to(tl.int64), key_N % P
            next_N = key_N + BLOCK_N
            page_N = tl.load(table + (next_N // P) * tl.cast(entry_stride, tl.int64), mask=next_N < stop, other=0)
            k_at_N = block_N * k_block_stride + slot_N * tl.cast(k_slot_stride, tl.int64)
            v_at_N = k_at_N
            if not ALIKE:
                v_at_N = block_N * v_block_stride + slot_N * tl.cast(v_slot_stride, tl.int64)
            k_mask_ND, v_mask_NE = (at_D < D)[None, :], (at_E < E)[None, :]
            if phase != 1:
                mask_N = (key_N >= low) & (key_N < stop)
                k_mask_ND, v_mask_NE = mask_N[:, None] & k_mask_ND, mask_N[:, None] & v_mask_NE
            k_ND = tl.load(k_cache + k_at_N[:, None] + at_D[None, :], mask=k_mask_ND, other=0)
            s_MN = tl.dot(q_MD, tl.trans(_operand(k_ND, FP8, dtype)), input_precision=PRECISION)
            s_MN = _scores(s_MN, factor, cap)
            if phase != 1:
                seen_MN = mask_N[None, :] & mask_M[:, None]
                if not SINGLE:
                    if LEFT is not None:
                        seen_MN &= key_N[None, :] >= (position_M - LEFT)[:, None]
                    if RIGHT is not None:
                        seen_MN &= key_N[None, :] <= (position_M + RIGHT)[:, None]
                s_MN = tl.where(seen_MN, s_MN, float("-inf"))
            higher_M = tl.maximum(top_M, tl.max(s_MN, 1))
            base_M = tl.where(higher_M == float("-inf"), 0.0, higher_M)
            p_MN = tl.exp2(s_MN - base_M[:, None])
            shrunk_M = tl.exp2(top_M - base_M)
            total_M = total_M * shrunk_M + tl.sum(p_MN, 1)
            top_M = higher_M
            v_NE = tl.load(v_cache + v_at_N[:, None] + at_E[None, :], mask=v_mask_NE, other=0)
            o_ME = o_ME * shrunk_M[:, None]
            o_ME = tl.dot(p_MN.to(p_dtype), _operand(v_NE, FP8, p_dtype), o_ME, input_precision=PRECISION)

    if v_scale is not None:
        o_ME *= tl.load(v_scale + kv_head * v_scale_stride)
    row_M = token_M * (K * GROUP) + head_M
    blind_M = total_M == 0.0
    if not DIVIDED:
        if sinks is not None:
            sink_M = tl.load(sinks + head_M * sinks_stride, mask=mask_M, other=0.0).to(tl.float32) * LOG2_E
            higher_M = tl.maximum(top_M, sink_M)
            base_M = tl.where(higher_M == float("-inf"), 0.0, higher_M)
            shrunk_M = tl.exp2(top_M - base_M)
            total_M = total_M * shrunk_M + tl.exp2(sink_M - base_M)
            o_ME = o_ME * shrunk_M[:, None]
            top_M = base_M
        if lse is not None:
            lse_M = tl.where(total_M == 0.0, float("-inf"), (top_M + tl.log2(total_M)) * LN_2)
            tl.store(lse + row_M, lse_M, mask=mask_M)
    else:
        row_M = row_M * splits + split
        tl.store(lse + row_M, tl.where(blind_M, float("-inf"), top_M + tl.log2(total_M)), mask=mask_M)
    o_ME = tl.where(blind_M[:, None], 0.0, o_ME / total_M[:, None])
    o_at_ME = (row_M * E)[:, None] + at_E[None, :]
    tl.store(o + o_at_ME, o_ME.to(o.dtype.element_ty), mask=mask_M[:, None] & (at_E < E)[None, :])


@triton.jit(do_not_specialize=["sequences", "splits"])
def combine_kernel(
    parts,
    part_lse,
    cu,
    sinks,
    o,
    lse,
    sequences,
    splits,
    cu_stride,
    sinks_stride,
    H: tl.constexpr,
    E: tl.constexpr,
    ALL_S: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """One row of o (T, H, E) and lse (T, H), or None, from its parts; zeros in rows past the sums."""
    row = tl.program_id(0).to(tl.int64)
    owned = row < tl.load(cu + sequences * tl.cast(cu_stride, tl.int64)).to(tl.int64) * H
    part_lse += row * splits
    all_S = tl.arange(0, ALL_S)
    all_lse_S = tl.load(part_lse + all_S, mask=owned & (all_S < splits), other=float("-inf"))
    top = tl.max(all_lse_S, 0)
    if sinks is not None:
        sink = tl.load(sinks + row % H * sinks_stride).to(tl.float32) * LOG2_E
        top = tl.maximum(top, sink)
    top = tl.where(top == float("-inf"), 0.0, top)
    total = tl.sum(tl.exp2(all_lse_S - top), 0)
    if sinks is not None:
        total += tl.exp2(sink - top)
    at_E = tl.arange(0, BLOCK_E)
    o_E = tl.zeros((BLOCK_E,), tl.float32)
    for first in range(0, splits, BLOCK_S):
        at_S = first + tl.arange(0, BLOCK_S)
        lse_S = tl.load(part_lse + at_S, mask=owned & (at_S < splits), other=float("-inf"))
        part_at_SE = ((row * splits + at_S) * E)[:, None] + at_E[None, :]
        mask_SE = (lse_S != float("-inf"))[:, None] & (at_E < E)[None, :]
        part_SE = tl.load(parts + part_at_SE, mask=mask_SE, other=0.0)
        o_E += tl.sum(tl.exp2(lse_S - top)[:, None] * part_SE, 0)
    o_E /= tl.where(total == 0.0, 1.0, total)
    tl.store(o + row * E + at_E, o_E.to(o.dtype.element_ty), mask=at_E < E)
    if lse is not None:
        lse_row = tl.where(total == 0.0, float("-inf"), (top + tl.log2(total)) * LN_2)
        tl.store(lse + row, tl.where(owned, lse_row, 0.0))
