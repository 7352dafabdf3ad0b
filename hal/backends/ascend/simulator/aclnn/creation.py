"""Fills and ranges: tensors made of numbers alone."""

from __future__ import annotations

import torch
from torch import Tensor

from hal.backends.ascend.simulator import numerics
from hal.backends.ascend.simulator.operators import operator

Number = int | float | bool


@operator("aclnnInplaceFillScalar", "tk")
def fill_scalar(self_ref: Tensor, value: Number) -> None:
    self_ref.fill_(value)


@operator("aclnnInplaceFillTensor", "tt")
def fill_tensor(self_ref: Tensor, value: Tensor) -> None:
    self_ref.copy_(value.expand_as(self_ref))


@operator("aclnnInplaceOne", "t")
def one(self_ref: Tensor) -> None:
    self_ref.fill_(1)


@operator("aclnnInplaceZero", "t")
def zero(self_ref: Tensor) -> None:
    self_ref.zero_()


@operator("aclnnInplaceFillDiagonal", "tkb")
def fill_diagonal(self_ref: Tensor, fill_value: Number, wrap: bool) -> None:
    self_ref.fill_diagonal_(fill_value, wrap)


def _steps(start: Number, step: Number, out: Tensor) -> Tensor:
    """start + i·step: integers in int64, all else in float64, rounded once."""
    exact = torch.float64 if out.is_floating_point() or isinstance(step, float) else torch.int64
    return torch.arange(out.numel(), dtype=exact) * step + start


@operator("aclnnArange", "kkkt")
@operator("aclnnRange", "kkkt")
def arange(start: Number, end: Number, step: Number, out: Tensor) -> None:
    numerics.store(out, _steps(start, step, out).reshape(out.shape))


@operator("aclnnLinspace", "kkit")
def linspace(start: Number, end: Number, steps: int, out: Tensor) -> None:
    numerics.store(out, torch.linspace(start, end, steps, dtype=torch.float64))


@operator("aclnnLogSpace", "kkidt")
def logspace(start: Number, end: Number, steps: int, base: float, out: Tensor) -> None:
    numerics.store(out, torch.logspace(start, end, steps, base, dtype=torch.float64))


@operator("aclnnEye", "iit")
def eye(n: int, m: int, out: Tensor) -> None:
    out.copy_(torch.eye(n, m))


@operator("aclnnOneHot", "tittit")
def one_hot(self: Tensor, num_classes: int, on_value: Tensor, off_value: Tensor, axis: int, out: Tensor) -> None:
    if axis not in (-1, self.ndim):
        raise NotImplementedError(f"axis {axis}: only the last one is simulated")
    out.copy_(torch.where(self[..., None] == torch.arange(num_classes), on_value, off_value))
