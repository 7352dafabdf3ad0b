"""rms_norm, add_rms_norm and layer_norm in few ATen calls.

ATen has a fused layer norm for the CPU but no fused rms norm: `F.rms_norm` is composed of six calls. Here the
norm of a row is one reduction, and a single row (decoding) one more call with the factor as a number.

Shape suffixes: T any leading axes, F features.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from hal.capability import Declares, Implementation, Limit, Supports
from hal.op import Args

__all__ = ["IMPLEMENTATIONS"]

Gradients = tuple[Tensor | None, ...]

_vector_norm = torch.linalg.vector_norm


@lru_cache(64)
def _number(value: float, dtype: torch.dtype) -> Tensor:
    return torch.full((), value, dtype=dtype, device="cpu")


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype is torch.float64 else torch.float32


def _least(eps: float, dtype: torch.dtype) -> float:
    """eps as the contract counts it: at least the smallest normal number of what is computed in."""
    return max(eps, torch.finfo(_wide(dtype)).tiny)


def _rstd(x_TF: Tensor, eps: float) -> Tensor:
    """1 / sqrt(mean(x²) + eps), the last axis kept."""
    norm_T = _vector_norm(x_TF, 2, -1, True)
    return torch.addcmul(_number(eps, x_TF.dtype), norm_T, norm_T, value=1.0 / x_TF.shape[-1]).rsqrt_()


def _normed(x_TF: Tensor, scale_F: Tensor | None, eps: float) -> Tensor:
    """The scaled norm in x's dtype, float32 or float64; x is contiguous."""
    if scale_F is not None and x_TF.numel() == (features := x_TF.shape[-1]):
        norm = _vector_norm(x_TF, 2, -1, True).item()
        return torch.addcmul(_number(0.0, x_TF.dtype), x_TF, scale_F, value=(norm * norm / features + eps) ** -0.5)
    y_TF = x_TF.mul(_rstd(x_TF, eps))
    return y_TF if scale_F is None else y_TF.mul_(scale_F)


def _scale(weight: Tensor | None, dtype: torch.dtype, offset: float) -> Tensor | None:
    if weight is None or (weight.dtype is dtype and not offset):
        return weight
    scale_F = weight.to(dtype)
    return scale_F + offset if offset else scale_F


def _norm(
    x_TF: Tensor,
    dtype: torch.dtype,
    weight: Tensor | None,
    eps: float,
    offset: float,
    round_before_weight: bool,
) -> Tensor:
    """The norm of x (float32 or float64, contiguous) as `dtype`."""
    scale_F, eps = _scale(weight, x_TF.dtype, offset), _least(eps, dtype)
    if dtype is x_TF.dtype:
        return _normed(x_TF, scale_F, eps)
    if not round_before_weight or scale_F is None:
        return _normed(x_TF, scale_F, eps).to(dtype)
    return _normed(x_TF, None, eps).to(dtype).mul_(scale_F.to(dtype))


def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    weight_offset: float = 0.0,
    round_before_weight: bool = False,
) -> Tensor:
    if not x.is_contiguous():
        x = x.contiguous()
    x_TF = x if x.dtype is torch.float32 else x.to(_wide(x.dtype))
    return _norm(x_TF, x.dtype, weight, eps, weight_offset, round_before_weight)


def _sum(x: Tensor, residual: Tensor, round_residual: bool) -> tuple[Tensor, Tensor]:
    """What is normed, in its compute dtype, and the sum in x's dtype; both contiguous."""
    if x.dtype.itemsize > 2:
        total_TF = (x + residual).contiguous()
        return total_TF, total_TF
    if round_residual:
        rounded_TF = (x + residual).contiguous()
        return rounded_TF.float(), rounded_TF
    total_TF = (x.float() + residual).contiguous()
    return total_TF, total_TF.to(x.dtype)


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
    x_TF, residual_out = _sum(x, residual, round_residual)
    return _norm(x_TF, x.dtype, weight, eps, weight_offset, round_before_weight), residual_out


