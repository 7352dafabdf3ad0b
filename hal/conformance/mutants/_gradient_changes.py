"""What faulty gradients share: sums over rows, gradients that are lost, and mutants of a backward pass.

Shape letters: T rows, F features.
"""

from __future__ import annotations

import functools

from torch import Tensor

from hal.conformance.mutants.coarse import bfloat16_sum
from hal.conformance.mutants.mutant import Candidate, each, one, weaker

Found = tuple[Tensor | None, ...]

gradient = functools.partial(each, gradient=True)
graded = functools.partial(weaker, gradient=True)


def nothing(op: str, name: str) -> Candidate:
    return one(name, op, lambda d, a: None)


def over_rows(t_TF: Tensor) -> Tensor:
    return t_TF.flatten(0, -2).sum(0) if t_TF.dim() > 1 else t_TF


def but_the_last(t_TF: Tensor) -> Tensor:
    """The sum over all rows but the last."""
    rows = t_TF.flatten(0, -2) if t_TF.dim() > 1 else t_TF[None]
    return rows[:-1].sum(0) if len(rows) > 1 else rows[0]


def in_bfloat16(t_TF: Tensor) -> Tensor:
    return bfloat16_sum(t_TF.flatten(0, -2) if t_TF.dim() > 1 else t_TF[None], 0)


def first_axis_only(t_TF: Tensor) -> Tensor:
    """Of several leading axes the sum runs over the first."""
    return t_TF.sum(0).flatten(0, -2)[0] if t_TF.dim() > 2 else over_rows(t_TF)
