"""rms_norm, add_rms_norm and layer_norm: values, conventions, errors, gradients of both implementations."""

from __future__ import annotations

import math

import pytest
import torch
from contract import FLOATS, SIXTEEN, bounded, check, within

import hal
from hal import philox
from hal.errors import ArgumentError, DeviceError, DtypeError, ShapeError, UnsupportedError
from hal.op import oracle
from hal.ops import add_rms_norm, layer_norm, rms_norm


@pytest.fixture(params=["reference", "aten"], autouse=True)
def implementation(request):
    names = ("rms_norm", "add_rms_norm", "layer_norm")
    with hal.use(backend="cpu", impl=dict.fromkeys(names, request.param)):
        yield request.param


def normal(seed, *shape, dtype=torch.float32):
    return philox.normal(seed, shape).to(dtype)


def rms_formula(x, weight, eps, offset=0.0):
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * (weight.double() + offset)


def layer_formula(x, weight=None, bias=None, eps=1e-5):
    x = x.double()
    centred = x - x.mean(-1, keepdim=True)
    y = centred / (centred.square().mean(-1, keepdim=True) + eps).sqrt()
    return y * (1 if weight is None else weight.double()) + (0 if bias is None else bias.double())


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", [(576,), (1, 1, 576), (3, 7), (2, 3, 64), (5, 1)])
def test_rms_norm_is_its_formula(dtype, shape):
    x, w = normal(0, *shape, dtype=dtype), normal(1, shape[-1], dtype=dtype)
    check(rms_norm, rms_formula(x, w, 1e-5), x, w, 1e-5)
    check(rms_norm, rms_formula(x, torch.ones(shape[-1]), 1e-6), x)


def test_eps_is_inside_the_root():
    for rows in (1, 2):
        x = torch.full((rows, 4), 2.0**-10)
        check(rms_norm, torch.full((rows, 4), 0.5**0.5, dtype=torch.float64), x, torch.ones(4), 2.0**-20)


def test_a_row_of_zeros_is_zero_and_eps_may_be_zero():
    for rows in (1, 2):
        zero = torch.zeros(rows, 4)
        for eps in (1e-6, 0.0):
            assert torch.equal(rms_norm(zero, torch.ones(4), eps), zero)
            assert torch.equal(add_rms_norm(zero, zero, torch.ones(4), eps)[0], zero)
            assert torch.equal(layer_norm(zero + 3, torch.ones(4), torch.ones(4), eps), torch.ones(rows, 4))
        check(rms_norm, torch.ones(rows, 4, dtype=torch.float64), torch.ones(rows, 4), torch.ones(4), 0.0)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("size", [2.0**-130, 2.0**-127, 2.0**-90, 2.0**-64, 2.0**-63, 2.0**-62, 2.0**-40])
def test_an_eps_of_0_counts_as_the_smallest_normal_number_where_squares_underflow(dtype, size):
    size = size**8 if dtype is torch.float64 else max(size, torch.finfo(dtype).tiny * torch.finfo(dtype).eps)
    least = torch.finfo(torch.float64 if dtype is torch.float64 else torch.float32).tiny
    for rows in (1, 3):
        x = (normal(5, rows, 72, dtype=torch.float64).clamp(-3, 3) * size).to(dtype)
        scaled = x.double() / size  # squares of x itself may leave float64
        for op, t in ((rms_norm, scaled), (layer_norm, scaled - scaled.mean(-1, keepdim=True))):
            y = op(x, torch.ones(72), eps=0.0).double()
            floor = torch.tensor(least**0.5 / size, dtype=torch.float64)
            expected = t / t.square().mean(-1, keepdim=True).sqrt().hypot(floor)
            error = (y - expected).abs() - torch.finfo(dtype).eps / 2 * expected.abs() - torch.finfo(dtype).tiny
            assert (error <= 2.0**-18 * expected.abs().amax()).all(), (op, rows)


