"""The CUDA backend's Triton implementations as implementations of the CPU, run by Triton's interpreter: simulated."""

from __future__ import annotations

import types
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import cuda_interpreter  # noqa: F401  (mends the interpreter before a kernel is loaded)
import pytest
import torch

from hal import registry
from hal.backends.cuda import launch
from hal.backends.cuda.implementations import IMPLEMENTATIONS
from hal.capability import Implementation
from hal.conformance import runner
from hal.conformance.case import Case, cases
from hal.conformance.site import Site
from hal.hookspec import hookimpl

NAME = "cpu.cuda_kernels"
_entered: set[str] = set()
KERNELS = {found.op: found for found in IMPLEMENTATIONS if found.name == "triton"}


@hookimpl
def hal_implementations(backend: str) -> tuple[Implementation, ...]:
    return tuple(KERNELS.values())


@contextmanager
def interpreted() -> Iterator[Site]:
    """A site whose kernels are interpreted, as on a device with few multiprocessors: programs take several tiles.

    It may be entered again while it is: the cases from known defects enter it for a whole run.
    """
    with _registered() if NAME not in _entered else nullcontext():
        yield Site.of("cpu")


@contextmanager
def _registered() -> Iterator[None]:
    plugin = types.ModuleType("cuda_kernels")
    plugin.hal_implementations = hal_implementations  # type: ignore[attr-defined]
    registry.register(plugin, NAME)
    _entered.add(NAME)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(launch, "multiprocessors", lambda device: 3)
            patch.setattr(launch, "capability", lambda device: 90)
            yield
    finally:
        torch.set_num_threads(threads)
        registry.unregister(NAME)
        _entered.discard(NAME)


def suite(*ops: str) -> list[Case]:
    """The quick suite's cases of these operators that have kernels."""
    return [case for op in ops if op in KERNELS for case in cases(op)]


def conforms(site: Site, case: Case) -> None:
    """The case passes, or is refused for its dtype, float64, alone."""
    result = runner.judge_case(site, case, "triton")
    if case.dtype == "float64":
        assert (result.status, result.why) == (
            "unsupported",
            ("dtype float64 is not among bfloat16, float16, float32",),
        )
    else:
        assert result.status == "passed", "\n".join(result.why)
