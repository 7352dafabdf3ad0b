"""paged_attention by aclnnFusedInferAttentionScore, and on 310P by aclnnIncreFlashAttention.

One query per sequence runs as it lies, if the caller's copy of the sums says so. More, or a mixture, run packed (layout
TND) where the head dim is 128, the only one that the operator takes so; for others they are padded to the longest (on
the device), with the true lengths beside. A window is refused: the keys that it hides would still meet the value
product, and one of them may be NaN.

T packed queries, B sequences, S queries of the longest, H query heads, K kv heads, D head dim, N blocks, P block size.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from hal.backends.ascend import attention_calls as calls
from hal.backends.ascend import pages
from hal.backends.ascend.attention_calls import U_P, Window
from hal.backends.ascend.chips import P310, WITH_BF16
from hal.capability import Declares, Implementation, Limit, Supports
from hal.memory import empty
from hal.op import Args
from hal.ops._attention_core import head_scale
from hal.ops._lengths import lengths, owners, pad, unpad

__all__ = ["IMPLEMENTATIONS"]

WHY = "paged_attention (ascend)"
MAX_BLOCK = 512
PACKED = 128


class _Cache(NamedTuple):
    """What is read: contiguous pages, their table, and how many keys each sequence has."""

    k: Tensor
    v: Tensor
    table: Tensor
    keys: list[int]


def _infer(
    q: Tensor, layout: str, queries: list[int] | None, cache: _Cache, causal: bool, scale: float, with_lse: bool
) -> tuple[Tensor, Tensor | None]:
    """(o, lse with a last axis of 1) of q in a layout of the operator."""
    P, K = cache.k.shape[1:3]
    band = calls.band(None, 0 if causal else None, q.device)
    o, lse = torch.ops.npu.npu_fused_infer_attention_score(
        q,
        cache.k.flatten(2),
        cache.v.flatten(2),
        atten_mask=band.mask,
        actual_seq_lengths=queries,
        actual_seq_lengths_kv=cache.keys,
        block_table=cache.table,
        num_heads=q.shape[-2],
        scale=scale,
        pre_tokens=band.pre,
        next_tokens=band.next,
        input_layout=layout,
        num_key_value_heads=K,
        sparse_mode=band.mode,
        inner_precise=0,
        block_size=P,
        softmax_lse_flag=with_lse,
    )
    return o, lse[..., 0] if with_lse else None


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
    T, B = q.shape[0], seq_lens.shape[0]
    keys = calls.host_list(seq_lens_cpu, seq_lens, WHY) if B else []
    single = max_seqlen_q == 1 and T == B
    if single and cu_seqlens_q_cpu is None:  # not read: `_padded` finds on the device which sequences have their query
        sums = list(range(B + 1))
    else:
        sums = calls.host_list(cu_seqlens_q_cpu, cu_seqlens_q, WHY)
    queries = [stop - start for start, stop in itertools.pairwise(sums)]
    if not any(s and n for s, n in zip(queries, keys, strict=True)):
        return _nothing(q, cu_seqlens_q, return_lse)
    dead = any(s and (not n or (causal and s > n)) for s, n in zip(queries, keys, strict=True))
    cache = _Cache(*pages.contiguous(k_cache, v_cache, block_table, seq_lens), keys)
    options = cache, causal, head_scale(scale, q.shape[2]), return_lse
    if _one_each(cu_seqlens_q_cpu, T, B):
        o, lse = _as_they_lie(q, seq_lens if dead else None, *options)
    elif q.shape[2] == PACKED and not single:
        o, lse = _packed(q, cu_seqlens_q, seq_lens if dead else None, sums[1:], *options)
    else:
        o, lse = _padded(q, cu_seqlens_q, seq_lens if dead else None, queries, *options)
    return o if lse is None else (o, lse)


def _one_each(cu_seqlens_q_cpu: Tensor | None, T: int, B: int) -> bool:
    """Whether the caller has said that row b is the query of sequence b.

    As many rows as sequences do not make it so: one without queries leaves a row past the end.
    """
    return cu_seqlens_q_cpu is not None and T == B and cu_seqlens_q_cpu.tolist() == list(range(B + 1))


def _as_they_lie(
    q: Tensor, seq_lens: Tensor | None, cache: _Cache, causal: bool, scale: float, with_lse: bool
) -> tuple[Tensor, Tensor | None]:
    o_T1HD, lse_TH1 = _infer(q.contiguous()[:, None], "BSND", None, cache, False, scale, with_lse)
    o, lse = o_T1HD[:, 0], None if lse_TH1 is None else lse_TH1[..., 0].contiguous()
    return (o, lse) if seq_lens is None else _repaired(o, lse, (seq_lens > 0)[:, None])


def _packed(
    q: Tensor,
    cu_seqlens_q: Tensor,
    seq_lens: Tensor | None,
    sums: list[int],
    cache: _Cache,
    causal: bool,
    scale: float,
    with_lse: bool,
) -> tuple[Tensor, Tensor | None]:
    T, rows = q.shape[0], sums[-1]
    o, lse = _infer(q[:rows].contiguous(), "TND", sums, cache, causal, scale, with_lse)
    lse = None if lse is None else lse.contiguous()
    if seq_lens is not None:
        b_T, place_T, _ = owners(cu_seqlens_q, rows)
        first_T = (lengths(cu_seqlens_q) - seq_lens)[b_T]
        sees_T = (seq_lens > 0)[b_T] & ((place_T >= first_T) | (not causal))
        o, lse = _repaired(o, lse, sees_T[:, None])
    if rows < T:
        o = torch.cat((o, o.new_zeros(T - rows, *o.shape[1:])))
        lse = None if lse is None else torch.cat((lse, lse.new_zeros(T - rows, lse.shape[1])))
    return o, lse


def _padded(
    q: Tensor,
    cu_seqlens_q: Tensor,
    seq_lens: Tensor | None,
    queries: list[int],
    cache: _Cache,
    causal: bool,
    scale: float,
    with_lse: bool,
) -> tuple[Tensor, Tensor | None]:
    T, longest = q.shape[0], max(queries)
    q_BSHD = pad(q, cu_seqlens_q, longest)
    several = longest > 1
    o_BSHD, lse_BHS = _infer(q_BSHD, "BSND", queries if several else None, cache, causal and several, scale, with_lse)
    lse_BSH = None if lse_BHS is None else lse_BHS.transpose(1, 2)
    if seq_lens is not None:
        place_S = torch.arange(longest, device=q.device)
        first_B1 = (lengths(cu_seqlens_q) - seq_lens)[:, None]
        sees_BS = (seq_lens > 0)[:, None] & ((place_S >= first_B1) | (not causal))
        o_BSHD, lse_BSH = _repaired(o_BSHD, lse_BSH, sees_BS[..., None])
    o = unpad(o_BSHD, cu_seqlens_q, T)
    return o, None if lse_BSH is None else unpad(lse_BSH, cu_seqlens_q, T)


def _repaired(o: Tensor, lse: Tensor | None, sees: Tensor) -> tuple[Tensor, Tensor | None]:
    """Rows that see nothing as the contract has them; `sees` is shaped like lse, or broadcasts to it."""
    return (
        torch.where(sees[..., None], o, 0.0),
        None if lse is None else torch.where(sees, lse, float("-inf")),
    )


def _nothing(q: Tensor, cu_seqlens_q: Tensor, with_lse: bool) -> Tensor | tuple[Tensor, Tensor]:
    T, H, _ = q.shape
    o = empty(q.shape, dtype=q.dtype, device=q.device).zero_()
    if not with_lse:
        return o
    lse = empty((T, H), dtype=torch.float32, device=q.device).zero_()
    past = torch.arange(T, device=q.device) >= cu_seqlens_q[-1]
    return o, lse.masked_fill_(~past[:, None], float("-inf"))


def _incre(
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
) -> Tensor:
    (_, P, K, D), (T, H, _), B = k_cache.shape, q.shape, seq_lens.shape[0]
    keys = calls.host_list(seq_lens_cpu, seq_lens, WHY) if T else []
    if not any(keys):
        return empty(q.shape, dtype=q.dtype, device=q.device).zero_()
    k_cache, v_cache, block_table = pages.contiguous(k_cache, v_cache, block_table, seq_lens)
    as_they_lie = _one_each(cu_seqlens_q_cpu, T, B)
    q_B1HD = q[:, None] if as_they_lie else pad(q, cu_seqlens_q, 1)
    o_B1HD = torch.ops.npu.npu_incre_flash_attention(
        q_B1HD.reshape(B, 1, H * D),
        k_cache.flatten(2),
        v_cache.flatten(2),
        actual_seq_lengths=keys,
        block_table=block_table,
        num_heads=H,
        scale_value=head_scale(scale, D),
        input_layout="BSH",
        num_key_value_heads=K,
        block_size=P,
        inner_precise=0,
    ).view(B, 1, H, D)
    if min(keys) == 0:
        o_B1HD, _ = _repaired(o_B1HD, None, (seq_lens > 0)[:, None, None])
    return o_B1HD[:, 0] if as_they_lie else unpad(o_B1HD, cu_seqlens_q, T)


def _common(a: Args) -> Iterable[str]:
    N, P, K, D = a.k_cache.shape
    if a.q.shape[1] > 256:
        yield f"{a.q.shape[1]} heads, the most supported are 256"
    if K * D > 65_535:
        yield f"kv heads times head dim is {K * D}, the most supported are 65535"
    if P > MAX_BLOCK or P % 16:
        yield f"block_size is {P}, not a multiple of 16 up to {MAX_BLOCK}"
    if not N:
        yield "the cache has no blocks"


def _reasons(a: Args) -> Iterable[str]:
    """blocks of 16·n up to 512 slots, of 128·n with more than one query unless the head dim is 128; K·D up to 65,535"""
    yield from _common(a)
    P, one_each = a.k_cache.shape[1], a.max_seqlen_q == 1 and a.q.shape[0] == a.seq_lens.shape[0]
    if not one_each and a.q.shape[2] != PACKED and P % 128:
        yield f"block_size is {P}, not a multiple of 128, with more (or fewer) than one query per sequence"
    if a.seq_lens.shape[0] > 4096:
        yield f"{a.seq_lens.shape[0]} sequences, the most supported are 4096"


def _reasons_310p(a: Args) -> Iterable[str]:
    """one query per sequence; blocks of 16·n up to 512 slots; at most 256 sequences"""
    yield from _common(a)
    if a.max_seqlen_q != 1 or a.q.shape[0] != a.seq_lens.shape[0]:
        yield "more (or fewer) than one query per sequence"
    if a.seq_lens.shape[0] > 256:
        yield f"{a.seq_lens.shape[0]} sequences, the most supported are 256"


_LIMITS = {"head_dim": Limit(max=512, multiple_of=16), "gqa_ratio": Limit(max=64)}
_FEATURES = frozenset({"causal", "scale", "lse", "gqa", "prefill", "host_lengths"})

IMPLEMENTATIONS = (
    Implementation(
        "paged_attention",
        "fused_infer",
        paged_attention,
        Supports(
            dtypes=frozenset({"bfloat16", "float16"}),
            features=_FEATURES,
            limits=_LIMITS,
            architectures=WITH_BF16,
            where=_reasons,
        ),
        # A recorded graph would keep the lengths of its recording.
        Declares(u_p=U_P, host_lengths=True, capturable=False, copies=frozenset("q")),
        priority=10,
    ),
    Implementation(
        "paged_attention",
        "incre_flash_310p",
        _incre,
        Supports(
            dtypes=frozenset({"float16"}),
            features=_FEATURES - {"lse", "prefill"},
            limits=_LIMITS,
            architectures=frozenset({P310}),
            where=_reasons_310p,
        ),
        Declares(u_p=U_P, host_lengths=True, capturable=False, copies=frozenset("q"), saturates=True),
        priority=10,
    ),
)
