"""linear by ATen's fused product and bias.

Accepts every request. 16-bit calls with a bias go to addmm: for an input or bias that is not contiguous, or an
input of many axes, `F.linear` adds the bias after rounding the product (measured at 300 times the bound). A bias
of another dtype than x is added in float32 or float64.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from hal.capability import Declares, Implementation

__all__ = ["IMPLEMENTATIONS"]


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if bias is None:
        return F.linear(x, weight)
    dtype = x.dtype
    if bias.dtype is not dtype:
        wide = torch.float64 if torch.float64 in (dtype, bias.dtype) else torch.float32
        return F.linear(x.to(wide), weight.to(wide), bias.to(wide)).to(dtype)
    if dtype.itemsize > 2:
        return F.linear(x, weight, bias)
    lead = x.shape[:-1]
    rows = x.reshape(math.prod(lead), x.shape[-1])
    return torch.addmm(bias, rows, weight.t()).view(*lead, weight.shape[0])


IMPLEMENTATIONS = (Implementation("linear", "aten", linear, declares=Declares(), priority=10),)
