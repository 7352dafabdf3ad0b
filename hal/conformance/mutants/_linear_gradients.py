"""Faulty gradients of linear.

Shape letters: T rows, I features in, O features out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from hal.conformance.mutants._changes import Step
from hal.conformance.mutants._gradient_changes import Found, first_axis_only, graded, gradient, nothing, over_rows
from hal.conformance.mutants.coarse import bfloat16_sum, rounded, wide
from hal.conformance.mutants.mutant import Candidate, Mutant, written
from hal.contract import Args

__all__ = ["MUTANTS", "linear"]


def linear(*, rows: Callable[[Tensor, Tensor], Tensor] = lambda dy_TO, x_TI: dy_TO.mT @ x_TI, bias: Step = over_rows,
           columns: Callable[[Tensor, Tensor], Tensor] = lambda dy, weight: dy @ weight) -> Candidate:  # fmt: skip
    """dx = dy·w (columns), dw = dyᵀ·x (rows), db = Σ dy (bias)."""

    def formula(a: Args, grads: Any) -> Found:
        dy, x, weight = wide(grads[0]), wide(a.x), wide(a.weight)
        dw = rows(dy.reshape(-1, dy.shape[-1]), x.reshape(-1, x.shape[-1]))
        return columns(dy, weight), dw, None if a.bias is None else bias(dy)

    return written("linear", formula)


MUTANTS: list[Mutant] = [
    *gradient("linear", "the bias gets nothing", "product", lambda op: nothing(op, "bias")),
    *gradient("linear", "the weight gets nothing", "product", lambda op: nothing(op, "weight")),
    *gradient("linear", "the weight's gradient lacks the last row", "product",
              lambda op: linear(rows=lambda dy, x: dy[:-1].mT @ x[:-1])),
    *gradient("linear", "the bias's gradient is summed over one axis of two", "product",
              lambda op: linear(bias=first_axis_only)),
    *graded("linear", "x's gradient is a little more", "product",
            lambda op, s: linear(columns=lambda dy, w: dy @ w * (1 + s)), 2.0**-8),
    *gradient("linear", "the weight's gradient is summed in bfloat16", "precision",
              lambda op: linear(rows=lambda dy, x: bfloat16_sum(dy.unsqueeze(-1) * x.unsqueeze(-2), 0))),
    *gradient("linear", "x's gradient is summed in bfloat16", "precision",
              lambda op: linear(columns=lambda dy, w: bfloat16_sum(dy.unsqueeze(-2) * w.mT, -1))),
    *graded("linear", "x's gradient has a rounding of its own", "precision",
            lambda op, s: linear(columns=lambda dy, w: rounded(dy @ w, s)), 2.0**-7),
]  # fmt: skip
