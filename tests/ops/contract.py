"""Judging a result against a formula written in the test, within the operator's own accuracy contract."""

from __future__ import annotations

import torch

from hal.accuracy import Accumulator, unit_roundoff
from hal.op import Args

FLOATS = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
SIXTEEN = [torch.bfloat16, torch.float16]


def within(public, got, formula, *args, **kwargs):
    """|got − formula| ≤ u|formula| + ω + 4E for each result, E from the contract; formulas are in float64."""
    op = public.op
    a = op.bind(args, kwargs)
    first = next(v for v in vars(a).values() if isinstance(v, torch.Tensor))
    wide = torch.float64 if first.dtype is torch.float64 else torch.float32
    double = {k: v.double() if isinstance(v, torch.Tensor) and v.is_floating_point() else v for k, v in vars(a).items()}
    gots, formulas = ((t if isinstance(t, tuple) else (t,)) for t in (got, formula))
    bounds = op.accuracy.bound(Args(**double), formulas, Accumulator(unit_roundoff(wide)))
    for name, y, want, error, meta in zip(op.results, gots, formulas, bounds, op.meta(a), strict=False):
        assert (tuple(y.shape), y.dtype) == (tuple(meta.shape), meta.dtype), name
        assert y.is_contiguous(), f"{name} has strides {y.stride()} for shape {tuple(y.shape)}"
        info = torch.finfo(y.dtype)
        omega = info.tiny * info.eps / 2 + (torch.finfo(wide).tiny if wide is torch.float32 else 0.0)
        # The formula is itself computed in float64: where the accumulator is float64 too it errs as the result does.
        allowed = unit_roundoff(y.dtype) * want.abs() + omega + (4 if wide is torch.float32 else 8) * error
        wrong = (y.double() - want).abs() > allowed
        if wrong.any():
            at = tuple(wrong.nonzero()[0].tolist())
            raise AssertionError(
                f"{op.name}: {name}{list(at)} = {y[at].item()}, but should be {want[at].item()} "
                f"within {allowed.expand_as(y)[at].item():.3g}"
            )


def check(public, formula, *args, **kwargs):
    """Call the operator and judge its result against `formula`; the inputs must come back as they were."""
    tensors = [t for t in (*args, *kwargs.values()) if isinstance(t, torch.Tensor)]
    before = [t.detach().clone() for t in tensors]
    got = public(*args, **kwargs)
    within(public, got, formula, *args, **kwargs)
    for t, old in zip(tensors, before, strict=True):
        assert torch.equal(t.nan_to_num(7.0), old.nan_to_num(7.0)), f"{public.op.name} modified an input"
    return got


def bounded(got, want, error, dtype):
    """A gradient within one rounding to its dtype and 4 times its derived error."""
    assert got.dtype is dtype
    assert got.shape == want.shape
    excess = (got.double() - want).abs() - unit_roundoff(dtype) * want.abs() - 2.0**-126 - 4 * error
    assert excess.max() <= 0, f"{excess.max():.3g} more than allowed, where the largest is {want.abs().max():.3g}"
