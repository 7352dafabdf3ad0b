"""cross_entropy: the formula beside torch's, what ignored rows may hold, gradients, bad input."""

from __future__ import annotations

import math
import pickle

import pytest
import torch
import torch.nn.functional as F

import hal
from hal import philox
from hal.errors import ArgumentError, DeviceError, DtypeError, ShapeError
from hal.ops import cross_entropy


@pytest.fixture(params=["reference", "aten"], autouse=True)
def implementation(request):
    with hal.use(backend="cpu", impl=f"cross_entropy={request.param}"):
        yield request.param


def make(rows, classes, seed=0, dtype=torch.float64, scale=2.0):
    logits = philox.normal(seed, (rows, classes)).mul(scale).to(dtype)
    return logits, philox.integers(seed + 1, (rows,), 0, classes)


def with_gradient(logits, target, **options):
    leaf = logits.detach().requires_grad_()
    loss = cross_entropy(leaf, target, **options)
    (gradient,) = torch.autograd.grad(loss.sum(), leaf)
    return loss.detach(), gradient


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("ignore_index", [-100, 3])
def test_float64_equals_torch_with_its_gradient(reduction, smoothing, ignore_index):
    logits, target = make(37, 19)
    target[5], target[20] = ignore_index, ignore_index
    options = {"reduction": reduction, "label_smoothing": smoothing, "ignore_index": ignore_index}
    leaf = logits.clone().requires_grad_()
    expected = F.cross_entropy(leaf, target, **options)
    (expected_gradient,) = torch.autograd.grad(expected.sum(), leaf)
    loss, gradient = with_gradient(logits, target, **options)
    torch.testing.assert_close(loss, expected.detach(), atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(gradient, expected_gradient, atol=1e-14, rtol=1e-12)


def test_z_loss_adds_its_multiple_of_the_squared_log_denominator():
    logits, target = make(11, 23)
    target[4] = -100
    plain = cross_entropy(logits, target, reduction="none")
    penalised = cross_entropy(logits, target, reduction="none", z_loss=0.25)
    expected = 0.25 * torch.logsumexp(logits, -1).square()
    expected[4] = 0
    torch.testing.assert_close(penalised - plain, expected, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1, "z_loss": 1e-3}], ids=["plain", "smoothed"])
def test_narrow_logits_are_computed_in_float32(dtype, options):
    logits, target = make(64, 1000, dtype=dtype, scale=5.0)
    target[::7] = -100
    loss, gradient = with_gradient(logits, target, **options)
    expected, expected_gradient = with_gradient(logits.double(), target, **options)
    assert loss.dtype == torch.float32
    assert gradient.dtype == dtype
    torch.testing.assert_close(loss.double(), expected, atol=2e-6, rtol=2e-6)
    # p errs by the sum of V exponentials and by the rounding of their arguments, the rest by one rounding
    # each; then comes the rounding to the logits' dtype.
    info, eps, n = torch.finfo(dtype), 2.0**-24, int((target != -100).sum())
    x = logits.double()
    lse = torch.logsumexp(x, -1, keepdim=True)
    p = (x - lse).exp() * (1 + 2 * options.get("z_loss", 0.0) * lse.abs())
    error = p * (math.sqrt(1000) * eps + 2 * eps * (1 + x.abs() + lse.abs())) + eps * F.one_hot(target % 1000, 1000)
    smoothed = options.get("label_smoothing", 0.0) / 1000 * 2 * eps
    allowed = 4 * (error + smoothed) / n + info.eps / 2 * expected_gradient.abs() + info.smallest_normal * info.eps
    assert ((gradient.double() - expected_gradient).abs() <= allowed).all()


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("rubbish", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1, "z_loss": 0.01}], ids=["plain", "smoothed"])
def test_rubbish_in_ignored_rows_has_no_influence(reduction, rubbish, options):
    logits, target = make(6, 9)
    target[2] = target[3] = -100
    spoilt = logits.clone()
    spoilt[2], spoilt[3, 4] = rubbish, rubbish
    loss, gradient = with_gradient(spoilt, target, reduction=reduction, **options)
    expected, expected_gradient = with_gradient(logits, target, reduction=reduction, **options)
    assert torch.equal(loss, expected)
    assert torch.equal(gradient, expected_gradient)
    assert not gradient[2:4].any()


@pytest.mark.parametrize("rows", [0, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1, "z_loss": 0.01}], ids=["plain", "smoothed"])
def test_without_targets_loss_and_gradient_are_zero(rows, dtype, reduction, options):
    logits = make(rows, 33, dtype=dtype)[0]
    loss, gradient = with_gradient(logits, torch.full((rows,), -100), reduction=reduction, **options)
    assert loss.shape == ((rows,) if reduction == "none" else ())
    assert loss.dtype == torch.float32
    assert not loss.any()
    assert gradient.shape == logits.shape
    assert not gradient.any()


