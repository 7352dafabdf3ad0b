"""silu_and_mul and gelu_and_mul by ATen's fused activations, in float32 for 16-bit inputs.

ATen's 16-bit activations round before the product with up, a second rounding that the contract does not have.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from hal.capability import Declares, Implementation

__all__ = ["IMPLEMENTATIONS"]

_WIDE = (torch.float32, torch.float64)
_silu = torch._C._nn.silu  # what F.silu calls
_halves = torch.split_with_sizes  # the cheapest of ATen's ways of splitting


def silu_and_mul(
    x: Tensor, *, limit: float | None = None, alpha: float = 1.0, up_offset: float = 0.0
) -> Tensor:
    half = x.shape[-1] // 2
    if not x.is_contiguous():
        x = x.contiguous()
    gate, up = _halves(x, (half, half), -1)
    wide = x.dtype in _WIDE
    if not wide:
        gate = gate.float()
    if limit is not None or up_offset:
        # Numbers meet tensors in float32: a 16-bit tensor would round limit and offset to its own dtype.
        up = up if wide else up.float()
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    if up_offset:
        up = up + up_offset
    y = _silu(gate) if alpha == 1.0 else torch.mul(gate, alpha).sigmoid_().mul_(gate)
    y.mul_(up)
    return y if wide else y.to(x.dtype)


def gelu_and_mul(x: Tensor, *, approximate: str = "none") -> Tensor:
    half = x.shape[-1] // 2
    if not x.is_contiguous():
        x = x.contiguous()
    gate, up = _halves(x, (half, half), -1)
    if x.dtype in _WIDE:
        return F.gelu(gate, approximate=approximate).mul_(up)
    return F.gelu(gate.float(), approximate=approximate).mul_(up).to(x.dtype)


_DECLARES = Declares(stride_invariant=True, copies=frozenset({"x"}))

IMPLEMENTATIONS = (
    Implementation("silu_and_mul", "aten", silu_and_mul, declares=_DECLARES, priority=10),
    Implementation("gelu_and_mul", "aten", gelu_and_mul, declares=_DECLARES, priority=10),
)
