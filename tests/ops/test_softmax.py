"""softmax: values on any axis, rows of −inf, errors."""

from __future__ import annotations

import math

import pytest
import torch
from contract import FLOATS, bounded, check, within

import hal
from hal import philox
from hal.errors import ArgumentError, DtypeError, ShapeError
from hal.ops import softmax


@pytest.fixture(params=["reference", "aten"], autouse=True)
def implementation(request):
    with hal.use(backend="cpu", impl={"softmax": request.param}):
        yield request.param


def normal(*shape, dtype=torch.float32, scale=1.0):
    return (philox.normal(0, shape) * scale).to(dtype)


def formula(x, dim):
    x = x.double()
    e = (x - x.amax(dim, keepdim=True)).exp()
    return e / e.sum(dim, keepdim=True)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("shape", "dim"), [((5,), 0), ((3, 7), -1), ((3, 7), 0), ((2, 300, 5), 1), ((2, 3, 4), -3)])
@pytest.mark.parametrize("scale", [0.1, 1, 30])
def test_softmax_is_its_formula_on_any_axis(dtype, shape, dim, scale):
    x = normal(*shape, dtype=dtype, scale=scale)
    check(softmax, formula(x, dim), x, dim)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dim", [-1, 0])
def test_16_bit_results_are_rounded_once(dtype, dim):
    x = normal(64, 64, dtype=dtype, scale=2)
    assert softmax(x, dim).eq(formula(x, dim).to(dtype)).float().mean() > 0.999


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("dim", [-1, 0])
def test_a_row_of_minus_infinity_is_zero_with_zero_gradient(dtype, dim):
    x = normal(4, 6, dtype=dtype)
    x.select(1 + dim, 2).fill_(-math.inf)  # row 2, or column 2 for dim 0
    x[0, 0] = -math.inf
    x.requires_grad_()
    y = softmax(x, dim)
    dead = y.detach().select(1 + dim, 2)
    assert torch.equal(dead, torch.zeros_like(dead))
    assert y[0, 0] == 0
    within(softmax, y.detach(), formula(x.detach(), dim).nan_to_num(0.0), x.detach(), dim)
    (dx,) = torch.autograd.grad(y, x, torch.linspace(-1, 1, 24, dtype=dtype).view(4, 6))
    assert dx.isfinite().all()
    assert torch.equal(dx.select(1 + dim, 2), torch.zeros_like(dead))
    assert dx[0, 0] == 0
    assert dx.abs().max() > 0


@pytest.mark.parametrize("dtype", FLOATS)
def test_nan_and_plus_infinity_spoil_their_row_only(dtype):
    x = normal(4, 5, dtype=dtype)
    clean = softmax(x)
    x[1, 2], x[2, 4] = math.nan, math.inf
    x[3] = -math.inf
    y = softmax(x)
    assert torch.equal(y[0], clean[0])
    assert y[1:3].isnan().all()
    assert torch.equal(y[3], torch.zeros_like(y[3]))


@pytest.mark.parametrize("dtype", FLOATS)
def test_strides_do_not_matter_and_inputs_are_not_modified(dtype):
    x = normal(6, 8, dtype=dtype)
    x[2] = -math.inf
    for view in (x.t().contiguous().t(), torch.stack((x, x), -1)[..., 0], x[2:3].expand(6, 8)):
        for dim in (0, 1):
            check(softmax, formula(view, dim).nan_to_num(0.0), view, dim)


def test_nothing_gives_nothing(implementation):
    assert softmax(torch.zeros(0, 4)).shape == (0, 4)
    assert softmax(torch.zeros(3, 0, 2), 2).shape == (3, 0, 2)
    if implementation == "reference":
        assert softmax(torch.zeros(3, 0)).shape == (3, 0)
        assert softmax(torch.zeros(0, 4), 0).shape == (0, 4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_gradient_is_y_times_dy_less_its_mean_under_y(dtype):
    """dx = y(dy − Σ y·dy). The y that is kept has its dtype's rounding u: u(|dx| + y·Σ|y·dy|) at the worst."""
    x, dy = normal(5, 33, dtype=dtype), philox.normal(1, (5, 33)).to(dtype)
    (dx,) = torch.autograd.grad(softmax(x.requires_grad_()), x, dy)
    y, dy = formula(x.detach(), -1), dy.double()
    want = y * (dy - (y * dy).sum(-1, keepdim=True))
    kept = torch.finfo(dtype).eps / 2 + (33**0.5 + 8) * 2.0**-24
    bounded(dx, want, kept * (want.abs() + y * (y * dy).abs().sum(-1, keepdim=True)), dtype)


BAD = [
    (lambda: softmax(torch.zeros(())), ShapeError, "no axis"),
    (lambda: softmax(torch.zeros(2, 3), 2), ArgumentError, "dim is 2; x has 2 axes"),
    (lambda: softmax(torch.zeros(2, 3), -3), ArgumentError, "dim is -3"),
    (lambda: softmax(torch.zeros(2, 3), 1.0), ArgumentError, "dim is 1.0"),
    (lambda: softmax(torch.zeros(2, 3, dtype=torch.int64)), DtypeError, "int64"),
]


@pytest.mark.parametrize(("call", "error", "message"), BAD)
def test_bad_input_gives_a_typed_error_that_names_it(call, error, message):
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize("odd", [math.nan, math.inf])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("dim", [0, 1])
def test_a_nan_gradient_into_a_row_of_minus_infinity_ends_there(dtype, dim, odd):
    x = normal(4, 4, dtype=dtype)
    x.select(1 - dim, 1).fill_(-math.inf)
    dy = normal(4, 4, dtype=dtype)
    clean = x.clone().requires_grad_()
    (expected,) = torch.autograd.grad(softmax(clean, dim), clean, dy)
    dy.select(1 - dim, 1)[2] = odd
    x.requires_grad_()
    (dx,) = torch.autograd.grad(softmax(x, dim), x, dy)
    assert (dx.select(1 - dim, 1) == 0).all()
    assert torch.equal(dx, expected)
