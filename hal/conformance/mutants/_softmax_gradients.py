"""Faulty gradients of softmax."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hal.conformance.mutants._changes import Step, same
from hal.conformance.mutants._gradient_changes import Found, graded, gradient
from hal.conformance.mutants.coarse import bfloat16_sum, rounded, wide
from hal.conformance.mutants.mutant import Candidate, Mutant, asked, one, written
from hal.contract import Args

__all__ = ["MUTANTS", "softmax"]


def softmax(*, middle: Callable[[Tensor, int], Tensor] = lambda weighed, dim: weighed.sum(dim, keepdim=True),
            kept: Step = same) -> Candidate:  # fmt: skip
    """dx = y(dy − Σ dy·y); middle: the sum. kept: what becomes of y."""

    def formula(a: Args, grads: Any) -> Found:
        dead = (a.x == -math.inf).all(a.dim, keepdim=True)
        y = kept(torch.softmax(wide(a.x).masked_fill(dead, 0.0), a.dim).masked_fill(dead, 0.0))
        dy = wide(grads[0])
        return (y * (dy - middle(dy * y, a.dim)),)

    return written("softmax", formula)


def sum_of_last_axis(weighed: Tensor, dim: int) -> Tensor:
    return weighed.sum(-1, keepdim=True)


def dead_rows_live(d: Tensor, a: Args) -> Tensor:
    """A row that is −inf throughout passes something on."""
    return torch.where((a.x == -math.inf).all(a.dim, keepdim=True), 2.0**-20, d)


MUTANTS: list[Mutant] = [
    *gradient("softmax", "the middle is left out", "softmax",
              lambda op: softmax(middle=lambda t, dim: torch.zeros_like(t))),
    *gradient("softmax", "the middle is of the last axis", "softmax", lambda op: softmax(middle=sum_of_last_axis)),
    *gradient("softmax", "it runs along the last axis", "softmax", lambda op: asked(op, dim=-1)),
    *gradient("softmax", "a row that is −inf throughout passes something on", "softmax",
              lambda op: one("x", op, dead_rows_live)),
    *graded("softmax", "a share of the middle is lost", "softmax",
            lambda op, s: softmax(middle=lambda t, dim: t.sum(dim, keepdim=True) * (1 - s)), 2.0**-4),
    *gradient("softmax", "the middle is summed in bfloat16", "precision",
              lambda op: softmax(middle=lambda t, dim: bfloat16_sum(t, dim, keepdim=True))),
    *graded("softmax", "y has a rounding of its own", "precision",
            lambda op, s: softmax(kept=lambda t: rounded(t, s)), 2.0**-6),
]  # fmt: skip
