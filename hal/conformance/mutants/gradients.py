"""Faulty gradients of every operator but attention.

Each operator's backward pass is written once more, as a formula of the arguments with places to go wrong in: one module
per family. Here are the faults that every operator can have.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hal.conformance.mutants import (
    _gate_gradients,
    _linear_gradients,
    _loss_gradients,
    _norm_gradients,
    _rotary_gradients,
    _softmax_gradients,
)
from hal.conformance.mutants._gate_gradients import gated
from hal.conformance.mutants._gates import GATED
from hal.conformance.mutants._gradient_changes import gradient
from hal.conformance.mutants._linear_gradients import linear
from hal.conformance.mutants._loss_gradients import cross_entropy
from hal.conformance.mutants._norm_gradients import norm
from hal.conformance.mutants._rotary_gradients import rotary
from hal.conformance.mutants._softmax_gradients import softmax
from hal.conformance.mutants.coarse import FLOAT32
from hal.conformance.mutants.mutant import Candidate, Gradients, Mutant, differentiated, one
from hal.conformance.mutants.norms import NORMS
from hal.contract import OPS, Args

__all__ = ["MUTANTS", "cross_entropy", "gated", "linear", "norm", "rotary", "softmax"]


def from_float32(op: str) -> Candidate:
    """The gradients of float64 as float32 has them."""

    def narrow(found: Gradients, a: Args, grads: Any) -> Gradients:
        return [d.float().double() if d is not None and d.dtype is torch.float64 else d for d in found]

    return differentiated(op, narrow)


def last_row_lost(op: str) -> Candidate:
    """The last row of the first gradient stays 0."""

    def lost(d: Tensor, a: Args) -> Tensor:
        at = torch.arange(d.shape[0]).reshape(-1, *[1] * (d.dim() - 1))
        return torch.where((at == d.shape[0] - 1) & (d.shape[0] > 1), 0.0, d)

    return one(OPS[op].grad[0], op, lost)


DIFFERENTIABLE = (*NORMS, *GATED, "softmax", "rotary_embedding", "linear", "cross_entropy")
OF = dict.fromkeys(NORMS, "statistics") | dict.fromkeys(GATED, "gates") | {
    "softmax": "softmax", "rotary_embedding": "rotary", "linear": "product", "cross_entropy": "cross entropy"
}  # fmt: skip


def in_each(name: str, fault: Callable[[str], Candidate]) -> list[Mutant]:
    """The same fault in every operator, against what it is about."""
    return [mutant for op in DIFFERENTIABLE for mutant in gradient(op, name, OF[op], fault)]


MUTANTS: list[Mutant] = [
    *in_each("nothing gets a gradient", lambda op: differentiated(op, lambda found, a, grads: [None] * len(found))),
    *in_each("the last row gets no gradient", last_row_lost),
    *_norm_gradients.MUTANTS, *_gate_gradients.MUTANTS, *_softmax_gradients.MUTANTS, *_rotary_gradients.MUTANTS,
    *_linear_gradients.MUTANTS, *_loss_gradients.MUTANTS,
    *gradient(DIFFERENTIABLE, "float64 is computed in float32", "precision", from_float32, invisible=FLOAT32),
]  # fmt: skip
