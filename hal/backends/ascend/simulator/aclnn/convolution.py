"""Convolutions on the cube core, with their gradients."""

from __future__ import annotations

import torch
from torch import Tensor

from hal.backends.ascend.simulator import numerics
from hal.backends.ascend.simulator.operators import operator


@operator("aclnnConvolution", "tttaaabaity")
def convolution(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    transposed: bool,
    output_padding: list[int],
    groups: int,
    output: Tensor,
    cube_math_type: int,
) -> None:
    wide_bias = None if bias is None else numerics.wide(bias)
    value = torch.convolution(
        numerics.wide(input),
        numerics.wide(weight),
        wide_bias,
        stride,
        padding,
        dilation,
        transposed,
        output_padding,
        groups,
    )
    numerics.store(output, value)


@operator("aclnnConvDepthwise2d", "ttataaaty")
def depthwise(
    self: Tensor,
    weight: Tensor,
    kernel_size: list[int],
    bias: Tensor | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    out: Tensor,
    cube_math_type: int,
) -> None:
    convolution(self, weight, bias, stride, padding, dilation, False, [0, 0], self.shape[1], out, cube_math_type)


@operator("aclnnConvolutionBackward", "tttaaaabaiayttt")
def convolution_gradient(
    grad_output: Tensor,
    input: Tensor,
    weight: Tensor,
    bias_sizes: list[int] | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    transposed: bool,
    output_padding: list[int],
    groups: int,
    output_mask: list[bool],
    cube_math_type: int,
    grad_input: Tensor | None,
    grad_weight: Tensor | None,
    grad_bias: Tensor | None,
) -> None:
    values = torch.ops.aten.convolution_backward(
        numerics.wide(grad_output),
        numerics.wide(input),
        numerics.wide(weight),
        bias_sizes,
        stride,
        padding,
        dilation,
        transposed,
        output_padding,
        groups,
        output_mask,
    )
    for target, value in zip((grad_input, grad_weight, grad_bias), values, strict=True):
        if target is not None and value is not None:
            numerics.store(target, value)
