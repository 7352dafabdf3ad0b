"""attention_varlen by aclnnFlashAttentionVarLenScore and its gradient, on packed rows (layout TND).

The operator takes running sums of lengths from the host. (aclnnFusedInferAttentionScore also has TND, for head dims 128
and 192 only; and no head dim is padded, so it is not used here.)

T packed queries, U packed keys, B sequences, H heads.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from hal.backends.ascend import attention_calls as calls
from hal.backends.ascend.attention_calls import U_P, Band, Window
from hal.backends.ascend.chips import FLOATS, WITH_BF16
from hal.backends.ascend.versions import cann
from hal.capability import Declares, Implementation, Limit, Supports
from hal.memory import empty
from hal.op import Args
from hal.ops._attention_core import head_scale
from hal.ops._lengths import lengths, owners

__all__ = ["IMPLEMENTATIONS"]

Gradients = tuple[Tensor | None, ...]

WHY = "attention_varlen (ascend)"


class _Request(NamedTuple):
    """A call without the rows past the last sequence.

    sees: which queries see a key, (T,), if not all do. seen: which keys a query may see, (U,), if not all.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    queries: list[int]
    keys: list[int]
    band: Band
    sees: Tensor | None
    seen: Tensor | None


def _prepared(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_q: Tensor,
    cu_k: Tensor,
    causal: bool,
    window: Window | None,
    cu_q_cpu: Tensor | None,
    cu_k_cpu: Tensor | None,
) -> _Request | None:
    """None if no query sees a key."""
    queries, keys = calls.host_list(cu_q_cpu, cu_q, WHY), calls.host_list(cu_k_cpu, cu_k, WHY)
    left, right = calls.narrowed(causal, window)
    pairs = [
        (stop - start, last - first)
        for start, stop, first, last in zip(queries, queries[1:], keys, keys[1:], strict=False)
    ]
    lively = [(s, n) for s, n in pairs if s and n and (right is None or s - n - right < s)]
    if not lively:
        return None
    q, k, v = q[: queries[-1]].contiguous(), k[: keys[-1]].contiguous(), v[: keys[-1]].contiguous()
    dead = any(s and (not n or (right is not None and s - n - right > 0)) for s, n in pairs)
    sees = _sees(cu_q, cu_k, q.shape[0], right) if dead else None
    if sees is not None:
        q = torch.where(sees[:, None, None], q, 0.0)
    hidden = any(n and (not s or (left is not None and n - s - left > 0)) for s, n in pairs)
    seen = _seen(cu_q, cu_k, k.shape[0], left) if hidden else None
    if seen is not None:
        k, v = (torch.where(seen[:, None, None], t, 0.0) for t in (k, v))
    longest = max(n for _, n in pairs)
    left = None if left is not None and left >= longest - 1 else left
    right = None if right is not None and right >= max(s for s, _ in pairs) - 1 else right
    return _Request(q, k, v, queries[1:], keys[1:], calls.band(left, right, q.device), sees, seen)


def _sees(cu_q: Tensor, cu_k: Tensor, rows: int, right: int | None) -> Tensor:
    b_T, place_T, owned_T = owners(cu_q, rows)
    queries_T, keys_T = lengths(cu_q)[b_T], lengths(cu_k)[b_T]
    sees_T = owned_T & (keys_T > 0)
    return sees_T if right is None else sees_T & (place_T + keys_T - queries_T + right >= 0)


def _seen(cu_q: Tensor, cu_k: Tensor, rows: int, left: int | None) -> Tensor:
    b_U, place_U, owned_U = owners(cu_k, rows)
    queries_U = lengths(cu_q)[b_U]
    seen_U = owned_U & (queries_U > 0)
    return seen_U if left is None else seen_U & (place_U >= lengths(cu_k)[b_U] - queries_U - left)


def _flash(r: _Request, scale: float) -> tuple[Tensor, Tensor]:
    o, maximum, total, *_ = torch.ops.npu.npu_fusion_attention(
        r.q,
        r.k,
        r.v,
        r.q.shape[1],
        "TND",
        atten_mask=r.band.mask,
        scale=scale,
        keep_prob=1.0,
        pre_tockens=r.band.pre,
        next_tockens=r.band.next,
        inner_precise=0,
        actual_seq_qlen=r.queries,
        actual_seq_kvlen=r.keys,
        sparse_mode=r.band.mode,
        softmax_layout="TND",
    )
    lse = calls.lse_of(maximum, total)
    if r.sees is not None:
        o = torch.where(r.sees[:, None, None], o, 0.0)
        lse = torch.where(r.sees[:, None], lse, float("-inf"))
    return o, lse


