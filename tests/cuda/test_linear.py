"""Judges linear by cuBLAS as far as a CPU goes: the same calls of torch's, on CPU tensors, by hal's own quick suite.

The products are ATen's here, so roundings of cuBLAS itself are not shown; layouts, dtypes, empty inputs, gradients and
the settings are.
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from hal import registry
from hal.backends.cuda import linear
from hal.capability import Implementation, Supports
from hal.conformance import runner
from hal.conformance.case import Case, cases
from hal.conformance.site import Site
from hal.hookspec import hookimpl

(CUBLAS,) = linear.IMPLEMENTATIONS
SETTINGS = torch.backends.cuda.matmul
REDUCTION, ACCUMULATION = "allow_bf16_reduced_precision_reduction", "allow_fp16_accumulation"


@hookimpl
def hal_implementations(backend: str) -> tuple[Implementation, ...]:
    return (replace(CUBLAS, supports=Supports()),)


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    plugin = types.ModuleType("cublas_on_cpu")
    plugin.hal_implementations = hal_implementations  # type: ignore[attr-defined]
    registry.register(plugin, "cpu.cublas_on_cpu")
    # oneDNN's bfloat16 product reads past rows of odd lengths, and multiplies what it finds there by 0.
    with torch.backends.mkldnn.flags(enabled=False):
        yield Site.of("cpu")
    registry.unregister("cpu.cublas_on_cpu")


@pytest.mark.parametrize("case", cases("linear"), ids=lambda case: case.id)
def test_conforms_but_for_what_only_cublas_computes(site: Site, case: Case) -> None:
    result = runner.judge_case(site, case, "cublas")
    assert result.status == "passed", "\n".join(result.why)


def test_it_is_for_cuda_devices() -> None:
    assert CUBLAS.supports.device_types == {"cuda"}


def seen_during(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, *names: str) -> list[bool]:
    """The settings at the moment of the product."""
    seen: list[bool] = []
    multiply = torch.mm

    def watched(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        seen.extend(getattr(SETTINGS, name) for name in names)
        return multiply(left, right)

    monkeypatch.setattr(torch, "mm", watched)
    CUBLAS.forward(torch.ones(3, 8, dtype=dtype), torch.ones(5, 8, dtype=dtype))
    return seen


@pytest.mark.parametrize("allowed", [True, False])
def test_16_bit_partial_sums_are_off_during_a_product_and_as_before_after_it(
    monkeypatch: pytest.MonkeyPatch, allowed: bool
) -> None:
    before = getattr(SETTINGS, REDUCTION)
    try:
        setattr(SETTINGS, REDUCTION, allowed)
        assert seen_during(monkeypatch, torch.bfloat16, REDUCTION) == [False]
        assert getattr(SETTINGS, REDUCTION) is allowed
    finally:
        setattr(SETTINGS, REDUCTION, before)


def test_accumulation_in_float16_is_off_during_a_product_and_on_again_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        setattr(SETTINGS, ACCUMULATION, True)
        assert seen_during(monkeypatch, torch.float16, ACCUMULATION) == [False]
        assert getattr(SETTINGS, ACCUMULATION) is True
    finally:
        setattr(SETTINGS, ACCUMULATION, False)
