"""Faulty cross entropy.

Shape letters: T rows, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from hal.conformance.mutants.coarse import FLOAT32, bfloat16_sum, in_float32, rounded, wide
from hal.conformance.mutants.mutant import Arguments, Candidate, Mutant, after, before, each, weaker

__all__ = ["MUTANTS", "loss"]

OP = "cross_entropy"


def loss(
    *,
    lse: Callable[[Tensor], Tensor] = lambda x_TV: torch.logsumexp(x_TV, -1),
    uniform: Callable[[Tensor, Tensor, Tensor], Tensor] = lambda lse_T, x_TV, chosen_T: lse_T - x_TV.mean(-1),
    z: Callable[[Tensor, Tensor], Tensor] = lambda lse_T, loss_T: lse_T.square(),
    kept: Callable[[Tensor, Tensor], Tensor] = lambda loss_T, keep_T: torch.where(keep_T, loss_T, 0.0),
    blanked: bool = True,
    total: Callable[[Tensor], Tensor] = torch.sum,
    count: Callable[[Tensor], Tensor | float] = lambda keep_T: keep_T.sum().clamp(min=1),
) -> Candidate:
    """The loss written once more, with places to go wrong in.

    uniform: the smoothed part of (lse, logits, the target's logit). z: what z-loss weighs, of (lse, the row's loss).
    kept: what becomes of ignored rows, and whether their logits are blanked. total, count: of a sum and a mean.
    """

    def formula(honest: Tensor, a: Arguments) -> Tensor:
        keep_T, s = a["target"] != a["ignore_index"], a["label_smoothing"]
        x_TV = wide(a["logits"])
        if blanked:
            x_TV = torch.where(keep_T[:, None], x_TV, 0.0)
        lse_T = lse(x_TV)
        chosen_T = x_TV.gather(-1, torch.where(keep_T, a["target"], 0)[:, None])[:, 0]
        loss_T = lse_T - chosen_T
        if s:
            loss_T = (1 - s) * loss_T + s * uniform(lse_T, x_TV, chosen_T)
        if a["z_loss"]:
            loss_T = loss_T + a["z_loss"] * z(lse_T, loss_T)
        loss_T = kept(loss_T, keep_T)
        if a["reduction"] == "none":
            return loss_T
        return total(loss_T) / count(keep_T) if a["reduction"] == "mean" else total(loss_T)

    return after(OP, formula)


def over_the_others(lse_T: Tensor, x_TV: Tensor, chosen_T: Tensor) -> Tensor:
    """The smoothed part goes to the other V − 1 classes."""
    others = max(x_TV.shape[-1] - 1, 1)
    return lse_T - (x_TV.sum(-1) - chosen_T) / others


def without_the_last_of_many(x_TV: Tensor) -> Tensor:
    return torch.logsumexp(x_TV[:, : x_TV.shape[1] - (x_TV.shape[1] > 8192)], -1)


def without_maximum(x_TV: Tensor) -> Tensor:
    return x_TV.exp().sum(-1).log()


def summed_in_bfloat16(x_TV: Tensor) -> Tensor:
    top_T1 = x_TV.amax(-1, keepdim=True)
    return bfloat16_sum((x_TV - top_T1).exp(), -1).log() + top_T1[:, 0]


def exponentials_rounded(x_TV: Tensor, s: float) -> Tensor:
    top_T1 = x_TV.amax(-1, keepdim=True)
    return rounded((x_TV - top_T1).exp(), s).sum(-1).log() + top_T1[:, 0]


def of_the_next_class(a: Arguments) -> Arguments:
    keep_T = a["target"] != a["ignore_index"]
    return {"target": torch.where(keep_T, (a["target"] + 1) % a["logits"].shape[1], a["target"])}


def last_row_ignored(loss_T: Tensor, keep_T: Tensor) -> Tensor:
    last_T = torch.arange(len(keep_T)) == len(keep_T) - 1
    return torch.where(keep_T & ~last_T, loss_T, 0.0)


def always_minus_hundred(a: Arguments) -> Arguments:
    """Another ignore_index is a class like any; where it is none, a row is ignored all the same."""
    known = (a["target"] >= 0) & (a["target"] < a["logits"].shape[1])
    return {"ignore_index": -100, "target": torch.where(known, a["target"], -100)}


def finite(a: Arguments) -> Arguments:
    return {"logits": a["logits"].clamp(min=torch.finfo(a["logits"].dtype).min)}


MUTANTS: list[Mutant] = [
    *each(OP, "the next class is the target", "cross entropy", lambda op: before(op, of_the_next_class)),
    *each(OP, "the loss is in bits", "cross entropy", lambda op: after(op, lambda y, a: y / math.log(2.0))),
    *each(OP, "a mean divides by all rows", "cross entropy", lambda op: loss(count=lambda keep_T: keep_T.numel())),
    *each(OP, "a mean is a sum", "cross entropy",
          lambda op: before(op, lambda a: {"reduction": "sum" if a["reduction"] == "mean" else a["reduction"]})),
    *each(OP, "a mean over nothing is NaN", "cross entropy", lambda op: loss(count=torch.sum)),
    *each(OP, "ignored rows count like others", "cross entropy", lambda op: loss(kept=lambda loss_T, keep_T: loss_T)),
    *each(OP, "only −100 is ignored", "cross entropy", lambda op: before(op, always_minus_hundred)),
    *each(OP, "what an ignored row holds is multiplied by 0", "cross entropy",
          lambda op: loss(blanked=False, kept=lambda loss_T, keep_T: loss_T * keep_T)),
    *each(OP, "the last row is ignored", "cross entropy", lambda op: loss(kept=last_row_ignored)),
    *each(OP, "smoothing is left out", "cross entropy", lambda op: before(op, lambda a: {"label_smoothing": 0.0})),
    *each(OP, "smoothing leaves the target out", "cross entropy", lambda op: loss(uniform=over_the_others)),
    *each(OP, "z-loss is left out", "cross entropy", lambda op: before(op, lambda a: {"z_loss": 0.0})),
    *each(OP, "z-loss is of the loss", "cross entropy", lambda op: loss(z=lambda lse_T, loss_T: loss_T.square())),
    *each(OP, "z-loss is not squared", "cross entropy", lambda op: loss(z=lambda lse_T, loss_T: lse_T.abs())),
    *each(OP, "no maximum is subtracted, and exponentials overflow", "cross entropy",
          lambda op: loss(lse=without_maximum)),
    *each(OP, "one class of 8,193 is left out", "cross entropy", lambda op: loss(lse=without_the_last_of_many)),
    *weaker(OP, "a share of the denominator is lost", "cross entropy",
            lambda op, s: loss(lse=lambda x_TV: torch.logsumexp(x_TV, -1) + math.log1p(-s)), 2.0**-13),
    *weaker(OP, "smoothing is a little more", "cross entropy",
            lambda op, s: before(op, lambda a: {"label_smoothing": a["label_smoothing"] * (1 + s)}), 2.0**-13),
    *weaker(OP, "z-loss is a little more", "cross entropy",
            lambda op, s: before(op, lambda a: {"z_loss": a["z_loss"] * (1 + s)}), 2.0**-13),
    *each(OP, "NaN becomes 0", "special values", lambda op: after(op, lambda y, a: y.nan_to_num(0.0, math.inf))),
    *each(OP, "Inf is the largest number", "special values",
          lambda op: after(op, lambda y, a: y.clamp(max=torch.finfo(y.dtype).max))),
    *each(OP, "−Inf is the lowest number", "special values", lambda op: before(op, finite)),
    *each(OP, "float64 is computed in float32", "precision", in_float32, invisible=FLOAT32),
    *each(OP, "the result has the rounding of bfloat16", "precision",
          lambda op: after(op, lambda y, a: y.bfloat16().to(y.dtype))),
    *each(OP, "exponentials are summed in bfloat16", "precision", lambda op: loss(lse=summed_in_bfloat16)),
    *each(OP, "rows are summed in bfloat16", "precision",
          lambda op: loss(total=lambda loss_T: bfloat16_sum(loss_T, 0))),
    *weaker(OP, "exponentials have a rounding of their own", "precision",
            lambda op, s: loss(lse=lambda x_TV: exponentials_rounded(x_TV, s)), 2.0**-13),
    *weaker(OP, "lse has a rounding of its own", "precision",
            lambda op, s: loss(lse=lambda x_TV: rounded(torch.logsumexp(x_TV, -1), s)), 2.0**-13),
]  # fmt: skip
