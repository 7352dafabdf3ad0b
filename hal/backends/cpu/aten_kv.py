"""The paged KV cache on the CPU, where block tables and slots are read on the host for free.

B sequences, P slots per block, K kv heads, D head dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hal.backends.cpu.aten_attention import DECLARES, FLOAT_NAMES, dense
from hal.capability import Declares, Implementation, Supports
from hal.memory import empty
from hal.ops import _cache
from hal.ops._attention_args import lse_dtype, split_window
from hal.ops.paged_attention import paged_attention as contract

__all__ = ["IMPLEMENTATIONS"]

Window = tuple[int | None, int | None]


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    cu_seqlens_q: Tensor,
    max_seqlen_q: int,
    *,
    causal: bool = True,
    window: Window | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    sinks: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    return_lse: bool = False,
    seq_lens_cpu: Tensor | None = None,
    cu_seqlens_q_cpu: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    T, H, _ = q.shape
    P = k_cache.shape[1]
    o = empty(q.shape, dtype=q.dtype, device=q.device)
    lse = empty((T, H), dtype=lse_dtype(q.dtype), device=q.device) if return_lse else None
    left, _ = split_window(window)
    starts = cu_seqlens_q.tolist()
    # Codes times their scale are not numbers of a 16-bit dtype: such a cache computes in float32.
    wide = _cache.quantised(k_cache)
    rows = q.to(lse_dtype(q.dtype)) if wide else q
    for b, n in enumerate(seq_lens.tolist()):
        start, stop = starts[b], starts[b + 1]
        if start == stop:
            continue
        first = 0 if left is None else max(0, n - (stop - start) - left) // P
        blocks = block_table[b, first : -(-n // P)].to(torch.int64)
        k, v = (
            _read(cache, blocks, n - first * P, scale_of, rows.dtype)
            for cache, scale_of in ((k_cache, k_scale), (v_cache, v_scale))
        )
        part, part_lse = dense(rows[None, start:stop], k[None], v[None], causal, window, None, scale, return_lse)
        o[start:stop] = part[0]
        if lse is not None and part_lse is not None:
            lse[start:stop] = part_lse[0].T
    o[starts[-1] :] = 0
    if lse is None:
        return o
    lse[starts[-1] :] = 0
    return o, lse


def _read(cache: Tensor, blocks: Tensor, rows: int, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    if not _cache.quantised(cache):
        return cache.index_select(0, blocks).flatten(0, 1)[:rows]
    codes = _cache.raw(cache).index_select(0, blocks).view(cache.dtype)
    return _cache.dequantised(codes, scale, dtype).flatten(0, 1)[:rows]


def write_kv_cache(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    *,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    slots, P = slot_mapping.tolist(), k_cache.shape[1]
    kept = [i for i, slot in enumerate(slots) if slot >= 0]
    if not kept:
        return
    source = slice(len(slots)) if len(kept) == len(slots) else torch.tensor(kept)
    block, offset = zip(*(divmod(slots[i], P) for i in kept), strict=True)
    places = torch.tensor(block), torch.tensor(offset)
    for x, cache, scale in ((k, k_cache, k_scale), (v, v_cache, v_scale)):
        rows = x[source]
        if x.untyped_storage()._cdata == cache.untyped_storage()._cdata:  # tokens that move within the cache
            rows = rows.clone()
        if _cache.quantised(cache):
            rows = _cache.codes(rows, scale, cache.dtype)
        if len(kept) == 1:
            _cache.raw(cache)[block[0], offset[0]] = _cache.bits(rows)[0]
        else:
            _cache.raw(cache)[places] = _cache.bits(rows)


IMPLEMENTATIONS = (
    Implementation(
        op="paged_attention",
        name="aten",
        forward=paged_attention,
        supports=Supports(
            dtypes=FLOAT_NAMES,
            features=frozenset(contract.op.features) - {"softcap", "sinks", "different_v_dim"},
            device_types=frozenset({"cpu"}),
        ),
        declares=DECLARES,
        priority=10,
    ),
    Implementation(
        op="write_kv_cache",
        name="aten",
        forward=write_kv_cache,
        supports=Supports(device_types=frozenset({"cpu"})),
        declares=Declares(batch_invariant=True, stride_invariant=True),
        priority=10,
    ),
)
