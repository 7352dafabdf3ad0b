"""Judges the implementations by hal's own quick suite, their kernels run by Triton's interpreter: simulated.

They are registered beside the CPU's implementations and called through the public operators, on CPU tensors. Each case
is judged twice: with the tiles of the host side, and with tiles so small that most rows are walked in blocks.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
import triton_interpreter  # noqa: F401  (mends the interpreter before a kernel is loaded)

from hal import registry
from hal.backends.ascend.triton import IMPLEMENTATIONS, launch, rotary
from hal.capability import Implementation
from hal.conformance import runner
from hal.conformance.case import Case, cases
from hal.conformance.judge import judge
from hal.conformance.site import Site
from hal.hookspec import hookimpl

# The CPU's descriptor names no architecture that triton-ascend compiles for.
ANYWHERE = tuple(replace(found, supports=replace(found.supports, architectures=None)) for found in IMPLEMENTATIONS)
SUITE = [case for found in IMPLEMENTATIONS for case in cases(found.op)]
# What tiles can change: the forward pass, in a 16-bit dtype and with special values.
TILED = [
    case
    for case in SUITE
    if case.tags & {"grid", "edge"} and not case.gradient and (case.dtype == "bfloat16" or "special" in case.tags)
]

pytestmark = pytest.mark.filterwarnings(
    "ignore:Conversion of an array with ndim:DeprecationWarning",  # the interpreter's own
    "ignore::RuntimeWarning",  # numpy's, where Inf and NaN come up
)


@hookimpl
def hal_implementations(backend: str) -> tuple[Implementation, ...]:
    return ANYWHERE


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    plugin = types.ModuleType("ascend_kernels")
    plugin.hal_implementations = hal_implementations  # type: ignore[attr-defined]
    registry.register(plugin, "cpu.ascend_kernels")
    yield Site.of("cpu")
    registry.unregister("cpu.ascend_kernels")


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few cores, so that programs take several tiles; CPU tensors need no device made current."""
    monkeypatch.setattr(launch, "vector_cores", lambda device: 3)
    monkeypatch.setattr(launch, "on", lambda device: contextlib.nullcontext())
    torch.set_num_threads(1)


def conforms(site: Site, case: Case) -> None:
    result = runner.judge_case(site, case, "triton")
    if case.dtype == "float64":
        assert (result.status, result.why) == (
            "unsupported",
            ("dtype float64 is not among bfloat16, float16, float32",),
        )
    else:
        assert result.status == "passed", "\n".join(result.why)


@pytest.mark.parametrize("case", SUITE, ids=lambda case: case.id)
def test_conforms_with_its_own_tiles(site: Site, case: Case) -> None:
    conforms(site, case)


@pytest.mark.parametrize("case", TILED, ids=lambda case: case.id)
def test_conforms_with_rows_in_blocks(site: Site, case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"WHOLE_ROW": 64, "TILE": 256, "MOST_ROWS": 16}.items():
        monkeypatch.setattr(launch, name, value)
    monkeypatch.setattr(rotary, "HEADS_AND_DIMS", 256)
    conforms(site, case)


def test_the_suite_tells_the_two_roundings_of_the_residual_apart() -> None:
    honest = next(found for found in ANYWHERE if found.op == "add_rms_norm")

    def swapped(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, **numbers: object) -> object:
        return honest.forward(x, residual, weight, **numbers | {"round_residual": not numbers["round_residual"]})

    judged = {case.id: judge(case, swapped).status for case in TILED if case.op == "add_rms_norm"}
    assert "failed" in judged.values()
