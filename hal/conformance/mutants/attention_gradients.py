"""Mutants of the backward passes of attention."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import torch
from torch import Tensor

from hal.conformance.mutants import _attention_sides
from hal.conformance.mutants._plain_attention import Plain
from hal.conformance.mutants._plain_gradients import plain_gradients
from hal.conformance.mutants.mutant import (
    Arguments,
    Candidate,
    Fault,
    Gradients,
    Mutant,
    differentiated,
    each,
    one,
    weaker,
)  # fmt: skip
from hal.contract import Args

__all__ = ["MUTANTS"]

BOTH = ("attention", "attention_varlen")
BFLOAT16 = torch.bfloat16

gradient = functools.partial(each, gradient=True)
graded = functools.partial(weaker, gradient=True)


def _of(name: str, change: Callable[[Tensor, Args], Tensor | None]) -> Fault:
    return lambda op: one(name, op, change)


def _told(change: Callable[[Arguments], Arguments]) -> Fault:
    return plain_gradients(told=change)


# Causality and windows.

SIDES = [
    *(m for name, change in _attention_sides.CAUSAL.items() for m in gradient(BOTH, name, "causal", _told(change))),
    *gradient(BOTH, "one row of one head sees one key ahead", "causal",
              plain_gradients(sight=Plain(look=_attention_sides.looks_ahead))),
    *(m for name, change in _attention_sides.WINDOW.items() for m in gradient(BOTH, name, "window", _told(change))),
    *gradient(BOTH, "one row of one head sees one key past the window", "window",
              plain_gradients(sight=Plain(look=_attention_sides.looks_back))),
]  # fmt: skip


# What has no influence and gets nothing.


def _leaking(d: Tensor, a: Args) -> Tensor:
    """Something small where there is nothing, as an unmasked product leaves it."""
    return d.masked_fill(d == 0, 2.0**-20)


def _last_row(d: Tensor, a: Args) -> Tensor:
    """The last of the rows of a packed batch gets something small, if it has nothing."""
    if d.shape[0] and not bool(d[-1].any()):
        d = d.clone()
        d[-1, -1, -1] = 2.0**-20
    return d


def _upstream_times_zero(found: Gradients, a: Args, grads: tuple[Tensor | None, ...]) -> Gradients:
    """A row's own gradient multiplied by its weight of 0, rather than left out."""
    if found[0] is not None and grads[0] is not None:
        found[0] = found[0] + 0.0 * grads[0].float().sum().to(found[0].dtype)
    return found


def _without_the_last_key(d: Tensor, a: Args) -> Tensor:
    """The last key of the second sequence gets nothing."""
    ends = a.cu_seqlens_k.tolist()
    if len(ends) < 3 or ends[2] == ends[1]:
        return d
    d = d.clone()
    d[ends[2] - 1] = 0.0
    return d


DEAD, HIDDEN, ENDS = "row without keys", "hidden NaN", "ragged ends"
NOTHING = [
    *gradient(BOTH, "something leaks into rows without keys", DEAD, _of("q", _leaking)),
    *gradient(BOTH, "the gradient of a row without keys is multiplied by 0", DEAD, plain_gradients(clean=("k", "v"))),
    *gradient(BOTH, "the gradient of a row without keys joins the others", DEAD,
              lambda op: differentiated(op, _upstream_times_zero)),
    *gradient(BOTH, "something leaks into keys that nobody sees", HIDDEN, _of("k", _leaking)),
    *gradient(BOTH, "something leaks into values that nobody sees", HIDDEN, _of("v", _leaking)),
    *gradient(BOTH, "a hidden key is multiplied by 0", HIDDEN, plain_gradients(clean=("v", "do"))),
    *gradient(BOTH, "a hidden value is multiplied by 0", HIDDEN, plain_gradients(clean=("k", "do"))),
    *gradient("attention_varlen", "something leaks into the last row of q's padding", ENDS, _of("q", _last_row)),
    *gradient("attention_varlen", "something leaks into the last row of k's padding", ENDS, _of("k", _last_row)),
    *gradient("attention_varlen", "something leaks into the last row of v's padding", ENDS, _of("v", _last_row)),
    *gradient("attention_varlen", "the second sequence's last key gets nothing", ENDS, _of("k", _without_the_last_key)),
    *gradient("attention_varlen", "the second sequence's last value gets nothing", ENDS,
              _of("v", _without_the_last_key)),
]  # fmt: skip


# Scale and cap.


def _more_of(name: str) -> Callable[[str, float], Candidate]:
    return lambda op, s: one(name, op, lambda d, a: d * (1 + s))


SCORES = [
    *gradient(BOTH, "neither q nor k gets the scale", "scale", plain_gradients(scaled=())),
    *gradient(BOTH, "q does not get the scale", "scale", plain_gradients(scaled=("k",))),
    *gradient(BOTH, "k does not get the scale", "scale", plain_gradients(scaled=("q",))),
    *gradient(BOTH, "a given scale is ignored", "scale", _told(lambda s: {"scale": None})),
    *graded(BOTH, "the scale of q's gradient is off by a part", "scale", _more_of("q"), 2.0**-8),
    *graded(BOTH, "the scale of k's gradient is off by a part", "scale", _more_of("k"), 2.0**-8),
    *gradient(BOTH, "the cap is ignored", "softcap", _told(lambda s: {"softcap": None})),
    *gradient(BOTH, "the cap has no slope", "softcap", plain_gradients(slope=torch.ones_like)),
    *gradient(BOTH, "the cap's slope is 1 - |tanh|", "softcap", plain_gradients(slope=lambda tanh: 1 - tanh.abs())),
    *gradient(BOTH, "the cap's slope counts twice", "softcap",
              plain_gradients(slope=lambda tanh: (1 - tanh.square()).square())),
    *graded(BOTH, "the cap's slope is off by a part", "softcap",
            lambda op, s: plain_gradients(slope=lambda tanh: (1 - tanh.square()) * (1 + s))(op), 2.0**-8),
]  # fmt: skip


