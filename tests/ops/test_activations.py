"""silu_and_mul and gelu_and_mul: values, clamps, errors."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from contract import FLOATS, SIXTEEN, check

import hal
from hal import philox
from hal.errors import ArgumentError, DtypeError, ShapeError
from hal.ops import gelu_and_mul, silu_and_mul


@pytest.fixture(params=["reference", "aten"], autouse=True)
def implementation(request):
    with hal.use(backend="cpu", impl={"silu_and_mul": request.param, "gelu_and_mul": request.param}):
        yield request.param


def normal(*shape, dtype=torch.float32, scale=1.0):
    return (philox.normal(0, shape) * scale).to(dtype)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", [(2,), (1, 1, 3072), (3, 34), (2, 3, 10)])
def test_silu_and_mul_is_gate_times_sigmoid_of_gate_times_up(dtype, shape):
    x = normal(*shape, dtype=dtype, scale=3)
    gate, up = x.double().chunk(2, -1)
    check(silu_and_mul, gate / (1 + (-gate).exp()) * up, x)


@pytest.mark.parametrize("op", [silu_and_mul, gelu_and_mul])
@pytest.mark.parametrize("dtype", SIXTEEN)
def test_16_bit_results_are_rounded_once(op, dtype):
    # Kernels that round the activation before the product miss the nearest value in a third of the elements.
    x = normal(64, 256, dtype=dtype)
    assert op(x).eq(op(x.double()).to(dtype)).float().mean() > 0.999


@pytest.mark.parametrize("dtype", FLOATS)
def test_limit_alpha_and_up_offset_are_gpt_oss_arithmetic(dtype):
    x = normal(5, 40, dtype=dtype, scale=6)
    x[0, :2], x[0, 20:22] = 9.0, -9.0
    # transformers' GptOssExperts: clamp(gate, max), clamp(up, ±), gate * sigmoid(gate * alpha) * (up + 1)
    gate, up = x.double().chunk(2, -1)
    gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
    expected = gate * torch.sigmoid(gate * 1.702) * (up + 1)
    check(silu_and_mul, expected, x, limit=7.0, alpha=1.702, up_offset=1.0)


@pytest.mark.parametrize("dtype", FLOATS)
def test_the_gate_is_clamped_above_only(dtype):
    x = torch.tensor([[-3.0, 3.0, -3.0, 3.0]], dtype=dtype)  # gates -3, 3; ups -3, 3
    expected = [[3 / (1 + math.exp(3)), 1 / (1 + math.exp(-1))]]
    check(silu_and_mul, torch.tensor(expected, dtype=torch.float64), x, limit=1.0)


def test_a_limit_that_the_dtype_cannot_hold_is_not_rounded_to_it():
    x = torch.tensor([[50.0, 1.0]], dtype=torch.bfloat16)
    gate = 0.1
    exact = torch.tensor(gate / (1 + math.exp(-gate)) * 0.1, dtype=torch.float64)
    assert silu_and_mul(x, limit=0.1).item() == exact.to(torch.bfloat16).item()


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", [(2,), (1, 1, 3072), (3, 34), (2, 3, 10)])
def test_gelu_and_mul_is_the_formula_of_its_approximation(dtype, shape):
    x = normal(*shape, dtype=dtype, scale=2)
    gate, up = x.double().chunk(2, -1)
    exact = gate / 2 * (1 + torch.erf(gate / 2**0.5)) * up
    tanh = gate / 2 * (1 + torch.tanh((2 / math.pi) ** 0.5 * (gate + 0.044715 * gate**3))) * up
    check(gelu_and_mul, exact, x)
    check(gelu_and_mul, tanh, x, approximate="tanh")


def test_the_two_gelus_differ():
    x = torch.tensor([[1.0, 1.0]], dtype=torch.float64)
    assert abs(gelu_and_mul(x) - gelu_and_mul(x, approximate="tanh")).item() > 1e-4


@pytest.mark.parametrize("op", [silu_and_mul, gelu_and_mul])
@pytest.mark.parametrize("dtype", FLOATS)
def test_strides_do_not_matter_and_inputs_are_not_modified(op, dtype):
    x = normal(6, 34, dtype=dtype)
    for view in (x.t().contiguous().t(), torch.stack((x, x), -1)[..., 0], x[:1].expand(6, 34)):
        check(op, op(view.double().contiguous()), view)


@pytest.mark.parametrize("op", [silu_and_mul, gelu_and_mul])
@pytest.mark.parametrize("shape", [(0, 8), (2, 0, 4), (3, 0)])
def test_nothing_gives_nothing(op, shape):
    assert op(torch.zeros(shape)).shape == (*shape[:-1], shape[-1] // 2)


@pytest.mark.parametrize("dtype", FLOATS)
def test_special_values_are_those_of_the_formula(dtype):
    x = torch.tensor([[math.nan, math.inf, -math.inf, 0.0, 1.0, 1.0, 1.0, math.inf]], dtype=dtype)
    silu = silu_and_mul(x)[0]
    assert silu.isnan().tolist() == [True, False, True, True]
    assert silu[1] == math.inf
    gelu = gelu_and_mul(x)[0]
    assert gelu.isnan().tolist() == [True, False, True, True]


INFINITE_UPS = [-1e-3, -1.0, -5.5, -6.8, -8.5, -14.5, -40.0, -104.0, -700.0, -6e4, 1e-3, 700.0]


@pytest.mark.parametrize("op", [silu_and_mul, partial(silu_and_mul, alpha=1.702), gelu_and_mul,
                                partial(gelu_and_mul, approximate="tanh")])  # fmt: skip
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("width", [1, 17])  # vectors and scalars take different ways
def test_an_infinite_up_keeps_its_sign_where_nothing_is_left_of_the_gate(op, dtype, width):
    gate = torch.tensor(INFINITE_UPS, dtype=dtype)[:, None].expand(-1, width)
    for up in (math.inf, -math.inf):
        y = op(torch.cat((gate, torch.full_like(gate, up)), -1))
        assert torch.equal(y, gate.sign() * up)
    for stays in (0.0, -math.inf, math.nan):
        assert op(torch.tensor([[stays, math.inf]], dtype=dtype)).isnan().all()


@pytest.mark.parametrize("op", [silu_and_mul, gelu_and_mul, partial(gelu_and_mul, approximate="tanh")])
def test_what_little_stands_for_a_gate_of_no_digits_moves_no_finite_result(op):
    gate, up = torch.tensor([[-40.0, -120.0, -1e30, 0.0]]), torch.tensor([[3.0, -3.0, 1.0, 5.0]])
    y = op(torch.cat((gate, up), -1))
    assert (y.abs() <= (1e-15 if op is silu_and_mul else 2.0**-23) * gate.abs() * up.abs()).all()
    assert y.isfinite().all()


BAD = [
    (lambda: silu_and_mul(torch.zeros(2, 5)), ShapeError, "even"),
    (lambda: silu_and_mul(torch.zeros(())), ShapeError, "2F"),
    (lambda: silu_and_mul(torch.zeros(2, 4, dtype=torch.int32)), DtypeError, "int32"),
    (lambda: silu_and_mul(torch.zeros(2, 4), limit=0.0), ArgumentError, "limit is 0.0"),
    (lambda: silu_and_mul(torch.zeros(2, 4), limit=math.nan), ArgumentError, "limit is NaN"),
    (lambda: silu_and_mul(torch.zeros(2, 4), alpha=math.inf), ArgumentError, "alpha is inf"),
    (lambda: silu_and_mul(torch.zeros(2, 4), up_offset=math.nan), ArgumentError, "up_offset is NaN"),
    (lambda: silu_and_mul(torch.zeros(2, 4), alpha="1"), ArgumentError, "alpha is '1'"),
    (lambda: gelu_and_mul(torch.zeros(2, 5)), ShapeError, "even"),
    (lambda: gelu_and_mul(torch.zeros(2, 4), approximate="erf"), ArgumentError, "'none' .*'tanh'"),
]


@pytest.mark.parametrize(("call", "error", "message"), BAD)
def test_bad_input_gives_a_typed_error_that_names_it(call, error, message):
    with pytest.raises(error, match=message):
        call()
