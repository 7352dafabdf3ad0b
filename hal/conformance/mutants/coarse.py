"""Arithmetic coarser than the contract asks for, of which mutants of precision are made."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from hal.conformance.mutants.mutant import HALVES, Candidate, reference
from hal.contract import OPS

__all__ = ["FLOAT32", "IDENTITY", "bfloat16_sum", "in_float32", "rounded", "wide"]

FLOAT32 = dict.fromkeys(("float32", *HALVES), "float32 is what the contract computes in")
IDENTITY = dict.fromkeys(
    ("float64", "float32"), "the dtype is the one computed in, so that rounding or cutting to it is the identity"
)


def wide(t: Tensor) -> Tensor:
    """A tensor in what the contract computes in: float32, or float64 for float64."""
    return t if t.dtype is torch.float64 else t.float()


def rounded(t: Tensor, s: float) -> Tensor:
    """t rounded to nearest, with s the unit roundoff; 2⁻¹¹ is tf32's. NaN and Inf stay."""
    mantissa, exponent = torch.frexp(t)
    return torch.where(t.isfinite(), torch.ldexp((mantissa / s).round() * s, exponent), t)


def bfloat16_sum(t: Tensor, dim: int, keepdim: bool = False) -> Tensor:
    """The sum over an axis, one term after the other in a bfloat16 accumulator."""
    total = torch.zeros_like(t.sum(dim))
    for term in t.unbind(dim):
        total = (total + term).bfloat16().to(t.dtype)
    return total.unsqueeze(dim) if keepdim else total


def in_float32(op: str) -> Candidate:
    """The reference on float32 in place of float64."""

    @functools.wraps(reference(op))
    def call(*args: Any, **kwargs: Any) -> Any:
        a = vars(OPS[op].bind(args, kwargs))
        found = reference(op)(**{name: _cast(value, torch.float64, torch.float32) for name, value in a.items()})
        if next(value for value in a.values() if isinstance(value, Tensor)).dtype is not torch.float64:
            return found
        many = (_cast(t, torch.float32, torch.float64) for t in found) if isinstance(found, tuple) else None
        return _cast(found, torch.float32, torch.float64) if many is None else tuple(many)

    return call


def _cast(value: Any, old: torch.dtype, new: torch.dtype) -> Any:
    return value.to(new) if isinstance(value, Tensor) and value.dtype is old else value
