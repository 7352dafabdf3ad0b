"""What holds where triton-ascend is not installed: importing costs nothing, and every request is told why."""

from __future__ import annotations

import importlib.util
import types
from collections.abc import Iterator
from dataclasses import replace
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest
import torch
from core_processes import python

import hal.ops
from hal import registry, selection, use
from hal.backends.ascend import implementations
from hal.backends.ascend import triton as kernels
from hal.capability import Implementation, Rejected
from hal.hookspec import hookimpl


@hookimpl
def hal_implementations(backend: str) -> list[Implementation]:
    """As declared, but for any architecture: what remains is whether the kernels can be compiled."""
    return [replace(i, supports=replace(i.supports, architectures=None)) for i in kernels.IMPLEMENTATIONS]


@pytest.fixture
def registered() -> Iterator[None]:
    plugin = types.ModuleType("ascend_kernels")
    plugin.hal_implementations = hal_implementations
    registry.register(plugin, "cpu.ascend_kernels")
    yield
    registry.unregister("cpu.ascend_kernels")


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Lets a test say which triton is found; the device is none of the simulated ones, whatever this process loaded."""
    monkeypatch.setattr(kernels.simulator, "active", lambda: False)
    kernels.missing.cache_clear()
    yield monkeypatch
    kernels.missing.cache_clear()


def answer(op: str, *arguments: torch.Tensor) -> object:
    contract = getattr(hal.ops, op).op
    with use(backend="cpu", impl=f"{op}=triton"):
        found = selection.explain(contract, contract.bind(arguments, {}), torch.device("cpu"))
    return next(c.answer for c in found.candidates if c.implementation.name == "triton")


def test_importing_the_implementations_imports_no_triton() -> None:
    script = """
        import sys
        from hal.backends.ascend.triton import IMPLEMENTATIONS
        answer([len(IMPLEMENTATIONS), [name for name in sys.modules if name.split(".")[0] in ("triton", "torch_npu")]])
    """
    assert python(script)[0] == [7, []]


def test_a_request_is_rejected_because_triton_ascend_is_not_installed(
    registered: None, installed: pytest.MonkeyPatch
) -> None:
    installed.setattr(importlib.util, "find_spec", lambda name: None)
    assert answer("rms_norm", torch.ones(2, 8)) == Rejected(("triton-ascend is not installed",))


def test_a_request_is_rejected_because_another_triton_is_installed(
    registered: None, installed: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "backends" / "nvidia").mkdir(parents=True)
    spec = ModuleSpec("triton", None, is_package=True)
    spec.submodule_search_locations = [str(tmp_path)]
    installed.setattr(importlib.util, "find_spec", lambda name: spec)
    found = answer("softmax", torch.ones(2, 8))
    assert isinstance(found, Rejected) and "has no Ascend backend" in found.reasons[0]


def test_every_reason_is_given_at_once(registered: None, installed: pytest.MonkeyPatch) -> None:
    installed.setattr(importlib.util, "find_spec", lambda name: None)
    found = answer("layer_norm", torch.ones(2, 8, dtype=torch.float64))
    assert isinstance(found, Rejected) and len(found.reasons) == 2
    assert any("float64" in reason for reason in found.reasons)


@pytest.mark.parametrize("op", sorted(found.op for found in kernels.IMPLEMENTATIONS))
def test_the_backend_has_the_kernels_behind_its_own_native_implementations(op: str) -> None:
    native = {i.name: i.priority for i in implementations.IMPLEMENTATIONS if i.op == op and i.kind == "native"}
    assert native.pop("triton") == kernels.PRIORITY
    assert native and min(native.values()) > kernels.PRIORITY
