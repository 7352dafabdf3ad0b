"""Faulty rotary embedding: pairs, positions, tables of cosines and sines."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hal.conformance.mutants._changes import Step, changed, finite, given, same
from hal.conformance.mutants.coarse import FLOAT32, in_float32, rounded, wide
from hal.conformance.mutants.mutant import Arguments, Candidate, Mutant, after, before, each, weaker

__all__ = ["MUTANTS"]


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


MUTANTS: list[Mutant] = [
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