def test_weight_offset_is_added_to_the_weight_as_gemma_does():
    x, w = normal(0, 3, 16, dtype=torch.bfloat16), normal(1, 16, dtype=torch.bfloat16)
    # transformers' GemmaRMSNorm
    xf = x.float()
    gemma = (xf * torch.rsqrt(xf.pow(2).mean(-1, keepdim=True) + 1e-6) * (1.0 + w.float())).type_as(x)
    got = check(rms_norm, rms_formula(x, w, 1e-6, 1.0), x, w, weight_offset=1.0)
    within(rms_norm, gemma, rms_formula(x, w, 1e-6, 1.0), x, w, weight_offset=1.0)
    assert got.eq(gemma).float().mean() > 0.95
    check(rms_norm, rms_formula(x, w, 1e-6, 1.0), x.double(), w, weight_offset=1.0)


@pytest.mark.parametrize("dtype", SIXTEEN)
def test_round_before_weight_is_llamas_arithmetic_in_transformers(dtype):
    x, w = normal(0, 64, 256, dtype=dtype), normal(1, 256, dtype=dtype)
    # transformers' LlamaRMSNorm
    xf = x.to(torch.float32)
    llama = w * (xf * torch.rsqrt(xf.pow(2).mean(-1, keepdim=True) + 1e-6)).to(dtype)
    rounded, once = rms_norm(x, w, round_before_weight=True), rms_norm(x, w)
    # Values next to a tie of the first rounding may fall on either side of it.
    assert rounded.eq(llama).float().mean() > 0.999
    assert once.eq(llama).float().mean() < 0.95


@pytest.mark.parametrize("dtype", SIXTEEN)
def test_both_roundings_are_exactly_where_the_contract_puts_them(dtype):
    x = torch.zeros(3, 4, dtype=dtype)
    x[:, 0], x[:, 1] = 1.0, 1.0 + 2 * torch.finfo(dtype).eps
    w = torch.full((4,), 1.0 + torch.finfo(dtype).eps, dtype=dtype)
    exact = rms_formula(x, torch.ones(4), 1e-6)
    twice = (exact.to(dtype).double() * w.double()).to(dtype)
    assert torch.equal(rms_norm(x, w, round_before_weight=True), twice)
    assert torch.equal(rms_norm(x, w), (exact * w.double()).to(dtype))


def test_weight_may_have_any_float_dtype_and_the_result_keeps_that_of_x():
    for dtype in FLOATS:
        x = normal(0, 3, 8, dtype=dtype)
        for weight_dtype in FLOATS:
            w, b = normal(1, 8, dtype=weight_dtype), normal(2, 8, dtype=weight_dtype)
            check(rms_norm, rms_formula(x, w, 1e-6), x, w)
            check(layer_norm, layer_formula(x, w, b), x, w, b)
            check(add_rms_norm, (rms_formula(x + x, w, 1e-6), x.double() * 2), x, x, w)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", [(1, 1, 64), (4, 64)])
def test_add_rms_norm_is_an_addition_and_the_norm_of_its_result(dtype, shape):
    x, r, w = normal(0, *shape, dtype=dtype), normal(1, *shape, dtype=dtype), normal(2, 64, dtype=dtype)
    y, total = add_rms_norm(x, r, w, 1e-5, weight_offset=0.5, round_before_weight=True)
    assert torch.equal(total, (x.double() + r.double()).to(dtype))
    assert torch.equal(y, rms_norm(total, w, 1e-5, weight_offset=0.5, round_before_weight=True))


