"""rms_norm, add_rms_norm and layer_norm by aclnnRmsNorm, aclnnAddRmsNorm and aclnnLayerNorm.

Whether aclnnRmsNorm and aclnnAddRmsNorm round a 16-bit value between norm and weight, and whether the latter norms the
rounded sum, is documented nowhere and has changed between versions of CANN. So 16-bit operands go in only with a
weight of ones, where both readings are one; other 16-bit calls run in float32 and round where the contract does.

Shape suffixes: T rows, F features.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from hal.arithmetic import smallest_number
from hal.backends.ascend.chips import for_310p, for_bf16_chips, on_both
from hal.backends.ascend.constants import constant
from hal.capability import Declares, Implementation, Limit, Supports
from hal.op import Args

__all__ = ["IMPLEMENTATIONS"]

Gradients = tuple[Tensor | None, ...]


@constant
def _ones(features: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.ones(features, dtype=dtype, device=device)


def _least(eps: float) -> float:
    """eps as the contract counts it."""
    return max(float(eps), smallest_number(torch.float32))


def _rows(x: Tensor) -> Tensor:
    """(T, F), contiguous: the operators document 2 to 8 axes and say nothing of strides."""
    return x.reshape(-1, x.shape[-1]).contiguous()


def _scale(weight: Tensor, offset: float) -> Tensor:
    scale_F = weight.float()
    return scale_F + offset if offset else scale_F


def _normed(x_TF: Tensor, scale_F: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    """(y_TF in x's dtype, rstd_T1 in float32)."""
    gamma_F = _ones(x_TF.shape[-1], x_TF.dtype, x_TF.device) if scale_F is None else scale_F
    y_TF, rstd_T1 = torch.ops.npu.npu_rms_norm(x_TF, gamma_F, _least(eps))
    return y_TF, rstd_T1


def _norm(
    x_TF: Tensor, dtype: torch.dtype, weight: Tensor | None, eps: float, offset: float, round_before_weight: bool
) -> tuple[Tensor, Tensor]:
    """The scaled norm of x (`dtype` or float32) in `dtype`, and rstd."""
    if weight is None:
        y_TF, rstd_T1 = _normed(x_TF, None, eps)
        return y_TF.to(dtype), rstd_T1
    scale_F = _scale(weight, offset)
    if round_before_weight and dtype is not torch.float32:
        y_TF, rstd_T1 = _normed(x_TF, None, eps)
        return y_TF.to(dtype) * scale_F.to(dtype), rstd_T1
    y_TF, rstd_T1 = _normed(x_TF.float(), scale_F, eps)
    return y_TF.to(dtype), rstd_T1


def _rms_train(
    x: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    weight_offset: float = 0.0,
    round_before_weight: bool = False,
) -> tuple[Tensor, Tensor]:
    if not x.numel():
        return torch.empty_like(x, memory_format=torch.contiguous_format), x.new_empty(x.shape[:-1], dtype=torch.float)
    y_TF, rstd_T1 = _norm(_rows(x), x.dtype, weight, eps, weight_offset, round_before_weight)
    return y_TF.view(x.shape), rstd_T1.view(x.shape[:-1])


def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    weight_offset: float = 0.0,
    round_before_weight: bool = False,
) -> Tensor:
    return _rms_train(x, weight, eps, weight_offset=weight_offset, round_before_weight=round_before_weight)[0]


