"""What the operators on a paged KV cache share: checks, quantised codes, reading by block table.

N blocks, P slots per block (page), K kv heads, D head dim, B sequences, M entries per sequence of a block table.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hal.arithmetic import widen
from hal.contract import FLOATS, dtype_name
from hal.errors import ArgumentError, DtypeError, ShapeError
from hal.ops._attention_args import MAX_HEAD_DIM
from hal.ops._checks import check_dtype, check_rank
from hal.ops._overlap import overlaps_itself

__all__ = [
    "CODES",
    "bits",
    "cache_features",
    "check_block_ids",
    "check_cache",
    "check_pair",
    "check_scale_values",
    "check_scales",
    "codes",
    "dequantised",
    "quantised",
    "raw",
]

FP8 = torch.float8_e4m3fn
CODES = (torch.int8, FP8)
_RAW = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def quantised(cache: Tensor) -> bool:
    """Whether the cache holds codes that need a scale."""
    return cache.dtype in CODES


def raw(t: Tensor) -> Tensor:
    """The same memory as integers: copies move bits, and not every dtype can be indexed on every device."""
    return t.view(_RAW[t.element_size()])


def bits(rows: Tensor) -> Tensor:
    """Rows to be written, as integers; a lazily negated view is brought to its values first."""
    return raw(rows.resolve_neg())


def codes(x_TKD: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """value / scale, one IEEE division, then one rounding to int8 (nearest even) or fp8 e4m3fn; both saturate."""
    ratio = widen(x_TKD)
    if scale is not None:
        ratio = ratio / _per_head(scale.to(ratio.dtype))
    if dtype is torch.int8:
        return torch.where(ratio.isnan(), 0.0, ratio).round().clamp(-128, 127).to(torch.int8)
    limit = torch.finfo(dtype).max
    # Rounding goes through float32: a float64 must not be rounded twice in a row on its way to 8 bits.
    return ratio.clamp(-limit, limit).to(torch.float32).to(dtype)


def dequantised(stored: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Cache rows (…, K, D) in `dtype`, a compute dtype; codes times their scale."""
    values = stored.to(torch.float32).to(dtype) if stored.dtype in CODES else stored.to(dtype)
    return values if scale is None else values * _per_head(scale.to(dtype))


def _per_head(scale: Tensor) -> Tensor:
    return scale if scale.ndim == 0 else scale[:, None]


def cache_features(cache: Tensor, k_scale: Tensor | None, v_scale: Tensor | None) -> set[str]:
    """Features of a request that concern the cache's dtype and scales."""
    used = {"kv_int8"} if cache.dtype is torch.int8 else {"kv_fp8"} if cache.dtype is FP8 else set()
    given = [s for s in (k_scale, v_scale) if s is not None]
    if given:
        used.add("kv_scale")
    if any(s.ndim for s in given):
        used.add("kv_scale_per_head")
    return used


def check_cache(op: str, name: str, cache: Tensor) -> None:
    """Errors unless `cache` is (N, P, K, D) in a cache dtype, last stride 1, no element at two places."""
    check_rank(op, name, cache, 4, "(blocks, slots of a block, kv heads, head dim)")
    check_dtype(op, name, cache, (*FLOATS, *CODES))
    if cache.shape[1] == 0:
        raise ShapeError(f"{op}: {name} has blocks of 0 slots; a block has one slot at least")
    if cache.shape[2] == 0 or not 1 <= cache.shape[3] <= MAX_HEAD_DIM:
        raise ShapeError(
            f"{op}: {name} has {cache.shape[2]} kv heads of dim {cache.shape[3]}; supported are 1 head or more of 1 to "
            f"{MAX_HEAD_DIM}"
        )
    if cache.stride(3) != 1 and cache.shape[3] > 1:
        raise ArgumentError(
            f"{op}: {name} has last stride {cache.stride(3)}; a cache is any strided view whose last stride is 1, "
            "never copied: lay the head dim out last"
        )
    if cache.is_neg():
        raise ArgumentError(f"{op}: {name} is a lazily negated view, whose memory holds other values; resolve_neg() it")
    if overlaps_itself(cache):
        raise ArgumentError(
            f"{op}: {name} with shape {tuple(cache.shape)} and strides {tuple(cache.stride())} holds one element at "
            "several places; a cache must be a view without overlap: allocate it, do not expand it"
        )


