"""Paged KV caches: writing rows into slots, reading them back by a block table, copying blocks; fp8 by its bits.

Scope: caches are (N, P, K, D) with any strides and a unit last one, float32, float16, bfloat16, int8, or
float8_e4m3fn, which may come as uint8 (an architecture without fp8 knows no pointer to it). Rows to be written have any
strides; packed rows are contiguous. Codes are value / scale, one IEEE division, rounded once to nearest even,
saturated; they are made and read with integer arithmetic, so every architecture gives the same bits. Addresses are
64-bit. `write_kernel` and `gather_kernel` take k and v in one launch: program_id(1) counts the column blocks of k, then
those of v.

Limits: no float64 but in `copy_blocks_kernel`, which moves any dtype, of at most 16 caches a launch.

Floor, s bytes an element of the rows, c of the cache: write n·K·(D + E)·(s + c) + 8n bytes; gather the same with
4·⌈n / P⌉ for the table; copy 2c·P·K·D bytes a pair and cache. All are met, but that a pair whose destination is also
a source is staged: 4c.

Shape suffixes: T rows (tokens) of a tile, F its columns, a row's K·D values; N ids of a block of pairs.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["as_bytes", "copy_blocks_kernel", "decoded_fp8", "gather_kernel", "write_kernel"]


@triton.jit
def decoded_fp8(codes):
    """float8_e4m3fn codes (uint8) as float32: the bits moved into place, 2¹²⁰ too small."""
    wide = codes.to(tl.uint32)
    magnitude = wide & 0x7F
    value = (((wide & 0x80) << 24) | (magnitude << 20)).to(tl.float32, bitcast=True) * 1.329227995784916e36
    return tl.where(magnitude == 0x7F, float("nan"), value)


@triton.jit
def _encoded_fp8(x):
    """float32 as float8_e4m3fn codes (uint8): to nearest even, saturated at 448, NaN stays."""
    bits = x.to(tl.uint32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    # 448 is as high as codes go; the last of those that round to it would round on to NaN's code from 464 on.
    near = tl.minimum(magnitude, 0x43E00000)
    normal = ((near + 0x7FFFF + ((near >> 20) & 1)) >> 20) - 960
    # Below 2⁻⁶ codes are 2⁻⁹ apart, as are the numbers from 2¹⁴ on: their sum's last bits are the code.
    tiny = (near.to(tl.float32, bitcast=True) + 16384.0).to(tl.uint32, bitcast=True) - 0x46800000
    code = tl.where(near < 0x3C800000, tiny, normal)
    code = tl.where(magnitude > 0x7F800000, 0x7F, code)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def _encoded_int8(x):
    """float32 as int8: to nearest even, saturated, NaN gives 0."""
    x = tl.where(x == x, tl.minimum(tl.maximum(x, -128.0), 127.0), 0.0)
    # Numbers around 1.5·2²³ are 1 apart.
    return ((x + 12582912.0) - 12582912.0).to(tl.int8)


@triton.jit
def as_bytes(cache):
    """The pointer, to bytes if it is one to fp8."""
    if cache.dtype.element_ty == tl.float8e4nv:
        cache = cache.to(tl.pointer_type(tl.uint8), bitcast=True)
    return cache


@triton.jit
def _head_scale(scale, head_F, scale_stride, mask_F):
    """The scale of each column's head, as a row."""
    return tl.load(scale + head_F * scale_stride, mask=mask_F, other=1.0)[None, :]


