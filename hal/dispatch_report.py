"""The dispatch report: what ran, how often, and each synchronisation."""

from __future__ import annotations

import atexit
import json
import logging
from dataclasses import asdict
from typing import Any

from hal import host, settings
from hal.contract import Tally
from hal.errors import HalError
from hal.files import write_whole

__all__ = ["report", "reset", "tally"]

logger = logging.getLogger("hal")

_tallies: dict[tuple[str, ...], Tally] = {}


def tally(op: str, backend: str, implementation: str, kind: str, device: str) -> Tally:
    """The counter of one implementation; the same object for the same names."""
    key = (op, backend, implementation, kind, device)
    return _tallies.setdefault(key, Tally(*key))


def report() -> dict[str, Any]:
    """What ran so far: calls by operator and implementation, and synchronisations by who asked for them.

    simulated: no hardware stands behind the device that a call was made for.
    """
    from hal.descriptor import is_simulated  # the models of data sheets: only who asks for a report pays

    used = sorted((t for t in _tallies.values() if t.calls), key=lambda t: (-t.calls, t.op))
    calls = [asdict(t) | {"simulated": is_simulated(t.device)} for t in used]
    return {"calls": calls, "synchronisations": dict(host.synchronisations)}


def reset() -> None:
    """Start counting afresh."""
    for t in _tallies.values():
        t.calls = 0
    host.synchronisations.clear()


def _at_exit() -> None:
    try:
        path = settings.current().report
        if path is not None:
            write_whole(path, json.dumps(report(), indent=2) + "\n")
    except HalError as error:
        # A setting that means nothing has been told to whoever asked; only one who wants a report hears it again.
        if "report" in settings.environment():
            logger.warning("the dispatch report was not written: %s", error)


atexit.register(_at_exit)