@pytest.mark.parametrize("dtype", SIXTEEN)
def test_round_residual_false_norms_the_unrounded_sum(dtype):
    x, r = normal(0, 64, 64, dtype=dtype), normal(1, 64, 64, dtype=dtype) * 1.37
    w = torch.ones(64)
    summed = x.double() + r.double()
    rounded, total = add_rms_norm(x, r, w, round_residual=True)
    unrounded, same_total = add_rms_norm(x, r, w, round_residual=False)
    assert torch.equal(total, same_total)
    of_rounded, of_unrounded = rms_formula(total, w, 1e-6).to(dtype), rms_formula(summed, w, 1e-6).to(dtype)
    assert unrounded.eq(of_unrounded).float().mean() > 0.999
    assert rounded.eq(of_rounded).float().mean() > 0.999
    assert unrounded.eq(of_rounded).float().mean() < 0.95


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", [(1, 1, 576), (3, 7), (2, 3, 64)])
def test_layer_norm_is_its_formula(dtype, shape):
    x = normal(0, *shape, dtype=dtype)
    w, b = normal(1, shape[-1], dtype=dtype), normal(2, shape[-1], dtype=dtype)
    check(layer_norm, layer_formula(x, w, b), x, w, b)
    check(layer_norm, layer_formula(x, None, b, 1e-3), x, None, b, 1e-3)
    check(layer_norm, layer_formula(x), x)


def test_the_variance_of_layer_norm_is_centred():
    # mean(x²) − mean(x)² in float32 loses all of a variance of 1 under a mean of 4,096.
    x = 4096.0 + normal(0, 4, 512)
    check(layer_norm, layer_formula(x), x)
    mean = x.mean(-1, keepdim=True)
    uncentred = (x - mean) * (x.square().mean(-1, keepdim=True) - mean.square()).rsqrt()
    with pytest.raises(AssertionError, match="but should be"):
        within(layer_norm, uncentred, layer_formula(x), x)


def test_a_constant_row_gives_the_bias():
    b = normal(1, 8)
    for rows in (1, 3):
        y = layer_norm(torch.full((rows, 8), 3.0), torch.ones(8), b)
        assert torch.equal(y, b.expand(rows, 8))


@pytest.mark.parametrize("dtype", FLOATS)
def test_strides_do_not_matter_and_results_are_contiguous(dtype, implementation):
    x, w = normal(0, 6, 8, dtype=dtype), normal(1, 8, dtype=dtype)
    views = {
        "transposed": x.t().contiguous().t(),
        "every second": torch.stack((x, x), -1).flatten(-2)[:, ::2],
        "reversed copy": x.flip(0).contiguous().flip(0),
    }
    for what, view in views.items():
        assert torch.equal(view, x)
        for got, want in (
            (rms_norm(view, w), rms_norm(x, w)),
            (layer_norm(view, w, w), layer_norm(x, w, w)),
            *zip(add_rms_norm(view, view, w), add_rms_norm(x, x, w), strict=True),
        ):
            assert got.is_contiguous(), what
            if implementation == "aten":
                assert torch.equal(got, want), what  # declared
        check(rms_norm, rms_formula(x, w, 1e-6), view, w)
        check(layer_norm, layer_formula(x, w, w), view, w, w)
    row, scattered = x[:1].expand(6, 8), torch.stack((w, w), -1)[:, 0]
    check(rms_norm, rms_formula(row, w, 1e-6), row, scattered)
    check(layer_norm, layer_formula(row, w, w), row, scattered, scattered)


@pytest.mark.parametrize("shape", [(0, 8), (2, 0, 8), (3, 0)])
def test_no_tokens_or_no_features_give_an_empty_result(shape, implementation):
    x, w = torch.zeros(shape), torch.ones(shape[-1])
    if shape[-1] == 0 and implementation == "aten":
        with pytest.raises(UnsupportedError, match="features is 0"):
            rms_norm(x, w)
        return
    assert rms_norm(x, w).shape == layer_norm(x, w, w).shape == shape
    assert [t.shape for t in add_rms_norm(x, x, w)] == [shape, shape]


def test_nan_and_inf_stay_in_their_row():
    x = normal(0, 3, 8)
    x[0, 2], x[1, 3] = math.nan, math.inf
    y = rms_norm(x, torch.ones(8))
    assert y[0].isnan().all()
    assert y[1, 3].isnan()
    assert torch.equal(y[1, :3], torch.zeros(3))
    assert torch.equal(y[2:], rms_norm(x, torch.ones(8))[2:])
    assert y[2].isfinite().all()
    alone = rms_norm(x[1:2], torch.ones(8))
    assert torch.equal(alone.isnan(), y[1:2].isnan())