@triton.jit
def _write(
    x,
    cache,
    slots,
    scale,
    tokens,
    block,
    slots_stride,
    from_steps,
    into_steps,
    P: tl.constexpr,
    K: tl.constexpr,
    D: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_F: tl.constexpr,
):
    """One tile of rows of x into their slots."""
    token_stride, head_stride, stride = from_steps
    block_stride, slot_stride, cache_head_stride, scale_stride = into_steps
    cache = as_bytes(cache)
    code: tl.constexpr = cache.dtype.element_ty
    at_T = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T).to(tl.int64)
    slot_T = tl.load(slots + at_T * slots_stride, mask=at_T < tokens, other=-1)
    at_F = block * BLOCK_F + tl.arange(0, BLOCK_F)
    head_F, dim_F = (at_F // D).to(tl.int64), at_F % D
    mask_TF = (slot_T >= 0)[:, None] & (at_F < K * D)[None, :]
    from_TF = (at_T * token_stride)[:, None] + (head_F * head_stride + dim_F * tl.cast(stride, tl.int64))[None, :]
    to_T = slot_T // P * block_stride + slot_T % P * slot_stride
    to_TF = to_T[:, None] + (head_F * cache_head_stride + dim_F)[None, :]
    x_TF = tl.load(x + from_TF, mask=mask_TF, other=0.0)
    if code == tl.int8 or code == tl.uint8:
        x_TF = x_TF.to(tl.float32)
        if scale is not None:
            x_TF = tl.math.div_rn(
                x_TF, tl.broadcast_to(_head_scale(scale, head_F, scale_stride, at_F < K * D), x_TF.shape)
            )
        x_TF = _encoded_int8(x_TF) if code == tl.int8 else _encoded_fp8(x_TF)
    tl.store(cache + to_TF, x_TF, mask=mask_TF)


@triton.jit(do_not_specialize=["tokens"])
def write_kernel(
    k,
    v,
    k_cache,
    v_cache,
    slots,
    k_scale,
    v_scale,
    tokens,
    slots_stride,
    k_token_stride,
    k_head_stride,
    k_stride,
    k_block_stride,
    k_slot_stride,
    k_cache_head_stride,
    k_scale_stride,
    v_token_stride,
    v_head_stride,
    v_stride,
    v_block_stride,
    v_slot_stride,
    v_cache_head_stride,
    v_scale_stride,
    P: tl.constexpr,
    K: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_F: tl.constexpr,
):
    """Rows of k and v (tokens, K, D or E) into the caches' slots; slot -1 skips one; scales may be None."""
    block = tl.program_id(1)
    beyond = block - tl.cdiv(K * D, BLOCK_F)
    k_into = (k_block_stride, k_slot_stride, k_cache_head_stride, k_scale_stride)
    v_into = (v_block_stride, v_slot_stride, v_cache_head_stride, v_scale_stride)
    k_from, v_from = (k_token_stride, k_head_stride, k_stride), (v_token_stride, v_head_stride, v_stride)
    if beyond < 0:
        _write(k, k_cache, slots, k_scale, tokens, block, slots_stride, k_from, k_into, P, K, D, BLOCK_T, BLOCK_F)
    else:
        _write(v, v_cache, slots, v_scale, tokens, beyond, slots_stride, v_from, v_into, P, K, E, BLOCK_T, BLOCK_F)


@triton.jit
def _gather(
    cache,
    table,
    cu,
    scale,
    rows,
    total,
    block,
    owners,
    steps,
    HALVINGS: tl.constexpr,
    P: tl.constexpr,
    K: tl.constexpr,
    D: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_F: tl.constexpr,
):
    """One tile of packed rows, zeros where no sequence owns them."""
    sequences, entries, table_stride, entry_stride, cu_stride = owners
    block_stride, slot_stride, head_stride, scale_stride = steps
    cache = as_bytes(cache)
    code: tl.constexpr = cache.dtype.element_ty
    at_T = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T).to(tl.int64)
    # The last sequence that begins at or before the row: those of no keys, which begin there too, come before it.
    b_T = tl.zeros((BLOCK_T,), tl.int64)
    for i in tl.static_range(HALVINGS):
        later_T = b_T + (1 << (HALVINGS - 1 - i))
        first_T = tl.load(cu + later_T * cu_stride, mask=later_T < sequences, other=0)
        b_T = tl.where((later_T < sequences) & (first_T <= at_T), later_T, b_T)
    place_T = at_T - tl.load(cu + b_T * cu_stride)
    owned_T = (at_T < tl.load(cu + sequences * tl.cast(cu_stride, tl.int64))) & (place_T < entries * P) & (at_T < total)
    page_T = tl.load(table + b_T * table_stride + place_T // P * entry_stride, mask=owned_T, other=0).to(tl.int64)
    at_F = block * BLOCK_F + tl.arange(0, BLOCK_F)
    head_F = (at_F // D).to(tl.int64)
    mask_F = at_F < K * D
    from_T = page_T * block_stride + place_T % P * slot_stride
    from_TF = from_T[:, None] + (head_F * head_stride + at_F % D)[None, :]
    x_TF = tl.load(cache + from_TF, mask=owned_T[:, None] & mask_F[None, :], other=0)
    if code != rows.dtype.element_ty:
        x_TF = decoded_fp8(x_TF) if code == tl.uint8 else x_TF.to(tl.float32)
        if scale is not None:
            x_TF *= _head_scale(scale, head_F, scale_stride, mask_F)
    to_TF = (at_T * (K * D))[:, None] + at_F[None, :]
    tl.store(rows + to_TF, x_TF.to(rows.dtype.element_ty), mask=(at_T < total)[:, None] & mask_F[None, :])


@triton.jit(do_not_specialize=["total", "sequences", "entries", "table_stride"])
def gather_kernel(
    k_cache,
    v_cache,
    table,
    cu,
    k_scale,
    v_scale,
    k,
    v,
    total,
    sequences,
    entries,
    table_stride,
    entry_stride,
    cu_stride,
    k_block_stride,
    k_slot_stride,
    k_head_stride,
    k_scale_stride,
    v_block_stride,
    v_slot_stride,
    v_head_stride,
    v_scale_stride,
    HALVINGS: tl.constexpr,
    P: tl.constexpr,
    K: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_F: tl.constexpr,
):
    """The caches' rows in the order of cu's sequences, as k and v (total, K, D or E); 2^HALVINGS ≥ sequences."""
    block = tl.program_id(1)
    beyond = block - tl.cdiv(K * D, BLOCK_F)
    owners = (sequences, entries, table_stride, entry_stride, cu_stride)
    k_from = (k_block_stride, k_slot_stride, k_head_stride, k_scale_stride)
    v_from = (v_block_stride, v_slot_stride, v_head_stride, v_scale_stride)
    if beyond < 0:
        _gather(k_cache, table, cu, k_scale, k, total, block, owners, k_from, HALVINGS, P, K, D, BLOCK_T, BLOCK_F)
    else:
        _gather(v_cache, table, cu, v_scale, v, total, beyond, owners, v_from, HALVINGS, P, K, E, BLOCK_T, BLOCK_F)


@triton.jit
def _blocks(
    at,
    block_stride,
    slot_stride,
    head_stride,
    block,
    at_F,
    K: tl.constexpr,
    D: tl.constexpr,
):
    """Pointers to elements of a block."""
    slot_F, head_F, dim_F = (at_F // (K * D)).to(tl.int64), (at_F // D % K).to(tl.int64), at_F % D
    return at + block * block_stride + (slot_F * slot_stride + head_F * head_stride + dim_F)


@triton.jit(do_not_specialize=["pairs"])
def copy_blocks_kernel(
    cache_0,
    cache_1,
    cache_2,
    cache_3,
    cache_4,
    cache_5,
    cache_6,
    cache_7,
    cache_8,
    cache_9,
    cache_10,
    cache_11,
    cache_12,
    cache_13,
    cache_14,
    cache_15,
    source,
    target,
    staged,
    pairs,
    source_stride,
    target_stride,
    block_stride,
    slot_stride,
    head_stride,
    P: tl.constexpr,
    K: tl.constexpr,
    D: tl.constexpr,
    COUNT: tl.constexpr,
    COMMIT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_F: tl.constexpr,
):
    """Blocks of the first COUNT caches, whose strides are equal, copied; the others are any pointers.

    A pair whose target is no pair's source is copied at once. Others go to staged (COUNT, pairs, P·K·D), and from there
    to their targets by a second launch, with COMMIT, when everything has been read.
    """
    i, which = tl.program_id(0), tl.program_id(1)
    caches = (
        cache_0,
        cache_1,
        cache_2,
        cache_3,
        cache_4,
        cache_5,
        cache_6,
        cache_7,
        cache_8,
        cache_9,
        cache_10,
        cache_11,
        cache_12,
        cache_13,
        cache_14,
        cache_15,
    )
    cache = cache_0
    for j in tl.static_range(1, COUNT):
        cache = tl.where(which == j, caches[j], cache)
    cache, staged = as_bytes(cache), as_bytes(staged)
    from_block = tl.load(source + i * tl.cast(source_stride, tl.int64))
    to_block = tl.load(target + i * tl.cast(target_stride, tl.int64))
    read = 0
    for first in range(0, pairs, BLOCK_N):
        at_N = first + tl.arange(0, BLOCK_N)
        source_N = tl.load(source + at_N.to(tl.int64) * source_stride, mask=at_N < pairs, other=-1)
        read += tl.sum((source_N == to_block).to(tl.int32), 0)
    at_F = tl.program_id(2) * BLOCK_F + tl.arange(0, BLOCK_F)
    mask_F = at_F < P * K * D
    from_F = _blocks(cache, block_stride, slot_stride, head_stride, from_block, at_F, K, D)
    to_F = _blocks(cache, block_stride, slot_stride, head_stride, to_block, at_F, K, D)
    staged_F = staged + (which.to(tl.int64) * pairs + i) * (P * K * D) + at_F
    if COMMIT:
        if read > 0:
            tl.store(to_F, tl.load(staged_F, mask=mask_F), mask=mask_F)
    else:
        x_F = tl.load(from_F, mask=mask_F)
        if read > 0:
            tl.store(staged_F, x_F, mask=mask_F)
        else:
            tl.store(to_F, x_F, mask=mask_F)
