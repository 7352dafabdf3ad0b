"""Which CANN torch_npu runs on. Asking loads nothing: before torch_npu is loaded the version is unknown."""

from __future__ import annotations

import re
import sys
from functools import cache
from typing import Any

__all__ = ["cann", "cann_text"]


def cann_text() -> str:
    """CANN's version as it gives it, such as "8.5.0" or "8.3.RC1"; empty if it is unknown."""
    torch_npu = sys.modules.get("torch_npu")
    return "" if torch_npu is None else _read(torch_npu)


@cache
def _read(torch_npu: Any) -> str:
    return str(torch_npu.npu.utils.get_cann_version() or "")


def cann() -> tuple[int, int]:
    """CANN's version, major and minor; (0, 0) if it is unknown."""
    found = re.match(r"(\d+)\.(\d+)", cann_text())
    return (0, 0) if found is None else (int(found[1]), int(found[2]))
