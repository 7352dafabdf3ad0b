"""Results whose size depends on values: nonzero, boolean indexing, masked_select, unique; and what shows a tensor."""

from __future__ import annotations

import pytest
import torch
from aten import FLOATS, INTEGERS, agree, integers, values


def holes(*shape, dtype=torch.float32):
    """Values with zeros among them, and repetitions."""
    return integers(*shape, low=0, high=4, seed=3).to(dtype)


@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS, torch.bool], ids=str)
@pytest.mark.parametrize("shape", [(7,), (3, 5), (2, 3, 4), (0, 3), (1,)], ids=str)
def test_nonzero(shape, dtype):
    x = holes(*shape, dtype=dtype)
    agree(torch.nonzero, x)
    agree(torch.argwhere, x)
    agree(lambda x: torch.nonzero(x, as_tuple=True), x)
    agree(lambda x: torch.where(x), x)
    agree(lambda x: torch.zeros_like(x).nonzero(), x)


def test_nonzero_of_a_transposed_tensor():
    agree(lambda x: x.transpose(0, 2).nonzero(), holes(2, 3, 4))


@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS], ids=str)
def test_boolean_indexing(dtype):
    x = holes(4, 6, dtype=dtype)
    agree(lambda x: x[x > 1], x)
    agree(lambda x: x[(x > 1).any(1)], x)
    agree(lambda x: x[:, (x > 2).any(0)], x)
    agree(lambda x: x[x > 100], x)
    agree(lambda x: torch.masked_select(x, x > 1), x)
    agree(lambda x: torch.masked_select(x.t(), (x > 1)[:, :1].t()), x)


def test_boolean_assignment():
    def assigned(x):
        y = x.clone()
        y[y > 1] = 7
        y[(y == 0).any(1)] += 1
        return y

    agree(assigned, holes(4, 6))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_gradients_of_what_a_mask_leaves(dtype):
    agree(lambda x: x[x > 0.5] * 2, values(5, 6, dtype=dtype), grad=True)
    agree(lambda x: x.masked_select(x > 0.5) * 2, values(5, 6, dtype=dtype), grad=True)


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int32, torch.int64], ids=str)
def test_unique(dtype):
    x = holes(4, 6, dtype=dtype)
    agree(torch.unique, x)
    agree(lambda x: torch.unique(x, return_inverse=True, return_counts=True), x)
    agree(lambda x: torch._unique(x, return_inverse=True), x)
    agree(lambda x: torch.unique(x[:, :1], dim=0, return_inverse=True, return_counts=True), x)
    agree(lambda x: torch.unique(x[:2], dim=1), x)


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int64], ids=str)
def test_unique_consecutive(dtype):
    x = holes(4, 6, dtype=dtype)
    agree(lambda x: torch.unique_consecutive(x, return_inverse=True, return_counts=True), x)
    agree(torch.unique_consecutive, x)
    agree(lambda x: torch.unique_consecutive(x[:, :1], dim=0, return_inverse=True, return_counts=True), x)


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int64, torch.bool], ids=str)
def test_a_tensor_shows_itself(dtype):
    for x in (holes(2, 3, dtype=dtype), holes(3000, dtype=dtype), holes(dtype=dtype)):
        shown = repr(x.to("npu"))
        assert "device='npu:0'" in shown
        values_alone = repr(x).split("]")[0].removesuffix(")").split(", dtype")[0]
        assert shown.replace("\n", "").replace(" ", "").startswith(values_alone.replace("\n", "").replace(" ", ""))
