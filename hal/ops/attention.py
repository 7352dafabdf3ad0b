"""Attention over dense batches.

B batch, S queries, L keys, H query heads, K kv heads, D head dim of q and k, E head dim of v.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hal.accuracy import Accumulator, Accuracy, unit_roundoff
from hal.arithmetic import result, widen
from hal.errors import DtypeError, ShapeError
from hal.op import Args, Cost, Meta, Traits, dtype_name, op
from hal.ops import _attention_args as arguments
from hal.ops._attention_bound import forward_bound, gradient_bound, rows_without_keys
from hal.ops._attention_core import Sight, attend, head_scale
from hal.ops._checks import check_floating, check_rank, check_same_dtype

__all__ = ["attention"]

Window = tuple[int | None, int | None]


def _pack(
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
) -> tuple[Any, ...]:
    return q, k, v, mask, sinks, causal, *arguments.split_window(window), softcap, scale, return_lse


def _validate(a: Args) -> None:
    for name in ("q", "k", "v"):
        check_floating("attention", name, getattr(a, name))
        check_rank("attention", name, getattr(a, name), 4, "(batch, length, heads, head dim)")
    check_same_dtype("attention", q=a.q, k=a.k, v=a.v)
    arguments.check_devices("attention", a, "q", "k", "v", "mask", "sinks")
    if not a.q.shape[0] == a.k.shape[0] == a.v.shape[0]:
        raise ShapeError(
            f"attention: batch sizes are {a.q.shape[0]}, {a.k.shape[0]} and {a.v.shape[0]}; q (B, S, H, D), "
            "k and v (B, L, K, D) share B"
        )
    if a.k.shape[1] != a.v.shape[1]:
        raise ShapeError(f"attention: k has {a.k.shape[1]} keys, v has {a.v.shape[1]} values; they must be as many")
    arguments.check_heads("attention", a.q, a.k, a.v)
    arguments.check_options("attention", a, a.q.shape[2])
    if a.mask is not None:
        _check_mask(a.mask, (a.q.shape[0], a.q.shape[2], a.q.shape[1], a.k.shape[1]))


def _check_mask(mask: Tensor, full: tuple[int, ...]) -> None:
    if mask.dtype is not torch.bool and not (mask.is_floating_point() and mask.element_size() > 1):
        raise DtypeError(
            f"attention: mask is {dtype_name(mask.dtype)}; it is bool (True = attend) or an additive bias in float64, "
            "float32, bfloat16 or float16: convert it, for example with mask.bool()"
        )
    fits = mask.ndim <= 4 and all(n in (1, m) for n, m in zip(reversed(mask.shape), reversed(full), strict=False))
    if not fits:
        raise ShapeError(
            f"attention: mask has shape {tuple(mask.shape)}, which does not broadcast to (B, H, S, L) = {full}; "
            "queries are its last axis but one, keys its last"
        )


def _meta(a: Args) -> tuple[Meta, ...]:
    B, S, H, _ = a.q.shape
    lse_shape = (B, H, S) if a.return_lse else (0,)
    return Meta((B, S, H, a.v.shape[3]), a.q.dtype), Meta(lse_shape, arguments.lse_dtype(a.q.dtype))


def _traits(a: Args) -> Traits:
    (_, S, H, D), (_, L, K, E) = a.q.shape, a.v.shape
    used = arguments.features(a, H, K, D, E)
    if a.mask is not None:
        used.add("mask" if a.mask.dtype is torch.bool else "bias")
    dims = {"head_dim": D, "v_head_dim": E, "gqa_ratio": H // K, "queries": S, "keys": L}
    return Traits(dtype=dtype_name(a.q.dtype), features=frozenset(used), dims=dims)


def _cost(a: Args) -> Cost:
    (B, S, H, D), (_, L, K, E) = a.q.shape, a.v.shape
    pairs = arguments.visible_pairs(S, L, a.causal, a.window)
    moved = B * (S * H * (D + E) + L * K * (D + E)) * a.q.element_size()
    moved += sum(t.numel() * t.element_size() for t in (a.mask, a.sinks) if t is not None)
    moved += B * S * H * arguments.lse_dtype(a.q.dtype).itemsize if a.return_lse else 0
    return Cost(flops=2 * B * H * pairs * (D + E), bytes=moved)


def _sight(a: Args) -> Sight:
    left, right = arguments.split_window(a.window)
    return Sight(causal=a.causal, left=left, right=right, mask=a.mask)


def _bound(a: Args, expected: tuple[Tensor, ...], acc: Accumulator) -> tuple[Tensor, ...]:
    scale = head_scale(a.scale, a.q.shape[3])
    options: dict[str, Any] = {"softcap": a.softcap, "scale": scale, "sinks_H": a.sinks}
    return forward_bound(a.q, a.k, a.v, expected[0], _sight(a), acc, **options)[: len(expected)]


def _gradient_bound(
    a: Args, expected: tuple[Tensor, ...], grads: tuple[Tensor | None, ...], acc: Accumulator
) -> tuple[Tensor | None, ...]:
    do, dlse = (*grads, None)[:2]
    bias = a.mask if a.mask is not None and a.mask.is_floating_point() else None
    E = gradient_bound(
        a.q,
        a.k,
        a.v,
        expected[0],
        torch.zeros_like(expected[0]) if do is None else do,
        _sight(a),
        acc,
        unit_roundoff(a.q.dtype if acc.dtype is None else acc.dtype),
        softcap=a.softcap,
        scale=head_scale(a.scale, a.q.shape[3]),
        sinks_H=a.sinks,
        dlse_BHS=dlse,
        mask=bias,
    )
    return E.q, E.k, E.v, E.mask, E.sinks


def _exact(a: Args, expected: tuple[Tensor, ...]) -> tuple[Tensor | None, ...]:
    dead_BHS = rows_without_keys(_sight(a), a.q.shape[1], a.k.shape[1], a.q)
    dead = dead_BHS.transpose(1, 2)[..., None].expand(expected[0].shape)
    return (dead, None)[: len(expected)]


def _to_outs(a: Args, public: Any) -> tuple[Tensor, ...]:
    if isinstance(public, tuple):
        return public
    return public, public.new_empty(0, dtype=arguments.lse_dtype(public.dtype))


def _from_outs(outs: tuple[Tensor, ...], packed: tuple[Any, ...]) -> Any:
    return outs if packed[-1] else outs[0]


ACCURACY = Accuracy(
    rule="bound",
    bound=_bound,
    exact=_exact,
    gradient_bound=_gradient_bound,
    notes="derived in hal.ops._attention_bound",
)


@op(
    schema="Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor? sinks, bool causal, SymInt? window_left, "
    "SymInt? window_right, float? softcap, float? scale, bool return_lse",
    results=("o", "lse"),
    pack=_pack,
    validate=_validate,
    meta=_meta,
    traits=_traits,
    dims=("head_dim", "v_head_dim", "gqa_ratio", "queries", "keys"),
    cost=_cost,
    accuracy=ACCURACY,
    features=(*arguments.FEATURES, "mask", "bias"),
    grad=("q", "k", "v", "mask", "sinks"),
    saves=("o", "lse"),
    optional_result="return_lse",
    to_outs=_to_outs,
    from_outs=_from_outs,
    splits={"window": ("window_left", "window_right")},
    autocast=("q", "k", "v"),
)
def attention(
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
    """softmax(cap(scale·q·kᵀ) + bias) · v, over the keys that causal, window and mask all leave.

    Args:
        q: (B, S, H, D). k: (B, L, K, D). v: (B, L, K, E). One floating dtype; H a multiple of K, query head h uses
            kv head h // (H // K); D and E from 1 to 576.
        causal: query i sees keys 0 … i + (L - S).
        window: (left, right), inclusive counts of keys around i + (L - S), None = unbounded.
        mask: bool, True = attend, or an additive bias of any float dtype, broadcastable to (B, H, S, L); -inf in a
            bias masks as False does.
        softcap: cap·tanh(s/cap) on the scaled logits, before the mask; above 0.
        scale: factor on q·k; None = 1/sqrt(D).
        sinks: (H,), a logit per head that joins the denominator, neither scaled nor capped, without a value.
        return_lse: return (o, lse) rather than o.

    Returns:
        o (B, S, H, E) in q's dtype. lse (B, H, S), float32 (float64 for float64): natural log of the denominator,
        sinks included. A row that sees no key gives 0 and -inf (the sink's logit if there is one) and no gradient.
        A key that no query of its sequence sees has no influence, whatever k and v hold there.

    Raises:
        ShapeError, DtypeError, DeviceError, ArgumentError: arguments that do not fit the above.

    Source: Vaswani et al. 2017, "Attention Is All You Need"; grouped heads Ainslie et al. 2023; soft cap Gemma 2
    (2024); sinks as in gpt-oss (2025).
    """
    left, right = arguments.split_window(window)
    sight = Sight(causal=causal, left=left, right=right, mask=mask)
    q_BSHD, k_BLKD, v_BLKE = widen(q), widen(k), widen(v)
    o_BSHE, lse_BHS = attend(
        q_BSHD,
        k_BLKD,
        v_BLKE,
        sight,
        softcap=softcap,
        scale=head_scale(scale, q.shape[3]),
        sinks_H=None if sinks is None else sinks.to(q_BSHD.dtype),
    )
    o = result(o_BSHE, q.dtype)
    return (o, lse_BHS) if return_lse else o
