"""The operator set. The body of each reference function is the operator's meaning."""

from __future__ import annotations

from hal.ops.norms import rms_norm

__all__ = ["rms_norm"]
