"""rms_norm, add_rms_norm and layer_norm by the kernels of hal.kernels.norms."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hal.arithmetic import smallest_number
from hal.backends.ascend.triton import launch
from hal.op import empty

__all__ = ["add_rms_norm", "layer_norm", "rms_norm"]


def _like(x: Tensor) -> Tensor:
    return empty(x.shape, dtype=x.dtype, device=x.device)


def _least(eps: float) -> float:
    """eps as the contract counts it: at least the smallest normal number of the statistics."""
    return max(float(eps), smallest_number(torch.float32))


def _parameter(p: Tensor | None) -> Tensor | None:
    """Contiguous; the kernels have no float64, and their statistics none of its digits."""
    if p is None:
        return None
    return (p.float() if p.dtype is torch.float64 else p).contiguous()


def _rms(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    eps: float,
    weight_offset: float,
    round_before_weight: bool,
    round_residual: bool,
) -> tuple[Tensor, Tensor | None]:
    y, total = _like(x), None if residual is None else _like(x)
    if not x.numel():
        return y, total
    x_TF = launch.matrix(x)
    residual_TF = None if residual is None else launch.matrix(residual)
    rows, features = x_TF.shape
    blocks: dict[str, Any] = launch.tile(features)
    launch.run(
        "norms.rms_norm_kernel",
        -(-rows // blocks["BLOCK_R"]),
        x.device,
        x_TF,
        residual_TF,
        _parameter(weight),
        y,
        total,
        None,
        rows,
        features,
        x_TF.stride(0),
        0 if residual_TF is None else residual_TF.stride(0),
        _least(eps),
        float(weight_offset),
        ROUND_BEFORE_WEIGHT=round_before_weight,
        ROUND_RESIDUAL=round_residual,
        **blocks,
    )
    return y, total


def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    weight_offset: float = 0.0,
    round_before_weight: bool = False,
) -> Tensor:
    return _rms(x, None, weight, eps, weight_offset, round_before_weight, False)[0]


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
    y, total = _rms(x, residual, weight, eps, weight_offset, round_before_weight, round_residual)
    assert total is not None
    return y, total


def layer_norm(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5) -> Tensor:
    y = _like(x)
    if not x.numel():
        return y
    x_TF = launch.matrix(x)
    rows, features = x_TF.shape
    blocks: dict[str, Any] = launch.tile(features)
    launch.run(
        "norms.layer_norm_kernel",
        -(-rows // blocks["BLOCK_R"]),
        x.device,
        x_TF,
        _parameter(weight),
        _parameter(bias),
        y,
        None,
        None,
        rows,
        features,
        x_TF.stride(0),
        _least(eps),
        EXACT=features == blocks["BLOCK_F"],
        **blocks,
    )
    return y
