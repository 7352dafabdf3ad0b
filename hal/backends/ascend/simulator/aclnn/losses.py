"""Cross entropy of logits (N, C) and class indices, with the log probabilities that its gradient goes on with."""

from __future__ import annotations

from torch import Tensor

from hal.backends.ascend.simulator import numerics
from hal.backends.ascend.simulator.operators import operator

__all__: list[str] = []


def _kept(target: Tensor, ignore_index: int) -> Tensor:
    """Which rows count. A negative ignore_index names no row."""
    return target != ignore_index if ignore_index >= 0 else target == target


def _weights(target: Tensor, weight: Tensor | None, kept: Tensor, like: Tensor) -> Tensor:
    """The weight of each row: that of its class, 0 where it does not count."""
    per_row = like.new_ones(target.shape) if weight is None else numerics.wide(weight)[target.clamp_min(0)]
    return per_row.to(like.dtype) * kept


@operator("aclnnCrossEntropyLoss", "tttsiddbtttt")
def cross_entropy_loss(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None,
    reduction: str,
    ignore_index: int,
    label_smoothing: float,
    lse_square_scale_for_zloss: float,
    return_zloss: bool,
    loss: Tensor,
    log_prob: Tensor,
    zloss: Tensor | None,
    lse_for_zloss: Tensor | None,
) -> None:
    if return_zloss or lse_square_scale_for_zloss:
        raise NotImplementedError("the z-loss is not enabled in this operator")
    values = numerics.wide(input)
    shifted = values - values.amax(-1, keepdim=True)
    logs = shifted - numerics.total(shifted.exp(), -1, keepdim=True).log()
    numerics.store(log_prob, logs)
    kept = _kept(target, ignore_index)
    weights = _weights(target, weight, kept, logs)
    losses = -logs.gather(-1, target.clamp_min(0).unsqueeze(-1)).squeeze(-1) * weights
    if label_smoothing:
        per_class = logs if weight is None else logs * numerics.wide(weight)
        smooth = -numerics.total(per_class, -1) * kept
        losses = (1 - label_smoothing) * losses + label_smoothing / input.shape[-1] * smooth
    if reduction == "none":
        result = losses
    elif reduction == "sum":
        result = numerics.total(losses)
    else:
        result = numerics.total(losses) / numerics.total(weights)
    numerics.store(loss, result.reshape(loss.shape))


@operator("aclnnCrossEntropyLossGrad", "ttttttsiddt")
def cross_entropy_loss_grad(
    grad_loss: Tensor,
    log_prob: Tensor,
    target: Tensor,
    weight: Tensor | None,
    grad_zloss: Tensor | None,
    lse_for_zloss: Tensor | None,
    reduction: str,
    ignore_index: int,
    label_smoothing: float,
    lse_square_scale_for_zloss: float,
    out: Tensor,
) -> None:
    logs = numerics.wide(log_prob)
    kept = _kept(target, ignore_index)
    weights = _weights(target, weight, kept, logs)
    rows = numerics.wide(grad_loss).reshape(-1).expand(target.shape)
    if reduction == "mean":
        rows = rows / numerics.total(weights)
    # d(loss)/d(log probability), of the label and, smoothed, of every class; then through the log of the softmax.
    slope = logs.new_zeros(logs.shape)
    if label_smoothing:
        classes = logs.new_ones(logs.shape[-1]) if weight is None else numerics.wide(weight)
        slope -= label_smoothing / logs.shape[-1] * classes * kept.unsqueeze(-1)
    label = (-(1 - label_smoothing) * weights).unsqueeze(-1)
    slope.scatter_add_(-1, target.clamp_min(0).unsqueeze(-1), label)
    slope = slope * rows.unsqueeze(-1)
    numerics.store(out, slope - logs.exp() * numerics.total(slope, -1, keepdim=True))