def _rms_gradients(x_TF: Tensor, a: Args, rstd_T: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of x (the normed sum) and of the weight, in the compute dtype.

    The roundings of the forward pass count as the identity here: their derivative is not a rounding.
    """
    dtype = x_TF.dtype
    rstd_T, dy_TF = rstd_T.unsqueeze(-1), dy.to(dtype)
    normed_TF = x_TF * rstd_T
    scale_F = _scale(a.weight, dtype, a.weight_offset)
    rounded = a.round_before_weight and a.x.dtype is not dtype
    if scale_F is not None and rounded:
        scale_F = scale_F.to(a.x.dtype).to(dtype)
    g_TF = dy_TF if scale_F is None else dy_TF * scale_F
    dx_TF = (g_TF - normed_TF * (g_TF * normed_TF).mean(-1, keepdim=True)).mul_(rstd_T)
    if rounded:
        normed_TF = normed_TF.to(a.x.dtype)
    return dx_TF, (dy_TF * normed_TF).flatten(0, -2).sum(0) if x_TF.dim() > 1 else dy_TF * normed_TF


def _rms_backward(a: Args, outs: dict[str, Tensor], grads: Gradients, needs: tuple[bool, ...]) -> Gradients:
    (dy,) = grads
    if dy is None:
        return None, None
    dx, dw = _rms_gradients(a.x.to(_wide(a.x.dtype)), a, outs["rstd"], dy)
    return dx, None if a.weight is None else dw


def _add_rms_backward(a: Args, outs: dict[str, Tensor], grads: Gradients, needs: tuple[bool, ...]) -> Gradients:
    dy, d_residual_out = grads
    dx = None if d_residual_out is None else d_residual_out.to(_wide(a.x.dtype))
    dw = None
    if dy is not None:
        x_TF, _ = _sum(a.x, a.residual, a.round_residual)
        d_sum, dw = _rms_gradients(x_TF, a, outs["rstd"], dy)
        dx = d_sum if dx is None else d_sum.add_(dx)
    return dx, dx, None if a.weight is None else dw


def _to(dtype: torch.dtype, t: Tensor | None) -> Tensor | None:
    return None if t is None else t.to(dtype)


def layer_norm(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5) -> Tensor:
    dtype, shape, eps = x.dtype, x.shape[-1:], _least(eps, x.dtype)
    if (weight is None or weight.dtype is dtype) and (bias is None or bias.dtype is dtype):
        return torch.layer_norm(x, shape, weight, bias, eps, False)
    wide = _wide(dtype)
    return torch.layer_norm(x.to(wide), shape, _to(wide, weight), _to(wide, bias), eps, False).to(dtype)


def _layer_train(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> tuple[Tensor, Tensor, Tensor]:
    # In its own 16-bit mode ATen keeps mean and rstd in 16 bits, too coarse for the backward pass.
    wide = _wide(x.dtype)
    weight_F, bias_F = _to(wide, weight), _to(wide, bias)
    y_TF, mean_T, rstd_T = torch.native_layer_norm(x.to(wide), x.shape[-1:], weight_F, bias_F, _least(eps, wide))
    return y_TF.to(x.dtype), mean_T.reshape(x.shape[:-1]), rstd_T.reshape(x.shape[:-1])


def _layer_backward(a: Args, outs: dict[str, Tensor], grads: Gradients, needs: tuple[bool, ...]) -> Gradients:
    (dy,) = grads
    if dy is None:
        return None, None, None
    wide = _wide(a.x.dtype)
    dy_TF, x_TF = dy.to(wide).contiguous(), a.x.to(wide).contiguous()
    mask = [need and t is not None for need, t in zip(needs, (a.x, a.weight, a.bias), strict=True)]
    mean_T, rstd_T = outs["mean"].unsqueeze(-1), outs["rstd"].unsqueeze(-1)
    found = torch.ops.aten.native_layer_norm_backward.default(
        dy_TF, x_TF, a.x.shape[-1:], mean_T, rstd_T, _to(wide, a.weight), _to(wide, a.bias), mask
    )
    return tuple(t if wanted else None for t, wanted in zip(found, mask, strict=True))


_SUPPORTS = Supports(limits={"features": Limit(min=1)})
_DECLARES = Declares(stride_invariant=True, copies=frozenset({"x"}))

IMPLEMENTATIONS = (
    Implementation("rms_norm", "aten", rms_norm, _SUPPORTS, _DECLARES, priority=10, backward=_rms_backward),
    Implementation("add_rms_norm", "aten", add_rms_norm, _SUPPORTS, _DECLARES, priority=10, backward=_add_rms_backward),
    Implementation(
        "layer_norm",
        "aten",
        layer_norm,
        _SUPPORTS,
        Declares(stride_invariant=True, batch_invariant=True, copies=frozenset({"x"})),
        priority=10,
        train=_layer_train,
        backward=_layer_backward,
    ),
)
