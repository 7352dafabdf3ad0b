"""Batch and group normalisation in the forms of ATen, with their gradients."""

from __future__ import annotations

import torch
from torch import Tensor

from hal.backends.ascend.simulator import numerics
from hal.backends.ascend.simulator.operators import operator


def _wide(t: Tensor | None) -> Tensor | None:
    return None if t is None else numerics.wide(t)


@operator("aclnnGroupNorm", "tttiiiidttt")
def group_norm(
    self: Tensor,
    gamma: Tensor | None,
    beta: Tensor | None,
    n: int,
    c: int,
    hxw: int,
    group: int,
    eps: float,
    out: Tensor,
    mean_out: Tensor,
    rstd_out: Tensor,
) -> None:
    values = torch.ops.aten.native_group_norm(
        numerics.wide(self).contiguous(), _wide(gamma), _wide(beta), n, c, hxw, group, eps
    )
    for target, value in zip((out, mean_out, rstd_out), values, strict=True):
        numerics.store(target, value)


@operator("aclnnGroupNormBackward", "tttttiiiiattt")
def group_norm_gradient(
    grad_out: Tensor,
    input: Tensor,
    mean: Tensor,
    rstd: Tensor,
    gamma: Tensor | None,
    n: int,
    c: int,
    hxw: int,
    group: int,
    output_mask: list[bool],
    grad_input: Tensor | None,
    grad_gamma: Tensor | None,
    grad_beta: Tensor | None,
) -> None:
    values = torch.ops.aten.native_group_norm_backward(
        numerics.wide(grad_out).contiguous(),
        numerics.wide(input).contiguous(),
        numerics.wide(mean),
        numerics.wide(rstd),
        _wide(gamma),
        n,
        c,
        hxw,
        group,
        output_mask,
    )
    _store_present((grad_input, grad_gamma, grad_beta), values)


def _store_present(targets: tuple[Tensor | None, ...], values: tuple[Tensor | None, ...]) -> None:
    for target, value in zip(targets, values, strict=True):
        if target is not None and value is not None:
            numerics.store(target, value)


@operator("aclnnBatchNorm", "tttttbddttt")
def batch_norm(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    output: Tensor,
    save_mean: Tensor,
    save_invstd: Tensor,
) -> None:
    kept = _wide(running_mean), _wide(running_var)
    moved = tuple(None if t is None else t.clone() for t in kept)
    values = torch.ops.aten.native_batch_norm(
        numerics.wide(input), _wide(weight), _wide(bias), *moved, training, momentum, eps
    )
    if training:
        _store_present((running_mean, running_var), moved)
        _store_present((save_mean, save_invstd), values[1:])
    numerics.store(output, values[0])


@operator("aclnnBatchNormBackward", "tttttttbdattt")
def batch_norm_gradient(
    grad_out: Tensor,
    input: Tensor,
    weight: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    save_mean: Tensor | None,
    save_invstd: Tensor | None,
    training: bool,
    eps: float,
    output_mask: list[bool],
    grad_input: Tensor | None,
    grad_weight: Tensor | None,
    grad_bias: Tensor | None,
) -> None:
    values = torch.ops.aten.native_batch_norm_backward(
        numerics.wide(grad_out),
        numerics.wide(input),
        _wide(weight),
        _wide(running_mean),
        _wide(running_var),
        _wide(save_mean),
        _wide(save_invstd),
        training,
        eps,
        output_mask,
    )
    _store_present((grad_input, grad_weight, grad_bias), values)
