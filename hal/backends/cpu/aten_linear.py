"""linear by ATen's fused product and bias.

Accepts every request. A float32 product of one row, the step of decoding, goes to ATen's oneDNN operator: `F.linear`
calls MKL, which runs it on one thread, took 1.25 to 2.5 times as long on an AMD EPYC with two threads, and had 1.4 to
1.8 times the error (2.2e-7 against 1.5e-7 relative, 576 inputs). With two rows and more oneDNN is faster still, but
sums in one chain, at 1.5 to 2 times MKL's error: those stay with MKL. 16-bit calls with a bias go to addmm: for an
input or bias that is not contiguous, or an input of many axes, `F.linear` adds the bias after rounding the product
(measured at 300 times the bound). A bias of another dtype than x is added in float32 or float64.

oneDNN's bfloat16 product of many rows reads on past a row whose length is not a multiple of 32 and multiplies what it
finds by 0: a NaN in the next row, or in memory that is no part of x, comes through (lengths to 1,120 were tried;
float16 and float32 are free of it). Such rows are padded with zeros, which copies them.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from hal.capability import Declares, Implementation

__all__ = ["IMPLEMENTATIONS"]

_WHOLE = 32  # bfloat16 values that oneDNN takes at once

# Inductor's operator, without a public name; absent from builds of torch without oneDNN.
_onednn = getattr(torch.ops.mkldnn, "_linear_pointwise", None)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    dtype = x.dtype
    if dtype is torch.float32 and _takes(x, weight, bias):
        product: Tensor = _onednn.default(x, weight, bias, "none", [], "")  # type: ignore[union-attr]
        return product
    if dtype is torch.bfloat16 and (rest := -x.shape[-1] % _WHOLE):
        x, weight = F.pad(x, (0, rest)), F.pad(weight, (0, rest))
    if bias is None:
        return F.linear(x, weight)
    if bias.dtype is not dtype:
        wide = torch.float64 if torch.float64 in (dtype, bias.dtype) else torch.float32
        return F.linear(x.to(wide), weight.to(wide), bias.to(wide)).to(dtype)
    if dtype.itemsize > 2:
        return F.linear(x, weight, bias)
    lead = x.shape[:-1]
    rows = x.reshape(math.prod(lead), x.shape[-1])
    return torch.addmm(bias, rows, weight.t()).view(*lead, weight.shape[0])


def _takes(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    return (
        _onednn is not None
        and torch._C._get_mkldnn_enabled()
        and weight.is_contiguous()
        and x.dim() > 1
        and 0 < x.numel() == x.shape[-1]
        and weight.numel() > 0
        and (bias is None or (bias.dtype is torch.float32 and bias.is_contiguous()))
    )


IMPLEMENTATIONS = (Implementation("linear", "aten", linear, declares=Declares(), priority=10),)
