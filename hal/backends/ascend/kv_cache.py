"""write_kv_cache by aclnnScatterPaKvCache and by index, gather_kv_cache by aclnnGatherPaKvCache.

aclnnScatterPaKvCache refuses slot -1. Which slots are -1 only a read on the host could tell, so it is used where the
caller has said that there are none (`without_skips`); otherwise skipped tokens repeat the write of one that is not, as
in the reference: that needs no host, so a graph may record either way.

N blocks, P slots per block, K kv heads, D head dim, n slots.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from hal.backends.ascend import pages
from hal.backends.ascend.chips import A2, A3, A5, for_310p, for_bf16_chips
from hal.capability import Declares, Implementation, Supports
from hal.memory import empty
from hal.op import Args
from hal.ops import _cache

__all__ = ["IMPLEMENTATIONS", "without_skips"]

_MARK = "_hal_without_skips"


def without_skips(slot_mapping: Tensor) -> Tensor:
    """The same tensor, marked: no slot of it is -1, so that write_kv_cache may scatter it as it is.

    The mark stays when the tensor is refilled in place: mark a buffer only if no later filling holds -1 either.
    """
    setattr(slot_mapping, _MARK, True)
    return slot_mapping


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
    n = slot_mapping.shape[0]
    if n == 0 or k_cache.shape[0] == 0:
        return
    k, v = k[:n], v[:n]
    if _cache.quantised(k_cache):
        k, v = _cache.codes(k, k_scale, k_cache.dtype), _cache.codes(v, v_scale, v_cache.dtype)
    if getattr(slot_mapping, _MARK, False) and k_cache.is_contiguous() and v_cache.is_contiguous():
        torch.ops.npu.npu_scatter_pa_kv_cache(
            k.contiguous(), v.contiguous(), k_cache, v_cache, slot_mapping.contiguous(), cache_mode="Norm"
        )
    else:
        _write_kept(k, v, k_cache, v_cache, slot_mapping)


def _write_310p(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    *,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    # This chip has no aclnnScatterPaKvCache; a view of the slots does not carry the mark.
    write_kv_cache(k, v, k_cache, v_cache, slot_mapping[:], k_scale=k_scale, v_scale=v_scale)


def _write_kept(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    n, P = slot_mapping.shape[0], k_cache.shape[1]
    kept_n = slot_mapping >= 0
    some = kept_n.any()
    first = kept_n.to(torch.int32).argmax()
    source_n = torch.where(kept_n, torch.arange(n, device=k.device), first)
    slot_n = torch.where(some, slot_mapping.index_select(0, source_n), 0)
    block_n, offset_n = slot_n // P, slot_n % P
    for x, cache in ((k, k_cache), (v, v_cache)):
        cache[block_n, offset_n] = torch.where(some, x.index_select(0, source_n), cache[0, 0])


def gather_kv_cache(
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    cu_seqlens_k: Tensor,
    total_k: int,
    *,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    cu_seqlens_k_cpu: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    k, v = (
        empty((total_k, *cache.shape[2:]), dtype=cache.dtype, device=cache.device).zero_()
        for cache in (k_cache, v_cache)
    )
    if not (total_k and block_table.numel() and k_cache.shape[0]):
        return k, v
    sums = cu_seqlens_k.contiguous()
    # Each entry of the table must name a block, though no more are read than a sequence has.
    block_table = pages.named(block_table, sums[1:] - sums[:-1], k_cache.shape[1])
    k_pages, v_pages, table = pages.contiguous(k_cache, v_cache, block_table, sums[1:] - sums[:-1])
    if cu_seqlens_k_cpu is not None:
        rows = int(cu_seqlens_k_cpu[-1])
        if rows:
            _gather(k_pages, v_pages, table, sums, k[:rows], v[:rows])
        return k, v
    # The operator fills its results exactly. How many rows the sequences have is not known here, so one more sequence
    # (of block 0) takes the rest, which is blanked afterwards.
    needed = max(table.shape[1], -(-total_k // k_cache.shape[1]))
    table = F.pad(table, (0, needed - table.shape[1], 0, 1))
    _gather(k_pages, v_pages, table, torch.cat((sums, sums.new_full((1,), total_k))), k, v)
    past = (torch.arange(total_k, device=k.device) >= sums[-1])[:, None, None]
    return k.masked_fill_(past, 0), v.masked_fill_(past, 0)


def _gather(k_cache: Tensor, v_cache: Tensor, block_table: Tensor, sums: Tensor, k: Tensor, v: Tensor) -> None:
    torch.ops.npu.npu_gather_pa_kv_cache(
        k_cache, v_cache, block_table, sums, k, v, seq_offset=None, is_seq_lens_cumsum=True
    )


def _token_reasons(a: Args) -> list[str]:
    """tokens of 148 KiB at most"""
    size = max(cache.shape[2] * cache.shape[3] for cache in (a.k_cache, a.v_cache)) * a.k_cache.element_size()
    return [f"a token has {size} bytes, the most supported are {148 * 1024}"] if size > 148 * 1024 else []


_SIXTEEN = frozenset({"bfloat16", "float16"})
_WRITE = Declares(batch_invariant=True, stride_invariant=True, copies=frozenset({"k", "v"}))
# Lengths that the caller has on the host are taken as they are, which a graph would keep.
_GATHER = Declares(batch_invariant=True, stride_invariant=True, capturable=False)
_INT8 = frozenset({"kv_int8", "kv_scale", "kv_scale_per_head", "different_v_dim"})


def _gather_on(name: str, dtypes: frozenset[str], architectures: frozenset[str]) -> Implementation:
    return Implementation(
        "gather_kv_cache",
        name,
        gather_kv_cache,
        Supports(
            dtypes=dtypes,
            features=frozenset({"different_v_dim", "host_lengths"}),
            architectures=architectures,
            where=_token_reasons,
        ),
        _GATHER,
        priority=10,
    )


IMPLEMENTATIONS = (
    for_bf16_chips(
        Implementation("write_kv_cache", "aclnn", write_kv_cache, Supports(features=_INT8), _WRITE, priority=10)
    ),
    for_310p(Implementation("write_kv_cache", "aclnn", _write_310p, Supports(features=_INT8), _WRITE, priority=10)),
    _gather_on("aclnn", _SIXTEEN, frozenset({A2, A3})),
    _gather_on("aclnn_950", _SIXTEEN | {"float32"}, frozenset({A5})),
)
