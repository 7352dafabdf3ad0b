"""Runs one operator under every implementation that serves this machine's CPU and GPU, and judges by the
operator's own contract. Where kernels are interpreted (`make triton`), theirs are among the CPU's.

A case holds the right result, computed in float64 by `case_models` (which shares no code with hal), and
mostly the result of a known fault. `Choice.check` demands that the implementation meet the element bound
around the right one; `told_apart` that the faulty one lie outside of it, so that the case could fail.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch.utils._pytree import tree_leaves, tree_map

import hal
from hal import registry
from hal.accuracy import Accumulator, unit_roundoff
from hal.capability import Implementation
from hal.errors import UnsupportedError
from hal.op import OPS

C = 4.0


@dataclass(frozen=True)
class Choice:
    """One implementation of one operator on one backend."""

    op: str
    backend: str
    implementation: Implementation
    device: str = "cpu"

    def __str__(self):
        return f"{self.backend}/{self.implementation.name}"

    def use(self, **settings):
        """Settings under which calls go to this implementation and no other."""
        return hal.use(backend=self.backend, impl=f"{self.op}={self.implementation.name}", **settings)

    def call(self, *args, **kwargs):
        """The public operator's result; skips with the reasons where the implementation refuses with its
        typed error."""
        args_there, kwargs_there = tree_map(self.moved, (args, kwargs))
        with self.use():
            try:
                found = getattr(hal.ops, self.op)(*args_there, **kwargs_there)
                self._bring_back(OPS[self.op].bind(args, kwargs), OPS[self.op].bind(args_there, kwargs_there))
                return tree_map(_home, found)
            except UnsupportedError as refusal:
                if self.implementation.name in ("reference", "composed"):
                    raise
                pytest.skip("; ".join(refusal.rejections[str(self)]))

    def moved(self, value):
        """The value on the implementation's device; a tensor in the memory layout that it has here."""
        if not isinstance(value, torch.Tensor) or self.device == "cpu":
            return value
        if value.requires_grad:
            return value.to(self.device)
        storage = value.untyped_storage().to(device=self.device)
        there = torch.empty(0, dtype=value.dtype, device=self.device)
        return there.set_(storage, value.storage_offset(), value.shape, value.stride())

    def _bring_back(self, here, there):
        """What the operator wrote."""
        for name in OPS[self.op].mutates if self.device != "cpu" else ():
            for ours, theirs in zip(*map(tree_leaves, (getattr(here, name), getattr(there, name))), strict=True):
                ours.copy_(theirs)

    def gradients(self, inputs, run, grad_out=None):
        """Gradients of Σ run(*inputs) (or of its product with `grad_out`) in each input."""
        leaves = [t.detach().clone().requires_grad_() for t in inputs]
        out = run(*leaves)
        with self.use():
            return torch.autograd.grad(out, leaves, torch.ones_like(out) if grad_out is None else grad_out)

    def check(self, got, expected, *args, **kwargs):
        """Each result in turn: shape, dtype, special values and the element bound around the expected one."""
        for y, Y, allowed in self._judged(got, expected, args, kwargs):
            assert y.shape == Y.shape
            special = ~Y.isfinite()
            assert torch.equal(y.double()[special].nan_to_num(7.0), Y[special].nan_to_num(7.0))
            error = (y.double() - Y).abs()
            worst = (error - allowed).masked_fill(special, 0.0)
            assert not y[~special].isnan().any(), "NaN where a number should be"
            assert worst.numel() == 0 or worst.max() <= 0, (
                f"error {error.flatten()[worst.argmax()]:.4g}, but should be at most "
                f"{allowed.flatten()[worst.argmax()]:.4g}"
            )

    def told_apart(self, faulty, expected, *args, **kwargs):
        """The faulty results break the bound somewhere."""
        for y, Y, allowed in self._judged(faulty, expected, args, kwargs, cast=False):
            if y.isnan().any() and not Y.isnan().any():
                return
            if ((y.double() - Y).abs() > allowed).any():
                return
        pytest.fail("the known fault would pass: this case proves nothing")

    def _judged(self, got, expected, args, kwargs, cast=True):
        op = OPS[self.op]
        a = op.bind(args, kwargs)
        results = got if isinstance(got, tuple) else (got,)
        wanted = expected if isinstance(expected, tuple) else (expected,)
        metas = op.meta(a)[: len(op.results)]
        # Optional results that a case does not ask for.
        absent = tuple(torch.zeros(m.shape, dtype=torch.float64) for m in metas[len(wanted) :])
        leading = getattr(a, op.schema_names[0])
        double = {
            name: value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value
            for name, value in vars(a).items()
        }
        eps = unit_roundoff(torch.float64 if leading.dtype is torch.float64 else torch.float32)
        u_p = self.implementation.declares.u_p.get(str(leading.dtype).removeprefix("torch."), 0.0)
        bounds = op.accuracy.bound(type(a)(**double), wanted + absent, Accumulator(eps, u_p))
        for y, Y, E, meta in zip(results, wanted, bounds, metas, strict=False):
            if cast:
                assert y.dtype == meta.dtype
            info = torch.finfo(meta.dtype)
            omega = info.smallest_normal * info.eps / 2 + 2.0**-126
            yield y, Y, (unit_roundoff(meta.dtype) * Y.abs() + omega + C * E).expand(Y.shape)


def _home(value):
    return value.cpu() if isinstance(value, torch.Tensor) else value


def choices(op):
    """Every implementation of an operator that serves this machine's CPU, and its GPU if it has one."""
    found = [("cpu", i) for i in registry.implementations("cpu", op)]
    found += [("portable:cpu", i) for i in registry.implementations("portable", op)]
    present = [Choice(op, backend, i) for backend, i in found]
    if torch.cuda.is_available():
        present += [Choice(op, "cuda", i, "cuda") for i in registry.implementations("cuda", op)]
    return present


def each_implementation(op):
    """Run a test once per implementation, as its argument `choice`."""
    return pytest.mark.parametrize("choice", choices(op), ids=str)
