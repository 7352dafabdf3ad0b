"""Mutants of the attention operators: what a query makes of what it sees.

Shape letters: B batch, S queries, L keys, H query heads, K kv heads, D head dim of q and k, E head dim of v.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from hal.conformance.mutants._plain_attention import changed, dense, plain, referenced, spoilt, wide
from hal.conformance.mutants.coarse import IDENTITY
from hal.conformance.mutants.mutant import Arguments, Candidate, Fault, Mutant, after, each, weaker

__all__ = ["MUTANTS"]

ALL = ("attention", "attention_varlen", "paged_attention")
Results = tuple[Tensor, Tensor]


def _scale(s: Arguments) -> float:
    return float(s["q"].shape[-1] ** -0.5 if s["scale"] is None else s["scale"])


# Scale and cap.


def _padded_scale(s: Arguments) -> Arguments:
    D = s["q"].shape[-1]
    return {"scale": (D + -D % 64) ** -0.5} if s["scale"] is None else {}


def _scale_of_v(s: Arguments) -> Arguments:
    return {"scale": s["v"].shape[-1] ** -0.5} if s["scale"] is None else {}


def _scale_times(change: Callable[[float], float]) -> Fault:
    return changed(lambda s: {"scale": change(_scale(s))})


SCALE = [
    *each(ALL, "a given scale is ignored", "scale", changed(lambda s: {"scale": None})),
    *each(ALL, "there is no scale", "scale", changed(lambda s: {"scale": 1.0 if s["scale"] is None else s["scale"]})),
    *each(ALL, "the scale is that of a padded head", "scale", changed(_padded_scale)),
    *each(ALL, "the scale is that of v's width", "scale", changed(_scale_of_v)),
    *each(ALL, "the scale is applied twice", "scale", _scale_times(lambda scale: scale**2)),
    *weaker(ALL, "the scale is off by a part", "scale",
            lambda op, s: _scale_times(lambda scale: scale * (1 + s))(op), 2.0**-8),
]  # fmt: skip


def _capped(change: Callable[[float, Arguments], float | None]) -> Fault:
    return changed(lambda s: {} if s["softcap"] is None else {"softcap": change(s["softcap"], s)})


SOFTCAP = [
    *each(ALL, "the cap is ignored", "softcap", _capped(lambda cap, s: None)),
    *each(ALL, "the cap cuts", "softcap", plain(cap=lambda scores, cap: scores.clamp(-cap, cap))),
    *each(ALL, "the cap is of logits before the scale", "softcap", _capped(lambda cap, s: cap * _scale(s))),
    *each(ALL, "logits are not divided by the cap", "softcap", plain(cap=lambda scores, cap: cap * torch.tanh(scores))),
    *each(ALL, "logits are not multiplied by the cap", "softcap",
          plain(cap=lambda scores, cap: torch.tanh(scores / cap))),
    *each(ALL, "hidden logits are capped", "softcap", plain(
        hide=lambda scores, seen, s: scores.masked_fill(~seen, -math.inf if s["softcap"] is None else -s["softcap"])
    )),
    *weaker(ALL, "the cap is off by a part", "softcap",
            lambda op, s: _capped(lambda cap, told: cap * (1 + s))(op), 2.0**-8),
]  # fmt: skip


# Sinks.


def _sunk(change: Callable[[Tensor, Arguments], Tensor | None]) -> Fault:
    return changed(lambda s: {} if s["sinks"] is None else {"sinks": change(s["sinks"], s)})


def _cap_too(sinks: Tensor, s: Arguments) -> Tensor:
    return sinks if s["softcap"] is None else s["softcap"] * torch.tanh(sinks.double() / s["softcap"])


def _with_a_value(o: Tensor, lse: Tensor, s: Arguments) -> Results:
    """The sink takes the first key's value along."""
    if s["sinks"] is None or s["v"].shape[1] == 0:
        return o, lse
    share = torch.exp(wide(s["sinks"])[:, None] - lse)
    value = wide(s["v"])[:, :1].repeat_interleave(o.shape[2] // s["v"].shape[2], 2)
    return torch.where(o == 0, o, o + (share.transpose(1, 2)[..., None] * value).to(o.dtype)), lse


def _without_sinks(s: Arguments) -> Results:
    return referenced(s | {"sinks": None})


SINKS = [
    *each(ALL, "sinks are ignored", "sinks", _sunk(lambda sinks, s: None)),
    *each(ALL, "sinks are scaled", "sinks", _sunk(lambda sinks, s: sinks.double() * _scale(s))),
    *each(ALL, "sinks are capped", "sinks", _sunk(_cap_too)),
    *each(ALL, "a sink counts twice", "sinks", _sunk(lambda sinks, s: sinks.double() + math.log(2))),
    *each(ALL, "all heads have the first one's sink", "sinks", _sunk(lambda sinks, s: sinks[:1].expand(sinks.shape))),
    *each(ALL, "the heads' sinks stand in another order", "sinks", _sunk(lambda sinks, s: sinks.flip(0))),
    *each(ALL, "a sink has a value", "sinks", spoilt(_with_a_value)),
    *each(ALL, "sinks join lse alone", "sinks", spoilt(lambda o, lse, s: (_without_sinks(s)[0], lse))),
    *each(ALL, "sinks have bfloat16's digits", "sinks", _sunk(lambda sinks, s: sinks.bfloat16())),
    *weaker(ALL, "a sink weighs more by a part", "sinks",
            lambda op, s: _sunk(lambda sinks, told: sinks.double() + math.log1p(s))(op), 2.0**-8),
]  # fmt: skip


# Heads and their widths.


def _last_head_elsewhere(h: int, H: int, K: int) -> int:
    return 0 if h == H - 1 else h // (H // K)


def _narrow(width: Callable[[int], int]) -> Fault:
    """q and k lose what is past a width; the scale stays that of all."""

    def told(s: Arguments) -> Arguments:
        D = s["q"].shape[-1]
        return {name: s[name][..., : max(1, width(D))] for name in ("q", "k")} | {"scale": _scale(s)}

    return changed(told)


def _columns_lost(o: Tensor, start: int) -> Tensor:
    return o.masked_fill(torch.arange(o.shape[-1]) >= start, 0.0)


HEADS = [
    *each(ALL, "the kv head is h % K", "grouped heads", plain(head=lambda h, H, K: h % K)),
    *each(ALL, "all heads read the first kv head", "grouped heads", plain(head=lambda h, H, K: 0)),
    *each(ALL, "kv heads are taken from the last", "grouped heads", plain(head=lambda h, H, K: K - 1 - h // (H // K))),
    *each(ALL, "the last query head reads the first kv head", "grouped heads", plain(head=_last_head_elsewhere)),
    *each(ALL, "head dims are cut to a multiple of 16", "head dims", _narrow(lambda D: D // 16 * 16)),
    *each(ALL, "the last element of a head is lost", "head dims", _narrow(lambda D: D - 1)),
    *each(ALL, "elements past 64 are lost", "head dims", _narrow(lambda D: min(D, 64))),
    *each(ALL, "columns of v past a multiple of 16 are lost", "head dims", spoilt(
        lambda o, lse, s: (_columns_lost(o, max(1, o.shape[-1] // 16 * 16)), lse)
    )),
    *each(ALL, "columns of v past the width of k are lost", "head dims", spoilt(
        lambda o, lse, s: (_columns_lost(o, s["q"].shape[-1]), lse)
    )),
]  # fmt: skip


# Log-sum-exp.


def _logs(change: Callable[[Tensor, Arguments], Tensor]) -> Fault:
    return spoilt(lambda o, lse, s: (o, change(lse, s)))


def _unbiased(s: Arguments) -> Arguments:
    mask = s["mask"]
    return {} if mask is None or mask.dtype is torch.bool else {"mask": mask != -math.inf}


def _in_other_axes(op: str) -> Candidate:
    """lse lies in memory as the other layout has it."""

    def change(found: Results | Tensor, a: Arguments) -> Results | Tensor:
        if not isinstance(found, tuple):
            return found
        o, lse = found
        return o, lse.transpose(-1, -2).reshape(lse.shape).contiguous()

    return after(op, change)


LSE = [
    *each(ALL, "lse is in base 2", "lse", _logs(lambda lse, s: lse / math.log(2))),
    *each(ALL, "lse is without the sinks", "lse", _logs(lambda lse, s: _without_sinks(s)[1])),
    *each(ALL, "lse is the largest logit", "lse", plain(
        log=lambda top, total: top.masked_fill(total == 0, -math.inf)
    )),
    *each(ALL, "lse is of logits before the cap", "lse", _logs(lambda lse, s: referenced(s | {"softcap": None})[1])),
    *each(ALL, "lse is of logits before the scale", "lse", _logs(lambda lse, s: referenced(s | {"scale": 1.0})[1])),
    *each("attention", "lse is of logits before the bias", "lse",
          _logs(lambda lse, s: referenced(s | _unbiased(s))[1])),
    *each(ALL, "lse has its axes in another order", "lse", _in_other_axes),
    *each(ALL, "lse has bfloat16's digits", "lse", _logs(lambda lse, s: lse.bfloat16().to(lse.dtype))),
    *weaker(ALL, "lse is more by a part of 1", "lse", lambda op, s: _logs(lambda lse, told: lse + s)(op), 2.0**-8),
]  # fmt: skip


# Special values, and what is rounded on the way.


def _spread(o: Tensor, lse: Tensor, s: Arguments) -> Results:
    """A NaN spoils the next row too."""
    spoilt_BSH = o.isnan().any(-1)
    after_it = torch.zeros_like(spoilt_BSH)
    after_it[:, 1:] = spoilt_BSH[:, :-1]
    return o.masked_fill(after_it[..., None], math.nan), lse


def _overflowing(o: Tensor, lse: Tensor, s: Arguments) -> Results:
    """No maximum is taken out, of the scores or of the sinks."""
    lost = lse.exp().isinf()
    return o.masked_fill(lost.transpose(1, 2)[..., None], math.nan), lse.masked_fill(lost, math.inf)


def _tiles(p: Tensor, v: Tensor, digits: torch.dtype) -> Tensor:
    """P·v, summed over tiles of 8 keys in an accumulator of these digits."""
    total = torch.zeros((), dtype=v.dtype)
    for at in range(0, v.shape[1], 8):
        part = torch.einsum("bhsl,blhe->bshe", p[..., at : at + 8], v[:, at : at + 8])
        total = (total + part).to(digits).to(v.dtype)
    return total


def _cut(t: Tensor, dtype: torch.dtype) -> Tensor:
    """Rounded toward zero to a narrower dtype."""
    near = t.to(dtype)
    return torch.where(near.to(t.dtype).abs() > t.abs(), torch.nextafter(near, torch.zeros_like(near)), near)


def _product_of(digits: torch.dtype) -> Callable[[Tensor, Tensor, float], Tensor]:
    """Scores of these digits."""
    return lambda q, k, scale: (torch.einsum("bshd,blhd->bhsl", q, k) * scale).to(digits).to(q.dtype)


def _p_of(digits: torch.dtype) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda p, v: torch.einsum("bhsl,blhe->bshe", p.to(digits).to(p.dtype), v)


def _in_float32(s: Arguments) -> Results:
    wanted = s["q"].dtype
    o, lse = referenced(s | {name: s[name].float() if wanted is torch.float64 else s[name] for name in ("q", "k", "v")})
    return o.to(wanted), lse.to(wide(s["q"]).dtype)


BFLOAT16, FLOAT16 = torch.bfloat16, torch.float16
WIDE_ALREADY = "float32 is the compute dtype there, and honest"

SPECIAL = [
    *each(ALL, "NaN becomes 0", "special values", spoilt(
        lambda o, lse, s: (o.nan_to_num(), lse.nan_to_num(neginf=-math.inf))
    )),
    *each(ALL, "NaN spoils the next row", "special values", spoilt(_spread)),
    *each(ALL, "exponentials overflow", "special values", spoilt(_overflowing)),
    *each(ALL, "hidden logits make the seen ones underflow", "special values", plain(
        top=lambda hidden, scores: scores.amax(-1, keepdim=True)
    )),
]  # fmt: skip

PRECISION = [
    *each(ALL, "scores have bfloat16's digits", "precision", plain(product=_product_of(BFLOAT16))),
    *each(ALL, "scores have float16's digits", "precision", plain(product=_product_of(FLOAT16))),
    *each(ALL, "P has bfloat16's digits, undeclared", "precision", plain(weigh=_p_of(BFLOAT16))),
    *each(ALL, "P has float16's digits, undeclared", "precision", plain(weigh=_p_of(FLOAT16))),
    *each(ALL, "P·v is summed in bfloat16", "precision", plain(weigh=lambda p, v: _tiles(p, v, BFLOAT16))),
    *each(ALL, "P·v is summed in float16", "precision", plain(weigh=lambda p, v: _tiles(p, v, FLOAT16))),
    *each(ALL, "exponentials are summed in bfloat16", "precision", plain(
        total=lambda p: p.sum(-1, keepdim=True).to(BFLOAT16).to(p.dtype)
    )),
    *each(ALL, "results are cut, not rounded", "precision", plain(to=_cut),
          invisible=IDENTITY),
    *each(ALL, "float64 is computed in float32", "precision", lambda op: dense(op, _in_float32),
          invisible=dict.fromkeys(("float32", "bfloat16", "float16"), WIDE_ALREADY)),
]  # fmt: skip

MUTANTS: list[Mutant] = [*SCALE, *SOFTCAP, *SINKS, *HEADS, *LSE, *SPECIAL, *PRECISION]
