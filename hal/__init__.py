"""hal: one small set of LLM operators, several backends, and a suite that proves they agree.

    import hal
    y = hal.ops.rms_norm(x, weight)

The backend is chosen by HAL_BACKEND, or `hal.use(backend=...)`. Importing hal touches no device.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from hal import dispatch as _dispatch
from hal import errors, ops
from hal.contract import Dispatcher as _Dispatcher
from hal.settings import use

if TYPE_CHECKING:
    from hal.dispatch_report import report
    from hal.selection import explain

__version__ = "0.1.0"

__all__ = ["__version__", "errors", "explain", "ops", "report", "use"]

# Loaded on first use: they import pydantic and read entry points.
_LAZY = {"report": "hal.dispatch_report", "explain": "hal.selection"}


def _load_dispatcher() -> _Dispatcher:
    dispatcher: _Dispatcher = importlib.import_module("hal.selection").dispatcher()
    return dispatcher


_dispatch.install(_load_dispatcher)


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'hal' has no attribute {name!r}")
