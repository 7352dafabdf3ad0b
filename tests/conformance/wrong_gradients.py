"""Backward passes that are wrong on purpose, each in one way; and an honest one that shares nothing with hal's."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from faulty import reference
from torch import Tensor

from hal.capability import Declares, Implementation
from hal.contract import OPS, Args
from hal.recording import recompute

Found = list[Tensor | None]
Change = Callable[[Found, Args, tuple[Tensor | None, ...]], Found]


def implementation(op: str, backward: Callable[..., Any], **declares: Any) -> Implementation:
    return Implementation(op, "planted", reference(op), declares=Declares(**declares), backward=backward)


def after(op: str, change: Change) -> Implementation:
    """The reference's gradients, changed."""

    def backward(a: Args, outs: dict[str, Tensor], grads: Any, needs: tuple[bool, ...]) -> tuple[Tensor | None, ...]:
        return tuple(change(list(recompute(OPS[op], a, grads, needs)), a, grads))

    return implementation(op, backward, lse_grad=True)


def asked(op: str, **changes: Any) -> Implementation:
    """The reference's gradients of a call with other arguments."""

    def backward(a: Args, outs: dict[str, Tensor], grads: Any, needs: tuple[bool, ...]) -> tuple[Tensor | None, ...]:
        return recompute(OPS[op], Args(**vars(a) | changes), grads, needs)

    return implementation(op, backward, lse_grad=True)


def one(name: str, op: str, change: Callable[[Tensor, Args], Tensor | None]) -> Implementation:
    """The gradient of one argument, changed."""
    at = OPS[op].grad.index(name)

    def changed(found: Found, a: Args, grads: Any) -> Found:
        d = found[at]
        found[at] = None if d is None else change(d, a)
        return found

    return after(op, changed)


def written(op: str, formula: Callable[[Args, Any], tuple[Tensor | None, ...]], **declares: Any) -> Implementation:
    """Gradients by a formula of (arguments, gradients of the results)."""

    def backward(a: Args, outs: dict[str, Tensor], grads: Any, needs: tuple[bool, ...]) -> tuple[Tensor | None, ...]:
        found = formula(a, grads)
        return tuple(d if need else None for d, need in zip(found, needs, strict=True))

    return implementation(op, backward, **declares)


def wide(t: Tensor) -> Tensor:
    return t if t.dtype is torch.float64 else t.float()


def attention_formula(
    *, scaled: bool = True, slope: bool = True, delta: bool = True, group: bool = True
) -> Callable[[Args, Any], tuple[Tensor | None, ...]]:
    """The gradients of q, k and v as FlashAttention 2 (Dao 2023) writes them, for calls without mask and sinks."""

    def formula(a: Args, grads: Any) -> tuple[Tensor | None, ...]:
        if a.mask is not None or a.sinks is not None:
            floating = a.mask is not None and a.mask.is_floating_point()
            return recompute(OPS["attention"], a, grads, (True, True, True, floating, a.sinks is not None))
        q, k, v, do = (wide(t).transpose(1, 2) for t in (a.q, a.k, a.v, grads[0]))
        (_, H, S, D), (_, K, L, _) = q.shape, k.shape
        k, v = (t.repeat_interleave(H // K, 1) for t in (k, v))
        at, j = torch.arange(S)[:, None] + (L - S), torch.arange(L)
        seen = torch.ones(S, L, dtype=torch.bool)
        seen = seen & (j <= at) if a.causal else seen
        if a.window is not None:
            left, right = (S + L if n is None else n for n in a.window)
            seen = seen & (j >= at - left) & (j <= at + right)
        used = seen.any(0)[:, None]
        k, v = torch.where(used, k, 0.0), torch.where(used, v, 0.0)
        q, do = (torch.where(seen.any(1)[:, None], t, 0.0) for t in (q, do))
        scale = D**-0.5 if a.scale is None else a.scale
        s = q @ k.mT * scale
        tanh = torch.zeros_like(s) if a.softcap is None else torch.tanh(s / a.softcap)
        s = (s if a.softcap is None else a.softcap * tanh).masked_fill(~seen, -math.inf)
        p = torch.softmax(s.masked_fill(~seen.any(1)[:, None], 0.0), -1) * seen.any(1)[:, None]
        dp = do @ v.mT
        ds = p * (dp - (p * dp).sum(-1, keepdim=True) if delta else p * dp)
        if len(grads) > 1 and grads[1] is not None:
            ds = ds + p * torch.where(seen.any(1), wide(grads[1]), 0.0)[..., None]
        ds = ds * (1 - tanh.square()) if slope else ds
        ds = ds * scale if scaled else ds
        dk, dv = ds.mT @ q, p.mT @ do
        if group:
            dk, dv = (t.unflatten(1, (K, H // K)).sum(2) for t in (dk, dv))
        else:  # as if query head h used kv head h % K
            dk, dv = (t.unflatten(1, (H // K, K)).sum(1) for t in (dk, dv))
        return (ds @ k).transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2), None, None

    return formula


def layer_norm_formula(*, mean: bool = True, projection: bool = True) -> Callable[[Args, Any], Any]:
    def formula(a: Args, grads: Any) -> tuple[Tensor | None, ...]:
        x, dy = wide(a.x), wide(grads[0])
        centred = x - x.mean(-1, keepdim=True)
        rstd = (centred.square().mean(-1, keepdim=True) + a.eps).rsqrt()
        normed, g = centred * rstd, dy if a.weight is None else dy * a.weight.to(dy.dtype)
        dx = g - g.mean(-1, keepdim=True) if mean else g
        dx = dx - normed * (g * normed).mean(-1, keepdim=True) if projection else dx
        return (
            dx * rstd,
            None if a.weight is None else (dy * normed).flatten(0, -2).sum(0),
            None if a.bias is None else dy.flatten(0, -2).sum(0),
        )

    return formula


def cross_entropy_formula(
    *, smoothing: bool = True, z: bool = True, ignored: bool = True, count: bool = True
) -> Callable[[Args, Any], Any]:
    def formula(a: Args, grads: Any) -> tuple[Tensor | None, ...]:
        keep = a.target != a.ignore_index
        x = torch.where(keep[:, None], wide(a.logits), 0.0) if ignored else wide(a.logits)
        share = grads[0].to(x.dtype).expand(keep.shape)
        share = torch.where(keep, share, 0.0) if ignored else share
        if a.reduction == "mean":
            share = share / (keep.sum().clamp(min=1) if count else keep.numel())
        lse = torch.logsumexp(x, -1, keepdim=True)
        s = a.label_smoothing if smoothing else 0.0
        onehot = torch.zeros_like(x).scatter_(-1, torch.where(keep, a.target, 0)[:, None], 1.0)
        d = torch.exp(x - lse) * (1 + 2 * (a.z_loss if z else 0.0) * lse) - (1 - s) * onehot - s / x.shape[1]
        return (share[:, None] * d,)

    return formula


def rms_weight(a: Args, dy: Tensor, keep: Callable[[Tensor], Tensor]) -> Tensor:
    """dw of rms_norm, the sum over rows left to `keep`."""
    x = wide(a.x)
    rstd = (x.square().mean(-1, keepdim=True) + a.eps).rsqrt()
    return keep(wide(dy) * x * rstd)


def in_bfloat16(rows: Tensor) -> Tensor:
    """A sum over rows in a bfloat16 accumulator."""
    total = torch.zeros_like(rows[0], dtype=torch.bfloat16)
    for row in rows:
        total = (total.float() + row.float()).bfloat16()
    return total
