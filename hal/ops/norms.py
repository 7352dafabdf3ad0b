"""Normalisation over the last axis: rms_norm, add_rms_norm, layer_norm.

Shape suffixes: T any leading axes, F features.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hal.accuracy import Accumulator, Accuracy, growth, smallest_normal
from hal.arithmetic import smallest_number
from hal.errors import ArgumentError, ShapeError
from hal.op import Args, Cost, Meta, Traits, compute_dtype, dtype_name, op, result, stored, widen
from hal.ops._checks import check_floating, check_number, check_same_device, check_same_dtype, check_shape
from hal.ops._norm_gradients import layer_gradient_bound, rms_gradient_bound

__all__ = ["add_rms_norm", "layer_norm", "rms_norm"]

C = 4.0  # what conformance multiplies E with: a step in storage is not a multiple of E


def _check_norm(name: str, a: Args) -> None:
    check_floating(name, "x", a.x)
    if a.x.dim() < 1:
        raise ShapeError(f"{name}: x has no axis to normalise over; it must have at least one dimension (…, F)")
    for what in ("weight", "bias"):
        parameter = getattr(a, what, None)
        if parameter is not None:
            check_floating(name, what, parameter)
            check_shape(name, what, parameter, (a.x.shape[-1],), "the last axis of x")
            check_same_device(name, x=a.x, **{what: parameter})
    check_number(name, "eps", a.eps)
    if isinstance(a.eps, float | int) and a.eps < 0:
        raise ArgumentError(f"{name}: eps is {a.eps}, but it must be 0 or more")


def _traits(a: Args, *flags: str) -> Traits:
    features = {name for name in flags if getattr(a, name)}
    for what in ("weight", "bias"):
        parameter = getattr(a, what, None)
        if parameter is not None:
            features.add(what)
            if parameter.dtype != a.x.dtype:
                features.add(f"mixed_{what}_dtype")
    return Traits(dtype_name(a.x.dtype), frozenset(features), {"features": a.x.shape[-1]})


def _parameter_bytes(*parameters: Tensor | None) -> int:
    return sum(p.numel() * p.element_size() for p in parameters if p is not None)


def _validate_rms(a: Args) -> None:
    _check_norm("rms_norm", a)
    check_number("rms_norm", "weight_offset", a.weight_offset)


def _meta_rms(a: Args) -> tuple[Meta, ...]:
    return Meta(a.x.shape, a.x.dtype), Meta(a.x.shape[:-1], compute_dtype(a.x.dtype))


def _cost_rms(a: Args) -> Cost:
    size = a.x.numel() * a.x.element_size()
    return Cost(flops=4 * a.x.numel(), bytes=2 * size + _parameter_bytes(a.weight))


def _eps(a: Args, dtype: torch.dtype) -> float:
    """eps, of which the smallest normal number is the least: squares may vanish, their root may not."""
    return max(float(a.eps), smallest_number(dtype))


def _rstd(x_TF: Tensor, eps: float) -> Tensor:
    return torch.rsqrt(x_TF.square().mean(-1) + eps)


def _root(x_TF: Tensor, eps: float) -> Tensor:
    """sqrt(mean(x²) + eps), the last axis kept.

    Results are divided by it rather than multiplied by its reciprocal: the derivative of that has its third power,
    which leaves float32 where x is large or small.
    """
    return torch.sqrt(x_TF.square().mean(-1, keepdim=True) + eps)


def _rms_scaled(x_TF: Tensor, a: Args, dtype: torch.dtype) -> Tensor:
    """The norm of x (in its compute dtype), scaled; `dtype` is what the results are stored in."""
    normed_TF = x_TF / _root(x_TF, _eps(a, dtype))
    if a.round_before_weight:
        normed_TF = stored(normed_TF, dtype)
    if a.weight is None:
        return normed_TF
    scale_F = a.weight.to(normed_TF.dtype) + a.weight_offset
    return normed_TF * (stored(scale_F, dtype) if a.round_before_weight else scale_F)


def _rms_error(x_TF: Tensor, a: Args, y_TF: Tensor, acc: Accumulator) -> Tensor:
    relative = growth(x_TF.shape[-1], acc) + 4 * acc.eps
    error_TF = relative * y_TF.abs()
    normed_TF = x_TF * _rstd(x_TF, max(a.eps, smallest_normal(acc))).unsqueeze(-1)
    if a.weight is not None and a.weight_offset:
        error_TF = error_TF + acc.eps * (normed_TF * a.weight).abs()
    dtype = acc.dtype
    if not a.round_before_weight or dtype is None or dtype.itemsize > 2:
        return error_TF
    step_TF = _step(normed_TF, C * relative * normed_TF.abs(), dtype)
    if a.weight is None:
        return error_TF + step_TF / C
    scale_F: Tensor = a.weight + a.weight_offset
    step_F = _step(scale_F, acc.eps * (a.weight.abs() + scale_F.abs()), dtype)
    return error_TF + (step_TF * scale_F.abs() + normed_TF.abs() * step_F) / C


def _gradient_bound_rms(
    a: Args, results: tuple[Tensor, ...], grads: tuple[Tensor | None, ...], acc: Accumulator
) -> tuple[Tensor | None, ...]:
    (dy,) = grads
    assert dy is not None
    dx, dw = rms_gradient_bound(a.x, a, dy, acc)
    return dx, None if a.weight is None else dw


def _step(t: Tensor, error: Tensor, dtype: torch.dtype) -> Tensor:
    """How far apart the roundings to `dtype` of values within this error of t may lie."""
    return stored(t + error, dtype) - stored(t - error, dtype)


def _bound_rms(a: Args, results: tuple[Tensor, ...], acc: Accumulator) -> tuple[Tensor, ...]:
    return (_rms_error(a.x, a, results[0], acc),)


RMS_NOTES = (
    "The mean of F squares carries g(F), halved by the root, the mean's division, eps and the root 2ε; the "
    "products with x and with the weight and the sum of weight and offset ε each; where there is an offset, a "
    "float64 weight may be rounded before that sum, ε|x̂||weight|. With round_before_weight in a 16-bit dtype a "
    "value within that error of a tie may be stored one step off, which the weight multiplies. Squares that underflow "
    "err by 2⁻¹⁵⁰ beside an eps of 2⁻¹²⁶ or more, under ε. Gradients: derived in "
    "hal.ops._norm_gradients."
)


@op(
    schema="Tensor x, Tensor? weight, float eps, float weight_offset, bool round_before_weight",
    results=("y",),
    pack=lambda x, weight=None, eps=1e-6, *, weight_offset=0.0, round_before_weight=False: (
        x,
        weight,
        eps,
        weight_offset,
        round_before_weight,
    ),
    validate=_validate_rms,
    meta=_meta_rms,
    traits=lambda a: _traits(a, "weight_offset", "round_before_weight"),
    dims=("features",),
    cost=_cost_rms,
    accuracy=Accuracy(bound=_bound_rms, gradient_bound=_gradient_bound_rms, notes=RMS_NOTES),
    features=("weight", "mixed_weight_dtype", "weight_offset", "round_before_weight"),
    grad=("x", "weight"),
    stats=("rstd",),
    compute_stats=lambda a, outs: (_rstd(widen(a.x), _eps(a, a.x.dtype)),),
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
        x: (…, F), floating. Any strides. weight: (F,), any floating dtype; None = no scaling.
        eps: added to the mean square, 0 or more. Less than the smallest normal number of float32, 2⁻¹²⁶ (of float64
            for float64, 2⁻¹⁰²²), counts as that: so a row of zeros is 0, and one whose squares underflow is small.
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
    a = Args(weight=weight, eps=eps, weight_offset=weight_offset, round_before_weight=round_before_weight)
    return result(_rms_scaled(widen(x), a, x.dtype), x.dtype).contiguous()


def _pack_add_rms(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    weight_offset: float = 0.0,
    round_before_weight: bool = False,
    round_residual: bool = True,
) -> tuple[Any, ...]:
    return x, residual, weight, eps, weight_offset, round_before_weight, round_residual


def _validate_add_rms(a: Args) -> None:
    _check_norm("add_rms_norm", a)
    check_number("add_rms_norm", "weight_offset", a.weight_offset)
    check_shape("add_rms_norm", "residual", a.residual, tuple(a.x.shape), "the shape of x")
    check_same_dtype("add_rms_norm", x=a.x, residual=a.residual)
    check_same_device("add_rms_norm", x=a.x, residual=a.residual)


def _meta_add_rms(a: Args) -> tuple[Meta, ...]:
    like_x = Meta(a.x.shape, a.x.dtype)
    return like_x, like_x, Meta(a.x.shape[:-1], compute_dtype(a.x.dtype))


def _cost_add_rms(a: Args) -> Cost:
    size = a.x.numel() * a.x.element_size()
    return Cost(flops=5 * a.x.numel(), bytes=4 * size + _parameter_bytes(a.weight))


def _sum(x: Tensor, residual: Tensor, round_residual: bool) -> tuple[Tensor, Tensor]:
    """What is normed, and x + residual unrounded, in the compute dtype."""
    total_TF = widen(x) + widen(residual)
    return stored(total_TF, x.dtype) if round_residual else total_TF, total_TF


def _bound_add_rms(a: Args, results: tuple[Tensor, ...], acc: Accumulator) -> tuple[Tensor, ...]:
    sum_TF = a.x + a.residual
    dtype = acc.dtype
    if a.round_residual and dtype is not None:
        sum_TF = stored(sum_TF, dtype)
    return _rms_error(sum_TF, a, results[0], acc), torch.zeros_like(results[1])


def _gradient_bound_add_rms(
    a: Args, results: tuple[Tensor, ...], grads: tuple[Tensor | None, ...], acc: Accumulator
) -> tuple[Tensor | None, ...]:
    dy, d_sum = grads
    sum_TF = a.x + a.residual
    if a.round_residual and acc.dtype is not None:
        sum_TF = stored(sum_TF, acc.dtype)
    dx, dw = rms_gradient_bound(sum_TF, a, torch.zeros_like(sum_TF) if dy is None else dy, acc)
    if d_sum is not None:
        dx = dx + acc.eps * d_sum.abs()
    return dx, dx, None if a.weight is None else dw


@op(
    schema="Tensor x, Tensor residual, Tensor? weight, float eps, float weight_offset, "
    "bool round_before_weight, bool round_residual",
    results=("y", "residual_out"),
    pack=_pack_add_rms,
    validate=_validate_add_rms,
    meta=_meta_add_rms,
    traits=lambda a: _traits(a, "weight_offset", "round_before_weight", "round_residual"),
    dims=("features",),
    cost=_cost_add_rms,
    accuracy=Accuracy(
        bound=_bound_add_rms,
        gradient_bound=_gradient_bound_add_rms,
        notes=f"{RMS_NOTES} The sum is rounded once, from a float32 sum that errs by ε of itself: rounding "
        "that again to 16 bits equals one rounding (24 ≥ 2·11 + 2 bits), so residual_out has no error of its "
        "own, and the stored sum none either. Its gradient joins that of the norm in one sum, ε|d_residual_out|.",
    ),
    features=("weight", "mixed_weight_dtype", "weight_offset", "round_before_weight", "round_residual"),
    grad=("x", "residual", "weight"),
    stats=("rstd",),
    compute_stats=lambda a, outs: (_rstd(_sum(a.x, a.residual, a.round_residual)[0], _eps(a, a.x.dtype)),),
)
def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    weight_offset: float = 0.0,
    round_before_weight: bool = False,
    round_residual: bool = True,
) -> tuple[Tensor, Tensor]:
    """Root-mean-square norm of x + residual, and the sum itself, which the next block adds to.

    The norm is that of ``rms_norm``, with its arguments.

    Args:
        x: (…, F), floating. Any strides. residual: like x, same dtype. weight: (F,), any floating dtype;
        None = no scaling. eps: added to the mean square, 0 or more. weight_offset: added to the weight in
        float32; 1 is Gemma's. round_before_weight: as in ``rms_norm``. round_residual: True norms the sum
        as rounded to x's dtype (transformers), False the float32 sum (vLLM).

    Returns:
        (y, residual_out), both (…, F), dtype of x, contiguous; residual_out = x + residual, rounded once.

    Raises:
        ShapeError: residual has not x's shape, weight is not (F,), or x has no axis.
        DtypeError: a tensor is not floating, or residual has not x's dtype.
        DeviceError: the tensors are on different devices.
        ArgumentError: eps is negative or not a number.
    """
    normed_TF, total_TF = _sum(x, residual, round_residual)
    a = Args(weight=weight, eps=eps, weight_offset=weight_offset, round_before_weight=round_before_weight)
    y_TF = _rms_scaled(normed_TF, a, x.dtype)
    return result(y_TF, x.dtype).contiguous(), result(total_TF, x.dtype).contiguous()


def _meta_layer(a: Args) -> tuple[Meta, ...]:
    stat = Meta(a.x.shape[:-1], compute_dtype(a.x.dtype))
    return Meta(a.x.shape, a.x.dtype), stat, stat


def _cost_layer(a: Args) -> Cost:
    size = a.x.numel() * a.x.element_size()
    return Cost(flops=7 * a.x.numel(), bytes=2 * size + _parameter_bytes(a.weight, a.bias))


def _moments(x_TF: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """x less its mean, the mean and 1 / sqrt(variance + eps); the variance is centred, in two passes."""
    mean_T = x_TF.mean(-1)
    centred_TF = x_TF - mean_T.unsqueeze(-1)
    return centred_TF, mean_T, _rstd(centred_TF, eps)


def _bound_layer(a: Args, results: tuple[Tensor, ...], acc: Accumulator) -> tuple[Tensor, ...]:
    y_TF, g = results[0], growth(a.x.shape[-1], acc)
    _, _, rstd_T = _moments(a.x, max(a.eps, smallest_normal(acc)))
    shift_TF = (rstd_T * (g * a.x.abs().mean(-1) + smallest_normal(acc) * acc.eps)).unsqueeze(-1)
    if a.weight is not None:
        shift_TF = shift_TF * a.weight.abs()
    if a.bias is None:
        return ((g + 4 * acc.eps) * y_TF.abs() + shift_TF,)
    return ((g + 4 * acc.eps) * (y_TF - a.bias).abs() + acc.eps * a.bias.abs() + shift_TF,)


def _gradient_bound_layer(
    a: Args, results: tuple[Tensor, ...], grads: tuple[Tensor | None, ...], acc: Accumulator
) -> tuple[Tensor | None, ...]:
    (dy,) = grads
    assert dy is not None
    return layer_gradient_bound(a, dy, acc)


@op(
    schema="Tensor x, Tensor? weight, Tensor? bias, float eps",
    results=("y",),
    pack=lambda x, weight=None, bias=None, eps=1e-5: (x, weight, bias, eps),
    validate=lambda a: _check_norm("layer_norm", a),
    meta=_meta_layer,
    traits=_traits,
    dims=("features",),
    cost=_cost_layer,
    accuracy=Accuracy(
        bound=_bound_layer,
        gradient_bound=_gradient_bound_layer,
        notes="The mean errs by g(F)·mean|x|, and by 2⁻¹⁵⁰ where it has no digits left, which rstd and the weight "
        "multiply; as a shift common to a row it changes the variance in second order only. The variance is a mean of "
        "F squares, g(F); difference, root and products 4ε of Y − b; the last sum ε|Y| ≤ ε|Y − b| + ε|b|. Gradients: "
        "derived in hal.ops._norm_gradients.",
    ),
    features=("weight", "bias", "mixed_weight_dtype", "mixed_bias_dtype"),
    grad=("x", "weight", "bias"),
    stats=("mean", "rstd"),
    compute_stats=lambda a, outs: _moments(widen(a.x), _eps(a, a.x.dtype))[1:],
)
def layer_norm(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5) -> Tensor:
    """Layer norm over the last axis: (x − mean) / sqrt(var + eps) · weight + bias.

    var is the mean squared deviation, centred. Source: Ba, Kiros and Hinton, Layer Normalization, 2016.

    Args:
        x: (…, F), floating. Any strides.
        weight: (F,), any floating dtype; None = no scaling.
        bias: (F,), any floating dtype; None = no shift.
        eps: added to the variance, 0 or more; the least that counts is that of ``rms_norm``.

    Returns:
        (…, F), dtype of x, contiguous; computed in float32 (float64 for float64) and rounded once.

    Raises:
        ShapeError: weight or bias is not (F,), or x has no axis.
        DtypeError: a tensor is not floating.
        DeviceError: the tensors are on different devices.
        ArgumentError: eps is negative or not a number.
    """
    x_TF = widen(x)
    centred_TF = x_TF - x_TF.mean(-1, keepdim=True)
    y_TF = centred_TF / _root(centred_TF, _eps(Args(eps=eps), x.dtype))
    if weight is not None:
        y_TF = y_TF * weight.to(y_TF.dtype)
    if bias is not None:
        y_TF = y_TF + bias.to(y_TF.dtype)
    return result(y_TF, x.dtype).contiguous()
