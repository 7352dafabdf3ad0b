"""What the attention tests share: random inputs, forced implementations, the contract's own error bound."""

from __future__ import annotations

import contextlib

import torch

import hal
from hal import philox
from hal.accuracy import Accumulator, unit_roundoff
from hal.op import OPS, Args, oracle

U_P = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


def normal(seed, *shape, dtype=torch.float64, scale=1.0):
    return philox.normal(seed, shape).mul(scale).to(dtype)


def qkv(B, S, L, H, K, D, E=None, dtype=torch.float64, seed=0):
    E = D if E is None else E
    return (
        normal(seed, B, S, H, D, dtype=dtype),
        normal(seed + 1, B, L, K, D, dtype=dtype),
        normal(seed + 2, B, L, K, E, dtype=dtype),
    )


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


@contextlib.contextmanager
def forced(op, implementation):
    with hal.use(backend="cpu", impl=f"{op}={implementation}"):
        yield


def budget_used(op_name, args, kwargs, results, declares_p):
    """The largest share c of |y - Y| <= u·|Y| + omega + c·E over all results; the contract allows 4."""
    op = OPS[op_name]
    a = op.bind(args, kwargs)
    expected = oracle(op.reference, *args, **kwargs)
    expected = expected if isinstance(expected, tuple) else (expected,)
    results = results if isinstance(results, tuple) else (results,)
    leading = results[0].dtype
    eps = unit_roundoff(torch.float64 if leading is torch.float64 else torch.float32)
    wide = {
        n: t.double() if isinstance(t, torch.Tensor) and t.is_floating_point() and t.element_size() > 1 else t
        for n, t in vars(a).items()
    }
    acc = Accumulator(eps, U_P.get(leading, 0.0) if declares_p else 0.0)
    bounds = op.accuracy.bound(Args(**wide), expected, acc)
    used = 0.0
    for y, Y, E in zip(results, expected, bounds, strict=True):
        assert torch.equal(y.isnan(), Y.isnan())
        assert torch.equal(y.isinf(), Y.isinf())
        finite = Y.isfinite()
        info = torch.finfo(y.dtype)
        rest = (y.double() - Y).abs() - unit_roundoff(y.dtype) * Y.abs() - info.smallest_normal * info.eps - 2.0**-126
        shares = torch.where(rest > 0, rest / E.expand(Y.shape), 0.0)[finite]
        used = max(used, float(shares.max()) if shares.numel() else 0.0)
    return used
