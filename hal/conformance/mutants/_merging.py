"""Mutants of merge_attention."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from hal.conformance.mutants._cache_changes import finite
from hal.conformance.mutants._plain_attention import wide
from hal.conformance.mutants.mutant import Arguments, Fault, Mutant, after, before, each, reference, weaker

__all__ = ["MUTANTS"]

OP = "merge_attention"
Results = tuple[Tensor, Tensor]


def _beside(lse: Tensor, out: Tensor) -> Tensor:
    return (lse if out.ndim == 3 else lse.transpose(1, 2))[..., None]


def _spoilt(change: Callable[[Tensor, Tensor, Arguments], Results]) -> Fault:
    def changed(found: Results, a: Arguments) -> Results:
        out, lse = change(*found, a)
        # torch.where lies as its condition does
        return (out if out is a["out_a"] else out.contiguous()), lse.contiguous()

    return lambda op: after(op, changed)


def _given(change: Callable[[Arguments], Arguments]) -> Fault:
    return lambda op: before(op, change)


def _beside_both(a: Arguments, out: Tensor) -> Tensor:
    """Where both pieces have keys."""
    return _beside((a["lse_a"] != -math.inf) & (a["lse_b"] != -math.inf), out)


def _nothing(lse: Tensor, out: Tensor) -> Tensor:
    return _beside(lse == -math.inf, out)


def _handed_on(out: Tensor, lse: Tensor, a: Arguments) -> Results:
    """A piece without its other is returned itself, not a copy."""
    return (a["out_a"] if bool((a["lse_b"] == -math.inf).all()) else out), lse


def _averaged(out: Tensor, lse: Tensor, a: Arguments) -> Results:
    middle = ((wide(a["out_a"]) + wide(a["out_b"])) / 2).to(out.dtype)
    return torch.where(_beside_both(a, out), middle, out), lse


def _exchanged(a: Arguments) -> Arguments:
    """The weights are exchanged where both pieces have keys."""
    both = (a["lse_a"] != -math.inf) & (a["lse_b"] != -math.inf)
    return {name: torch.where(both, a[other], a[name]) for name, other in (("lse_a", "lse_b"), ("lse_b", "lse_a"))}


def _one_head(out: Tensor, lse: Tensor, a: Arguments) -> Results:
    other = reference(OP)(**(a | _exchanged(a)))[0]
    out[..., -1, :] = other[..., -1, :]
    return out, lse


def _one_row(out: Tensor, lse: Tensor, a: Arguments) -> Results:
    """The last row of all is the first piece's alone."""
    if out.numel() and not bool(_nothing(a["lse_a"], out).flatten()[-1]):
        out.view(-1, out.shape[-1])[-1] = a["out_a"].reshape(-1, out.shape[-1])[-1]
    return out, lse


def _base_2(a: Arguments) -> Arguments:
    return {name: a[name] * math.log(2) for name in ("lse_a", "lse_b")}


