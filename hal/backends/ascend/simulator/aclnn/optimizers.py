"""Optimiser steps in one operator, and the loss scale of mixed precision."""

from __future__ import annotations

import torch
from torch import Tensor

from hal.backends.ascend.simulator import numerics
from hal.backends.ascend.simulator.operators import operator


@operator("aclnnApplyAdamWV2", "ttttttfffffbb")
def adamw(
    var_ref: Tensor,
    m_ref: Tensor,
    v_ref: Tensor,
    max_grad_norm_ref: Tensor | None,
    grad: Tensor,
    step: Tensor,
    lr: float,
    beta1: float,
    beta2: float,
    weight_decay: float,
    eps: float,
    amsgrad: bool,
    maximize: bool,
) -> None:
    slope = -numerics.wide(grad) if maximize else numerics.wide(grad)
    first = numerics.wide(m_ref) * beta1 + slope * (1 - beta1)
    second = numerics.wide(v_ref) * beta2 + slope * slope * (1 - beta2)
    peak = second
    if amsgrad and max_grad_norm_ref is not None:
        peak = torch.maximum(numerics.wide(max_grad_norm_ref), second)
        numerics.store(max_grad_norm_ref, peak)
    count = step.item() + 1  # the steps before this one
    spread = (peak / (1 - beta2**count)).sqrt() + eps
    decayed = numerics.wide(var_ref) * (1 - lr * weight_decay)
    numerics.store(var_ref, decayed - lr / (1 - beta1**count) * first / spread)
    numerics.store(m_ref, first)
    numerics.store(v_ref, second)


@operator("aclnnAmpUpdateScale", "tttdditt")
def update_scale(
    current_scale: Tensor,
    growth_tracker: Tensor,
    found_inf: Tensor,
    growth_factor: float,
    backoff_factor: float,
    growth_interval: int,
    updated_scale: Tensor,
    updated_growth_tracker: Tensor,
) -> None:
    scale, steps = current_scale.clone(), growth_tracker.clone()
    torch._amp_update_scale_(scale, steps, found_inf, growth_factor, backoff_factor, growth_interval)
    updated_scale.copy_(scale)
    updated_growth_tracker.copy_(steps)