def test_a_class_with_logit_minus_infinity_costs_infinitely_only_when_it_is_the_target():
    logits = torch.tensor([[0.0, 1.0, -math.inf], [0.0, 1.0, -math.inf]])
    target = torch.tensor([1, 2])
    loss, gradient = with_gradient(logits, target, reduction="none")
    assert loss[0].item() == pytest.approx(math.log(1 + math.exp(-1)), rel=1e-6)
    assert loss[1].item() == math.inf
    p = torch.softmax(logits[0], 0)
    torch.testing.assert_close(gradient, torch.stack([p, p]) - F.one_hot(target, 3))
    for smoothing in (0.1, 1.0):
        smoothed, _ = with_gradient(logits, target, reduction="none", label_smoothing=smoothing)
        assert smoothed.tolist() == [math.inf, math.inf]


def test_large_logits_do_not_overflow():
    logits = torch.tensor([[3e38, -3e38, 0.0], [60000.0, 59990.0, 0.0]])
    loss = cross_entropy(logits, torch.tensor([0, 1]), reduction="none")
    torch.testing.assert_close(loss, torch.tensor([0.0, 10.0 + math.log1p(math.exp(-10))]), atol=4e-3, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_strided_and_broadcast_logits_give_the_same_bits_and_stay_unchanged(dtype):
    logits, target = make(12, 40, dtype=dtype)
    for view in (
        logits.t().contiguous().t(),
        torch.stack([logits, logits], -1)[..., 1],
        logits[:1].expand(12, 40),
    ):
        before = view.clone()
        loss, gradient = with_gradient(view, target, reduction="none")
        dense_loss, dense_gradient = with_gradient(view.contiguous(), target, reduction="none")
        torch.testing.assert_close(loss, dense_loss, atol=1e-6, rtol=1e-6)
        torch.testing.assert_close(gradient, dense_gradient, atol=1e-6, rtol=1e-2)
        assert torch.equal(view, before)
        assert gradient.is_contiguous()


def test_gradient_passes_gradcheck():
    logits, target = make(5, 7)
    target[3] = -100
    for reduction in ("none", "mean", "sum"):
        assert torch.autograd.gradcheck(
            lambda x, r=reduction: cross_entropy(x, target, reduction=r, label_smoothing=0.2, z_loss=0.1),
            logits.clone().requires_grad_(),
        )


def test_incoming_gradients_scale_each_row():
    logits, target = make(6, 8)
    leaf = logits.clone().requires_grad_()
    weights = torch.tensor([1.0, -2.0, 0.0, 3.0, 0.5, 7.0], dtype=torch.float64)
    (gradient,) = torch.autograd.grad(cross_entropy(leaf, target, reduction="none"), leaf, weights)
    expected = (torch.softmax(logits, -1) - F.one_hot(target, 8)) * weights[:, None]
    torch.testing.assert_close(gradient, expected)


def bad_calls():
    x, t = torch.zeros(4, 5), torch.zeros(4, dtype=torch.int64)
    return [
        (ShapeError, "4 rows and target 3", (x, t[:3]), {}),
        (ShapeError, "logits", (x[0], t), {}),
        (ShapeError, "logits", (x[None], t), {}),
        (ShapeError, "target", (x, t[:, None]), {}),
        (ShapeError, "V must be at least 1", (x[:, :0], t), {}),
        (DtypeError, "logits", (x.long(), t), {}),
        (DtypeError, "int64", (x, t.int()), {}),
        (DtypeError, "int64", (x, t.float()), {}),
        (DeviceError, "target", (x, t.to("meta")), {}),
        (ArgumentError, "'none', 'mean', 'sum'", (x, t), {"reduction": "avg"}),
        (ArgumentError, "label_smoothing", (x, t), {"label_smoothing": 1.5}),
        (ArgumentError, "label_smoothing", (x, t), {"label_smoothing": math.nan}),
        (ArgumentError, "z_loss", (x, t), {"z_loss": -0.1}),
        (ArgumentError, "z_loss", (x, t), {"z_loss": math.nan}),
        (ArgumentError, r"target\[2\] is 5", (x, torch.tensor([0, 4, 5, 0])), {}),
        (ArgumentError, r"target\[1\] is -1", (x, torch.tensor([0, -1, 0, 0])), {}),
        (ArgumentError, r"target\[0\] is -100", (x, torch.tensor([-100, 0, 0, 0])), {"ignore_index": -1}),
    ]


@pytest.mark.parametrize(("error", "match", "args", "options"), bad_calls())
def test_bad_input_raises_a_typed_error_that_names_it(error, match, args, options):
    with pytest.raises(error, match=match):
        cross_entropy(*args, **options)


def test_the_operator_pickles_by_name():
    assert pickle.loads(pickle.dumps(cross_entropy.op)) is cross_entropy.op
