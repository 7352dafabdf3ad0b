"""attention by aclnnFusedInferAttentionScore (inference) and aclnnFlashAttentionScore with its gradient (training).

`fused_infer` serves 16-bit calls without a mask per head; its training pass is the other operator's. `flash` serves
float32, masks per head and head dims that the first refuses. On 310P `prompt_flash` and, for one query, `incre_flash`
serve float16 without a log-sum-exp. Soft cap, sinks and additive masks are refused: a mask would be rounded to q's
dtype, and what the scale multiplies depends on the version.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from hal.backends.ascend import attention_calls as calls
from hal.backends.ascend.attention_calls import U_P, Band, Window
from hal.backends.ascend.chips import P310, WITH_BF16
from hal.capability import Declares, Implementation, Limit, Supports
from hal.memory import empty
from hal.op import Args
from hal.ops._attention_core import Sight, head_scale

__all__ = ["IMPLEMENTATIONS"]

Gradients = tuple[Tensor | None, ...]


class _Request(NamedTuple):
    """A call with what nobody sees cut off: `dead` queries in front, `first` keys, and what hides the others.

    visible: True = attend, where the caller gave a mask; sees: which rows see a key, (B or 1, H or 1, S), if not all.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    dead: int
    first: int
    band: Band
    visible: Tensor | None
    sees: Tensor | None


def _prepared(q: Tensor, k: Tensor, v: Tensor, causal: bool, window: Window | None, mask: Tensor | None) -> _Request:
    S, L = q.shape[1], k.shape[1]
    left, right = calls.narrowed(causal, window)
    if mask is not None:
        mask = mask[(None,) * (4 - mask.ndim)]
        if mask.stride(1) == 0:  # one for all heads, expanded
            mask = mask[:, :1]
        if left is not None or right is not None:
            mask = Sight(False, left, right, mask).visible(0, S, S, L, q.device)
        return _masked(q, k, v, mask)
    dead = 0 if right is None else min(S, max(0, S - L - right))
    S -= dead
    first = 0 if left is None else max(0, L - S - left)
    L -= first
    # A bound that hides nothing from anybody is none.
    left = None if left is not None and left >= L - 1 else left
    right = None if right is not None and right >= S - 1 else right
    q, k, v = q[:, dead:].contiguous(), k[:, first:].contiguous(), v[:, first:].contiguous()
    return _Request(q, k, v, dead, first, calls.band(left, right, q.device), None, None)


