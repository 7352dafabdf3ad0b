"""Normalisation: faults seen in fused kernels elsewhere."""

from __future__ import annotations

import pytest
import torch
from case_models import draw, layer_norm, rms_norm
from case_support import each_implementation

from hal.errors import HalError


@each_implementation("add_rms_norm")
def test_sum_of_squares_beyond_the_range_of_float16(choice):
    """microsoft/onnxruntime#29043: x + residual squared in half precision is inf, and the row turns to
    zeros."""
    x = torch.full((2, 4096), 7000.0, dtype=torch.float16)
    x[0, 1::2] = -7000.0
    x[1] = 320.0
    x[1, 5] = 16000.0
    residual = torch.full_like(x, 8.0)
    weight = torch.linspace(0.5, 1.5, 4096).half()
    total = x.double() + residual.double()  # exact in float16
    expected = rms_norm(total, weight), total
    args = x, residual, weight, 1e-6
    y, residual_out = choice.call(*args)
    choice.check((y, residual_out), expected, *args)
    assert y.isfinite().all()
    assert (y != 0).all()
    assert torch.equal(residual_out.double(), total)
    squares = total.half().square().float().mean(-1, keepdim=True)
    choice.told_apart((total * squares.double().rsqrt() * weight.double(), total), expected, *args)


@each_implementation("rms_norm")
def test_weight_wider_than_x(choice):
    """vllm-project/vllm#48324: the kernel knows x's dtype only and reads float32 weights as 16-bit words."""
    x, weight = draw(2, 5, 256, dtype=torch.bfloat16), torch.linspace(-2, 2, 256)
    expected = rms_norm(x, weight, 1e-5)
    try:
        y = choice.call(x, weight, 1e-5)
    except (TypeError, ValueError) as refusal:
        assert isinstance(refusal, HalError)
        assert "dtype" in str(refusal)
        return
    choice.check(y, expected, x, weight, 1e-5)
    misread = weight.view(torch.bfloat16)[:256].nan_to_num()
    choice.told_apart(rms_norm(x, misread, 1e-5), expected, x, weight, 1e-5)


@each_implementation("rms_norm")
def test_one_is_added_to_the_weight_before_any_rounding(choice):
    """linkedin/Liger-Kernel#1462, vllm-project/vllm#29810: 1 + w is formed in bfloat16, where 16.6875 does
    not exist."""
    x = torch.tensor([[7.0, 1.0] * 32], dtype=torch.bfloat16)  # rms 5
    weight = torch.full((64,), 15.6875, dtype=torch.bfloat16)
    y = choice.call(x, weight, 0.0, weight_offset=1.0)
    assert y.unique().tolist() == [3.34375, 23.375]  # 0.2 · 16.6875 and 1.4 · 16.6875, rounded once
    expected = rms_norm(x, weight, 0.0, offset=1.0)
    choice.check(y, expected, x, weight, 0.0, weight_offset=1.0)
    choice.told_apart(rms_norm(x, weight + 1, 0.0).bfloat16(), expected, x, weight, 0.0, weight_offset=1.0)


@pytest.mark.parametrize("weighted", [True, False])
@each_implementation("rms_norm")
def test_no_rows(choice, weighted):
    """stepfun-ai/StepMesh#43: a batch of 0 tokens launches an empty grid, and a later operator reports the
    error."""
    weight = torch.ones(128, dtype=torch.bfloat16) if weighted else None
    y = choice.call(torch.empty(0, 128, dtype=torch.bfloat16), weight)
    assert (y.shape, y.dtype) == ((0, 128), torch.bfloat16)
    one = torch.ones(1, 128, dtype=torch.bfloat16)
    assert torch.equal(choice.call(one, weight), one)


@each_implementation("rms_norm")
def test_head_norm_on_a_slice_of_the_fused_projection(choice):
    """vllm-project/vllm-xpu-kernels#396, vllm-project/vllm#28103: rows counted flat but addressed as if
    dense."""
    tokens, heads, width = 6, 7, 80
    qkv = draw(5, tokens, (heads + 2) * width, dtype=torch.float16)
    before, q = qkv.clone(), qkv[:, : heads * width].view(tokens, heads, width)
    weight = torch.linspace(0.1, 2, width).half()
    y = choice.call(q, weight)
    expected = rms_norm(q, weight)
    choice.check(y, expected, q, weight)
    assert torch.equal(qkv, before)
    walked = qkv.flatten()[: tokens * heads * width].view(tokens, heads, width)
    choice.told_apart(rms_norm(walked, weight), expected, q, weight)


@each_implementation("rms_norm")
def test_second_row_lies_beyond_two_to_the_31_elements(choice):
    """flashinfer-ai/flashinfer#3007: row times stride wraps in 32 bits. Only two pages of the 4 GB are ever
    touched."""
    stride = 2**31 + 256
    x = torch.empty(stride + 128, dtype=torch.bfloat16).as_strided((2, 128), (stride, 1))
    values, weight = draw(6, 2, 128, dtype=torch.bfloat16), torch.ones(128, dtype=torch.bfloat16)
    x.copy_(values)
    y = choice.call(x, weight)
    choice.check(y, rms_norm(values, weight), values, weight)
    choice.told_apart(rms_norm(values[:1].expand(2, 128), weight), rms_norm(values, weight), values, weight)


@each_implementation("layer_norm")
def test_lanes_past_the_end_of_an_odd_row(choice):
    """triton-lang/triton#9838: masked lanes are loaded as 0 and bring the squared mean into the variance."""
    x = (50.0 + torch.arange(17) / 4).repeat(3, 1)
    args = x, torch.ones(17), torch.zeros(17), 1e-5
    y, expected = choice.call(*args), layer_norm(*args)
    choice.check(y, expected, *args)
    assert y[0, 0].item() == pytest.approx(-1.6330, abs=1e-4)
    assert y[0, 16].item() == pytest.approx(1.6330, abs=1e-4)
    mean = x.double().mean(-1, keepdim=True)
    padded = torch.nn.functional.pad(x.double(), (0, 15)) - mean
    variance = padded.square().sum(-1, keepdim=True) / 17
    choice.told_apart((x - mean) / (variance + 1e-5).sqrt(), expected, *args)


@each_implementation("layer_norm")
def test_mean_much_larger_than_spread(choice):
    """microsoft/onnxruntime#31973: E[x²] − E[x]² in float32 cancels to noise."""
    row = 8192.0 + (torch.arange(4096) % 16) / 16  # exact in float32, variance 255/12/256
    x = torch.stack((row, -row))
    args = x, torch.ones(4096), torch.zeros(4096), 1e-5
    y, expected = choice.call(*args), layer_norm(*args)
    choice.check(y, expected, *args)
    assert expected[0, 15].item() == pytest.approx(7.5 / 16 / (255 / 12 / 256 + 1e-5) ** 0.5, rel=1e-9)
    mean = x.mean(-1, keepdim=True)
    variance = (x.square().mean(-1, keepdim=True) - mean.square()).clamp_min(0)
    choice.told_apart((x - mean) * (variance + 1e-5).rsqrt(), expected, *args)
