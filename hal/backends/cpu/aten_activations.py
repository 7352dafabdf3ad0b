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


def _gate_up(x: Tensor) -> tuple[Tensor, Tensor]:
    """The halves of x in float32 (float64 for float64), of one contiguous tensor."""
    if x.dtype not in _WIDE:
        x = x.float()
    if not x.is_contiguous():
        x = x.contiguous()
    half = x.shape[-1] // 2
    gate, up = _halves(x, (half, half), -1)
    return gate, up


def _has_nan(y: Tensor) -> bool:
    """Whether there may be a NaN, in one pass."""
    total = y.sum().item()
    return total != total


def _infinite(gate: Tensor, up: Tensor) -> Tensor:
    """Where the result is infinite although the activated gate may have been rounded to 0."""
    return up.isinf() & gate.isfinite() & (gate != 0)


def silu_and_mul(x: Tensor, *, limit: float | None = None, alpha: float = 1.0, up_offset: float = 0.0) -> Tensor:
    gate, up = _gate_up(x)
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    if up_offset:
        up = up + up_offset
    y = _silu(gate) if alpha == 1.0 else torch.mul(gate, alpha).sigmoid_().mul_(gate)
    y.mul_(up)
    if _has_nan(y):
        y = torch.where(_infinite(gate, up), gate * up, y)
    return y if y.dtype is x.dtype else y.to(x.dtype)


def gelu_and_mul(x: Tensor, *, approximate: str = "none") -> Tensor:
    gate, up = _gate_up(x)
    y = F.gelu(gate, approximate=approximate).mul_(up)
    if _has_nan(y):
        # ATen's vectorised erf form is NaN at +inf.
        y = torch.where((gate == float("inf")) | _infinite(gate, up), gate * up, y)
    return y if y.dtype is x.dtype else y.to(x.dtype)


_DECLARES = Declares(stride_invariant=True, copies=frozenset({"x"}))

IMPLEMENTATIONS = (
    Implementation("silu_and_mul", "aten", silu_and_mul, declares=_DECLARES, priority=10),
    Implementation("gelu_and_mul", "aten", gelu_and_mul, declares=_DECLARES, priority=10),
)
