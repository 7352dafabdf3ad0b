"""Losses of torch.nn.functional other than the fused cross entropy, and their gradients."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from hal.backends.ascend.simulator import numerics
from hal.backends.ascend.simulator.operators import operator

NONE, MEAN = 0, 1


def _reduced(loss: Tensor, reduction: int, out: Tensor) -> None:
    if reduction == NONE:
        numerics.store(out, loss)
    else:
        numerics.store(out, numerics.mean(loss) if reduction == MEAN else numerics.total(loss))


def _share(grad_output: Tensor, count: int, reduction: int) -> Tensor:
    """What of the upstream gradient falls on one element."""
    grad = numerics.wide(grad_output)
    return grad / count if reduction == MEAN else grad


def _define_loss(name: str, function: Callable[[Tensor], Tensor], slope: Callable[[Tensor], Tensor]) -> None:
    """A loss of self - target alone."""

    @operator(f"aclnn{name}", "ttit")
    def loss(self: Tensor, target: Tensor, reduction: int, out: Tensor) -> None:
        _reduced(function(numerics.wide(self) - numerics.wide(target)), reduction, out)

    @operator(f"aclnn{name}Backward", "tttit")
    def gradient(grad_output: Tensor, self: Tensor, target: Tensor, reduction: int, out: Tensor) -> None:
        distance = numerics.wide(self) - numerics.wide(target)
        numerics.store(out, _share(grad_output, distance.numel(), reduction) * slope(distance))


_define_loss("MseLoss", torch.square, lambda distance: 2 * distance)
_define_loss("L1Loss", torch.abs, torch.sign)


@operator("aclnnSmoothL1Loss", "ttift")
def smooth_l1(self: Tensor, target: Tensor, reduction: int, beta: float, result: Tensor) -> None:
    loss = torch.nn.functional.smooth_l1_loss(numerics.wide(self), numerics.wide(target), reduction="none", beta=beta)
    _reduced(loss, reduction, result)


@operator("aclnnSmoothL1LossBackward", "tttift")
def smooth_l1_gradient(
    grad_out: Tensor, self: Tensor, target: Tensor, reduction: int, beta: float, grad_input: Tensor
) -> None:
    distance = numerics.wide(self) - numerics.wide(target)
    slope = torch.where(distance.abs() < beta, distance / beta, distance.sign()) if beta else distance.sign()
    numerics.store(grad_input, _share(grad_out, distance.numel(), reduction) * slope)


@operator("aclnnBinaryCrossEntropy", "tttit")
def binary_cross_entropy(self: Tensor, target: Tensor, weight: Tensor | None, reduction: int, out: Tensor) -> None:
    loss = torch.nn.functional.binary_cross_entropy(
        numerics.wide(self), numerics.wide(target), _maybe(weight), reduction="none"
    )
    _reduced(loss, reduction, out)


@operator("aclnnBinaryCrossEntropyBackward", "ttttit")
def binary_cross_entropy_gradient(
    grad_output: Tensor, self: Tensor, target: Tensor, weight: Tensor | None, reduction: int, out: Tensor
) -> None:
    x, wanted = numerics.wide(self), numerics.wide(target)
    slope = (x - wanted) / ((1 - x) * x).clamp(min=1e-12)
    if weight is not None:
        slope = slope * numerics.wide(weight)
    numerics.store(out, _share(grad_output, x.numel(), reduction) * slope)


@operator("aclnnBinaryCrossEntropyWithLogits", "ttttit")
def binary_cross_entropy_logits(
    self: Tensor, target: Tensor, weight: Tensor | None, pos_weight: Tensor | None, reduction: int, out: Tensor
) -> None:
    loss = torch.nn.functional.binary_cross_entropy_with_logits(
        numerics.wide(self),
        numerics.wide(target),
        _maybe(weight),
        reduction="none",
        pos_weight=_maybe(pos_weight),
    )
    _reduced(loss, reduction, out)


@operator("aclnnBinaryCrossEntropyWithLogitsBackward", "tttttit")
def binary_cross_entropy_logits_gradient(
    grad_output: Tensor,
    self: Tensor,
    target: Tensor,
    weight: Tensor | None,
    pos_weight: Tensor | None,
    reduction: int,
    out: Tensor,
) -> None:
    x, wanted = numerics.wide(self), numerics.wide(target)
    positive = wanted if pos_weight is None else wanted * numerics.wide(pos_weight)
    slope = (positive + 1 - wanted) * torch.sigmoid(x) - positive
    if weight is not None:
        slope = slope * numerics.wide(weight)
    numerics.store(out, _share(grad_output, x.numel(), reduction) * slope)


def _maybe(t: Tensor | None) -> Tensor | None:
    return None if t is None else numerics.wide(t)


@operator("aclnnKlDiv", "ttibt")
def kl_div(self: Tensor, target: Tensor, reduction: int, log_target: bool, out: Tensor) -> None:
    loss = torch.nn.functional.kl_div(
        numerics.wide(self), numerics.wide(target), reduction="none", log_target=log_target
    )
    _reduced(loss, reduction, out)


def _weights(self: Tensor, target: Tensor, weight: Tensor | None, ignored: int) -> Tensor:
    """What each row's loss counts: its class's weight, 0 where the target is ignored."""
    counts = target != ignored
    if weight is None:
        return counts.to(numerics.wide(self).dtype)
    return torch.where(counts, numerics.wide(weight)[torch.where(counts, target, 0)], 0.0)


@operator("aclnnNLLLoss", "tttiitt")
def nll(
    self: Tensor,
    target: Tensor,
    weight: Tensor | None,
    reduction: int,
    ignore_index: int,
    out: Tensor,
    total_weight_out: Tensor,
) -> None:
    x, targets = numerics.wide(self), target.long()
    if x.ndim == 1:
        x, targets = x[None], targets.reshape(1)
    weights = _weights(x, targets, weight, ignore_index)
    chosen = x.gather(1, torch.where(targets == ignore_index, 0, targets)[:, None])[:, 0]
    loss = torch.where(weights == 0, 0.0, -chosen * weights)
    total = numerics.total(weights)
    numerics.store(total_weight_out, total.reshape(total_weight_out.shape))
    if reduction == NONE:
        numerics.store(out, loss.reshape(out.shape))
    else:
        summed = numerics.total(loss)
        numerics.store(out, summed / total if reduction == MEAN else summed)


@operator("aclnnNLLLossBackward", "ttttiitt")
def nll_gradient(
    grad_output: Tensor,
    self: Tensor,
    target: Tensor,
    weight: Tensor | None,
    reduction: int,
    ignore_index: int,
    total_weight: Tensor,
    out: Tensor,
) -> None:
    x, targets = numerics.wide(self), target.long()
    if x.ndim == 1:
        x, targets = x[None], targets.reshape(1)
    weights = _weights(x, targets, weight, ignore_index)
    upstream = numerics.wide(grad_output)
    if reduction == MEAN:
        upstream = upstream / numerics.wide(total_weight)
    places = torch.where(targets == ignore_index, 0, targets)[:, None]
    # An ignored row takes no gradient even where the mean is one of nothing.
    values = torch.where(weights == 0, 0.0, -upstream * weights)[:, None]
    numerics.store(out, torch.zeros_like(x).scatter(1, places, values.to(x.dtype)).reshape(out.shape))