def check_pair(op: str, k_cache: Tensor, v_cache: Tensor) -> None:
    """Errors unless both caches are valid and fit each other (only the head dim may differ)."""
    check_cache(op, "k_cache", k_cache)
    check_cache(op, "v_cache", v_cache)
    if k_cache.dtype is not v_cache.dtype:
        raise DtypeError(
            f"{op}: k_cache is {dtype_name(k_cache.dtype)}, v_cache is {dtype_name(v_cache.dtype)}; both have one dtype"
        )
    if k_cache.shape[:3] != v_cache.shape[:3]:
        raise ShapeError(
            f"{op}: k_cache is {tuple(k_cache.shape)}, v_cache {tuple(v_cache.shape)}; blocks, slots and kv heads must "
            "be equal"
        )


def check_scales(op: str, cache: Tensor, k_scale: Tensor | None, v_scale: Tensor | None) -> None:
    """Errors unless the scales fit the cache: none for floats, both for int8, float32 () or (K,)."""
    kv_heads = cache.shape[2]
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        if scale is None:
            if cache.dtype is torch.int8:
                raise ArgumentError(f"{op}: {name} is None; an int8 cache needs it: float32, () or ({kv_heads},)")
            continue
        if not quantised(cache):
            raise ArgumentError(
                f"{op}: {name} is given, but the cache is {dtype_name(cache.dtype)}; only int8 and float8_e4m3fn "
                "caches are scaled: pass None"
            )
        check_dtype(op, name, scale, (torch.float32,))
        if tuple(scale.shape) not in ((), (kv_heads,)):
            raise ShapeError(
                f"{op}: {name} has shape {tuple(scale.shape)}; it must be () or one per kv head, ({kv_heads},)"
            )


def check_scale_values(op: str, k_scale: Tensor | None, v_scale: Tensor | None) -> None:
    """ArgumentError for a scale that is NaN, infinite, zero or negative."""
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        if scale is None:
            continue
        values = scale.flatten().tolist()
        bad = [x for x in values if not 0 < x < math.inf]
        if bad:
            raise ArgumentError(
                f"{op}: {name} holds {bad[0]}; scales are finite and above 0 (a group that is all zero has scale 1)"
            )


def check_block_ids(op: str, block_table: Tensor, lengths: list[int], cache: Tensor) -> None:
    """ArgumentError for a block id out of range where a sequence reads, or a table too short for it."""
    N, P = cache.shape[:2]
    M = block_table.shape[1]
    for b, length in enumerate(lengths):
        if length < 0:
            raise ArgumentError(f"{op}: sequence {b} has {length} keys; lengths are 0 or more")
        if length > M * P:
            raise ArgumentError(
                f"{op}: sequence {b} has {length} keys, but its {M} blocks of {P} slots hold {M * P}; give block_table "
                "more columns"
            )
    if not lengths or max(lengths) == 0:
        return
    used = [-(-length // P) for length in lengths]
    bad = _bad_id(block_table, used, N)
    if bad is not None:
        b, m, found = bad
        raise ArgumentError(
            f"{op}: block_table[{b}, {m}] is {found}, but the cache has blocks 0 … {N - 1}; entries within a "
            f"sequence's {lengths[b]} keys must name blocks"
        )


def _bad_id(block_table: Tensor, used: list[int], n_blocks: int) -> tuple[int, int, int] | None:
    if block_table.numel() <= 256:
        for b, row in enumerate(block_table.tolist()):
            for m in range(used[b]):
                if not 0 <= row[m] < n_blocks:
                    return b, m, row[m]
        return None
    column_M = torch.arange(block_table.shape[1], device=block_table.device)
    read_BM = column_M < torch.tensor(used, device=block_table.device)[:, None]
    bad_BM = read_BM & ((block_table < 0) | (block_table >= n_blocks))
    if not bool(bad_BM.any()):
        return None
    b, m = bad_BM.nonzero()[0].tolist()
    return b, m, int(block_table[b, m])