def _train(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    causal: bool = False,
    window: Window | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    sinks: Tensor | None = None,
    return_lse: bool = False,
    cu_seqlens_q_cpu: Tensor | None = None,
    cu_seqlens_k_cpu: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    T, H, D = q.shape
    request = _prepared(q, k, v, cu_seqlens_q, cu_seqlens_k, causal, window, cu_seqlens_q_cpu, cu_seqlens_k_cpu)
    if request is not None and request.q.shape[0] == T:
        return _flash(request, head_scale(scale, D))
    o = empty((T, H, v.shape[2]), dtype=q.dtype, device=q.device).zero_()
    lse = empty((T, H), dtype=torch.float32, device=q.device).zero_()
    if request is None:
        owned_T = owners(cu_seqlens_q, T)[2] if cu_seqlens_q.shape[0] > 1 else lse.new_zeros(T, dtype=torch.bool)
        return o, lse.masked_fill_(owned_T[:, None], float("-inf"))
    rows = request.q.shape[0]
    o[:rows], lse[:rows] = _flash(request, head_scale(scale, D))
    return o, lse


def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    causal: bool = False,
    window: Window | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    sinks: Tensor | None = None,
    return_lse: bool = False,
    cu_seqlens_q_cpu: Tensor | None = None,
    cu_seqlens_k_cpu: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    o, lse = _train(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        causal=causal,
        window=window,
        scale=scale,
        cu_seqlens_q_cpu=cu_seqlens_q_cpu,
        cu_seqlens_k_cpu=cu_seqlens_k_cpu,
    )
    return (o, lse) if return_lse else o


def _backward(a: Args, outs: dict[str, Tensor], grads: Gradients, needs: tuple[bool, ...]) -> Gradients:
    do = grads[0]
    if do is None:
        return (None,) * 4
    r = _prepared(
        a.q,
        a.k,
        a.v,
        a.cu_seqlens_q,
        a.cu_seqlens_k,
        a.causal,
        a.window,
        a.cu_seqlens_q_cpu,
        a.cu_seqlens_k_cpu,
    )
    if r is None:
        return (None,) * 4
    rows = r.q.shape[0]
    do = do[:rows].contiguous()
    if r.sees is not None:
        do = torch.where(r.sees[:, None, None], do, 0.0)
    maximum, total = calls.softmax_statistics(outs["lse"][:rows], None if r.sees is None else r.sees[:, None])
    dq, dk, dv, *_ = torch.ops.npu.npu_fusion_attention_grad(
        r.q,
        r.k,
        r.v,
        do,
        r.q.shape[1],
        "TND",
        atten_mask=r.band.mask,
        softmax_max=maximum,
        softmax_sum=total,
        attention_in=outs["o"][:rows].contiguous(),
        scale_value=head_scale(a.scale, a.q.shape[2]),
        keep_prob=1.0,
        pre_tockens=r.band.pre,
        next_tockens=r.band.next,
        inner_precise=0,
        actual_seq_qlen=r.queries,
        actual_seq_kvlen=r.keys,
        sparse_mode=r.band.mode,
        softmax_layout="TND",
    )
    return _whole(dq, r.sees, a.q.shape[0]), _whole(dk, r.seen, a.k.shape[0]), _whole(dv, r.seen, a.v.shape[0]), None


def _whole(grad: Tensor, worked: Tensor | None, rows: int) -> Tensor:
    """A gradient with zeros past the last sequence and where there was no work, which the operator may not write."""
    if worked is not None:
        grad = torch.where(worked[:, None, None], grad, 0.0)
    short = rows - grad.shape[0]
    return torch.cat((grad, grad.new_zeros(short, *grad.shape[1:]))) if short else grad


def _reasons(a: Args) -> Iterable[str]:
    """CANN 8.3; at most 256 heads, 1,024 sequences and 2^20 rows; a v no wider than k"""
    if a.q.shape[1] > 256:
        yield f"{a.q.shape[1]} heads, the most supported are 256"
    if a.v.shape[2] > a.k.shape[2]:
        yield f"v is {a.v.shape[2]} wide, more than k with {a.k.shape[2]}"
    if a.cu_seqlens_q.shape[0] - 1 > 1024:
        yield f"{a.cu_seqlens_q.shape[0] - 1} sequences, the most supported are 1024"
    if cann() < (8, 3):
        yield "CANN before 8.3 gives the statistics of packed rows in another order"
    if max(a.q.shape[0], a.k.shape[0]) > 2**20:
        yield f"{max(a.q.shape[0], a.k.shape[0])} rows, the most supported are {2**20}"


IMPLEMENTATIONS = (
    Implementation(
        "attention_varlen",
        "flash",
        attention_varlen,
        Supports(
            dtypes=FLOATS,
            features=frozenset({"causal", "window", "scale", "lse", "gqa", "different_v_dim", "host_lengths"}),
            limits={"head_dim": Limit(max=768)},
            architectures=WITH_BF16,
            where=_reasons,
        ),
        Declares(u_p=U_P, host_lengths=True, capturable=False, copies=frozenset("qkv")),
        priority=10,
        train=_train,
        backward=_backward,
    ),
)
