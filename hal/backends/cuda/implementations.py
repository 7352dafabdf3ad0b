"""All that the CUDA backend implements."""

from __future__ import annotations

from hal.backends.cuda import norms, sdpa
from hal.capability import Implementation

__all__ = ["IMPLEMENTATIONS"]

IMPLEMENTATIONS: tuple[Implementation, ...] = (
    *norms.IMPLEMENTATIONS,
    *sdpa.IMPLEMENTATIONS,
)
