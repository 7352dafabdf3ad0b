"""attention under its derived error bounds: results, gradients, and mistakes that must not pass."""

from __future__ import annotations

import pytest
import torch
from attention_support import budget_used, forced, normal, qkv

from hal.accuracy import Accumulator, unit_roundoff
from hal.op import OPS, baseline
from hal.ops._attention_bound import gradient_bound
from hal.ops._attention_core import Sight
from hal.ops.attention import attention


@pytest.fixture(params=["reference", "aten"])
def implementation(request):
    with forced("attention", request.param):
        yield request.param


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("S", "L"), [(1, 1), (1, 1100), (70, 70), (33, 600)])
@pytest.mark.parametrize(
    "options", [{}, {"causal": True}, {"window": (20, 0)}, {"mask": True}], ids=["plain", "causal", "window", "mask"]
)
@pytest.mark.parametrize("return_lse", [False, True])
def test_errors_stay_within_the_derived_bound(implementation, dtype, S, L, options, return_lse):
    q, k, v = qkv(1, S, L, 6, 2, 64, dtype=dtype)
    options = {"mask": normal(50, 1, 1, S, L) > -0.3} if "mask" in options else options
    options = options | {"return_lse": return_lse}
    result = attention(q, k, v, **options)
    assert budget_used("attention", (q, k, v), options, result, implementation == "aten") <= 4


@pytest.mark.parametrize(
    "mistake",
    [
        {"scale": 8**-0.5 * (1 + 2**-8)},
        {"causal": False},
        {"window": (5, None)},
        {"softcap": 30.0},
    ],
    ids=["scale", "causal", "window", "softcap"],
)
def test_the_bound_tells_mistakes_apart(mistake):
    q, k, v = qkv(1, 40, 40, 4, 2, 8, dtype=torch.float32)
    asked = {"causal": True, "window": (4, None)}
    wrong = attention(q, k, v, **(asked | mistake))
    assert budget_used("attention", (q, k, v), asked, wrong, False) > 4


def gradient_budget_used(dtype, asked, done, rounding=None, declares_p=False):
    """The largest share of the derived bound that the gradients of `done` use, when `asked` was wanted."""
    q, k, v = qkv(1, 48, 64, 4, 2, 32, 16, dtype=dtype)
    upstream = normal(9, 1, 48, 4, 16, dtype=dtype)
    wide = [t.double().requires_grad_() for t in (q, k, v)]
    o = attention(*wide, **asked)
    expected = torch.autograd.grad(o, wide, upstream.double())
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    result = attention(*leaves, **done) if rounding is None else baseline(rounding, OPS["attention"].reference, *leaves)
    found = torch.autograd.grad(result, leaves, upstream)
    left, right = asked.get("window", (None, None))
    bounds = gradient_bound(
        *(t.detach() for t in (*wide, o)),
        upstream.double(),
        Sight(asked.get("causal", False), left, right),
        Accumulator(unit_roundoff(torch.float32), unit_roundoff(dtype) if declares_p else 0.0),
        0.0,
        softcap=asked.get("softcap"),
        scale=32**-0.5,
        sinks_H=None,
    )
    used = 0.0
    for d, D, E in zip(found, expected, bounds[:3], strict=True):
        rest = (d.double() - D).abs() - unit_roundoff(dtype) * D.abs() - 2.0**-125
        used = max(used, float(torch.where(rest > 0, rest / E, 0.0).max()))
    return used


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (9, 2)}, {"softcap": 2.0}], ids=str)
def test_errors_of_gradients_stay_within_the_derived_bound(dtype, options):
    assert gradient_budget_used(dtype, options, options) <= 4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_rounding_of_p_and_ds_must_be_declared(dtype):
    assert gradient_budget_used(dtype, {}, {}, rounding=dtype, declares_p=True) <= 4
    assert gradient_budget_used(dtype, {}, {}, rounding=dtype, declares_p=False) > 4


@pytest.mark.parametrize(
    "mistake", [{"scale": 32**-0.5 * (1 + 2**-8)}, {"causal": False}, {"window": (20, None)}], ids=str
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_bound_of_gradients_tells_mistakes_apart(dtype, mistake):
    assert gradient_budget_used(dtype, {"causal": True}, {"causal": True} | mistake) > 4