def _add_rms_train(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    weight_offset: float = 0.0,
    round_before_weight: bool = False,
    round_residual: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    shape, dtype = x.shape, x.dtype
    if not x.numel():
        empty = torch.empty_like(x, memory_format=torch.contiguous_format)
        return empty, torch.empty_like(empty), x.new_empty(shape[:-1], dtype=torch.float)
    x_TF, residual_TF = _rows(x), _rows(residual)
    if dtype is not torch.float32 and round_residual:
        sum_TF = x_TF + residual_TF
        y_TF, rstd_T1 = _norm(sum_TF, dtype, weight, eps, weight_offset, round_before_weight)
    else:
        rounded = weight is not None and round_before_weight and dtype is not torch.float32
        ones_F = _ones(shape[-1], torch.float32, x.device)
        scale_F = ones_F if weight is None else _scale(weight, weight_offset)
        y_TF, rstd_T1, sum_TF = torch.ops.npu.npu_add_rms_norm(
            x_TF.float(), residual_TF.float(), ones_F if rounded else scale_F, _least(eps)
        )
        y_TF = y_TF.to(dtype) * scale_F.to(dtype) if rounded else y_TF.to(dtype)
    return y_TF.view(shape), sum_TF.to(dtype).view(shape), rstd_T1.view(shape[:-1])


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
    return _add_rms_train(
        x,
        residual,
        weight,
        eps,
        weight_offset=weight_offset,
        round_before_weight=round_before_weight,
        round_residual=round_residual,
    )[:2]


Gradient = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def _by_operator(dy_TF: Tensor, x_TF: Tensor, scale_F: Tensor, rstd_T1: Tensor) -> tuple[Tensor, Tensor]:
    dx_TF, dw_F = torch.ops.npu.npu_rms_norm_backward(dy_TF, x_TF, scale_F, rstd_T1)
    return dx_TF, dw_F


def _by_aten(dy_TF: Tensor, x_TF: Tensor, scale_F: Tensor, rstd_T1: Tensor) -> tuple[Tensor, Tensor]:
    """The same where there is no such operator (310P)."""
    normed_TF, g_TF = x_TF * rstd_T1, dy_TF * scale_F
    dx_TF = (g_TF - normed_TF * (g_TF * normed_TF).mean(-1, keepdim=True)) * rstd_T1
    return dx_TF, (dy_TF * normed_TF).sum(0)


def _rms_gradients(gradient: Gradient, x_TF: Tensor, a: Args, rstd: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of x (the normed sum, float32) and of the weight, in float32."""
    dy_TF, rstd_T1 = _rows(dy).float(), rstd.reshape(-1, 1).contiguous()
    rounded = a.round_before_weight and a.x.dtype is not torch.float32
    scale_F = _ones(x_TF.shape[-1], torch.float32, x_TF.device)
    if a.weight is not None:
        scale_F = _scale(a.weight, a.weight_offset)
        scale_F = scale_F.to(a.x.dtype).float() if rounded else scale_F
    dx_TF, dw_F = gradient(dy_TF, x_TF, scale_F, rstd_T1)
    if rounded and a.weight is not None:
        dw_F = (dy_TF * (x_TF * rstd_T1).to(a.x.dtype)).sum(0)
    return dx_TF.view(a.x.shape), dw_F


def _rms_backward(
    gradient: Gradient, a: Args, outs: dict[str, Tensor], grads: Gradients, needs: tuple[bool, ...]
) -> Gradients:
    (dy,) = grads
    if dy is None or not a.x.numel():
        return None, None
    dx, dw = _rms_gradients(gradient, _rows(a.x).float(), a, outs["rstd"], dy)
    return dx, None if a.weight is None else dw


def _add_rms_backward(
    gradient: Gradient, a: Args, outs: dict[str, Tensor], grads: Gradients, needs: tuple[bool, ...]
) -> Gradients:
    dy, d_residual_out = grads
    if not a.x.numel():
        return None, None, None
    dx = None if d_residual_out is None else d_residual_out.float()
    dw = None
    if dy is not None:
        if a.round_residual:
            sum_TF = (_rows(a.x) + _rows(a.residual)).float()
        else:
            sum_TF = _rows(a.x).float() + _rows(a.residual).float()
        d_sum, dw = _rms_gradients(gradient, sum_TF, a, outs["rstd"], dy)
        dx = d_sum if dx is None else d_sum + dx
    return dx, dx, None if a.weight is None else dw


def _float(t: Tensor | None) -> Tensor | None:
    return None if t is None else t.float()


def layer_norm(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5) -> Tensor:
    dtype = x.dtype
    if not x.numel():
        return torch.empty_like(x, memory_format=torch.contiguous_format)
    if any(t is not None and t.dtype is not dtype for t in (weight, bias)):
        weight, bias = _float(weight), _float(bias)
        return torch.layer_norm(_rows(x).float(), x.shape[-1:], weight, bias, _least(eps)).to(dtype).view(x.shape)
    return torch.layer_norm(_rows(x), x.shape[-1:], weight, bias, _least(eps)).view(x.shape)


def _layer_train(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> tuple[Tensor, Tensor, Tensor]:
    lead = x.shape[:-1]
    if not x.numel():
        stat = x.new_empty(lead, dtype=torch.float)
        return torch.empty_like(x, memory_format=torch.contiguous_format), stat, torch.empty_like(stat)
    # In float32 whatever x is: the statistics are to be good enough for the backward pass.
    y_TF, mean, rstd = torch.native_layer_norm(
        _rows(x).float(), x.shape[-1:], _float(weight), _float(bias), _least(eps)
    )
    return y_TF.to(x.dtype).view(x.shape), mean.view(lead), rstd.view(lead)


def _layer_backward(a: Args, outs: dict[str, Tensor], grads: Gradients, needs: tuple[bool, ...]) -> Gradients:
    (dy,) = grads
    if dy is None or not a.x.numel():
        return None, None, None
    mask = [need and t is not None for need, t in zip(needs, (a.x, a.weight, a.bias), strict=True)]
    mean_T1, rstd_T1 = (outs[name].reshape(-1, 1).contiguous() for name in ("mean", "rstd"))
    found = torch.ops.aten.native_layer_norm_backward.default(
        _rows(dy).float(),
        _rows(a.x).float(),
        a.x.shape[-1:],
        mean_T1,
        rstd_T1,
        _float(a.weight),
        _float(a.bias),
        mask,
    )
    dx, dw, db = (t if wanted else None for t, wanted in zip(found, mask, strict=True))
    return None if dx is None else dx.view(a.x.shape), dw, db


# Which kernel of the operator runs depends on the number of rows: nothing is promised across batches. The weight's
# gradient is a sum in no fixed order unless torch.use_deterministic_algorithms is on, which is when run_to_run counts.
_DECLARES = Declares(stride_invariant=True, copies=frozenset({"x"}))
_DECLARES_ADD = Declares(stride_invariant=True, copies=frozenset({"x", "residual"}))
_SUPPORTS = Supports(limits={"features": Limit(min=1)})

_RMS = Implementation(
    "rms_norm",
    "aclnn",
    rms_norm,
    _SUPPORTS,
    _DECLARES,
    priority=10,
    train=_rms_train,
    backward=partial(_rms_backward, _by_operator),
)
_ADD_RMS = Implementation(
    "add_rms_norm",
    "aclnn",
    add_rms_norm,
    _SUPPORTS,
    _DECLARES_ADD,
    priority=10,
    train=_add_rms_train,
    backward=partial(_add_rms_backward, _by_operator),
)
_LAYER = Implementation(
    "layer_norm", "aclnn", layer_norm, _SUPPORTS, _DECLARES, priority=10, train=_layer_train, backward=_layer_backward
)

IMPLEMENTATIONS = (
    for_bf16_chips(_RMS),
    for_310p(_RMS, train=_rms_train, backward=partial(_rms_backward, _by_aten)),
    for_bf16_chips(_ADD_RMS),
    for_310p(_ADD_RMS, train=_add_rms_train, backward=partial(_add_rms_backward, _by_aten)),
    *on_both(_LAYER),
)
