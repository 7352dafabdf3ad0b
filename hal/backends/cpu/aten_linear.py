"""linear by ATen's fused product and bias.

Accepts every request; a bias of another dtype than x is added in float32, so that rounding stays one.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from hal.capability import Declares, Implementation

__all__ = ["IMPLEMENTATIONS"]


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if bias is None or bias.dtype is x.dtype:
        return F.linear(x, weight, bias)
    wide = torch.float64 if torch.float64 in (x.dtype, bias.dtype) else torch.float32
    return F.linear(x.to(wide), weight.to(wide), bias.to(wide)).to(x.dtype)


IMPLEMENTATIONS = (Implementation("linear", "aten", linear, declares=Declares(), priority=10),)
