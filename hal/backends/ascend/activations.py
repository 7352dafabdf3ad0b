"""silu_and_mul and gelu_and_mul by aclnnSwiGlu and aclnnGeGluV3.

SwiGLU with a limit, a slope or an offset is written in float32 ATen operators. gelu is never npu_fast_gelu, whose
formula is another one on each chip, nor torch's own gelu, which is the tanh form on an NPU whatever is asked for.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hal.backends.ascend.chips import for_bf16_chips, on_both
from hal.capability import Declares, Implementation
from hal.op import Args

__all__ = ["IMPLEMENTATIONS"]

Gradients = tuple[Tensor | None, ...]


def _mended(y: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    """y with Inf where an infinite up met a gate that vanished on its way, and NaN came of it.

    gate / |gate| is its sign, and NaN for 0, Inf and NaN.
    """
    return torch.where(y != y, gate / gate.abs() * up, y)


def _empty(x: Tensor) -> Tensor:
    return x.new_empty((*x.shape[:-1], x.shape[-1] // 2))


def _ungated(x: Tensor, limit: float | None, alpha: float, up_offset: float) -> Tensor:
    gate, up = x.float().chunk(2, -1)
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    up = up + up_offset
    return _mended(gate * torch.sigmoid(gate * alpha) * up, gate, up).to(x.dtype).contiguous()


def silu_and_mul(x: Tensor, *, limit: float | None = None, alpha: float = 1.0, up_offset: float = 0.0) -> Tensor:
    if not x.numel():
        return _empty(x)
    if limit is not None or alpha != 1.0 or up_offset:
        return _ungated(x, limit, alpha, up_offset)
    return _mended(torch.ops.npu.npu_swiglu(x.contiguous(), -1), *x.chunk(2, -1))


def _silu_backward(a: Args, outs: dict[str, Tensor], grads: Gradients, needs: tuple[bool, ...]) -> Gradients:
    (dy,) = grads
    if dy is None or not a.x.numel():
        return (None,)
    if a.limit is None and a.alpha == 1.0 and not a.up_offset:
        return (torch.ops.npu.npu_swiglu_backward(dy.float().contiguous(), a.x.float().contiguous(), -1),)
    gate, up = a.x.float().chunk(2, -1)
    dy = dy.float()
    inside_gate = inside_up = None
    if a.limit is not None:
        inside_gate, inside_up = gate <= a.limit, up.abs() <= a.limit
        gate, up = gate.clamp(max=a.limit), up.clamp(-a.limit, a.limit)
    sigmoid = torch.sigmoid(gate * a.alpha)
    d_gate = dy * (up + a.up_offset) * sigmoid * (1 + a.alpha * gate * (1 - sigmoid))
    d_up = dy * gate * sigmoid
    if inside_gate is not None and inside_up is not None:
        d_gate, d_up = torch.where(inside_gate, d_gate, 0.0), torch.where(inside_up, d_up, 0.0)
    return (torch.cat((d_gate, d_up), -1),)


def _geglu(x: Tensor, approximate: str) -> tuple[Tensor, Tensor]:
    """(gelu(gate)·up, gelu(gate)); the gate is the left half."""
    y, gelu = torch.ops.npu.npu_geglu(x.contiguous(), -1, int(approximate == "tanh"), True)
    return y, gelu


def gelu_and_mul(x: Tensor, *, approximate: str = "none") -> Tensor:
    return _mended(_geglu(x, approximate)[0], *x.chunk(2, -1)) if x.numel() else _empty(x)


def _gelu_backward(a: Args, outs: dict[str, Tensor], grads: Gradients, needs: tuple[bool, ...]) -> Gradients:
    (dy,) = grads
    if dy is None or not a.x.numel():
        return (None,)
    # The operator's own gelu in float32: what the forward pass has in 16 bits would round the gradient twice.
    x = a.x.float()
    _, gelu = _geglu(x, a.approximate)
    tanh = int(a.approximate == "tanh")
    return (torch.ops.npu.npu_geglu_grad(dy.float().contiguous(), x.contiguous(), gelu, -1, tanh, True),)


_DECLARES = Declares(stride_invariant=True, copies=frozenset({"x"}))

IMPLEMENTATIONS = (
    for_bf16_chips(
        Implementation("silu_and_mul", "aclnn", silu_and_mul, declares=_DECLARES, priority=10, backward=_silu_backward)
    ),
    *on_both(
        Implementation("gelu_and_mul", "aclnn", gelu_and_mul, declares=_DECLARES, priority=10, backward=_gelu_backward)
    ),
)
