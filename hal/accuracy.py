"""The accuracy contract of an operator: which rule judges it and the derived element bound."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

import torch
from torch import Tensor

if TYPE_CHECKING:
    from hal.op import Args

__all__ = ["Accumulator", "Accuracy", "Rule", "growth", "smallest_normal", "unit_roundoff"]

Rule = Literal["bound", "bitwise", "codes", "sampling"]


def unit_roundoff(dtype: torch.dtype) -> float:
    """u = eps/2 of a floating dtype: the largest relative error of one rounding to nearest."""
    return torch.finfo(dtype).eps / 2


@dataclass(frozen=True)
class Accumulator:
    """What an implementation computes with.

    eps: u of its accumulator. u_p: u of the dtype it rounds P and dS to. dtype: in which results are stored, which
    the bounds of inner storage roundings need (the tensors that they see are float64).
    """

    eps: float
    u_p: float = 0.0
    dtype: torch.dtype | None = None


def growth(n: int, acc: Accumulator) -> float:
    """g(n) = sqrt(n)·eps, the expected growth of the rounding error of a sum of n terms."""
    return math.sqrt(max(n, 1)) * acc.eps


def smallest_normal(acc: Accumulator) -> float:
    """Below this an accumulator's numbers lose digits, or are 0."""
    return torch.finfo(torch.float32 if acc.eps > 2.0**-50 else torch.float64).tiny


GradientBound: TypeAlias = (
    "Callable[[Args, tuple[Tensor, ...], tuple[Tensor | None, ...], Accumulator], tuple[Tensor | None, ...]]"
)


@dataclass(frozen=True)
class Accuracy:
    """How results are judged (rules R1 to R5 of the numerics policy).

    `bound(a, Y, acc)` gets the arguments with floating tensors already in float64 and the oracle's results, and
    returns E of |y - Y| <= u_out·|Y| + omega + c·E for each result, in float64, broadcastable to the result.
    `exact(a, Y)` returns, for each result, a bool mask of the elements whose value the contract fixes, or None.
    `gradient_bound(a, Y, grads, acc)` gets a gradient (float64) or None for each result as well, and returns E for the
    gradient of each differentiable argument, None for an argument that is absent. Where such an E is 0 and the oracle's
    gradient too, the gradient is exactly 0.
    """

    rule: Rule = "bound"
    bound: Callable[[Args, tuple[Tensor, ...], Accumulator], tuple[Tensor, ...]] | None = None
    exact: Callable[[Args, tuple[Tensor, ...]], tuple[Tensor | None, ...]] | None = None
    gradient_bound: GradientBound | None = None
    free_share: float = 0.5
    notes: str = ""
