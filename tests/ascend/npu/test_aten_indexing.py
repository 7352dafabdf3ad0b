"""Reads, writes and rearrangements on the simulated device."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from aten import FLOATS, INTEGERS, agree, integers, values

EVERY = (*FLOATS, *INTEGERS, torch.bool)
BYTES = (torch.float8_e4m3fn, torch.float8_e5m2)


@pytest.fixture(params=EVERY, ids=str)
def x(request):
    return integers(5, 7, dtype=request.param, seed=3)


def written(t, where, value):
    t = t.clone()
    t[where] = value
    return t


def test_reads_by_index(x):
    i = torch.tensor([0, 2, -1])
    agree(lambda t, i: (t[i], t[:, i], t[i, i], t[i[:, None], i], t[None, :, i]), x, i)
    agree(lambda t, i: (t.index_select(1, i), t.index_select(0, i)), x, i.abs())
    agree(lambda t, i: (t.gather(1, i), t.take_along_dim(i, 1), t.take(i)), x, integers(5, 3))


def test_writes_by_index(x):
    i = torch.tensor([0, 2])
    agree(lambda t, i: (written(t, i, 1), written(t, (slice(None), i), 1), written(t, (i, i), t[1, :2])), x, i)
    agree(lambda t: (written(t, (slice(1, 3), slice(None, None, 2)), 1), written(t, t.bool(), t[0, 0])), x)
    agree(lambda t, i: (t.index_copy(0, i, t[3:]), t.index_fill(1, i, 1)), x, i)
    agree(lambda t, i: (t.scatter(1, i, t.flip(1)), t.scatter(1, i, 1)), x, torch.tensor([[1, 3]] * 5))
    agree(lambda t: t.masked_scatter(t.bool(), t.flip(0)), x)


@pytest.mark.parametrize("dtype", FLOATS + INTEGERS)
def test_writes_that_add(dtype):
    x = integers(5, 7, dtype=dtype)
    agree(lambda t, i: t.index_put((i,), t[:3], accumulate=True), x, torch.tensor([0, 2, 2]))
    agree(lambda t, i: t.index_add(0, i, t[:3]), x, torch.tensor([0, 2, 2]))
    agree(lambda t, i: (t.scatter_add(1, i, t), t.scatter_reduce(1, i, t, "amax")), x, integers(5, 7, seed=1))
    agree(lambda t, i: t.scatter_reduce(1, i, t, "sum", include_self=False), x, integers(5, 7, seed=1))


def test_rearrangements(x):
    agree(lambda t: (torch.cat([t, t[:2]]), torch.cat([t, t], 1), torch.stack([t, t], 1)), x)
    agree(lambda t: (t.repeat(2, 3), t.repeat_interleave(2, 0), t.roll(2, 1), t.flip(0, 1), t.tril(), t.triu(1)), x)
    agree(lambda t: (*t.split([2, 5], 1), *t.chunk(2), t.t().contiguous()), x)
    agree(lambda t: (t[:, ::3].clone(), t[:, None].contiguous()), x)
    agree(lambda t: (t.unfold(1, 3, 2).contiguous(), t.expand(2, 5, 7).contiguous(), t.diagonal().clone()), x)
    agree(lambda t: (t.as_strided((3, 2), (2, 9), 1).clone(), t.as_strided((4, 4), (1, 1)).clone()), x)
    agree(lambda t: (F.pad(t, (1, 2)), F.pad(t, (1, 0, 2, 1), value=1)), x)


def test_copies_between_any_strides(x):
    def copied(t):
        target = torch.zeros(7, 10, dtype=t.dtype, device=t.device)
        target[:, 1::2].copy_(t.t())
        target.t()[0, 1:6] = t[:, 0]
        return target

    agree(copied, x)


@pytest.mark.parametrize("to", EVERY, ids=str)
def test_casts(x, to):
    agree(lambda t: (t.to(to), t.t().to(to), torch.zeros(5, 7, dtype=to, device=t.device).copy_(t)), x)


@pytest.mark.parametrize("dtype", BYTES, ids=str)
def test_eight_bit_floats_are_moved_and_cast(dtype):
    x = values(5, 7, low=-2.0, high=2.0)
    small = x.to(dtype)
    on_device = small.npu()
    assert torch.equal(on_device.cpu().view(torch.uint8), small.view(torch.uint8))
    assert torch.equal(on_device.t().contiguous().float().cpu(), small.float().t())
    assert torch.equal(x.npu().to(dtype).float().cpu(), small.float())
    assert torch.equal(on_device.view(torch.uint8).cpu(), small.view(torch.uint8))
    assert torch.equal(torch.cat([on_device, on_device]).float().cpu(), torch.cat([small.float(), small.float()]))


def test_fills(x):
    agree(lambda t: (t.clone().fill_(1), t.clone().zero_(), torch.ones_like(t), torch.full_like(t, 1)), x)
    agree(lambda t: (t.clone().fill_(t[0, 0]), t.new_zeros(3), t.clone().fill_diagonal_(1)), x)


@pytest.mark.parametrize(
    "function",
    [
        lambda d: torch.arange(5, device=d),
        lambda d: torch.arange(9, 1, -3, device=d),
        lambda d: torch.arange(0.0, 1.0, 0.1, device=d),
        lambda d: torch.arange(5, device=d, dtype=torch.float16),
        lambda d: torch.linspace(0, 1, 7, device=d),
        lambda d: torch.eye(4, 3, device=d),
        lambda d: torch.full((2,), True, device=d),
        lambda d: torch.cat([torch.zeros(0, device=d), torch.zeros(2, 3, device=d)]),
        lambda d: F.one_hot(torch.arange(3, device=d), 5),
        lambda d: torch.stack(torch.meshgrid(torch.arange(3, device=d), torch.arange(2, device=d), indexing="ij")),
    ],
)
def test_made_of_numbers(function):
    torch.testing.assert_close(function("npu").cpu(), function("cpu"))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(
    "function",
    [
        lambda t, i: t[i],
        lambda t, i: t.index_select(0, i),
        lambda t, i: t.gather(0, i[:, None]),
        lambda t, i: torch.zeros_like(t).index_add(0, i, t[:3]),
        lambda t, i: torch.cat([t, t * 2], 1),
        lambda t, i: torch.stack([t, t]),
        lambda t, i: t[1:3, ::2] * 1,
        lambda t, i: t.expand(3, 5, 7) * 2,
        lambda t, i: t.masked_fill(t > 0.5, 0.0),
        lambda t, i: torch.where(t > 0.5, t, t * 2),
        lambda t, i: t.sort(1)[0],
        lambda t, i: t.topk(2, 1)[0],
        lambda t, i: F.pad(t, (1, 1)),
        lambda t, i: t.unfold(1, 3, 2) * 1,
        lambda t, i: t.tril().roll(1, 0).flip(1),
        lambda t, i: F.embedding(i, t),
        lambda t, i: F.embedding(i, t, padding_idx=2),
    ],
)
def test_gradients_of_movement(function, dtype):
    agree(function, values(5, 7, dtype=dtype), torch.tensor([0, 2, 2]), grad=True, steps=16)
