"""Sums, extremes, orders and products on the simulated device."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from aten import FLOATS, INTEGERS, agree, integers, values

SMOOTH = [
    "sum",
    "mean",
    "std",
    "var",
    "logsumexp",
    "amax",
    "amin",
    "norm",
]
WHOLE = [
    "sum",
    "prod",
    "max",
    "min",
    "amax",
    "amin",
    "argmax",
    "argmin",
    "any",
    "all",
    "count_nonzero",
]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", SMOOTH)
def test_reductions_and_their_gradients(name, dtype):
    function, x = getattr(torch, name), values(5, 7, dtype=dtype, low=-1.0, high=1.0)
    agree(lambda t: function(t, dim=1), x, grad=True, steps=16)
    agree(lambda t: function(t, dim=0, keepdim=True), x, grad=True, steps=16)
    agree(lambda t: function(t.t(), dim=(0, 1)), x, steps=16)


@pytest.mark.parametrize("dtype", FLOATS + INTEGERS + (torch.bool,))
@pytest.mark.parametrize("name", WHOLE)
def test_reductions_of_everything(name, dtype):
    if dtype is torch.bool and name in ("argmax", "argmin"):
        return
    x = torch.randperm(35, generator=torch.Generator().manual_seed(0)).view(5, 7)
    agree(getattr(torch, name), (x % 2 if name == "prod" or dtype is torch.bool else x).to(dtype), steps=16)


@pytest.mark.parametrize("dtype", FLOATS + INTEGERS)
def test_extremes_along_a_dimension(dtype):
    x = torch.randperm(35, generator=torch.Generator().manual_seed(0)).view(5, 7).to(dtype)
    agree(lambda t: (*t.max(1), *t.min(0, keepdim=True), t.argmax(1), t.argmin(0)), x)
    agree(lambda t: (*torch.cummax(t, 1), *torch.cummin(t, 0)), x)


@pytest.mark.parametrize("dtype", FLOATS + INTEGERS)
def test_orders(dtype):
    x = torch.randperm(35, generator=torch.Generator().manual_seed(0)).view(5, 7).to(dtype)
    agree(lambda t: (*t.sort(1), *t.sort(0, descending=True), t.argsort(1)), x)
    agree(lambda t: (*t.topk(3, 1), *t.topk(2, 0, largest=False), *t.kthvalue(2, 1)), x)


def test_a_stable_sort_keeps_the_order_of_equals():
    agree(lambda t: torch.sort(t, stable=True, dim=1, descending=True), integers(5, 40, high=4))


def test_places_in_sorted_sequences():
    x, v = values(3, 9).sort(1)[0], values(3, 4, seed=1)
    agree(lambda s, t: (torch.searchsorted(s, t), torch.searchsorted(s, t, right=True)), x, v)
    agree(lambda s, t: torch.bucketize(t, s[0]), x, v)
    agree(lambda s: torch.searchsorted(s[0], s[0], right=True, out_int32=True), x)


@pytest.mark.parametrize("dtype", FLOATS + INTEGERS)
def test_running_sums(dtype):
    x = values(5, 7, dtype=dtype) if dtype.is_floating_point else integers(5, 7, dtype=dtype, high=3)
    agree(lambda t: (t.cumsum(1), t.cumsum(0)), x, steps=16)
    agree(lambda t: t.cumprod(1), x, steps=16)


@pytest.mark.parametrize("dtype", FLOATS)
def test_matrix_products_and_their_gradients(dtype):
    m, k, batch = values(5, 7, dtype=dtype), values(7, 6, dtype=dtype, seed=1), values(3, 5, 7, dtype=dtype, seed=2)
    for function, inputs in (
        (torch.mm, (m, k)),
        (torch.matmul, (batch, k)),
        (torch.matmul, (m.t(), m)),
        (torch.bmm, (batch, batch.transpose(1, 2))),
        (torch.mv, (m, k[:, 0])),
        (torch.dot, (m[0], k[:, 0])),
        (F.linear, (batch, k.t(), k[0])),
        (F.linear, (batch, k.t())),
        (lambda c, a, b: torch.addmm(c, a, b, beta=0.5, alpha=2), (values(5, 6, dtype=dtype), m, k)),
        (lambda c, a, b: torch.baddbmm(c, a, b, beta=0.5), (values(5, 5, dtype=dtype), batch, batch.transpose(1, 2))),
        (torch.addmv, (m[:, 0], m, k[:, 0])),
        (lambda a, b: torch.einsum("bij,jk->bik", a, b), (batch, k)),
    ):
        agree(function, *inputs, grad=True, steps=16)


def test_addmm_with_beta_0_does_not_read_what_it_adds_to():
    m = values(3, 4)
    assert torch.addmm(torch.full((3, 3), torch.nan).npu(), m.npu(), m.t().npu(), beta=0).isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.int32])
def test_the_cube_core_has_no_such_format(dtype):
    m = integers(3, 3, dtype=dtype).npu()
    with pytest.raises(RuntimeError, match="the cube core takes"):
        torch.matmul(m, m)


@pytest.mark.parametrize("dtype", FLOATS)
def test_softmax_and_its_logarithm(dtype):
    x = values(5, 7, dtype=dtype, low=-8.0, high=8.0)
    agree(lambda t: t.softmax(-1), x, grad=True, steps=16)
    agree(lambda t: t.log_softmax(0), x, grad=True, steps=16)
    agree(lambda t: F.softmax(t, 1, dtype=torch.float32), x)


def test_a_row_of_nothing_is_nan():
    row = torch.full((2, 3), float("-inf")).npu()
    assert row.softmax(-1).isnan().all()
    assert torch.equal(torch.logsumexp(row, 1).cpu(), torch.full((2,), float("-inf")))


def test_empty_reductions():
    none = torch.zeros(3, 0)
    agree(lambda t: (t.sum(1), t.sum(), t.any(1), t.all(1), t.cumsum(1), t.prod(1)), none)
    assert torch.zeros(0, 3).npu().mean(0).isnan().all()
    agree(lambda t: t @ t.t(), none)
