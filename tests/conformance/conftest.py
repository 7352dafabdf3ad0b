from __future__ import annotations

import os
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

from hal import registry

# A plug-in that adds one implementation of rms_norm to the cpu backend; {body} may spoil the right result y.
PLUGIN = """
from __future__ import annotations

import os
import signal

from torch import Tensor

from hal.capability import Implementation, Supports
from hal.hookspec import hookimpl
from hal.op import OPS


def rms_norm(
    x: Tensor, weight: Tensor | None = None, eps: float = 1e-6, *, weight_offset: float = 0.0,
    round_before_weight: bool = False,
) -> Tensor:
    y = OPS["rms_norm"].reference(
        x, weight, eps, weight_offset=weight_offset, round_before_weight=round_before_weight
    )
    {body}
    return y


ALL = [Implementation(op="rms_norm", name="throwaway", forward=rms_norm, supports={supports})]


@hookimpl
def hal_implementations(backend):
    return ALL
"""


@pytest.fixture
def registered() -> Iterator[Callable[..., None]]:
    """Registers the throw-away implementation in this process, with the given body."""

    def register(body: str, supports: str = "Supports()") -> None:
        module = ModuleType("throwaway")
        exec(PLUGIN.format(body=body, supports=supports), module.__dict__)
        registry.register(module, "cpu.throwaway")

    yield register
    registry.unregister("cpu.throwaway")


@pytest.fixture
def installed(tmp_path: Path) -> Callable[[str], dict[str, str]]:
    """Installs the throw-away plug-in beside the test; returns the environment of a process that finds it."""

    def install(body: str) -> dict[str, str]:
        site = tmp_path / "site"
        info = site / "throwaway-1.0.dist-info"
        info.mkdir(parents=True)
        (site / "throwaway.py").write_text(PLUGIN.format(body=body, supports="Supports()"))
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: throwaway\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(
            textwrap.dedent("""\
                [hal.backends]
                cpu.throwaway = throwaway
                """)
        )
        return os.environ | {"PYTHONPATH": str(site), "OMP_NUM_THREADS": "1"}

    return install
