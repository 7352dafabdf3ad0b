"""Ordinary training on the simulated device: losses, normalisations, convolutions, optimisers."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from aten import FLOATS, agree, integers, values
from torch import nn

LOSSES = [
    "mse_loss",
    "l1_loss",
    "smooth_l1_loss",
    "binary_cross_entropy",
]
OPTIMISERS = {
    "adamw": (torch.optim.AdamW, {}),
    "adamw-amsgrad": (torch.optim.AdamW, {"amsgrad": True}),
    "adamw-one-by-one": (torch.optim.AdamW, {"foreach": False}),
    "adamw-fused": (torch.optim.AdamW, {"fused": True}),
    "adam": (torch.optim.Adam, {"weight_decay": 0.1}),
    "sgd": (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
    "rmsprop": (torch.optim.RMSprop, {}),
    "adagrad": (torch.optim.Adagrad, {}),
    "nadam": (torch.optim.NAdam, {}),
}


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("name", LOSSES)
def test_losses_of_differences(name, reduction, dtype):
    def loss(x, y):
        return getattr(F, name)(x, y.detach(), reduction=reduction) + 0 * y.sum()

    agree(loss, values(5, 7, dtype=dtype), values(5, 7, dtype=dtype, seed=1), grad=True, steps=32)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_negative_log_likelihood(reduction, dtype):
    x, target = values(5, 7, dtype=dtype, low=-2.0, high=2.0), integers(5)
    weight = torch.linspace(0.5, 2, 7)
    agree(lambda x, t: F.cross_entropy(x, t, reduction=reduction, ignore_index=2), x, target, grad=True, steps=32)
    agree(lambda x, t: F.nll_loss(x, t, weight.to(x), reduction=reduction), x, target, grad=True, steps=32)


@pytest.mark.parametrize("dtype", FLOATS)
def test_normalisations(dtype):
    x, w = values(5, 6, dtype=dtype, low=-1.0, high=1.0), values(6, dtype=dtype, seed=1)
    agree(lambda x, w: F.layer_norm(x, (6,), w, w), x, w, grad=True, steps=32)
    agree(lambda x, w: F.rms_norm(x, (6,), w, 1e-6), x, w, grad=True, steps=32)
    agree(lambda x: F.group_norm(x.view(5, 6, 1), 2), x, grad=True, steps=64)
    agree(lambda x: F.batch_norm(x.view(5, 6, 1), None, None, training=True), x, grad=True, steps=64)


@pytest.mark.parametrize("dtype", FLOATS)
def test_convolutions(dtype):
    x, w, b = values(2, 4, 9, dtype=dtype), values(6, 4, 3, dtype=dtype, seed=1), values(6, dtype=dtype, seed=2)
    agree(F.conv1d, x, w, b, grad=True, steps=32)
    agree(lambda x, w: F.conv1d(x, w, groups=4, padding=2), x, values(4, 1, 3, dtype=dtype), grad=True, steps=32)
    images, kernel = values(2, 3, 6, 6, dtype=dtype), values(5, 3, 3, 3, dtype=dtype)
    agree(lambda x, w: F.conv2d(x, w, padding=1, stride=2), images, kernel, grad=True, steps=32)


def trained(device, optimiser, options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.SiLU(), nn.LayerNorm(8), nn.Linear(8, 3)).to(device)
    x, target = values(16, 6).to(device), integers(16, high=3).to(device)
    steps = optimiser(model.parameters(), lr=1e-2, **options)
    for _ in range(5):
        steps.zero_grad()
        F.cross_entropy(model(x), target).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        steps.step()
    return [p.detach().cpu() for p in model.parameters()]


@pytest.mark.parametrize("name", OPTIMISERS)
def test_five_steps_of_an_optimiser(name):
    optimiser, options = OPTIMISERS[name]
    for got, want in zip(trained("npu", optimiser, options), trained("cpu", optimiser, options), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-4)


def test_the_gradient_scaler_unscales_and_backs_off():
    weight = nn.Parameter(torch.ones(3, device="npu"))
    steps, scaler = torch.optim.SGD([weight], lr=0.1), torch.amp.GradScaler("npu")
    scaler.scale((weight * 2).sum()).backward()
    scaler.step(steps)
    scaler.update()
    torch.testing.assert_close(weight.detach().cpu(), torch.full((3,), 0.8))
    before = scaler.get_scale()
    weight.grad = torch.full((3,), torch.inf, device="npu")
    scaler.step(steps)
    scaler.update()
    assert scaler.get_scale() == before / 2
    torch.testing.assert_close(weight.detach().cpu(), torch.full((3,), 0.8))


def test_autocast_computes_products_in_bfloat16():
    layer = nn.Linear(4, 4).npu()
    with torch.autocast("npu", dtype=torch.bfloat16):
        assert layer(torch.ones(2, 4, device="npu")).dtype is torch.bfloat16
