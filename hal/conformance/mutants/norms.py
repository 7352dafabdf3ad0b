"""Faulty norms: rms_norm, add_rms_norm and layer_norm.

Shape letters: T rows, F features.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hal.conformance.mutants.coarse import FLOAT32, IDENTITY, bfloat16_sum, in_float32, rounded, wide
from hal.conformance.mutants.mutant import Arguments, Candidate, Mutant, after, before, each, weaker

__all__ = ["MUTANTS", "norm"]

RMS = ("rms_norm", "add_rms_norm")
NORMS = (*RMS, "layer_norm")


def mean(t_TF: Tensor) -> Tensor:
    return t_TF.mean(-1, keepdim=True)


def root(variance_T1: Tensor, eps: float) -> Tensor:
    return (variance_T1 + eps).sqrt()


def norm(
    op: str,
    *,
    variance: Callable[[Tensor], Tensor] = lambda x_TF: mean(x_TF.square()),
    root: Callable[[Tensor, float], Tensor] = root,
    centre: Callable[[Tensor], Tensor] = lambda x_TF: x_TF - mean(x_TF),
    value: Callable[[Tensor], Tensor] = lambda normed_TF: normed_TF,
    scaled: Callable[[Tensor, Tensor], Tensor] = lambda normed_TF, scale_F: normed_TF * scale_F,
    scale: Callable[[Tensor, float], Tensor] = lambda weight_F, offset: weight_F + offset,
    stored: Callable[[Tensor, torch.dtype], Tensor] = lambda scale_F, dtype: scale_F.to(dtype).to(scale_F.dtype),
    floor: bool = True,
) -> Candidate:
    """A norm written once more, plainly, with places to go wrong in.

    variance: of what is normed. value: what becomes of the normed value. scale: of weight and offset. stored: its
    rounding where the normed value is rounded before the product. floor: an eps of 0 counts as the least number.
    """

    def formula(honest: Tensor | tuple[Tensor, Tensor], a: Arguments) -> Tensor | tuple[Tensor, Tensor]:
        dtype = a["x"].dtype
        x_TF = wide(a["x"])
        if op == "add_rms_norm":
            x_TF = x_TF + wide(a["residual"])
            x_TF = x_TF.to(dtype).to(x_TF.dtype) if a["round_residual"] else x_TF
        if op == "layer_norm":
            x_TF = centre(x_TF)
        eps = max(a["eps"], torch.finfo(x_TF.dtype).tiny) if floor else a["eps"]
        y_TF = value(x_TF / root(variance(x_TF), eps))
        early = a.get("round_before_weight", False)
        if early:
            y_TF = y_TF.to(dtype).to(x_TF.dtype)
        if a["weight"] is not None:
            scale_F = scale(a["weight"].to(x_TF.dtype), a.get("weight_offset", 0.0))
            y_TF = scaled(y_TF, stored(scale_F, dtype) if early else scale_F)
        if a.get("bias") is not None:
            y_TF = y_TF + a["bias"].to(x_TF.dtype)
        y = y_TF.to(dtype).contiguous()
        return (y, honest[1]) if isinstance(honest, tuple) else y

    return after(op, formula)


def unbiased(x_TF: Tensor) -> Tensor:
    return x_TF.square().sum(-1, keepdim=True) / max(x_TF.shape[-1] - 1, 1)


def without_tail(x_TF: Tensor) -> Tensor:
    """Only whole vectors of 32 enter."""
    features = x_TF.shape[-1]
    whole = features - features % 32 or features
    return x_TF[..., :whole].square().sum(-1, keepdim=True) / features


def without_the_last_of_many(x_TF: Tensor) -> Tensor:
    features = x_TF.shape[-1]
    return x_TF[..., : features - (features > 8192)].square().sum(-1, keepdim=True) / features


def last_as_first(x_TF: Tensor) -> Tensor:
    """The last row has the statistics of the first."""
    variance = mean(x_TF.square())
    return torch.cat((variance[:-1], variance[:1])) if variance.dim() > 1 and len(variance) else variance


def one_pass(op: str) -> Candidate:
    """The variance is E[x²] − E[x]²."""
    means: list[Tensor] = []

    def centre(x_TF: Tensor) -> Tensor:
        means[:] = [x_TF]
        return x_TF - mean(x_TF)

    def variance(centred_TF: Tensor) -> Tensor:
        return (mean(means[0].square()) - mean(means[0]).square()).clamp(min=0)

    return norm(op, centre=centre, variance=variance)


def bfloat16_mean(t_TF: Tensor) -> Tensor:
    return bfloat16_sum(t_TF, -1, keepdim=True) / t_TF.shape[-1]


def eps_outside(variance_T1: Tensor, eps: float) -> Tensor:
    return variance_T1.sqrt() + eps


def last_weight_lost(normed_TF: Tensor, scale_F: Tensor) -> Tensor:
    """The weight reaches whole vectors of 32 only."""
    features = scale_F.shape[-1]
    rest = torch.arange(features) >= (features - features % 32 or features)
    return normed_TF * torch.where(rest, 1.0, scale_F)


def squares_overflow(op: str) -> Candidate:
    """Squares are taken in x's dtype."""

    def overflown(r: Any, a: Arguments) -> Any:
        largest = torch.finfo(a["x"].dtype).max

        def variance(x_TF: Tensor) -> Tensor:
            return mean(x_TF.square().masked_fill(x_TF.square() > largest, math.inf))

        call: Any = norm(op, variance=variance)
        return call(**a)

    return after(op, overflown)


