"""An implementation that prepares: asked once for a plan, and what it returns serves that plan's calls alone."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import hal
from hal import registry
from hal.capability import Implementation
from hal.contract import Args
from hal.hookspec import hookimpl

softmax = hal.ops.softmax


class Prepared:
    """softmax times two, by a function that knows the shape it was made for."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, ...]] = []
        self.implementation = Implementation(
            "softmax", "prepared", self.forward, priority=1000, prepare=self.prepare, backward=None
        )

    @staticmethod
    def forward(x: Tensor, dim: int = -1) -> Tensor:
        raise AssertionError("a plan calls what was prepared")

    def prepare(self, a: Args) -> Callable[..., Tensor]:
        shape = tuple(a.x.shape)
        self.asked.append(shape)

        def call(x: Tensor, dim: int = -1) -> Tensor:
            assert tuple(x.shape) == shape and dim == a.dim
            return softmax.op.reference(x, dim) * 2

        return call


@pytest.fixture
def prepared() -> Iterator[Prepared]:
    made = Prepared()
    plugin: Any = types.ModuleType("prepares")
    plugin.hal_implementations = hookimpl(lambda backend: [made.implementation] if backend == "cpu" else [])
    registry.register(plugin, "cpu.prepares")
    yield made
    registry.unregister("cpu.prepares")


def test_it_is_asked_once_for_calls_of_one_plan_and_again_for_another(prepared: Prepared) -> None:
    for rows in (2, 2, 3, 2):
        x = torch.randn(rows, 5)
        assert torch.equal(softmax(x), softmax.op.reference(x) * 2)
    assert prepared.asked == [(2, 5), (3, 5)]
    x = torch.randn(2, 5)
    assert torch.equal(softmax(x, dim=0), softmax.op.reference(x, 0) * 2)
    assert prepared.asked == [(2, 5), (3, 5), (2, 5)]


def test_it_serves_recorded_and_compiled_calls_too(prepared: Prepared) -> None:
    x = torch.randn(2, 5, requires_grad=True)
    assert torch.equal(softmax(x), softmax.op.reference(x) * 2)
    assert torch.equal(torch.ops.hal.softmax_fwd(x.detach(), -1, False), softmax.op.reference(x) * 2)
    assert prepared.asked


def test_the_choice_of_another_implementation_leaves_it_alone(prepared: Prepared) -> None:
    with hal.use(impl={"softmax": "reference"}):
        x = torch.randn(2, 5)
        assert torch.equal(softmax(x), softmax.op.reference(x))
    assert prepared.asked == []
