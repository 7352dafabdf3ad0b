"""Faulty gated activations: halves and limits, the gate's curve, special values.

Shape letters: F features of a gated result.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from hal.conformance.mutants._changes import changed, finite, given
from hal.conformance.mutants.coarse import FLOAT32, IDENTITY, in_float32, rounded, wide
from hal.conformance.mutants.mutant import Arguments, Candidate, Mutant, after, before, each, weaker

__all__ = ["GATED", "MUTANTS"]

GATED = ("silu_and_mul", "gelu_and_mul")


def gated(
    op: str,
    *,
    value: Callable[[Tensor, Arguments], Tensor] = lambda t, a: t,
    halves: Callable[[Tensor, Arguments], tuple[Tensor, Tensor]] | None = None,
    act: Callable[[Tensor, Arguments], Tensor] | None = None,
    signed: bool = True,
) -> Candidate:
    """The gated unit written once more.

    value: what becomes of the activated gate. halves: gate and up, limited. signed: an infinite up keeps its sign where
    the activated gate was rounded to 0.
    """

    def limited(x: Tensor, a: Arguments) -> tuple[Tensor, Tensor]:
        gate, up = x.chunk(2, -1)
        if a.get("limit") is not None:
            gate, up = gate.clamp(max=a["limit"]), up.clamp(-a["limit"], a["limit"])
        return gate, up + a.get("up_offset", 0.0)

    def activated(gate: Tensor, a: Arguments) -> Tensor:
        if op == "silu_and_mul":
            return gate * torch.sigmoid(a["alpha"] * gate)
        if a["approximate"] == "none":
            return 0.5 * gate * (1 + torch.erf(gate * math.sqrt(0.5)))
        return 0.5 * gate * (1 + torch.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate * gate * gate)))

    def formula(honest: Tensor, a: Arguments) -> Tensor:
        gate, up = (halves or limited)(wide(a["x"]), a)
        y = value((act or activated)(gate, a), a) * up
        if signed:
            y = torch.where(up.isinf() & gate.isfinite() & (gate != 0), gate * up, y)
        return y.to(honest.dtype).contiguous()

    return after(op, formula)


def limited_below(x: Tensor, a: Arguments) -> tuple[Tensor, Tensor]:
    gate, up = x.chunk(2, -1)
    if a["limit"] is not None:
        gate, up = (t.clamp(-a["limit"], a["limit"]) for t in (gate, up))
    return gate, up + a["up_offset"]


def limited_above(x: Tensor, a: Arguments) -> tuple[Tensor, Tensor]:
    gate, up = (t if a["limit"] is None else t.clamp(max=a["limit"]) for t in x.chunk(2, -1))
    return gate, up + a["up_offset"]


def limited_late(x: Tensor, a: Arguments) -> tuple[Tensor, Tensor]:
    """The limit comes after the offset."""
    gate, up = x.chunk(2, -1)
    up = up + a["up_offset"]
    return (gate, up) if a["limit"] is None else (gate.clamp(max=a["limit"]), up.clamp(-a["limit"], a["limit"]))


def halves_swapped(a: Arguments) -> Arguments:
    gate, up = a["x"].chunk(2, -1)
    return {"x": torch.cat((up, gate), -1)}


def halves_interleaved(a: Arguments) -> Arguments:
    return {"x": torch.cat((a["x"][..., ::2], a["x"][..., 1::2]), -1)}


def alpha_twice(gate: Tensor, a: Arguments) -> Tensor:
    z: Tensor = a["alpha"] * gate
    return z * torch.sigmoid(z)


def limit_swallows_nan(a: Arguments) -> Arguments:
    return {} if a["limit"] is None else {"x": a["x"].masked_fill(a["x"].isnan(), a["limit"])}


def exponential_overflows(gate: Tensor, a: Arguments) -> Tensor:
    """σ = eᶻ/(1 + eᶻ), which is Inf/Inf for large z."""
    grown = torch.exp(a["alpha"] * gate)
    return gate * grown / (1 + grown)


def gate_without_minus_infinity(y: Tensor, a: Arguments) -> Tensor:
    """−Inf·0 is taken for 0."""
    gate, up = a["x"].chunk(2, -1)
    return y.masked_fill((gate == -math.inf) & up.isfinite(), 0.0)


MUTANTS: list[Mutant] = [
    *each(GATED, "up is gated in place of the gate", "gates", lambda op: before(op, halves_swapped)),
    *each(GATED, "gate and up alternate", "gates", lambda op: before(op, halves_interleaved)),
    *each("silu_and_mul", "alpha is left out", "gates", given(alpha=1.0)),
    *each("silu_and_mul", "alpha scales the gate too", "gates", lambda op: gated(op, act=alpha_twice)),
    *each("silu_and_mul", "the limit is left out", "gates", given(limit=None)),
    *each("silu_and_mul", "the limit bounds the gate below too", "gates", lambda op: gated(op, halves=limited_below)),
    *each("silu_and_mul", "the limit bounds up above only", "gates", lambda op: gated(op, halves=limited_above)),
    *each("silu_and_mul", "the limit comes after the offset", "gates", lambda op: gated(op, halves=limited_late)),
    *each("silu_and_mul", "the offset is left out", "gates", given(up_offset=0.0)),
    *weaker("silu_and_mul", "alpha is a little more", "gates",
            lambda op, s: before(op, lambda a: {"alpha": a["alpha"] * (1 + s)}), 2.0**-13),
    *weaker("silu_and_mul", "the limit is a little more", "gates",
            lambda op, s: before(op, lambda a: {"limit": a["limit"] and a["limit"] * (1 + s)}), 2.0**-8),
    *weaker("silu_and_mul", "the offset is a little more", "gates",
            lambda op, s: before(op, lambda a: {"up_offset": a["up_offset"] * (1 + s)}), 2.0**-13),
    *each("gelu_and_mul", "tanh stands for erf", "gates", given(approximate="tanh")),
    *each("gelu_and_mul", "erf stands for tanh", "gates", given(approximate="none")),
    *each("gelu_and_mul", "gelu is gate·σ(1.702 gate)", "gates",
          lambda op: gated(op, act=lambda gate, a: gate * torch.sigmoid(1.702 * gate))),
    *weaker("gelu_and_mul", "the gate's argument is a little more", "gates",
            lambda op, s: gated(op, act=lambda g, a: 0.5 * g * (1 + torch.erf(g * (1 + s) * math.sqrt(0.5)))
                                if a["approximate"] == "none" else
                                0.5 * g * (1 + torch.tanh((1 + s) * math.sqrt(2 / math.pi) * (g + 0.044715 * g**3)))),
            2.0**-13),
    *each(GATED, "NaN becomes 0", "special values",
          lambda op: changed(op, lambda y, a: y.nan_to_num(0.0, math.inf, -math.inf))),
    *each(GATED, "Inf is the largest number", "special values", lambda op: before(op, finite)),
    *each(GATED, "−Inf·0 is 0", "special values", lambda op: changed(op, gate_without_minus_infinity)),
    *each(GATED, "an infinite up is NaN where the activated gate rounds to 0", "special values",
          lambda op: gated(op, signed=False)),
    *each("silu_and_mul", "the limit swallows NaN", "special values", lambda op: before(op, limit_swallows_nan)),
    *each("silu_and_mul", "the gate's exponential overflows", "special values",
          lambda op: gated(op, act=exponential_overflows)),
    *each(GATED, "float64 is computed in float32", "precision", in_float32, invisible=FLOAT32),
    *each(GATED, "the activated gate is rounded to x's dtype", "precision",
          lambda op: gated(op, value=lambda t, a: t.to(a["x"].dtype).to(t.dtype)), invisible=IDENTITY),
    *weaker(GATED, "the activated gate has a rounding of its own", "precision",
            lambda op, s: gated(op, value=lambda t, a: rounded(t, s)), 2.0**-13),
]  # fmt: skip
