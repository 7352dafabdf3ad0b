"""Normalisation over the last axis: rms_norm.

Shape suffixes: T any leading axes, F features.
"""

from __future__ import annotations


import torch
from torch import Tensor

from hal.accuracy import Accumulator, Accuracy, growth
from hal.op import Args, Cost, Meta, Traits, compute_dtype, dtype_name, op, result, stored, widen
from hal.ops._checks import check_floating, check_number, check_same_device, check_shape
from hal.errors import ArgumentError, ShapeError

__all__ = ["rms_norm"]


def _check_norm(name: str, a: Args) -> None:
    check_floating(name, "x", a.x)
    if a.x.dim() < 1:
        raise ShapeError(f"{name}: x has no axis to normalise over; it must have at least one dimension (…, F)")
    if a.weight is not None:
        check_floating(name, "weight", a.weight)
        check_shape(name, "weight", a.weight, (a.x.shape[-1],), "the last axis of x")
    check_same_device(name, x=a.x, weight=a.weight)
    check_number(name, "eps", a.eps)
    if isinstance(a.eps, float | int) and a.eps < 0:
        raise ArgumentError(f"{name}: eps is {a.eps}, but it must be 0 or more")


def _validate_rms(a: Args) -> None:
    _check_norm("rms_norm", a)
    check_number("rms_norm", "weight_offset", a.weight_offset)


def _meta_rms(a: Args) -> tuple[Meta, ...]:
    return Meta(a.x.shape, a.x.dtype), Meta(a.x.shape[:-1], compute_dtype(a.x.dtype))


def _traits_rms(a: Args) -> Traits:
    features = set()
    if a.weight is not None:
        features.add("weight")
        if a.weight.dtype != a.x.dtype:
            features.add("mixed_weight_dtype")
    if a.weight_offset:
        features.add("weight_offset")
    if a.round_before_weight:
        features.add("round_before_weight")
    return Traits(dtype_name(a.x.dtype), frozenset(features), {"features": a.x.shape[-1]})


def _cost_rms(a: Args) -> Cost:
    size = a.x.numel() * a.x.element_size()
    weight = 0 if a.weight is None else a.weight.numel() * a.weight.element_size()
    return Cost(flops=4 * a.x.numel(), bytes=2 * size + weight)


def _bound_rms(a: Args, results: tuple[Tensor, ...], acc: Accumulator) -> tuple[Tensor, ...]:
    return ((growth(a.x.shape[-1], acc) + 4 * acc.eps) * results[0].abs(),)


def _rstd(x_TF: Tensor, eps: float) -> Tensor:
    return torch.rsqrt(widen(x_TF).square().mean(-1) + eps)


@op(
    schema="Tensor x, Tensor? weight, float eps, float weight_offset, bool round_before_weight",
    results=("y",),
    pack=lambda x, weight=None, eps=1e-6, *, weight_offset=0.0, round_before_weight=False: (
        x, weight, eps, weight_offset, round_before_weight,
    ),
    validate=_validate_rms,
    meta=_meta_rms,
    traits=_traits_rms,
    cost=_cost_rms,
    accuracy=Accuracy(
        bound=_bound_rms,
        notes="The mean of F squares carries g(F); the root, the product with x and with the weight 4 roundings.",
    ),
    features=("weight", "mixed_weight_dtype", "weight_offset", "round_before_weight"),
    grad=("x", "weight"),
    stats=("rstd",),
    compute_stats=lambda a, outs: (_rstd(a.x, a.eps),),
)
def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    weight_offset: float = 0.0,
    round_before_weight: bool = False,
) -> Tensor:
    """Root-mean-square norm over the last axis: x / sqrt(mean(x²) + eps) · (weight + weight_offset).

    Source: Zhang and Sennrich, Root Mean Square Layer Normalization, 2019.

    Args:
        x: (…, F), floating. Any strides.
        weight: (F,), any floating dtype; None = no scaling.
        eps: added to the mean square, 0 or more.
        weight_offset: added to the weight in float32; 1 is Gemma's.
        round_before_weight: False scales in float32 and rounds once; True rounds the normed value to x's dtype and
            multiplies in that dtype (Llama in transformers, vLLM).

    Returns:
        (…, F), dtype of x, contiguous.

    Raises:
        ShapeError: weight is not (F,), or x has no axis.
        DtypeError: x or weight is not floating.
        DeviceError: x and weight are on different devices.
        ArgumentError: eps is negative or not a number.
    """
    x_TF = widen(x)
    normed_TF = x_TF * torch.rsqrt(x_TF.square().mean(-1, keepdim=True) + eps)
    if round_before_weight:
        normed_TF = stored(normed_TF, x.dtype)
    if weight is not None:
        scale_F = weight.to(normed_TF.dtype) + weight_offset
        normed_TF = normed_TF * (stored(scale_F, x.dtype) if round_before_weight else scale_F)
    return result(normed_TF, x.dtype).contiguous()
