"""A run of `hal bench`: what was measured, on what, as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from hal import settings
from hal.bench.comparison import COPY, Row
from hal.bench.device_time import device_times
from hal.conformance.environment import environment
from hal.files import write_whole

__all__ = ["Record", "matrix_rate"]

FORMAT, VERSION = "hal-bench", 1
# Of the product that sets the arithmetic's roof.
SIDE = 8192


@dataclass
class Record:
    """The rows of a run and what they depend on. `left_out`: workloads that could not run here, and why."""

    device: str
    dtype: str
    flops_per_us: float | None
    rows: list[Row] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)

    def best_peer(self, workload: str) -> Row | None:
        """The fastest of the peers on a workload: neither hal nor the copy."""
        peers = [row for row in self.of(workload) if row.candidate != COPY and not row.candidate.startswith("hal/")]
        return min(peers, key=lambda row: row.device_us, default=None)

    def of(self, workload: str) -> list[Row]:
        return [row for row in self.rows if row.workload == workload]

    @property
    def workloads(self) -> Sequence[str]:
        return tuple(dict.fromkeys(row.workload for row in self.rows))

    def write(self, path: Path) -> None:
        """As JSON, whole or not at all."""
        document: dict[str, Any] = {
            "format": FORMAT,
            "version": VERSION,
            "device": self.device,
            "dtype": self.dtype,
            "flops_per_us": self.flops_per_us,
            "environment": environment(settings.environment()).model_dump(),
            "rows": [row.to_dict() for row in self.rows],
            "left_out": self.left_out,
        }
        write_whole(path, json.dumps(document, indent=1, ensure_ascii=False) + "\n")


def matrix_rate(device: torch.device, dtype: torch.dtype) -> float | None:
    """Flops a microsecond of a large square product in this dtype; None on a CPU, where nothing here reaches it."""
    if device.type == "cpu":
        return None
    a, b = (torch.randn(SIDE, SIDE, device=device, dtype=torch.float32).to(dtype) for _ in range(2))
    took = device_times({"product": [lambda: a @ b]}, device, rounds=5)["product"]
    return 2 * SIDE**3 / took.median_us
