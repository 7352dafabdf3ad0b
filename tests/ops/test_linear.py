"""linear: values, dtypes, errors."""

from __future__ import annotations

import pytest
import torch
from contract import FLOATS, bounded, check

import hal
from hal import philox
from hal.errors import DeviceError, DtypeError, ShapeError
from hal.ops import linear


@pytest.fixture(params=["reference", "aten"], autouse=True)
def implementation(request):
    with hal.use(backend="cpu", impl={"linear": request.param}):
        yield request.param


def normal(seed, *shape, dtype=torch.float32):
    return philox.normal(seed, shape).to(dtype)


def formula(x, weight, bias=None):
    return x.double() @ weight.double().T + (0 if bias is None else bias.double())


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", [(64,), (1, 1, 576), (7, 33), (2, 3, 16), (3, 1)])
def test_linear_is_the_product_with_the_transposed_weight(dtype, shape):
    x, w, b = normal(0, *shape, dtype=dtype), normal(1, 5, shape[-1], dtype=dtype), normal(2, 5, dtype=dtype) * 10
    check(linear, formula(x, w), x, w)
    check(linear, formula(x, w, b), x, w, b)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_products_are_summed_in_float32_and_rounded_once(dtype):
    # 4,097 ones lose their last in bfloat16 or float16 sums; the bias is added before the rounding.
    x, w = torch.ones(1, 4097, dtype=dtype), torch.ones(2, 4097, dtype=dtype)
    assert linear(x, w, torch.full((2,), -4096.0, dtype=dtype)).tolist() == [[1.0, 1.0]]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("bias_dtype", FLOATS)
def test_the_bias_may_have_any_float_dtype(dtype, bias_dtype):
    x, w, b = normal(0, 4, 9, dtype=dtype), normal(1, 5, 9, dtype=dtype), normal(2, 5, dtype=bias_dtype)
    check(linear, formula(x, w, b), x, w, b)


@pytest.mark.parametrize("dtype", FLOATS)
def test_strides_do_not_matter(dtype):
    x, w, b = normal(0, 6, 8, dtype=dtype), normal(1, 5, 8, dtype=dtype), normal(2, 5, dtype=dtype) * 10
    views = [x.t().contiguous().t(), torch.stack((x, x), -1)[..., 0], x[:1].expand(6, 8)]
    weights = [w.t().contiguous().t(), torch.stack((w, w), -1)[..., 0], w[:1].expand(5, 8)]
    bias = torch.stack((b, b), -1)[..., 0]
    for x_view, w_view in zip(views, weights, strict=True):
        check(linear, formula(x_view, w_view), x_view, w_view)
        check(linear, formula(x_view, w_view, bias), x_view, w_view, bias)
    deep = x.view(1, 2, 3, 8).permute(2, 0, 1, 3)
    check(linear, formula(deep, w, b), deep, w, b)


def test_empty_axes():
    w = torch.ones(4, 3)
    assert linear(torch.ones(0, 3), w).shape == (0, 4)
    assert linear(torch.ones(2, 3), torch.ones(0, 3)).shape == (2, 0)
    nothing = linear(torch.ones(2, 0), torch.ones(4, 0), torch.arange(4.0))
    assert torch.equal(nothing, torch.arange(4.0).expand(2, 4))
    assert torch.equal(linear(torch.ones(2, 0), torch.ones(4, 0)), torch.zeros(2, 4))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_gradients_are_the_products(dtype):
    x, w, b = normal(0, 2, 3, 8, dtype=dtype), normal(1, 5, 8, dtype=dtype), normal(2, 5, dtype=torch.float32)
    dy = normal(3, 2, 3, 5, dtype=dtype)
    leaves = [t.requires_grad_() for t in (x, w, b)]
    dx, dw, db = torch.autograd.grad(linear(*leaves), leaves, dy)
    x, w, b, dy = (t.detach().double() for t in (x, w, b, dy))
    rows, x_rows = dy.reshape(6, 5), x.reshape(6, 8)
    eps = 2.0**-52 if dtype is torch.float64 else 2.0**-24
    bounded(dx, dy @ w, 5**0.5 * eps * (dy.abs() @ w.abs()), dtype)
    bounded(dw, rows.T @ x_rows, 6**0.5 * eps * (rows.abs().T @ x_rows.abs()), dtype)
    bounded(db, rows.sum(0), 6**0.5 * 2.0**-24 * rows.abs().sum(0), torch.float32)


W = torch.zeros(4, 3)
BAD = [
    (lambda: linear(torch.zeros(2, 4), W), ShapeError, r"x has shape \(2, 4\) and weight \(4, 3\)"),
    (lambda: linear(torch.zeros(()), W), ShapeError, "last axis"),
    (lambda: linear(torch.zeros(2, 3), torch.zeros(3)), ShapeError, "weight"),
    (lambda: linear(torch.zeros(2, 3), W, torch.zeros(3)), ShapeError, r"bias has shape \(3,\)"),
    (lambda: linear(torch.zeros(2, 3), W.double()), DtypeError, "x float32, weight float64"),
    (lambda: linear(torch.zeros(2, 3, dtype=torch.int64), W.long()), DtypeError, "int64"),
    (lambda: linear(torch.zeros(2, 3), W, torch.zeros(4, dtype=torch.int8)), DtypeError, "int8"),
    (lambda: linear(torch.zeros(2, 3), W.to("meta")), DeviceError, "meta"),
]


@pytest.mark.parametrize(("call", "error", "message"), BAD)
def test_bad_input_gives_a_typed_error_that_names_it(call, error, message):
    with pytest.raises(error, match=message):
        call()
