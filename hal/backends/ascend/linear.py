"""linear by aclnnMm and aclnnAddmm.

A bias of x's dtype is added by the operator before it rounds; any other is added to a float32 product. float32
products are strict, or hf32 (11 significant bits) where torch's precision setting allows it, whatever torch_npu's own
switch says. 310P multiplies float32 in float16, so it serves float16 alone.

Shape suffixes: T rows, I features in, O features out.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from hal.backends.ascend.chips import for_310p, for_bf16_chips
from hal.capability import Declares, Implementation, Supports
from hal.op import Args

__all__ = ["IMPLEMENTATIONS"]

Gradients = tuple[Tensor | None, ...]


@contextmanager
def _precision(dtype: torch.dtype) -> Iterator[None]:
    """torch_npu's hf32 switch as torch's float32 precision has it, for products of this dtype."""
    if dtype is not torch.float32:
        yield
        return
    switches: Any = torch.get_device_module("npu").matmul
    before, wanted = bool(switches.allow_hf32), torch.get_float32_matmul_precision() != "highest"
    if before is wanted:
        yield
        return
    switches.allow_hf32 = wanted
    try:
        yield
    finally:
        switches.allow_hf32 = before


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    n_out, n_in = weight.shape
    shape = (*x.shape[:-1], n_out)
    if not x.numel() or not n_out:
        y = x.new_zeros(shape)
        return y if bias is None else y + bias.to(x.dtype)
    x_TI = x.reshape(-1, n_in)
    with _precision(x.dtype if bias is None or bias.dtype is x.dtype else torch.float32):
        if bias is None:
            y_TO = x_TI @ weight.T
        elif bias.dtype is x.dtype:
            y_TO = torch.addmm(bias, x_TI, weight.T)
        else:
            y_TO = torch.addmm(bias.float(), x_TI.float(), weight.T.float()).to(x.dtype)
    return y_TO.view(shape)


def _backward(a: Args, outs: dict[str, Tensor], grads: Gradients, needs: tuple[bool, ...]) -> Gradients:
    (dy,) = grads
    if dy is None:
        return None, None, None
    n_in, (for_x, for_weight, for_bias) = a.weight.shape[1], needs
    dy_TO = dy.flatten(0, -2) if dy.dim() > 1 else dy[None]
    db = dy_TO.float().sum(0) if for_bias and a.bias is not None else None
    if not dy.numel() or not a.x.numel():
        return None, None, db
    x_TI = a.x.reshape(-1, n_in)
    with _precision(dy.dtype):
        dx = (dy_TO @ a.weight).view(a.x.shape) if for_x else None
        dw = dy_TO.T @ x_TI if for_weight else None
    return dx, dw, db


def _halves_only(a: Args) -> list[str]:
    """a bias of x's dtype"""
    if a.bias is None or a.bias.dtype is a.x.dtype:
        return []
    return ["a bias of another dtype wants a float32 product, which this chip computes in float16"]


_LINEAR = Implementation(
    "linear",
    "aclnn",
    linear,
    # Of a transposed operand nothing is copied, of other strides whatever the operator likes.
    declares=Declares(copies=frozenset({"x", "weight"})),
    priority=10,
    backward=_backward,
)

IMPLEMENTATIONS = (
    for_bf16_chips(_LINEAR),
    for_310p(
        Implementation(
            "linear",
            "aclnn",
            linear,
            Supports(dtypes=frozenset({"float16"}), where=_halves_only),
            _LINEAR.declares,
            priority=10,
        )
    ),
)
