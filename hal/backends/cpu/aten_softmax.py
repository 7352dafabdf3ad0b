"""softmax by ATen's fused kernel, mended: a row that is −inf throughout is 0 here, NaN there."""

from __future__ import annotations

import torch
from torch import Tensor

from hal.capability import Declares, Implementation, Limit, Supports
from hal.op import Args

__all__ = ["IMPLEMENTATIONS"]


def softmax(x: Tensor, dim: int = -1) -> Tensor:
    if x.dtype.itemsize == 2 and dim not in (-1, x.dim() - 1):
        # Over an inner axis ATen keeps 16-bit intermediates: measured at 7,800 times the bound.
        y = torch.softmax(x, dim, dtype=torch.float32).to(x.dtype)
    else:
        y = torch.softmax(x, dim)
    # Such a row is NaN from its first element on, as is a row with a NaN: one column tells whether to look.
    first = y.select(dim, 0).sum().item()
    if first != first:
        y.masked_fill_((x == float("-inf")).all(dim, keepdim=True), 0.0)
    return y


def _backward(
    a: Args, outs: dict[str, Tensor], grads: tuple[Tensor | None, ...], needs: tuple[bool, ...]
) -> tuple[Tensor | None]:
    (dy,), y = grads, outs["y"]
    if dy is None or not needs[0]:
        return (None,)
    wide = torch.float64 if y.dtype is torch.float64 else torch.float32
    # The rounding of a 16-bit y would spread over the whole row: made again, it costs no more than widening.
    y = torch.softmax(a.x, a.dim, dtype=wide) if y.dtype.itemsize == 2 else y
    dx = torch._softmax_backward_data(dy.to(wide), y, a.dim, wide)
    # A NaN that comes into a row of zeros survives the products with them, on to the row's first element.
    first = dx.select(a.dim, 0).sum().item()
    if first != first:
        dx.masked_fill_((a.x == float("-inf")).all(a.dim, keepdim=True), 0.0)
    return (dx,)


IMPLEMENTATIONS = (
    Implementation(
        "softmax",
        "aten",
        softmax,
        supports=Supports(limits={"length": Limit(min=1)}),
        declares=Declares(),
        priority=10,
        backward=_backward,
    ),
)
