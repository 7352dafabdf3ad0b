"""Faulty gradients of rotary embedding."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hal.conformance.mutants._changes import Step, same
from hal.conformance.mutants._gradient_changes import Found, graded, gradient, nothing
from hal.conformance.mutants.coarse import rounded, wide
from hal.conformance.mutants.mutant import Candidate, Mutant, asked, one, written
from hal.contract import Args

__all__ = ["MUTANTS", "rotary"]


def rotary(*, way: float = -1.0, value: Step = same, table: Step = same) -> Candidate:
    """The gradient turned by `way` times the angle; value, table: what becomes of products, of cos and sin."""

    def formula(a: Args, grads: Any) -> Found:
        half = a.cos.shape[1]
        pairs = slice(0, half), slice(half, 2 * half)
        if a.interleaved:
            pairs = slice(0, 2 * half, 2), slice(1, 2 * half, 2)

        def turned(grad: Tensor | None) -> Tensor | None:
            if grad is None:
                return None
            d = wide(grad)
            c, s = (table(part[a.positions].to(d.dtype)).unsqueeze(-2) for part in (a.cos, a.sin))
            first, second = (d[..., part] for part in pairs)
            found = d.clone()
            found[..., pairs[0]] = value(first * c) - way * value(second * s)
            found[..., pairs[1]] = value(second * c) + way * value(first * s)
            return found

        return turned(grads[0]), turned(grads[1])

    return written("rotary_embedding", formula)


def rest_gets_nothing(d: Tensor, a: Args) -> Tensor:
    return d.masked_fill(torch.arange(d.shape[-1]) >= 2 * a.cos.shape[1], 0.0)


MUTANTS: list[Mutant] = [
    *gradient("rotary_embedding", "it turns on in place of back", "rotary", lambda op: rotary(way=1.0)),
    *gradient("rotary_embedding", "the key gets nothing", "rotary", lambda op: nothing(op, "k")),
    *gradient("rotary_embedding", "dims past rotary_dim get nothing", "rotary",
              lambda op: one("q", op, rest_gets_nothing)),
    *gradient("rotary_embedding", "pairs are never neighbours", "rotary", lambda op: asked(op, interleaved=False)),
    *graded("rotary_embedding", "the sine is a little more", "rotary",
            lambda op, s: rotary(way=-1.0 - s), 2.0**-8),
    *gradient("rotary_embedding", "tables are read as bfloat16", "precision",
              lambda op: rotary(table=lambda t: t.bfloat16().to(t.dtype))),
    *graded("rotary_embedding", "products have a rounding of their own", "precision",
            lambda op, s: rotary(value=lambda t: rounded(t, s)), 2.0**-8),
]  # fmt: skip
