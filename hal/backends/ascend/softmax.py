"""softmax by aclnnSoftmax, with the contract's zeros in rows that are -inf throughout, where the operator has NaN."""

from __future__ import annotations

import torch
from torch import Tensor

from hal.backends.ascend.chips import on_both
from hal.capability import Declares, Implementation
from hal.op import Args

__all__ = ["IMPLEMENTATIONS"]

Gradients = tuple[Tensor | None, ...]


def softmax(x: Tensor, dim: int = -1) -> Tensor:
    x = x.contiguous()
    if not x.numel():
        return torch.empty_like(x)
    dead = x.amax(dim, keepdim=True) == float("-inf")
    return torch.softmax(x, dim).masked_fill_(dead, 0.0)


def _backward(a: Args, outs: dict[str, Tensor], grads: Gradients, needs: tuple[bool, ...]) -> Gradients:
    (dy,) = grads
    if dy is None or not a.x.numel():
        return (None,)
    y = outs["y"]
    return (torch.ops.aten._softmax_backward_data.default(dy.contiguous(), y, a.dim, y.dtype),)


IMPLEMENTATIONS = on_both(
    Implementation(
        "softmax",
        "aclnn",
        softmax,
        declares=Declares(stride_invariant=True, copies=frozenset({"x"})),
        priority=10,
        backward=_backward,
    )
)
