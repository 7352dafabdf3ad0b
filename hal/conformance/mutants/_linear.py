"""Faulty linear: terms of the product left out, sums too coarse, the bias.

Shape letters: I features in, O features out.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from hal.conformance.mutants._changes import changed, finite, given
from hal.conformance.mutants.coarse import FLOAT32, IDENTITY, bfloat16_sum, in_float32, rounded, wide
from hal.conformance.mutants.mutant import HALVES, Arguments, Candidate, Mutant, after, before, each, weaker

__all__ = ["MUTANTS"]


def product(*, matmul: Callable[[Tensor, Tensor], Tensor] = lambda x, w: x @ w.mT,
            add: Callable[[Tensor, Tensor, torch.dtype], Tensor] = lambda y, b, dtype: y + b.to(y.dtype)
            ) -> Candidate:  # fmt: skip
    """The product written once more. add: product, bias and the dtype of x."""

    def formula(honest: Tensor, a: Arguments) -> Tensor:
        y = matmul(wide(a["x"]), wide(a["weight"]))
        y = y if a["bias"] is None else add(y, a["bias"], honest.dtype)
        return y.to(honest.dtype).contiguous()

    return after("linear", formula)


def square_taken_as_in_out(a: Arguments) -> Arguments:
    return {"weight": a["weight"].T} if a["weight"].shape[0] == a["weight"].shape[1] else {}


def tail_lost(x: Tensor, w: Tensor) -> Tensor:
    whole = x.shape[-1] - x.shape[-1] % 32 or x.shape[-1]
    return x[..., :whole] @ w[:, :whole].mT


def one_of_many_lost(x: Tensor, w: Tensor) -> Tensor:
    n = x.shape[-1] - (x.shape[-1] > 8192)
    return x[..., :n] @ w[:, :n].mT


def share_lost(x: Tensor, w: Tensor, s: float) -> Tensor:
    """One product of 1/s is left out, and at least the last of as many."""
    kept = torch.arange(1, x.shape[-1] + 1) % round(1 / s) != 0
    return (x * kept) @ w.mT


def in_bfloat16(x: Tensor, w: Tensor) -> Tensor:
    return bfloat16_sum(x.unsqueeze(-2) * w, -1)


def last_row_unbiased(honest: Tensor, a: Arguments) -> Tensor:
    if a["bias"] is None or honest.dim() < 2 or not honest.numel():
        return honest
    last = torch.arange(honest.shape[-2])[:, None] == honest.shape[-2] - 1
    plain = wide(a["x"]) @ wide(a["weight"]).mT
    return torch.where(last, plain.to(honest.dtype), honest)


MUTANTS: list[Mutant] = [
    *each("linear", "the bias is left out", "product", given(bias=None)),
    *each("linear", "the last row goes without its bias", "product", lambda op: changed(op, last_row_unbiased)),
    *each("linear", "a square weight is taken as (in, out)", "product",
          lambda op: before(op, square_taken_as_in_out)),
    *each("linear", "features past a multiple of 32 are left out", "product", lambda op: product(matmul=tail_lost)),
    *each("linear", "one product of 8,193 is left out", "product", lambda op: product(matmul=one_of_many_lost)),
    *weaker("linear", "one product of many is left out", "product",
            lambda op, s: product(matmul=lambda x, w: share_lost(x, w, s)), 2.0**-13),
    *weaker("linear", "the bias is a little more", "product",
            lambda op, s: product(add=lambda y, b, dtype: y + b.to(y.dtype) * (1 + s)), 2.0**-8),
    *each("linear", "NaN becomes 0", "special values", lambda op: before(
        op, lambda a: {"x": a["x"].nan_to_num(0.0, math.inf, -math.inf)})),
    *each("linear", "Inf is the largest number", "special values", lambda op: before(op, finite)),
    *each("linear", "zero weights hide NaN and Inf", "special values", lambda op: product(
        matmul=lambda x, w: torch.where(w == 0, 0.0, x.unsqueeze(-2) * w).sum(-1))),
    *each("linear", "float64 is computed in float32", "precision", in_float32, invisible=FLOAT32),
    *each("linear", "products are summed in bfloat16", "precision", lambda op: product(matmul=in_bfloat16)),
    *each("linear", "the bias is added after rounding", "precision",
          lambda op: product(add=lambda y, b, dtype: y.to(dtype).to(y.dtype) + b.to(y.dtype)), invisible=IDENTITY),
    *each("linear", "the bias is read as bfloat16", "precision",
          lambda op: product(add=lambda y, b, dtype: y + b.bfloat16().to(y.dtype))),
    *weaker("linear", "factors have a rounding of their own", "precision", lambda op, s: product(
        matmul=lambda x, w: rounded(x, s) @ rounded(w, s).mT), 2.0**-11,
            invisible=dict.fromkeys(HALVES, "factors of 8 and of 11 bits lose nothing by a rounding to 11 bits")),
    *weaker("linear", "the product has a rounding of its own", "precision", lambda op, s: product(
        matmul=lambda x, w: rounded(x @ w.mT, s)), 2.0**-13),
]  # fmt: skip
