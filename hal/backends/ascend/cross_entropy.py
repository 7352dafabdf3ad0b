"""cross_entropy by aclnnCrossEntropyLoss, in float32 and row by row.

The operator gives a loss in the dtype of the logits, ignores nothing where ignore_index is negative, and divides by
the number of rows that count even if there are none: so it gets float32 logits and a target in range for each row, and
rows are left out and summed here. It has no z-loss.

Shape suffixes: T rows, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hal.backends.ascend.chips import for_bf16_chips
from hal.capability import Declares, Implementation, Limit, Supports
from hal.op import Args

__all__ = ["IMPLEMENTATIONS"]

MAX_ROWS = 200_000


def cross_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: str = "mean",
) -> Tensor:
    keep_T = target != ignore_index
    if logits.shape[0]:
        x_TV, class_T = logits.float().contiguous(), torch.where(keep_T, target, 0)
        loss_T = torch.ops.npu.npu_cross_entropy_loss(x_TV, class_T, None, "none", -100, label_smoothing, 0.0, False)[0]
        if not label_smoothing:
            # Of a row with +inf the operator makes NaN; the loss is infinite, unless that is the target's own logit.
            top_T = x_TV.amax(-1)
            chosen_T = x_TV.gather(-1, class_T[:, None])[:, 0]
            loss_T = torch.where(top_T == float("inf"), top_T - chosen_T, loss_T)
        # What an ignored row holds has no influence, NaN neither.
        loss_T = torch.where(keep_T, loss_T, 0.0)
    else:
        loss_T = logits.new_zeros(0, dtype=torch.float32)
    if reduction == "none":
        return loss_T
    total = loss_T.sum()
    return total / keep_T.sum().clamp(min=1) if reduction == "mean" else total


def _reasons(a: Args) -> list[str]:
    """label_smoothing below 1"""
    return [f"label_smoothing is {a.label_smoothing}; it must be below 1"] if a.label_smoothing >= 1.0 else []


IMPLEMENTATIONS = (
    for_bf16_chips(
        Implementation(
            "cross_entropy",
            "aclnn",
            cross_entropy,
            Supports(
                features=frozenset({"label_smoothing", "reduction_mean", "reduction_sum", "reduction_none"}),
                limits={"rows": Limit(max=MAX_ROWS)},
                where=_reasons,
            ),
            Declares(stride_invariant=True, copies=frozenset({"logits"})),
            priority=10,
        )
    ),
)