def test_inputs_are_not_modified():
    for dtype in FLOATS:
        for rows in (1, 4):
            x, r = normal(0, rows, 8, dtype=dtype), normal(1, rows, 8, dtype=dtype)
            w, b = normal(2, 8, dtype=dtype), normal(3, 8, dtype=dtype)
            before = [t.clone() for t in (x, r, w, b)]
            for round_residual in (True, False):
                add_rms_norm(x, r, w, round_before_weight=True, round_residual=round_residual)
            rms_norm(x, w, weight_offset=1.0)
            layer_norm(x, w, b)
            assert all(torch.equal(now, old) for now, old in zip((x, r, w, b), before, strict=True))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("features", [5, 64, 577, 4096])
def test_layer_norm_of_a_row_has_the_same_bits_in_any_batch(features, dtype):
    x, w = normal(0, 37, features, dtype=dtype), normal(1, features, dtype=dtype)
    with hal.use(invariant=True, impl={"layer_norm": "aten"}):  # the one that declares it
        whole = layer_norm(x, w, w)
        assert torch.equal(torch.cat([layer_norm(row, w, w) for row in x.split(1)]), whole)
        assert torch.equal(torch.cat([layer_norm(part, w, w) for part in x.split(9)]), whole)


def norm_calls():
    return {
        "rms_norm": lambda x, r, w, b: rms_norm(x, w, 1e-5),
        "add_rms_norm": lambda x, r, w, b: add_rms_norm(x, r, w, 1e-5, round_residual=False)[0],
        "layer_norm": lambda x, r, w, b: layer_norm(x, w, b),
    }


def norm_gradients(call, dtype, leaf_dtype, mean=0.0):
    x = (mean + normal(0, 5, 96)).to(leaf_dtype).to(dtype).requires_grad_()
    r = normal(1, 5, 96, dtype=leaf_dtype).to(dtype).requires_grad_()
    w, b = (normal(2 + i, 96, dtype=leaf_dtype).to(dtype).requires_grad_() for i in range(2))
    dy = normal(7, 5, 96, dtype=leaf_dtype).to(dtype)
    return torch.autograd.grad(call(x, r, w, b), (x, r, w, b), dy, allow_unused=True)


@pytest.mark.parametrize("mean", [0.0, 50.0, 1000.0])
@pytest.mark.parametrize("name", norm_calls())
def test_float32_gradients_lie_within_their_derived_errors(name, mean):
    """dx = r(g − [mean g] − x̂·mean(g x̂)) with g = dy·w; dw = Σ dy·x̂; db = Σ dy.

    A sum over F errs by g(F), what precedes and follows it by a few ε; a shift s of x̂ (layer_norm: from the mean's
    error r·g(F)·mean|x|) moves dx by r·s(|mean(g x̂)| + |x̂||mean g|) and dw by Σ|dy|·s.
    """
    call = norm_calls()[name]
    got, want = (norm_gradients(call, dtype, torch.float32, mean) for dtype in (torch.float32, torch.float64))
    x, r, w, dy = (t.double() for t in (mean + normal(0, 5, 96), normal(1, 5, 96), normal(2, 96), normal(7, 5, 96)))
    x = x + r if name == "add_rms_norm" else x
    centred = x - x.mean(-1, keepdim=True) if name == "layer_norm" else x
    rstd = (centred.square().mean(-1, keepdim=True) + 1e-5).rsqrt()
    normed, g = centred * rstd, dy * w
    eps = 2.0**-24
    relative = (96**0.5 + 4) * eps
    error = relative * rstd * (g.abs() + normed.abs() * (g * normed).abs().mean(-1, keepdim=True))
    shift = torch.zeros_like(rstd)
    if name == "layer_norm":
        shift = rstd * 96**0.5 * eps * x.abs().mean(-1, keepdim=True)
        error = error + relative * rstd * g.abs().mean(-1, keepdim=True)
        means = (g * normed).mean(-1, keepdim=True).abs(), g.mean(-1, keepdim=True).abs()
        error = error + rstd * shift * (means[0] + normed.abs() * means[1])
    bounded(got[0], want[0], error, torch.float32)
    weight_error = (5**0.5 * eps + relative) * (dy * normed).abs().sum(0) + (dy.abs() * shift).sum(0)
    bounded(got[2], want[2], weight_error, torch.float32)
    if name == "add_rms_norm":
        assert torch.equal(got[1], got[0])
    if name == "layer_norm":
        bounded(got[3], want[3], 5**0.5 * eps * dy.abs().sum(0), torch.float32)


