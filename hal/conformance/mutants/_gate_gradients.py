"""Faulty gradients of the gated activations."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from hal.conformance.mutants._changes import Step, same
from hal.conformance.mutants._gates import GATED
from hal.conformance.mutants._gradient_changes import Found, graded, gradient
from hal.conformance.mutants.coarse import rounded, wide
from hal.conformance.mutants.mutant import Candidate, Mutant, asked, one, written
from hal.contract import Args

__all__ = ["MUTANTS", "gated"]


def silu(*, curved: bool = True, limited: bool = True, offset: bool = True, value: Step = same) -> Candidate:
    """dgate = dy·up·σ(1 + z(1 − σ)), dup = dy·gate·σ, z = alpha·gate; value: what becomes of σ."""

    def formula(a: Args, grads: Any) -> Found:
        gate, up = wide(a.x).chunk(2, -1)
        dy = wide(grads[0])
        inside = torch.ones_like(gate, dtype=torch.bool), torch.ones_like(up, dtype=torch.bool)
        if a.limit is not None:
            if limited:
                inside = gate <= a.limit, up.abs() <= a.limit
            gate, up = gate.clamp(max=a.limit), up.clamp(-a.limit, a.limit)
        z = a.alpha * gate
        share, rest = value(torch.sigmoid(z)), torch.sigmoid(-z)
        of_gate = dy * (up + (a.up_offset if offset else 0.0)) * share * ((1 + z * rest) if curved else 1.0)
        return (torch.cat((of_gate * inside[0], dy * gate * share * inside[1]), -1),)

    return written("silu_and_mul", formula)


def gelu(*, curved: bool = True, value: Step = same) -> Candidate:
    """dgate = dy·up·(Φ + gate·Φ′), dup = dy·gate·Φ; value: what becomes of Φ."""

    def formula(a: Args, grads: Any) -> Found:
        gate, up = wide(a.x).chunk(2, -1)
        dy = wide(grads[0])
        if a.approximate == "none":
            share = 0.5 * (1 + torch.erf(gate * math.sqrt(0.5)))
            slope = torch.exp(-0.5 * gate.square()) * math.sqrt(0.5 / math.pi)
        else:
            t = torch.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3))
            share = 0.5 * (1 + t)
            slope = 0.5 * (1 - t * t) * math.sqrt(2 / math.pi) * (1 + 3 * 0.044715 * gate.square())
        share = value(share)
        of_gate = dy * up * (share + gate * slope if curved else share)
        return (torch.cat((of_gate, dy * gate * share), -1),)

    return written("gelu_and_mul", formula)


def gated(op: str, **how: Any) -> Candidate:
    return silu(**how) if op == "silu_and_mul" else gelu(**how)


def halves_swapped(d: Tensor, a: Args) -> Tensor:
    of_gate, of_up = d.chunk(2, -1)
    return torch.cat((of_up, of_gate), -1)


MUTANTS: list[Mutant] = [
    *gradient(GATED, "the gate's curve is left out", "gates", lambda op: gated(op, curved=False)),
    *gradient(GATED, "gate and up are swapped", "gates", lambda op: one("x", op, halves_swapped)),
    *gradient("silu_and_mul", "gradients go through the limit", "gates", lambda op: silu(limited=False)),
    *gradient("silu_and_mul", "the limit is left out", "gates", lambda op: asked(op, limit=None)),
    *gradient("silu_and_mul", "alpha is left out", "gates", lambda op: asked(op, alpha=1.0)),
    *gradient("silu_and_mul", "the offset is left out", "gates", lambda op: silu(offset=False)),
    *gradient("gelu_and_mul", "tanh stands for erf", "gates", lambda op: asked(op, approximate="tanh")),
    *gradient("gelu_and_mul", "erf stands for tanh", "gates", lambda op: asked(op, approximate="none")),
    *graded(GATED, "the gate's share is a little more", "gates",
            lambda op, s: gated(op, value=lambda t: t * (1 + s)), 2.0**-8),
    *graded(GATED, "the gate's share has a rounding of its own", "precision",
            lambda op, s: gated(op, value=lambda t: rounded(t, s)), 2.0**-8),
]  # fmt: skip