def finite(a: Arguments) -> Arguments:
    largest = torch.finfo(a["x"].dtype).max
    return {"x": a["x"].clamp(-largest, largest)}


def nan_skipped(op: str) -> Candidate:
    def skipping(t_TF: Tensor) -> Tensor:
        return mean(t_TF.nan_to_num(0.0, math.inf, -math.inf))

    return norm(op, variance=lambda x_TF: skipping(x_TF.square()), centre=lambda x_TF: x_TF - skipping(x_TF))


def first_result(change: Callable[[Tensor, Arguments], Tensor]) -> Callable[[str], Candidate]:
    """The norm changed, the sum left as it is."""
    return lambda op: after(op, lambda r, a: (change(r[0], a), r[1]) if isinstance(r, tuple) else change(r, a))


def without_zero_rows(y: Tensor, a: Arguments) -> Tensor:
    return y.masked_fill((a["x"] == 0).all(-1, keepdim=True), math.nan)


def offset_scales_alone(a: Arguments) -> Arguments:
    if a["weight"] is not None or not a["weight_offset"]:
        return {}
    return {"weight": torch.ones(a["x"].shape[-1])}


def taken(sum_of: Callable[[Tensor, Arguments], Tensor], op: str = "add_rms_norm") -> Candidate:
    """The second result of add_rms_norm, spoilt."""
    return after(op, lambda r, a: (r[0], sum_of(r[1], a).to(r[1].dtype).contiguous()))


def last_row_of_x(total: Tensor, a: Arguments) -> Tensor:
    """The last row's residual is lost."""
    last = torch.arange(total.shape[0])[(...,) + (None,) * (total.dim() - 1)] == total.shape[0] - 1
    return torch.where(last, a["x"], total)