# Sinks and masks.


def _first_batch(d: Tensor, a: Args) -> Tensor:
    return d[:1].expand(d.shape) if d.ndim == 4 else d


JOINED = [
    *gradient(BOTH, "sinks get nothing", "sinks", _of("sinks", lambda d, a: None)),
    *gradient(BOTH, "a sink counts twice", "sinks", _of("sinks", lambda d, a: d * 2)),
    *gradient(BOTH, "sinks get what they should give", "sinks", _of("sinks", lambda d, a: -d)),
    *gradient(BOTH, "all sinks get the first one's gradient", "sinks",
              _of("sinks", lambda d, a: d[:1].expand(d.shape))),
    *gradient(BOTH, "sinks are no part of the denominator", "sinks", _told(lambda s: {"sinks": None})),
    *gradient(BOTH, "sinks are scaled", "sinks",
              _of("sinks", lambda d, a: d * (a.q.shape[-1] ** -0.5 if a.scale is None else a.scale))),
    *graded(BOTH, "the sinks' gradient is off by a part", "sinks", _more_of("sinks"), 2.0**-5),
    *gradient("attention", "a bias gets nothing", "mask", _of("mask", lambda d, a: None)),
    *gradient("attention", "a bias gets half", "mask", _of("mask", lambda d, a: d / 2)),
    *gradient("attention", "a bias is scaled", "mask",
              _of("mask", lambda d, a: d * (a.q.shape[-1] ** -0.5 if a.scale is None else a.scale))),
    *gradient("attention", "a mask is ignored", "mask", _told(lambda s: {"mask": None})),
    *gradient("attention", "a bias is left out of the logits", "mask", _told(
        lambda s: {} if s["mask"] is None or s["mask"].dtype is torch.bool else {"mask": torch.zeros_like(s["mask"])}
    )),
    *gradient("attention", "the cap's slope is the bias's too", "mask", plain_gradients(bias_last=True)),
    *gradient("attention", "all batches get the first one's gradient of a bias", "mask", _of("mask", _first_batch)),
    *graded("attention", "the bias's gradient is off by a part", "mask", _more_of("mask"), 2.0**-8),
]  # fmt: skip


# Heads, lse and what is rounded on the way.


def _strided(d: Tensor, K: int) -> Tensor:
    """As if query head h read kv head h % K."""
    summed: Tensor = d.unflatten(1, (d.shape[1] // K, K)).sum(1)
    return summed


def _first_of_group(d: Tensor, K: int) -> Tensor:
    return d[:, :: d.shape[1] // K]


def _last_lost(d: Tensor, K: int) -> Tensor:
    """The last head of the last group is left out."""
    groups: Tensor = d.unflatten(1, (K, d.shape[1] // K)).clone()
    if groups.shape[2] > 1:
        groups[:, -1, -1] = 0.0
    return groups.sum(2)


def _tiles(a: Tensor, b: Tensor) -> Tensor:
    """A product summed over tiles of 4 in a bfloat16 accumulator."""
    total = torch.zeros((), dtype=a.dtype)
    for at in range(0, a.shape[-1], 4):
        total = (total + a[..., at : at + 4] @ b[..., at : at + 4, :]).to(BFLOAT16).to(a.dtype)
    return total if total.ndim else a @ b


def _bfloat16(t: Tensor) -> Tensor:
    return t.to(BFLOAT16).to(t.dtype)


LSE = [
    *gradient(BOTH, "the gradient into lse is left out", "lse", plain_gradients(dlse=torch.zeros_like)),
    *gradient(BOTH, "the gradient into lse has the other sign", "lse", plain_gradients(dlse=torch.neg)),
    *gradient(BOTH, "the gradient into lse is that of base 2", "lse",
              plain_gradients(dlse=lambda d: d / math.log(2))),
    *graded(BOTH, "the gradient into lse is off by a part", "lse",
            lambda op, s: plain_gradients(dlse=lambda d: d * (1 + s))(op), 2.0**-6),
]  # fmt: skip

HEADS = [
    *gradient(BOTH, "heads are summed into kv head h % K", "grouped heads", plain_gradients(over=_strided)),
    *gradient(BOTH, "the first head of a group is its sum", "grouped heads", plain_gradients(over=_first_of_group)),
    *gradient(BOTH, "the last head of the last group is left out", "grouped heads", plain_gradients(over=_last_lost)),
    *gradient(BOTH, "a group's gradients are averaged", "grouped heads", plain_gradients(
        over=lambda d, K: d.unflatten(1, (K, d.shape[1] // K)).mean(2)
    )),
]  # fmt: skip

PRECISION = [
    *gradient(BOTH, "there is no delta", "precision",
              plain_gradients(delta=lambda p, dp: torch.zeros_like(p[..., :1]))),
    *gradient(BOTH, "P has bfloat16's digits, undeclared", "precision", plain_gradients(p=_bfloat16)),
    *gradient(BOTH, "dS has bfloat16's digits, undeclared", "precision", plain_gradients(ds=_bfloat16)),
    *gradient(BOTH, "products are summed in bfloat16", "precision", plain_gradients(times=_tiles)),
    *gradient(BOTH, "gradients have bfloat16's digits before they are summed over heads", "precision",
              plain_gradients(over=lambda d, K: _bfloat16(d).unflatten(1, (K, d.shape[1] // K)).sum(2))),
]  # fmt: skip

MUTANTS: list[Mutant] = [*SIDES, *NOTHING, *SCORES, *JOINED, *LSE, *HEADS, *PRECISION]
