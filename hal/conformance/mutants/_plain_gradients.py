"""Gradients of attention by FlashAttention 2's formula (Dao 2023), written plainly, with places to go wrong in.

Shape letters: B batch, S queries, L keys, H query heads, K kv heads, D head dim of q and k, E head dim of v.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hal.conformance.mutants._plain_attention import Plain, sequences, wide
from hal.conformance.mutants.mutant import Arguments, Fault, written
from hal.contract import OPS, Args

__all__ = ["plain_gradients"]


class _Found(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None
    sinks: Tensor | None


def plain_gradients(**places: Any) -> Fault:
    """Gradients that go wrong in these places."""
    backward = Backward(**places)

    def formula_of(op: str) -> Callable[[Args, Any], tuple[Tensor | None, ...]]:
        def formula(a: Args, grads: Any) -> tuple[Tensor | None, ...]:
            return _all_sequences(backward, op, dict(vars(a)), grads)

        return formula

    return lambda op: written(op, formula_of(op), lse_grad=True)


def _all_sequences(backward: Backward, op: str, a: Arguments, grads: Any) -> tuple[Tensor | None, ...]:
    do, dlse = (*grads, None)[:2]
    if do is None:  # lse alone was asked for
        B_S_H, E = a["q"].shape[:-1], a["v"].shape[-1]
        do = a["q"].new_zeros(*B_S_H, E)
    if op == "attention":
        return tuple(backward(next(sequences(op, a)), do, dlse))
    total = {name: torch.zeros_like(wide(a[name])) for name in OPS[op].grad if a[name] is not None}
    cu_k = a["cu_seqlens_k"].tolist()
    for s in sequences(op, a):
        rows, keys = s["rows"], slice(cu_k[s["at"]], cu_k[s["at"] + 1])
        found = backward(s, do[rows][None], None if dlse is None else dlse[rows].T[None])
        total["q"][rows], total["k"][keys], total["v"][keys] = found.q[0], found.k[0], found.v[0]
        if found.sinks is not None:
            total["sinks"] += found.sinks
    return tuple(total.get(name) for name in OPS[op].grad)


def _slope(tanh: Tensor) -> Tensor:
    return 1 - tanh.square()


def _over_groups(d: Tensor, K: int) -> Tensor:
    """(B, H, L, D) to (B, K, L, D)"""
    summed: Tensor = d.unflatten(1, (K, d.shape[1] // K)).sum(2)
    return summed


def _matmul(a: Tensor, b: Tensor) -> Tensor:
    return a @ b


@dataclass(frozen=True)
class Backward:
    """The backward pass of dense attention, each step of it to be replaced.

    told: the arguments, changed. sight: what is seen, and where query 0 stands. clean: what loses entries without
    influence, k and v those of keys that nobody sees, do those of rows without keys. scaled: the gradients that get
    the scale. slope: that of the cap, of tanh. delta: Σ_j P dP. dlse: the gradient into lse. over: dk and dv, summed
    over the query heads of a kv head. p, ds: P and dS, rounded. bias_last: a bias gets the cap's slope. times: a
    product over keys or over rows.
    """

    told: Callable[[Arguments], Arguments] = lambda s: {}
    sight: Plain = field(default_factory=Plain)
    clean: tuple[str, ...] = ("k", "v", "do")
    scaled: tuple[str, ...] = ("q", "k")
    slope: Callable[[Tensor], Tensor] = _slope
    delta: Callable[[Tensor, Tensor], Tensor] = lambda p, dp: (p * dp).sum(-1, keepdim=True)
    dlse: Callable[[Tensor], Tensor] = lambda d: d
    over: Callable[[Tensor, int], Tensor] = _over_groups
    p: Callable[[Tensor], Tensor] = lambda p: p
    ds: Callable[[Tensor], Tensor] = lambda ds: ds
    bias_last: bool = False
    times: Callable[[Tensor, Tensor], Tensor] = _matmul

    def __call__(self, s: Arguments, do: Tensor, dlse: Tensor | None) -> _Found:
        s = s | self.told(s)
        q, k, v, do = (wide(t).transpose(1, 2) for t in (s["q"], s["k"], s["v"], do))
        H, D, K = q.shape[1], q.shape[3], k.shape[1]
        seen = self.sight.look(self.sight.seen(s), s)
        k, v = (t.repeat_interleave(H // K, 1) for t in (k, v))
        unused, dead = ~seen.any(2)[..., None], ~seen.any(3, keepdim=True)
        k, v = (t.masked_fill(unused, 0.0) if name in self.clean else t for name, t in (("k", k), ("v", v)))
        do = do.masked_fill(dead, 0.0) if "do" in self.clean else do
        scale = D**-0.5 if s["scale"] is None else s["scale"]
        scores, slope = q @ k.mT * scale, None
        if s["softcap"] is not None:
            tanh = torch.tanh(scores / s["softcap"])
            scores, slope = s["softcap"] * tanh, self.slope(tanh)
        bias = None if s["mask"] is None or s["mask"].dtype is torch.bool else s["mask"]
        scores = scores if bias is None else scores + bias.masked_fill(bias == -math.inf, 0.0).to(scores.dtype)
        scores = scores.masked_fill(~seen, -math.inf)
        sinks = None if s["sinks"] is None else s["sinks"].to(q.dtype)[:, None, None]
        joined = scores if sinks is None else torch.cat((scores, sinks.expand(*scores.shape[:3], 1)), -1)
        lse = torch.logsumexp(joined, -1, keepdim=True) if joined.shape[-1] else scores.sum(-1, keepdim=True)
        lse = lse.masked_fill(lse == -math.inf, 0.0)
        p = torch.exp(scores - lse)
        dp = do @ v.mT
        delta = self.delta(p, dp)
        into = torch.zeros_like(delta) if dlse is None else self.dlse(dlse.to(q.dtype))[..., None]
        ds = self.ds(p * (dp - delta + into))
        d_sinks = None if sinks is None else (torch.exp(sinks - lse) * (into - delta)).sum((0, 2, 3))
        sloped = ds if slope is None else ds * slope
        into_bias = sloped if self.bias_last else ds
        d_mask = (
            None if bias is None else into_bias.sum_to_size((*(1,) * (4 - bias.ndim), *bias.shape)).view(bias.shape)
        )
        dq, dk = self.times(sloped, k), self.times(sloped.mT, q)
        dq, dk = (d * scale if name in self.scaled else d for name, d in (("q", dq), ("k", dk)))
        dk, dv = self.over(dk, K), self.over(self.times(self.p(p).mT, do), K)
        return _Found(dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2), d_mask, d_sinks)