def _masked(q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> _Request:
    """A request with a mask of its own (rank 4); queries and keys that it leaves out of everything hold zeros."""
    K = k.shape[2]
    sees = visible.any(3)
    seen = visible.any(2)
    if seen.shape[1] != 1:
        seen = seen.unflatten(1, (K, seen.shape[1] // K)).any(2)
    seen = seen.transpose(1, 2)[..., None]
    q = torch.where(sees.transpose(1, 2)[..., None], q, 0.0)
    k, v = (torch.where(seen, t, 0.0) for t in (k, v))
    return _Request(q, k, v, 0, 0, Band(1, None, calls.MAX_TOKENS, calls.MAX_TOKENS), visible, sees)


def _finished(r: _Request, o: Tensor, lse: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """The whole result: rows that see nothing are 0 and -inf."""
    if r.sees is not None:
        o = torch.where(r.sees.transpose(1, 2)[..., None], o, 0.0)
        lse = None if lse is None else torch.where(r.sees, lse, float("-inf"))
    if r.dead:
        o = torch.cat((o.new_zeros(o.shape[0], r.dead, *o.shape[2:]), o), 1)
        if lse is not None:
            lse = torch.cat((lse.new_full((*lse.shape[:2], r.dead), float("-inf")), lse), 2)
    return o, lse


def _nothing(q: Tensor, v: Tensor, with_lse: bool) -> tuple[Tensor, Tensor | None]:
    """No queries, or no key that any query sees."""
    B, S, H, _ = q.shape
    o = empty((B, S, H, v.shape[3]), dtype=q.dtype, device=q.device).zero_()
    return o, empty((B, H, S), dtype=torch.float32, device=q.device).fill_(float("-inf")) if with_lse else None


def _is_nothing(q: Tensor, k: Tensor, causal: bool, window: Window | None) -> bool:
    S, L = q.shape[1], k.shape[1]
    right = calls.narrowed(causal, window)[1]
    return not q.numel() or L == 0 or (right is not None and S - L - right >= S)


def _infer(r: _Request, scale: float, with_lse: bool) -> tuple[Tensor, Tensor | None]:
    S, H, L, K = *r.q.shape[1:3], *r.k.shape[1:3]
    mask, mode, precise = r.band.mask, r.band.mode, 0
    if r.visible is not None:
        mask = calls.hidden(r.visible, 1, S, L)
        # One query knows neither sparse modes nor the repair of rows that see nothing.
        mode, precise = (0, 0) if S == 1 else (1, 2)
    o, lse = torch.ops.npu.npu_fused_infer_attention_score(
        r.q,
        r.k,
        r.v,
        atten_mask=mask,
        num_heads=H,
        scale=scale,
        pre_tokens=r.band.pre,
        next_tokens=r.band.next,
        input_layout="BSND",
        num_key_value_heads=K,
        sparse_mode=mode,
        inner_precise=precise,
        softmax_lse_flag=with_lse,
    )
    return o, lse[..., 0].contiguous() if with_lse else None


def _flash_mask(r: _Request) -> tuple[Tensor | None, int]:
    """(mask, inner_precise) of the training operator."""
    if r.visible is None:
        return r.band.mask, 0
    heads = 1 if r.visible.shape[1] == 1 else r.q.shape[2]
    batch = r.q.shape[0] if heads > 1 or r.visible.shape[0] > 1 else 1
    visible = r.visible.expand(batch, *r.visible.shape[1:])
    return calls.hidden(visible, heads, r.q.shape[1], r.k.shape[1]), 2


def _flash(r: _Request, scale: float) -> tuple[Tensor, Tensor]:
    mask, precise = _flash_mask(r)
    o, maximum, total, *_ = torch.ops.npu.npu_fusion_attention(
        r.q,
        r.k,
        r.v,
        r.q.shape[2],
        "BSND",
        atten_mask=mask,
        scale=scale,
        keep_prob=1.0,
        pre_tockens=r.band.pre,
        next_tockens=r.band.next,
        inner_precise=precise,
        sparse_mode=r.band.mode,
    )
    return o, calls.lse_of(maximum, total)


def fused_infer(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    window: Window | None = None,
    mask: Tensor | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    sinks: Tensor | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    if _is_nothing(q, k, causal, window):
        o, lse = _nothing(q, v, return_lse)
    else:
        request = _prepared(q, k, v, causal, window, mask)
        o, lse = _finished(request, *_infer(request, head_scale(scale, q.shape[3]), return_lse))
    return o if lse is None else (o, lse)


def flash(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    window: Window | None = None,
    mask: Tensor | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    sinks: Tensor | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    o, lse = _train(q, k, v, causal=causal, window=window, mask=mask, scale=scale)
    return (o, lse) if return_lse else o


def _train(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    window: Window | None = None,
    mask: Tensor | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    sinks: Tensor | None = None,
    return_lse: bool = False,
) -> tuple[Tensor, Tensor]:
    if _is_nothing(q, k, causal, window):
        o, lse = _nothing(q, v, True)
    else:
        request = _prepared(q, k, v, causal, window, mask)
        o, lse = _finished(request, *_flash(request, head_scale(scale, q.shape[3])))
    assert lse is not None
    return o, lse


def _backward(a: Args, outs: dict[str, Tensor], grads: Gradients, needs: tuple[bool, ...]) -> Gradients:
    do = grads[0]
    if do is None or _is_nothing(a.q, a.k, a.causal, a.window):
        return (None,) * 5
    r = _prepared(a.q, a.k, a.v, a.causal, a.window, a.mask)
    o, do, lse = outs["o"][:, r.dead :].contiguous(), do[:, r.dead :].contiguous(), outs["lse"][:, :, r.dead :]
    if r.sees is not None:
        do = torch.where(r.sees.transpose(1, 2)[..., None], do, 0.0)
    mask, precise = _flash_mask(r)
    maximum, total = calls.softmax_statistics(lse, r.sees)
    dq, dk, dv, *_ = torch.ops.npu.npu_fusion_attention_grad(
        r.q,
        r.k,
        r.v,
        do,
        r.q.shape[2],
        "BSND",
        atten_mask=mask,
        softmax_max=maximum,
        softmax_sum=total,
        attention_in=o,
        scale_value=head_scale(a.scale, a.q.shape[3]),
        keep_prob=1.0,
        pre_tockens=r.band.pre,
        next_tockens=r.band.next,
        inner_precise=precise,
        sparse_mode=r.band.mode,
    )
    return _behind(dq, r.dead), _behind(dk, r.first), _behind(dv, r.first), None, None


def _behind(grad: Tensor, cut: int) -> Tensor:
    """The gradient with zeros for what was cut off in front."""
    return torch.cat((grad.new_zeros(grad.shape[0], cut, *grad.shape[2:]), grad), 1) if cut else grad


def _on_310p(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    window: Window | None = None,
    mask: Tensor | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    sinks: Tensor | None = None,
    return_lse: bool = False,
) -> Tensor:
    H, K = q.shape[2], k.shape[2]
    if _is_nothing(q, k, causal, window):
        return _nothing(q, v, False)[0]
    r = _prepared(q, k, v, causal, window, mask)
    visible = r.visible
    S, L = r.q.shape[1], r.k.shape[1]
    if r.band.mask is not None:  # of the sparse modes this chip has the plain one only
        visible = Sight(False, *calls.narrowed(causal, window)).visible(0, S, S, L, q.device)
    hidden = None if visible is None else calls.hidden(visible, 1, S, L)
    factor = head_scale(scale, q.shape[3])
    if S == 1:
        o = torch.ops.npu.npu_incre_flash_attention(
            r.q,
            r.k,
            r.v,
            atten_mask=hidden,
            num_heads=H,
            scale_value=factor,
            input_layout="BSND",
            num_key_value_heads=K,
            inner_precise=0,
        )
    else:  # knows no grouped heads here
        o = torch.ops.npu.npu_prompt_flash_attention(
            r.q,
            r.k if H == K else r.k.repeat_interleave(H // K, 2),
            r.v if H == K else r.v.repeat_interleave(H // K, 2),
            atten_mask=hidden,
            num_heads=H,
            scale_value=factor,
            pre_tokens=calls.MAX_TOKENS,
            next_tokens=calls.MAX_TOKENS,
            input_layout="BSND",
        )
    return _finished(r, o, None)[0]


def _infer_reasons(a: Args) -> Iterable[str]:
    """a mask that is one for all heads; at most 256 heads, H·D and K·D below 65,535"""
    if a.mask is not None and a.mask.ndim > 2 and a.mask.shape[-3] != 1 and a.mask.stride(-3) != 0:
        yield "the mask differs from head to head"
    yield from _size_reasons(a)
    widest = a.q.shape[2] * a.q.shape[3]
    if widest >= 65_535:
        yield f"heads times head dim is {widest}, which must be below 65535"


def _size_reasons(a: Args) -> Iterable[str]:
    """at most 256 heads"""
    if a.q.shape[2] > 256:
        yield f"{a.q.shape[2]} heads, the most supported are 256"


def _flash_reasons(a: Args) -> Iterable[str]:
    """at most 256 heads, a v no wider than k"""
    yield from _size_reasons(a)
    if a.v.shape[3] > a.k.shape[3]:
        yield f"v is {a.v.shape[3]} wide, more than k with {a.k.shape[3]}"


def _reasons_310p(a: Args) -> Iterable[str]:
    """a mask that is one for all heads; at most 128 sequences of 65,535 keys"""
    yield from _infer_reasons(a)
    if a.q.shape[0] > 128:
        yield f"{a.q.shape[0]} sequences, the most supported are 128"
    if max(a.q.shape[1], a.k.shape[1]) > 65_535:
        yield "more than 65535 queries or keys"


_COPIES = frozenset("qkv")
_FEATURES = frozenset({"causal", "window", "scale", "lse", "gqa", "mask"})

IMPLEMENTATIONS = (
    Implementation(
        "attention",
        "fused_infer",
        fused_infer,
        Supports(
            dtypes=frozenset({"bfloat16", "float16"}),
            features=_FEATURES,
            limits={"head_dim": Limit(max=512, multiple_of=16), "gqa_ratio": Limit(max=64)},
            architectures=WITH_BF16,
            where=_infer_reasons,
        ),
        Declares(u_p=U_P, copies=_COPIES),
        priority=20,
        train=_train,
        backward=_backward,
    ),
    Implementation(
        "attention",
        "flash",
        flash,
        Supports(
            dtypes=frozenset({"float32", "bfloat16", "float16"}),
            features=_FEATURES | {"different_v_dim"},
            limits={"head_dim": Limit(max=768)},
            architectures=WITH_BF16,
            where=_flash_reasons,
        ),
        Declares(u_p=U_P, copies=_COPIES),
        priority=10,
        train=_train,
        backward=_backward,
    ),
    Implementation(
        "attention",
        "flash_310p",
        _on_310p,
        Supports(
            dtypes=frozenset({"float16"}),
            features=_FEATURES - {"lse"},
            limits={"head_dim": Limit(max=512, multiple_of=16), "gqa_ratio": Limit(max=64)},
            architectures=frozenset({P310}),
            where=_reasons_310p,
        ),
        Declares(u_p=U_P, capturable=False, copies=_COPIES, saturates=True),
        priority=10,
    ),
)
