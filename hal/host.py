"""Reading device values on the host: counted, refused inside a capture, subject to HAL_SYNC."""

from __future__ import annotations

import logging
from collections import Counter
from typing import Any

import torch
from torch import Tensor

from hal import settings
from hal.errors import CaptureError, SyncError

__all__ = ["capturing", "synchronisations", "to_host"]

logger = logging.getLogger("hal")

synchronisations: Counter[str] = Counter()


def capturing(device: torch.device) -> bool:
    """Whether the current stream of `device` is recording a graph."""
    if device.type == "cpu":
        return False
    module: Any = getattr(torch, device.type, None)  # what a device type without graphs lacks
    ask = getattr(module, "is_current_stream_capturing", None)
    return ask is not None and module.is_available() and bool(ask())


def to_host(t: Tensor, why: str) -> Tensor:
    """`t` on the CPU. For a device tensor this synchronises: `why` names who asked, for the report.

    Raises CaptureError inside a graph capture and SyncError under HAL_SYNC=error.
    """
    if t.device.type == "cpu":
        return t
    if capturing(t.device):
        raise CaptureError(f"{why} needs values on the host, which a graph capture forbids; pass the *_cpu lengths")
    policy = settings.current().sync
    if policy == "error":
        raise SyncError(f"{why} would synchronise with {t.device} while HAL_SYNC=error; pass the *_cpu lengths")
    if policy == "warn" and why not in synchronisations:
        logger.warning("%s synchronises with %s to read lengths; pass the *_cpu lengths to avoid it", why, t.device)
    synchronisations[why] += 1
    return t.cpu()
