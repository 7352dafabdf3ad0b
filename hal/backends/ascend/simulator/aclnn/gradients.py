"""Gradients of functions that work element by element."""

from __future__ import annotations

import torch
from torch import Tensor

from hal.backends.ascend.simulator import numerics
from hal.backends.ascend.simulator.operators import operator


@operator("aclnnSigmoidBackward", "ttt")
def sigmoid_gradient(grad_output: Tensor, output: Tensor, grad_input: Tensor) -> None:
    y = numerics.wide(output)
    numerics.store(grad_input, numerics.wide(grad_output) * y * (1 - y))


@operator("aclnnTanhBackward", "ttt")
def tanh_gradient(grad_output: Tensor, output: Tensor, grad_input: Tensor) -> None:
    numerics.store(grad_input, numerics.wide(grad_output) * (1 - numerics.wide(output) ** 2))


@operator("aclnnSiluBackward", "ttt")
def silu_gradient(grad_output: Tensor, self: Tensor, grad_input: Tensor) -> None:
    x = numerics.wide(self)
    s = torch.sigmoid(x)
    numerics.store(grad_input, numerics.wide(grad_output) * s * (1 + x * (1 - s)))


@operator("aclnnThresholdBackward", "ttkt")
def threshold_gradient(grad_output: Tensor, self: Tensor, threshold: float, out: Tensor) -> None:
    out.copy_(torch.where(self > threshold, grad_output, torch.zeros_like(grad_output)))


@operator("aclnnLeakyReluBackward", "ttkbt")
def leaky_relu_gradient(
    grad_output: Tensor, self: Tensor, negative_slope: float, self_is_result: bool, out: Tensor
) -> None:
    grad = numerics.wide(grad_output)
    numerics.store(out, torch.where(self > 0, grad, grad * negative_slope))


@operator("aclnnHardtanhBackward", "ttkkt")
def hardtanh_gradient(grad_output: Tensor, self: Tensor, min: float, max: float, out: Tensor) -> None:
    out.copy_(torch.where((self > min) & (self < max), grad_output, torch.zeros_like(grad_output)))


@operator("aclnnHardsigmoidBackward", "ttt")
def hardsigmoid_gradient(grad_output: Tensor, self: Tensor, out: Tensor) -> None:
    grad = numerics.wide(grad_output)
    numerics.store(out, torch.where((self > -3) & (self < 3), grad / 6, torch.zeros_like(grad)))


@operator("aclnnSoftplusBackward", "ttkkt")
def softplus_gradient(grad_output: Tensor, self: Tensor, beta: float, threshold: float, grad_input: Tensor) -> None:
    grad, x = numerics.wide(grad_output), numerics.wide(self) * beta
    numerics.store(grad_input, torch.where(x > threshold, grad, grad * torch.sigmoid(x)))


@operator("aclnnLogSigmoidForward", "ttt")
def log_sigmoid(self: Tensor, out: Tensor, buffer: Tensor) -> None:
    numerics.store(out, torch.nn.functional.logsigmoid(numerics.wide(self)))


@operator("aclnnLogSigmoidBackward", "tttt")
def log_sigmoid_gradient(grad_output: Tensor, self: Tensor, buffer: Tensor, grad_input: Tensor) -> None:
    numerics.store(grad_input, numerics.wide(grad_output) * torch.sigmoid(-numerics.wide(self)))


@operator("aclnnEluBackward", "tkkkbtt")
def elu_gradient(
    grad_output: Tensor,
    alpha: float,
    scale: float,
    input_scale: float,
    is_result: bool,
    self_or_result: Tensor,
    grad_input: Tensor,
) -> None:
    grad, x = numerics.wide(grad_output), numerics.wide(self_or_result)
    below = input_scale * (x + alpha * scale) if is_result else input_scale * alpha * scale * (x * input_scale).exp()
    numerics.store(grad_input, torch.where(x > 0, grad * scale, grad * below))


@operator("aclnnMishBackward", "ttt")
def mish_gradient(grad: Tensor, x: Tensor, x_grad: Tensor) -> None:
    values = numerics.wide(x)
    inner = torch.tanh(torch.nn.functional.softplus(values))
    slope = inner + values * torch.sigmoid(values) * (1 - inner * inner)
    numerics.store(x_grad, numerics.wide(grad) * slope)


@operator("aclnnHardswishBackward", "ttt")
@operator("aclnnHardswishBackwardV2", "ttt")
def hardswish_gradient(grad_output: Tensor, self: Tensor, out: Tensor) -> None:
    x = numerics.wide(self)
    slope = torch.where(x <= -3, 0.0, torch.where(x < 3, x / 3 + 0.5, 1.0))
    numerics.store(out, numerics.wide(grad_output) * slope)


@operator("aclnnGluBackward", "ttit")
def glu_gradient(grad_out: Tensor, self: Tensor, dim: int, out: Tensor) -> None:
    value, gate = numerics.wide(self).chunk(2, dim)
    upstream, open_share = numerics.wide(grad_out), torch.sigmoid(gate)
    to_gate = upstream * value * open_share * (1 - open_share)
    numerics.store(out, torch.cat((upstream * open_share, to_gate), dim))


@operator("aclnnSoftshrinkBackward", "ttkt")
@operator("aclnnHardshrinkBackward", "ttkt")
def shrink_gradient(grad_output: Tensor, self: Tensor, lambd: float, grad_input: Tensor) -> None:
    grad_input.copy_(torch.where(self.abs() > lambd, grad_output, torch.zeros_like(grad_output)))


@operator("aclnnLogitGrad", "ttdt")
def logit_gradient(x: Tensor, dy: Tensor, eps: float, dx: Tensor) -> None:
    """x comes first; an eps below 0 stands for none, where what lies outside of [0, 1] has no gradient."""
    values, margin = numerics.wide(x), max(eps, 0.0)
    outside = (values < margin) | (values > 1 - margin)
    slope = torch.where(outside, torch.nan if eps < 0 else 0.0, 1 / (values * (1 - values)))
    numerics.store(dx, numerics.wide(dy) * slope)
