"""Rules of the cross entropy."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from hal.backends.ascend.simulator.constraints import Constraint
from hal.backends.ascend.simulator.rules._common import FLOATS, absent, dtypes

_PAGE = "torch_npu-npu_cross_entropy_loss"
_LOSS = "aclnnCrossEntropyLoss"
_loss = partial(Constraint, _LOSS, page=_PAGE, enforced_by="document")


def _rows(input: Tensor) -> str | None:
    return None if input.dim() == 2 and 0 < input.shape[0] <= 200_000 else f"{tuple(input.shape)}"


def _classes(input: Tensor, target: Tensor, ignore_index: int) -> str | None:
    kept = target[target != ignore_index] if ignore_index >= 0 else target
    if not kept.numel():
        return None
    least, greatest = (int(x) for x in kept.aminmax())
    return None if least >= 0 and greatest < input.shape[-1] else f"{least} to {greatest} of {input.shape[-1]}"


def _smoothing(label_smoothing: float) -> str | None:
    return None if 0 <= label_smoothing < 1 else f"{label_smoothing:g}"


def _ignored(input: Tensor, ignore_index: int) -> str | None:
    return None if ignore_index < input.shape[-1] else f"{ignore_index} of {input.shape[-1]}"


def _no_zloss(lse_square_scale_for_zloss: float, return_zloss: bool) -> str | None:
    return "that it is asked for" if lse_square_scale_for_zloss or return_zloss else None


ROWS = (
    absent(_LOSS, _PAGE),
    _loss(rule="logits are (N, C) with N from 1 to 200,000", check=_rows),
    _loss(
        rule="logits are float16, bfloat16 or float32",
        check=dtypes("input", allowed=FLOATS),
    ),
    _loss(
        rule="targets are int64",
        check=dtypes("target", allowed=(torch.int64,)),
    ),
    _loss(
        rule="each target is a class or ignore_index; a negative ignore_index ignores none",
        check=_classes,
        values=True,
    ),
    _loss(
        rule="weights are float32",
        check=dtypes("weight", allowed=(torch.float32,)),
    ),
    _loss(rule="label_smoothing is at least 0 and below 1", check=_smoothing),
    _loss(rule="ignore_index is below the number of classes", check=_ignored),
    _loss(rule="the z-loss stays off, which is not enabled", check=_no_zloss),
)
