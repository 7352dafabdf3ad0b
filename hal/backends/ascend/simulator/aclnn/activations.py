"""Gated activations and softmax: SwiGLU, GeGLU, gelu-and-multiply, GELU, softmax, and their gradients."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hal.backends.ascend.simulator import numerics
from hal.backends.ascend.simulator.operators import operator

__all__: list[str] = []

_TANH_SCALE = math.sqrt(2 / math.pi)
_TANH_CUBIC = 0.044715


def _halves(x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    left, right = numerics.wide(x).chunk(2, dim)
    return left, right


def _gelu(x: Tensor, tanh: bool) -> Tensor:
    share: Tensor = 1 + torch.tanh(_TANH_SCALE * (x + _TANH_CUBIC * x**3)) if tanh else torch.erfc(-x / math.sqrt(2))
    return 0.5 * x * share


def _gelu_slope(x: Tensor, tanh: bool) -> Tensor:
    """The derivative of gelu."""
    if tanh:
        inner = torch.tanh(_TANH_SCALE * (x + _TANH_CUBIC * x**3))
        steep = (1 - inner * inner) * _TANH_SCALE * (1 + 3 * _TANH_CUBIC * x * x)
        return 0.5 * (1 + inner + x * steep)
    density = torch.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)
    return 0.5 * torch.erfc(-x / math.sqrt(2)) + x * density


@operator("aclnnSwiGlu", "tit")
def swiglu(x: Tensor, dim: int, out: Tensor) -> None:
    gate, up = _halves(x, dim)
    numerics.store(out, gate * torch.sigmoid(gate) * up)


@operator("aclnnSwiGluGrad", "ttit")
def swiglu_grad(y_grad: Tensor, x: Tensor, dim: int, out: Tensor) -> None:
    gate, up = _halves(x, dim)
    upstream = numerics.wide(y_grad)
    sigmoid = torch.sigmoid(gate)
    slope = sigmoid * (1 + gate * (1 - sigmoid))
    numerics.store(out, torch.cat((upstream * up * slope, upstream * gate * sigmoid), dim))


@operator("aclnnGeGluV3", "tiibtt")
def geglu(x: Tensor, dim: int, approximate: int, activate_left: bool, out: Tensor, out_gelu: Tensor) -> None:
    left, right = _halves(x, dim)
    gate, up = (left, right) if activate_left else (right, left)
    active = _gelu(gate, approximate == 1)
    numerics.store(out_gelu, active)
    numerics.store(out, active * up)


@operator("aclnnGeGluV3Backward", "tttiibt")
def geglu_backward(
    dy: Tensor, x: Tensor, gelu: Tensor, dim: int, approximate: int, activate_left: bool, dx: Tensor
) -> None:
    left, right = _halves(x, dim)
    gate, up = (left, right) if activate_left else (right, left)
    upstream = numerics.wide(dy)
    to_gate = upstream * up * _gelu_slope(gate, approximate == 1)
    to_up = upstream * numerics.wide(gelu)
    numerics.store(dx, torch.cat((to_gate, to_up) if activate_left else (to_up, to_gate), dim))


@operator("aclnnGeluMul", "tst")
def gelu_mul(input: Tensor, approximate: str, out: Tensor) -> None:
    gate, up = _halves(input, -1)
    numerics.store(out, _gelu(gate, approximate == "tanh") * up)


@operator("aclnnGeluBackward", "ttt")
def gelu_backward(grad_output: Tensor, self: Tensor, grad_input: Tensor) -> None:
    """The tanh form, like aclnnGelu."""
    numerics.store(grad_input, numerics.wide(grad_output) * _gelu_slope(numerics.wide(self), True))


@operator("aclnnGeluBackwardV2", "ttst")
def gelu_backward_v2(grad_output: Tensor, self: Tensor, approximate: str, grad_input: Tensor) -> None:
    slope = _gelu_slope(numerics.wide(self), approximate == "tanh")
    numerics.store(grad_input, numerics.wide(grad_output) * slope)


def _logits(x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """The values less their maximum along dim, and the sum of their exponentials."""
    values = numerics.wide(x)
    shifted = values - values.amax(dim, keepdim=True)
    return shifted, numerics.total(shifted.exp(), dim, keepdim=True)


@operator("aclnnSoftmax", "tit")
def softmax(self: Tensor, dim: int, out: Tensor) -> None:
    if self.numel():
        shifted, total = _logits(self, dim)
        numerics.store(out, shifted.exp() / total)


@operator("aclnnSoftmaxBackward", "ttit")
def softmax_backward(grad_output: Tensor, output: Tensor, dim: int, grad_input: Tensor) -> None:
    upstream, probabilities = numerics.wide(grad_output), numerics.wide(output)
    mean = numerics.total(upstream * probabilities, dim, keepdim=True)
    numerics.store(grad_input, probabilities * (upstream - mean))


@operator("aclnnLogSoftmax", "tit")
def log_softmax(self: Tensor, dim: int, out: Tensor) -> None:
    if self.numel():
        shifted, total = _logits(self, dim)
        numerics.store(out, shifted - total.log())


@operator("aclnnLogSoftmaxBackward", "ttit")
def log_softmax_backward(grad_output: Tensor, output: Tensor, dim: int, grad_input: Tensor) -> None:
    upstream = numerics.wide(grad_output)
    total = numerics.total(upstream, dim, keepdim=True)
    numerics.store(grad_input, upstream - numerics.wide(output).exp() * total)