MUTANTS: list[Mutant] = [
    *each(NORMS, "the mean square is divided by F − 1", "statistics", lambda op: norm(op, variance=unbiased)),
    *each(NORMS, "features past a multiple of 32 are left out of the statistics", "statistics",
          lambda op: norm(op, variance=without_tail)),
    *each(NORMS, "one feature of 8,193 is left out of the statistics", "statistics",
          lambda op: norm(op, variance=without_the_last_of_many)),
    *each(NORMS, "the last row has the statistics of the first", "statistics",
          lambda op: norm(op, variance=last_as_first)),
    *each("layer_norm", "the mean stays in", "statistics", lambda op: norm(op, centre=lambda x_TF: x_TF)),
    *each("layer_norm", "the variance is E[x²] − E[x]²", "statistics", one_pass),
    *weaker(NORMS, "a share of the mean square is lost", "statistics",
            lambda op, s: norm(op, variance=lambda x_TF: mean(x_TF.square()) * (1 - s)), 2.0**-13),
    *weaker("layer_norm", "a share of the mean stays in", "statistics",
            lambda op, s: norm(op, centre=lambda x_TF: x_TF - mean(x_TF) * (1 - s)), 2.0**-13),
    *each(NORMS, "eps stands outside the root", "eps", lambda op: norm(op, root=eps_outside)),
    *each(NORMS, "eps is left out", "eps", lambda op: before(op, lambda a: {"eps": 1e-30})),
    *each(NORMS, "eps is 1e-5 at least", "eps", lambda op: before(op, lambda a: {"eps": max(a["eps"], 1e-5)})),
    *each(NORMS, "an eps of 0 is 0", "eps", lambda op: norm(op, floor=False)),
    *weaker(NORMS, "eps is a little more", "eps",
            lambda op, s: before(op, lambda a: {"eps": a["eps"] * (1 + s)}), 2.0**-8),
    *each(NORMS, "the weight is left out", "weight", lambda op: before(op, lambda a: {"weight": None})),
    *each(NORMS, "weights are read as bfloat16", "weight",
          lambda op: before(op, lambda a: {"weight": a["weight"] if a["weight"] is None else a["weight"].bfloat16()})),
    *each(NORMS, "weights past a multiple of 32 are left out", "weight",
          lambda op: norm(op, scaled=last_weight_lost)),
    *each(RMS, "the offset is left out", "weight", lambda op: before(op, lambda a: {"weight_offset": 0.0})),
    *each(RMS, "the offset scales without a weight", "weight", lambda op: before(op, offset_scales_alone)),
    *each("layer_norm", "the bias is left out", "weight", lambda op: before(op, lambda a: {"bias": None})),
    *each("layer_norm", "the bias is read as bfloat16", "weight",
          lambda op: before(op, lambda a: {"bias": a["bias"] if a["bias"] is None else a["bias"].bfloat16()})),
    *weaker(NORMS, "the weight is a little more", "weight",
            lambda op, s: norm(op, scale=lambda weight_F, offset: weight_F * (1 + s) + offset), 2.0**-13),
    *each(RMS, "it is rounded after the weight alone", "rounding",
          lambda op: before(op, lambda a: {"round_before_weight": False}), invisible=IDENTITY),
    *each(RMS, "it is rounded before the weight always", "rounding",
          lambda op: before(op, lambda a: {"round_before_weight": True}), invisible=IDENTITY),
    *each(RMS, "asked to round before the weight, the scale is left unrounded", "rounding",
          lambda op: norm(op, stored=lambda scale_F, dtype: scale_F), invisible=IDENTITY),
    *each("add_rms_norm", "the rounded sum is normed always", "rounding",
          lambda op: before(op, lambda a: {"round_residual": True}), invisible=IDENTITY),
    *each("add_rms_norm", "the unrounded sum is normed always", "rounding",
          lambda op: before(op, lambda a: {"round_residual": False}), invisible=IDENTITY),
    *each("add_rms_norm", "residual_out is x", "rounding", lambda op: taken(lambda total, a: a["x"])),
    *each("add_rms_norm", "residual_out is x in the last row", "rounding", lambda op: taken(last_row_of_x)),
    *each("add_rms_norm", "residual_out is rounded to bfloat16 first", "rounding",
          lambda op: taken(lambda total, a: (wide(a["x"]) + wide(a["residual"])).bfloat16()),
          invisible={"bfloat16": "one rounding to bfloat16 is what the contract asks for"}),
    *weaker("add_rms_norm", "residual_out is a little more", "rounding",
            lambda op, s: taken(lambda total, a: (wide(a["x"]) + wide(a["residual"])) * (1 + s)), 2.0**-13),
    *each(NORMS, "NaN becomes 0", "special values", first_result(lambda y, a: y.nan_to_num(0.0, math.inf, -math.inf))),
    *each(NORMS, "NaN is left out of the statistics", "special values", nan_skipped),
    *each(NORMS, "Inf is the largest number", "special values", lambda op: before(op, finite)),
    *each(NORMS, "squares overflow in x's dtype", "special values", squares_overflow,
          invisible=dict.fromkeys(("float64", "float32", "bfloat16"),
                                  "its squares overflow where those of the accumulator do: they have one range")),
    *each(NORMS, "a row of zeros is NaN", "special values", first_result(without_zero_rows)),
    *each(NORMS, "squares are summed in bfloat16", "precision",
          lambda op: norm(op, variance=lambda x_TF: bfloat16_mean(x_TF.square()))),
    *each("layer_norm", "the mean is summed in bfloat16", "precision",
          lambda op: norm(op, centre=lambda x_TF: x_TF - bfloat16_mean(x_TF))),
    *each(NORMS, "float64 is computed in float32", "precision", in_float32, invisible=FLOAT32),
    *weaker(NORMS, "the normed value has a rounding of its own", "precision",
            lambda op, s: norm(op, value=lambda normed_TF: rounded(normed_TF, s)), 2.0**-13),
    *weaker("layer_norm", "the mean has a rounding of its own", "precision",
            lambda op, s: norm(op, centre=lambda x_TF: x_TF - rounded(mean(x_TF), s)), 2.0**-13),
]  # fmt: skip
