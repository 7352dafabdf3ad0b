"""Derived error bounds of the gradients of the norms, in float64.

With r = 1 / sqrt(mean + eps), eps at least the smallest normal number, x̂ the normed value and g = dy·w:

    dx = r(g − [mean g] − x̂·mean(g·x̂)), dw = Σ dy·x̂, db = Σ dy, the sums over the rows, [mean g] for layer_norm.

A mean of F terms errs by g(F), r by half of that and 2ε, the products before and after by ε each: in all
(g(F) + 4ε)·r(|g| + [mean|g|] + |x̂|·mean|g·x̂|). layer_norm's own mean errs by g(F)·mean|x|, which shifts every x̂ of
the row by s = r·g(F)·mean|x| and so dx by r·s(|mean(g·x̂)| + |x̂||mean g|), and by r·s²·|mean g| where s is all that x̂
has (a constant row). A sum over T rows adds g(T):
dw (g(T) + g(F) + 4ε)Σ|dy·x̂| + Σ|dy|·s, db g(T)Σ|dy|. With round_before_weight in a 16-bit dtype, x̂ or the scale
within its error of a tie may be stored one step off.

Shape letters: T rows, F features.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hal.accuracy import Accumulator, growth, smallest_normal
from hal.arithmetic import stored
from hal.contract import Args

__all__ = ["layer_gradient_bound", "rms_gradient_bound"]

C = 4.0  # what conformance multiplies E with: a step in storage is not a multiple of E


def rms_gradient_bound(x_TF: Tensor, a: Args, dy_TF: Tensor, acc: Accumulator) -> tuple[Tensor, Tensor]:
    """E of the gradients of x_TF, which is what is normed, and of the weight."""
    rstd_T1 = torch.rsqrt(x_TF.square().mean(-1, keepdim=True) + max(a.eps, smallest_normal(acc)))
    normed_TF = x_TF * rstd_T1
    relative = growth(x_TF.shape[-1], acc) + 4 * acc.eps
    scale_F, doubt_F = torch.ones_like(x_TF[..., :1]), torch.zeros_like(x_TF[..., :1])
    if a.weight is not None:
        scale_F = a.weight + a.weight_offset
        doubt_F = acc.eps * a.weight.abs() if a.weight_offset else torch.zeros_like(scale_F)
    error_TF = relative * normed_TF.abs()
    dtype = acc.dtype
    if a.round_before_weight and dtype is not None and dtype.itemsize == 2:
        error_TF = error_TF + _step(normed_TF, C * error_TF, dtype) / C
        if a.weight is not None:
            doubt_F = _step(scale_F, acc.eps * (a.weight.abs() + scale_F.abs()), dtype) / C
            scale_F = stored(scale_F, dtype)
    g_TF = dy_TF * scale_F
    unsure_TF = relative * g_TF.abs() + dy_TF.abs() * doubt_F
    own_TF = rstd_T1 * (unsure_TF + normed_TF.abs() * (normed_TF.abs() * unsure_TF).mean(-1, keepdim=True))
    rows = dy_TF.numel() // max(dy_TF.shape[-1], 1)
    weight_TF = dy_TF.abs() * error_TF + growth(rows, acc) * (dy_TF * normed_TF).abs()
    return _finite(own_TF), _finite(_over_rows(weight_TF))


def layer_gradient_bound(a: Args, dy_TF: Tensor, acc: Accumulator) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """E of the gradients of x, weight and bias."""
    features = a.x.shape[-1]
    centred_TF = a.x - a.x.mean(-1, keepdim=True)
    rstd_T1 = torch.rsqrt(centred_TF.square().mean(-1, keepdim=True) + max(a.eps, smallest_normal(acc)))
    normed_TF = centred_TF * rstd_T1
    g_TF = dy_TF if a.weight is None else dy_TF * a.weight
    relative = growth(features, acc) + 4 * acc.eps
    shift_T1 = rstd_T1 * growth(features, acc) * a.x.abs().mean(-1, keepdim=True)
    product_TF = g_TF * normed_TF
    size_TF = g_TF.abs() + g_TF.abs().mean(-1, keepdim=True)
    size_TF = size_TF + normed_TF.abs() * product_TF.abs().mean(-1, keepdim=True)
    moved_TF = product_TF.mean(-1, keepdim=True).abs() + normed_TF.abs() * g_TF.mean(-1, keepdim=True).abs()
    moved_TF = moved_TF + shift_T1 * g_TF.mean(-1, keepdim=True).abs()
    own_TF = rstd_T1 * (relative * size_TF + shift_T1 * moved_TF)
    rows = dy_TF.numel() // max(features, 1)
    weight_TF = (growth(rows, acc) + relative) * (dy_TF * normed_TF).abs() + dy_TF.abs() * shift_T1
    return (
        _finite(own_TF),
        None if a.weight is None else _finite(_over_rows(weight_TF)),
        None if a.bias is None else growth(rows, acc) * _over_rows(dy_TF.abs()),
    )


def _over_rows(t_TF: Tensor) -> Tensor:
    return t_TF.flatten(0, -2).sum(0) if t_TF.dim() > 1 else t_TF


def _step(t: Tensor, error: Tensor, dtype: torch.dtype) -> Tensor:
    """How far apart the roundings to `dtype` of values within this error of t may lie."""
    return stored(t + error, dtype) - stored(t - error, dtype)


def _finite(error: Tensor) -> Tensor:
    # Where the gradient is NaN or Inf there is no error to bound: R4 judges those positions.
    return torch.where(error.isfinite(), error, 0.0)