@pytest.mark.parametrize("dtype", SIXTEEN)
@pytest.mark.parametrize("name", norm_calls())
def test_16_bit_gradients_are_those_of_float32_rounded_once(name, dtype):
    call = norm_calls()[name]
    narrow, wide = (norm_gradients(call, d, dtype) for d in (dtype, torch.float32))
    for got, want in zip(narrow, wide, strict=True):
        assert (got is None) == (want is None)
        assert got is None or torch.equal(got, want.to(dtype))


def test_only_the_gradients_asked_for_are_computed():
    x, w = normal(0, 3, 8), normal(1, 8).requires_grad_()
    for y in (rms_norm(x, w), layer_norm(x, w, w.detach()), add_rms_norm(x, x, w)[0]):
        (dw,) = torch.autograd.grad(y.sum(), w)
        assert dw.shape == (8,)
    x.requires_grad_()
    _, total = add_rms_norm(x, x.detach(), w)
    (dx,) = torch.autograd.grad(total.sum(), x)
    assert torch.equal(dx, torch.ones_like(x))


def test_the_oracle_computes_in_float64_and_keeps_the_stored_roundings():
    x, w = normal(0, 3, 8, dtype=torch.bfloat16), normal(1, 8, dtype=torch.bfloat16)
    reference = rms_norm.op.reference
    y = oracle(reference, x, w)
    assert y.dtype is torch.float64
    assert torch.equal(y, rms_formula(x, torch.ones(8), 1e-6) * w.double()) or (
        (y - rms_formula(x, w, 1e-6)).abs().max() < 1e-14
    )
    twice = oracle(reference, x, w, round_before_weight=True)
    assert torch.equal(twice, rms_formula(x, torch.ones(8), 1e-6).to(torch.bfloat16).double() * w.double())


X = torch.zeros(2, 4)
BAD = [
    (lambda: rms_norm(X, torch.ones(5)), ShapeError, r"weight has shape \(5,\)"),
    (lambda: rms_norm(torch.zeros(()), None), ShapeError, "no axis"),
    (lambda: rms_norm(X.long()), DtypeError, "int64"),
    (lambda: rms_norm(X, torch.ones(4, dtype=torch.int32)), DtypeError, "int32"),
    (lambda: rms_norm(X, torch.ones(4, device="meta")), DeviceError, "meta"),
    (lambda: rms_norm(X, eps=-1.0), ArgumentError, "eps is -1.0"),
    (lambda: rms_norm(X, eps=math.nan), ArgumentError, "eps is NaN"),
    (lambda: rms_norm(X, weight_offset=math.nan), ArgumentError, "weight_offset is NaN"),
    (lambda: rms_norm([1.0]), (ArgumentError, DtypeError), "tensor"),
    (lambda: add_rms_norm(X, X[:1]), ShapeError, "residual"),
    (lambda: add_rms_norm(X, X.double()), DtypeError, "share one dtype"),
    (lambda: add_rms_norm(X, torch.zeros(2, 4, device="meta")), DeviceError, "meta"),
    (lambda: layer_norm(X, torch.ones(4), torch.ones(2, 4)), ShapeError, "bias"),
    (lambda: layer_norm(X, torch.ones(4), torch.ones(4, device="meta")), DeviceError, "meta"),
    (lambda: layer_norm(X, eps=-1e-9), ArgumentError, "eps"),
]


@pytest.mark.parametrize(("call", "error", "message"), BAD)
def test_bad_input_gives_a_typed_error_that_names_it(call, error, message):
    with pytest.raises(error, match=message):
        call()
