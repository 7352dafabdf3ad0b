"""Faulty gated activations, softmax, rotary embedding and linear.

Shape letters: F features of a gated result, n length of the softmax axis, D head dim, I features in, O features out.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hal.conformance.mutants.coarse import FLOAT32, IDENTITY, bfloat16_sum, in_float32, rounded, wide
from hal.conformance.mutants.mutant import HALVES, Arguments, Candidate, Mutant, after, before, each, weaker

__all__ = ["MUTANTS", "gated", "product", "rotation", "share"]

GATED = ("silu_and_mul", "gelu_and_mul")
Step = Callable[[Tensor], Tensor]


def same(t: Tensor) -> Tensor:
    return t


def changed(op: str, change: Callable[[Any, Arguments], Any]) -> Candidate:
    """The result changed; of rotary_embedding each of the two."""
    return after(
        op,
        lambda r, a: tuple(None if t is None else change(t, a) for t in r) if isinstance(r, tuple) else change(r, a),
    )


def given(**changes: Any) -> Callable[[str], Candidate]:
    """Arguments that are not heeded."""
    return lambda op: before(op, lambda a: changes)


# Gated activations.


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


def finite(a: Arguments) -> Arguments:
    name = "q" if "q" in a else "x"
    largest = torch.finfo(a[name].dtype).max
    return {name: a[name].clamp(-largest, largest)}


# Softmax.


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


# Rotary embedding.


def rotation(*, value: Step = same, table: Step = same, shift: int = 0) -> Candidate:
    """Rotation written once more. value: what becomes of a product. table: of cos and sin. shift: of positions."""

    def formula(r: tuple[Tensor, Tensor | None], a: Arguments) -> tuple[Tensor, Tensor | None]:
        at = (a["positions"] + shift) % a["cos"].shape[0]
        half = a["cos"].shape[1]

        def turned(x: Tensor) -> Tensor:
            t = wide(x)
            c, s = (table(part[at].to(t.dtype)).unsqueeze(-2) for part in (a["cos"], a["sin"]))
            pairs = (slice(0, 2 * half, 2), slice(1, 2 * half, 2)) if a["interleaved"] else (
                slice(0, half), slice(half, 2 * half))  # fmt: skip
            first, second = (t[..., part] for part in pairs)
            y = t.clone(memory_format=torch.contiguous_format)
            y[..., pairs[0]] = value(first * c) - value(second * s)
            y[..., pairs[1]] = value(second * c) + value(first * s)
            return y.to(x.dtype)

        return turned(a["q"]), None if a["k"] is None else turned(a["k"])

    return after("rotary_embedding", formula)


def rest_is_zero(y: Tensor, a: Arguments) -> Tensor:
    rest = torch.arange(y.shape[-1]) >= 2 * a["cos"].shape[1]
    return y.masked_fill(rest, 0.0)


def pairs_across_the_head(a: Arguments) -> Arguments:
    """The halves are those of the whole head, though fewer dims turn: the rest gets angles of 0."""
    more = a["q"].shape[-1] // 2 - a["cos"].shape[1]
    pad = torch.nn.functional.pad
    return {"cos": pad(a["cos"], (0, more), value=1.0), "sin": pad(a["sin"], (0, more)), "rotary_dim": None}


def last_token_late(a: Arguments) -> Arguments:
    """The last token has the position of the one before it."""
    return {"positions": torch.cat((a["positions"][:1], a["positions"][1:-1], a["positions"][-2:-1]))[
        : a["positions"].shape[0]]}  # fmt: skip


def eight_bits(a: Arguments) -> Arguments:
    return {"positions": a["positions"].bfloat16().long().clamp(max=a["cos"].shape[0] - 1)}


def first_batch(a: Arguments) -> Arguments:
    return {"positions": a["positions"][:1].expand(a["positions"].shape)} if a["positions"].ndim > 1 else {}


# Linear.


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


GATES: list[Mutant] = [
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

SOFTMAX: list[Mutant] = [
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

ROTARY: list[Mutant] = [
    *each("rotary_embedding", "pairs are the other kind", "rotary",
          lambda op: before(op, lambda a: {"interleaved": not a["interleaved"]})),
    *each("rotary_embedding", "pairs are never neighbours", "rotary", given(interleaved=False)),
    *each("rotary_embedding", "it turns the other way", "rotary", lambda op: before(op, lambda a: {"sin": -a["sin"]})),
    *each("rotary_embedding", "the key is not turned", "rotary", lambda op: after(op, lambda r, a: (r[0], a["k"]
          if a["k"] is None else a["k"].clone(memory_format=torch.contiguous_format)))),
    *each("rotary_embedding", "dims past rotary_dim are zero", "rotary", lambda op: changed(op, rest_is_zero)),
    *each("rotary_embedding", "pairs lie across the whole head", "rotary",
          lambda op: before(op, pairs_across_the_head)),
    *each("rotary_embedding", "positions count from 1", "rotary", lambda op: rotation(shift=1)),
    *each("rotary_embedding", "the last token has the position of the one before", "rotary",
          lambda op: before(op, last_token_late)),
    *each("rotary_embedding", "positions have 8 bits", "rotary", lambda op: before(op, eight_bits)),
    *each("rotary_embedding", "all batches have the first one's positions", "rotary",
          lambda op: before(op, first_batch)),
    *weaker("rotary_embedding", "the sine is a little more", "rotary",
            lambda op, s: before(op, lambda a: {"sin": a["sin"] * (1 + s)}), 2.0**-13),
    *weaker("rotary_embedding", "cos and sin are a little more", "rotary", lambda op, s: before(
        op, lambda a: {name: a[name] * (1 + s) for name in ("cos", "sin")}), 2.0**-13),
    *each("rotary_embedding", "NaN becomes 0", "special values",
          lambda op: changed(op, lambda y, a: y.nan_to_num(0.0, math.inf, -math.inf))),
    *each("rotary_embedding", "Inf is the largest number", "special values", lambda op: before(op, finite)),
    *each("rotary_embedding", "float64 is computed in float32", "precision", in_float32, invisible=FLOAT32),
    *each("rotary_embedding", "tables are read as bfloat16", "precision",
          lambda op: rotation(table=lambda t: t.bfloat16().to(t.dtype))),
    *weaker("rotary_embedding", "tables have a rounding of their own", "precision",
            lambda op, s: rotation(table=lambda t: rounded(t, s)), 2.0**-13),
    *weaker("rotary_embedding", "products have a rounding of their own", "precision",
            lambda op, s: rotation(value=lambda t: rounded(t, s)), 2.0**-13),
]  # fmt: skip

LINEAR: list[Mutant] = [
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

MUTANTS = [*GATES, *SOFTMAX, *ROTARY, *LINEAR]
