"""torch's functions that work element by element, on the simulated device."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from aten import FLOATS, INTEGERS, agree, integers, values

SMOOTH = [
    "acos",
    "acosh",
    "asin",
    "asinh",
    "atan",
    "atanh",
    "cos",
    "cosh",
    "erf",
    "erfc",
    "erfinv",
    "exp",
    "exp2",
    "expm1",
    "log",
    "log10",
    "log1p",
    "log2",
    "reciprocal",
    "rsqrt",
    "sigmoid",
    "sin",
    "sinc",
    "sinh",
    "sqrt",
    "square",
    "tan",
    "tanh",
    "logit",
]
ROUNDED = [
    "abs",
    "ceil",
    "floor",
    "frac",
    "neg",
    "relu",
    "round",
    "sign",
    "signbit",
    "sgn",
    "trunc",
    "isnan",
    "isinf",
    "isfinite",
    "logical_not",
    "nan_to_num",
]
ACTIVATIONS = [
    "silu",
    "relu",
    "mish",
    "hardswish",
    "hardsigmoid",
    "logsigmoid",
    "softplus",
    "elu",
    "leaky_relu",
    "relu6",
    "hardtanh",
    "celu",
    "selu",
    "tanhshrink",
    "softsign",
    "softshrink",
    "hardshrink",
]
ARITHMETIC = [
    "add",
    "sub",
    "mul",
    "div",
    "true_divide",
    "pow",
    "atan2",
    "maximum",
    "minimum",
    "fmod",
    "remainder",
    "floor_divide",
    "xlogy",
    "logaddexp",
]
COMPARISONS = [
    "eq",
    "ne",
    "lt",
    "le",
    "gt",
    "ge",
    "logical_and",
    "logical_or",
    "logical_xor",
    "isclose",
]
BITS = [
    "bitwise_and",
    "bitwise_or",
    "bitwise_xor",
    "bitwise_left_shift",
    "bitwise_right_shift",
]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", SMOOTH)
def test_smooth_functions_and_their_gradients(name, dtype):
    x = values(5, 7, dtype=dtype, low=1.1, high=2.0) if name == "acosh" else values(5, 7, dtype=dtype)
    agree(getattr(torch, name), x, steps=4)
    # Backward is made of several operators, each of which rounds.
    agree(getattr(torch, name), x, grad=True, steps=16)
    if hasattr(torch, f"{name}_"):
        agree(getattr(torch, f"{name}_"), x)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", ROUNDED)
def test_functions_that_are_exact(name, dtype):
    x = values(5, 7, dtype=dtype, low=-3.0, high=3.0)
    x[0, :3] = torch.tensor([float("inf"), float("-inf"), float("nan")])
    agree(getattr(torch, name), x[1:] if name in ("nan_to_num", "sign", "sgn", "frac") else x)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_and_their_gradients(name, dtype):
    agree(getattr(F, name), values(6, 8, dtype=dtype, low=-4.0, high=4.0), grad=True, steps=16)


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_gelu_is_the_tanh_form_whatever_is_asked_for(approximate):
    x = values(64, low=-3.0, high=3.0)
    got = F.gelu(x.npu(), approximate=approximate).cpu()
    torch.testing.assert_close(got, F.gelu(x.double(), approximate="tanh").float())
    assert (got - F.gelu(x)).abs().max() > 1e-4


@pytest.mark.parametrize("dtype", FLOATS + INTEGERS)
@pytest.mark.parametrize("name", ARITHMETIC)
def test_arithmetic_with_broadcasting_views_and_numbers(name, dtype):
    function = getattr(torch, name)
    floating = dtype.is_floating_point
    if not floating and name in ("logaddexp", "atan2", "xlogy"):
        return  # no functions of integers
    a = values(5, 7, dtype=dtype, low=1.0, high=4.0) if floating else integers(5, 7, dtype=dtype, low=1)
    b = values(7, dtype=dtype, low=1.0, high=3.0) if floating else integers(7, dtype=dtype, low=1, high=4)
    discontinuous = name in ("fmod", "remainder", "floor_divide")
    for x, y in ((a, b), (a.t(), b[:5]), (a[:, 1:4], b[2:5])):
        agree(function, x, y)
    if name not in ("maximum", "minimum", "atan2", "logaddexp"):
        agree(lambda x: function(x, 2), a)
    if floating and not discontinuous:
        agree(function, a, b, grad=True, steps=16)


@pytest.mark.parametrize("dtype", FLOATS + INTEGERS)
def test_operators_of_python(dtype):
    a = values(5, 7, dtype=dtype, low=1.0, high=4.0) if dtype.is_floating_point else integers(5, 7, dtype=dtype, low=1)
    agree(lambda x: (2 - x, 2 * x, x + 3, x**2, -x if dtype is not torch.uint8 else x), a)
    agree(lambda x: (x == 2, x != x.flip(0), x < 3, x >= 2, x > x.flip(1)), a)
    agree(lambda x: (x.add_(1), x.sub_(1), x.mul_(2)), a)
    agree(lambda x: (torch.div(x, 3, rounding_mode="floor"), torch.div(x, x.flip(0), rounding_mode="trunc")), a)
    agree(lambda x: (torch.add(x, x, alpha=2), torch.sub(x, x.flip(0), alpha=1)), a)
    agree(lambda x: (x.clamp(2, 3), x.clamp(min=2), x.clamp(max=2), x.clamp(x.flip(0), x + 1)), a)


@pytest.mark.parametrize("dtype", FLOATS + INTEGERS + (torch.bool,))
@pytest.mark.parametrize("name", COMPARISONS)
def test_comparisons_and_logic(name, dtype):
    a, b = integers(5, 7, dtype=dtype, high=3), integers(7, dtype=dtype, high=3, seed=1)
    agree(getattr(torch, name), a, b)


@pytest.mark.parametrize("dtype", [*INTEGERS, torch.bool])
@pytest.mark.parametrize("name", BITS)
def test_bits(name, dtype):
    if dtype is torch.bool and "shift" in name:
        return
    agree(getattr(torch, name), integers(5, 7, dtype=dtype), integers(7, dtype=dtype, high=3, seed=1))


@pytest.mark.parametrize("dtype", FLOATS + INTEGERS + (torch.bool,))
def test_choices(dtype):
    a, b = integers(5, 7, dtype=dtype), integers(5, 7, dtype=dtype, seed=1)
    agree(lambda x, y: torch.where(x > y, x, y), a, b)
    agree(lambda x: torch.where(x.bool(), 1.0, 0.0), a)
    agree(lambda x, y: (x.masked_fill(y.bool(), 1), x.masked_fill(y.bool(), x[0, 0])), a, b)
    agree(lambda x, y: x.masked_fill_(y.bool(), 0), a, b)


@pytest.mark.parametrize("dtype", FLOATS)
def test_three_operands(dtype):
    a, b = values(5, 7, dtype=dtype), values(7, dtype=dtype, seed=1)
    agree(lambda x, y: torch.addcmul(x, x, y, value=2), a, b, grad=True, steps=16)
    agree(lambda x, y: torch.addcdiv(x, x, y, value=-0.5), a, b, grad=True, steps=16)
    agree(lambda x, y: torch.lerp(x, y.expand(5, 7), 0.25), a, b, grad=True, steps=16)
    agree(lambda x, y: torch.lerp(x, x + 1, y), a, b)


def test_a_number_meets_a_narrow_tensor_in_float32():
    x = values(64)
    assert torch.equal((x.npu() * 0.1).cpu(), x * 0.1)
    assert torch.equal((x.npu() < 0.3).cpu(), x < 0.3)
    assert torch.equal((x.half().npu() == x.half()[3].item()).cpu(), x.half() == x.half()[3])
