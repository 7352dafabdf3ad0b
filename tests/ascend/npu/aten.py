"""A computation on the simulated device beside the same one on the CPU in float64."""

from __future__ import annotations

import torch
from torch import Tensor

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)


def values(*shape, dtype=torch.float32, low=0.1, high=0.9, seed=0):
    """Numbers in [low, high), the same on every call."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.rand(shape, generator=generator, dtype=torch.float64) * (high - low) + low
    return drawn.to(dtype)


def integers(*shape, dtype=torch.int64, low=0, high=7, seed=0):
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _results(function, inputs, grad):
    leaves = [t.clone().requires_grad_(grad and t.is_floating_point()) for t in inputs]
    results = function(*leaves)
    results = list(results) if isinstance(results, tuple | list) else [results]
    if grad:
        # Weights that differ, so that gradients of permuted elements differ too.
        total = sum(
            (r * torch.linspace(0.5, 1.5, r.numel(), dtype=r.dtype).view(r.shape).to(r.device)).sum() for r in results
        )
        total.backward()
        results += [leaf.grad for leaf in leaves if leaf.requires_grad]
    return [r.detach().cpu() if isinstance(r, Tensor) else torch.tensor(r) for r in results]


def agree(function, *inputs, grad=False, steps=4):
    """The device's results are those of the CPU in float64 to within `steps` roundings; what is exact is equal."""
    expected = _results(function, [t.double() if t.is_floating_point() else t for t in inputs], grad)
    actual = _results(function, [t.to("npu") for t in inputs], grad)
    assert len(actual) == len(expected)
    for got, want in zip(actual, expected, strict=True):
        assert got.shape == want.shape
        if not got.is_floating_point():
            assert got.dtype == want.dtype
            assert torch.equal(got, want)
            continue
        precision = steps * torch.finfo(got.dtype).eps
        scale = want[want.isfinite()].abs().max().item() if want.isfinite().any() else 0.0
        torch.testing.assert_close(got.double(), want.double(), rtol=precision, atol=precision * scale, equal_nan=True)
