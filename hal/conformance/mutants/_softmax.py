"""Faulty softmax: what is subtracted, the denominator, rows without a finite number.

Shape letters: n length of the softmax axis.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from hal.conformance.mutants._changes import Step, changed, finite, given
from hal.conformance.mutants.coarse import FLOAT32, bfloat16_sum, in_float32, rounded, wide
from hal.conformance.mutants.mutant import Arguments, Candidate, Mutant, after, before, each, weaker

__all__ = ["MUTANTS"]


def share(*, top: Callable[[Tensor, int], Tensor] = lambda x, dim: x.amax(dim, keepdim=True),
          power: Step = torch.exp, total: Callable[[Tensor, int], Tensor] = lambda e, dim: e.sum(dim, keepdim=True),
          dead: float = 0.0) -> Candidate:  # fmt: skip
    """Softmax written once more. top: what is subtracted. total: the denominator. dead: rows that are all −inf."""

    def formula(y: Tensor, a: Arguments) -> Tensor:
        if not a["x"].shape[a["dim"]]:
            return y
        x = wide(a["x"])
        nothing = (x == -math.inf).all(a["dim"], keepdim=True)
        x = x.masked_fill(nothing, 0.0)
        e = power(x - top(x, a["dim"]))
        return (e / total(e, a["dim"])).masked_fill(nothing, dead).to(y.dtype).contiguous()

    return after("softmax", formula)


def without_the_last_of_many(e: Tensor, dim: int) -> Tensor:
    n = e.shape[dim]
    return e.narrow(dim, 0, n - (n > 8192)).sum(dim, keepdim=True)


def top_of_the_first_block(x: Tensor, dim: int) -> Tensor:
    """The maximum is not looked for past the first 64, and does not grow later."""
    return x.narrow(dim, 0, min(64, x.shape[dim])).amax(dim, keepdim=True)


def not_rescaled(e: Tensor, dim: int) -> Tensor:
    """A second block whose maximum is larger adds to a sum that still stands for the first one's."""
    n = e.shape[dim]
    if n <= 64:
        return e.sum(dim, keepdim=True)
    first, rest = e.narrow(dim, 0, 64), e.narrow(dim, 64, n - 64)
    return first.sum(dim, keepdim=True) / first.amax(dim, keepdim=True) + rest.sum(dim, keepdim=True)


MUTANTS: list[Mutant] = [
    *each("softmax", "it runs along the last axis always", "softmax", given(dim=-1)),
    *each("softmax", "a row that is −inf throughout is NaN", "softmax", lambda op: share(dead=math.nan)),
    *each("softmax", "a row that is −inf throughout is a little above 0", "softmax", lambda op: share(dead=2.0**-24)),
    *each("softmax", "powers are of 2", "softmax", lambda op: share(power=torch.exp2)),
    *each("softmax", "nothing is subtracted, and exponentials overflow", "softmax",
          lambda op: share(top=lambda x, dim: torch.zeros_like(x))),
    *each("softmax", "the maximum is that of the first 64", "softmax", lambda op: share(top=top_of_the_first_block)),
    *each("softmax", "a sum is not scaled anew when the maximum grows", "softmax",
          lambda op: share(total=not_rescaled)),
    *each("softmax", "one term of 8,193 is left out of the denominator", "softmax",
          lambda op: share(total=without_the_last_of_many)),
    *weaker("softmax", "a share of the denominator is lost", "softmax",
            lambda op, s: share(total=lambda e, dim: e.sum(dim, keepdim=True) * (1 - s)), 2.0**-13),
    *weaker("softmax", "exponents are a little more", "softmax",
            lambda op, s: share(power=lambda t: torch.exp(t * (1 + s))), 2.0**-13),
    *each("softmax", "NaN becomes 0", "special values", lambda op: changed(op, lambda y, a: y.nan_to_num(0.0))),
    *each("softmax", "Inf is the largest number", "special values", lambda op: before(op, finite)),
    *each("softmax", "float64 is computed in float32", "precision", in_float32, invisible=FLOAT32),
    *each("softmax", "the denominator is summed in bfloat16", "precision",
          lambda op: share(total=lambda e, dim: bfloat16_sum(e, dim, keepdim=True))),
    *weaker("softmax", "exponentials have a rounding of their own", "precision",
            lambda op, s: share(power=lambda t: rounded(torch.exp(t), s)), 2.0**-12),
]  # fmt: skip