def _weighed(digits: torch.dtype) -> Fault:
    """Merging written once more, with weights of these digits."""

    def merge(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> Results:
        top = torch.maximum(lse_a, lse_b)
        top = top.masked_fill(top == -math.inf, 0.0)
        shares = [torch.exp(lse - top) for lse in (lse_a, lse_b)]
        total = shares[0] + shares[1]
        out = torch.zeros_like(wide(out_a), memory_format=torch.contiguous_format)
        for piece, share in ((out_a, shares[0]), (out_b, shares[1])):
            w = _beside((share / total.masked_fill(total == 0, 1.0)).to(digits).to(share.dtype), piece)
            out = out + w * torch.where(w == 0, 0.0, wide(piece))
        return out.to(out_a.dtype), (top + torch.log(total)).contiguous()

    return lambda op: merge


def _overflowing(out: Tensor, lse: Tensor, a: Arguments) -> Results:
    """No maximum is taken out."""
    lost = (a["lse_a"].exp() + a["lse_b"].exp()).isinf()
    return out.masked_fill(_beside(lost, out), math.nan), lse.masked_fill(lost, math.inf)


def _leaking(a: Arguments, out: Tensor) -> Tensor:
    """What 0 times an empty piece leaves."""
    empty: Tensor = (_nothing(a["lse_a"], out) * a["out_a"]) + (_nothing(a["lse_b"], out) * a["out_b"])
    return out + 0 * empty


MERGING = [
    *each(OP, "the pieces are averaged", "merging", _spoilt(_averaged)),
    *each(OP, "the weights are exchanged", "merging", _given(_exchanged)),
    *each(OP, "the last head's weights are exchanged", "merging", _spoilt(_one_head)),
    *each(OP, "the last row is the first piece's", "merging", _spoilt(_one_row)),
    *each(OP, "the pieces are added", "merging", _spoilt(
        lambda out, lse, a: (torch.where(_beside_both(a, out), a["out_a"] + a["out_b"], out), lse)
    )),
    *each(OP, "the logarithms are of base 2", "merging", _given(_base_2)),
    *each(OP, "a piece without its other is returned itself", "merging", _spoilt(_handed_on)),
    *weaker(OP, "the first piece weighs more by a part", "merging",
            lambda op, s: before(op, lambda a: {"lse_a": a["lse_a"] + math.log1p(s)}), 2.0**-8),
]  # fmt: skip

ROWS = [
    *each(OP, "nothing beside nothing is NaN", "row without keys", _spoilt(
        lambda out, lse, a: (out.masked_fill(_nothing(lse, out), math.nan), lse)
    )),
    *each(OP, "nothing beside nothing is next to 0", "row without keys", _spoilt(
        lambda out, lse, a: (out.masked_fill(_nothing(lse, out), 2.0**-20), lse)
    )),
    *each(OP, "lse has a finite floor", "row without keys", _spoilt(lambda out, lse, a: (out, lse.clamp(min=-1e30)))),
    *each(OP, "an empty piece is multiplied by 0", "row without keys", _spoilt(
        lambda out, lse, a: (_leaking(a, out), lse)
    )),
    *each(OP, "nothing beside something gives nothing", "row without keys", _spoilt(
        lambda out, lse, a: (torch.where(_beside_both(a, out), out, 0.0), lse)
    )),
]  # fmt: skip

LSE = [
    *each(OP, "lse is the larger one", "lse", _spoilt(
        lambda out, lse, a: (out, torch.maximum(a["lse_a"], a["lse_b"]))
    )),
    *each(OP, "lse is the first piece's", "lse", _spoilt(lambda out, lse, a: (out, a["lse_a"].clone().contiguous()))),
    *each(OP, "lse is in base 2", "lse", _spoilt(lambda out, lse, a: (out, lse / math.log(2)))),
    *each(OP, "lse has bfloat16's digits", "lse", _spoilt(lambda out, lse, a: (out, lse.bfloat16().to(lse.dtype)))),
    *weaker(OP, "lse is more by a part of 1", "lse",
            lambda op, s: after(op, lambda found, a: (found[0], found[1] + s)), 2.0**-8),
]  # fmt: skip

SPECIAL = [
    *each(OP, "NaN becomes 0", "special values", _spoilt(
        lambda out, lse, a: (out.masked_fill(out.isnan(), 0.0), lse)
    )),
    *each(OP, "infinity becomes the largest number", "special values", _spoilt(lambda out, lse, a: (finite(out), lse))),
    *each(OP, "an lse of NaN becomes -inf", "special values", _spoilt(
        lambda out, lse, a: (out, lse.masked_fill(lse.isnan(), -math.inf))
    )),
    *each(OP, "exponentials overflow", "special values", _spoilt(_overflowing)),
]  # fmt: skip

PRECISION = [
    *each(OP, "the weights have bfloat16's digits", "precision", _weighed(torch.bfloat16)),
    *each(OP, "the weights have float16's digits", "precision", _weighed(torch.float16)),
    *each(OP, "lse is read in bfloat16", "precision", _given(
        lambda a: {name: a[name].bfloat16().to(a[name].dtype) for name in ("lse_a", "lse_b")}
    )),
]  # fmt: skip

MUTANTS: list[Mutant] = [*MERGING, *ROWS, *LSE, *SPECIAL, *PRECISION]
