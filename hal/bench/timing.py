"""Timing of single calls: medians and p99 of short Python calls, candidates taken in turn.

A batch would hide the tail, so each call is timed alone and the cost of the clock is taken off. Candidates
take turns in rounds: whatever the machine does in the meantime meets all of them.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["Timing", "settle", "take_turns"]


@dataclass(frozen=True)
class Timing:
    """Microseconds of host time a call."""

    median_us: float
    p99_us: float
    calls: int


def take_turns(
    candidates: Mapping[str, Callable[[], Any]],
    rounds: int = 40,
    calls: int = 100,
    between: Callable[[], None] = lambda: None,
) -> dict[str, Timing]:
    """Time each candidate `rounds * calls` times. `between` runs untimed after each candidate's turn."""
    samples: dict[str, list[int]] = {name: [] for name in candidates}
    for fn in candidates.values():
        _turn(fn, calls)
        between()
    clock = statistics.median(_turn(_nothing, 10 * calls))
    collecting = gc.isenabled()
    gc.disable()
    try:
        for _ in range(rounds):
            for name, fn in candidates.items():
                samples[name] += _turn(fn, calls)
                between()
            gc.collect()
    finally:
        if collecting:
            gc.enable()
    return {name: _summary(times, clock) for name, times in samples.items()}


def settle(device: torch.device) -> Callable[[], None]:
    """What to do between turns: a device's queue must not fill up, for a full one blocks the host."""
    return (lambda: None) if device.type == "cpu" else (lambda: torch.accelerator.synchronize(device))


def _turn(fn: Callable[[], Any], calls: int) -> list[int]:
    now = time.perf_counter_ns
    times = [0] * calls
    for i in range(calls):
        start = now()
        fn()
        times[i] = now() - start
    return times


def _nothing() -> None:
    pass


def _summary(times: list[int], clock: float) -> Timing:
    ordered = sorted(times)
    p99 = ordered[min(len(ordered) - 1, len(ordered) * 99 // 100)]
    return Timing(max(0.0, statistics.median(ordered) - clock) / 1e3, max(0.0, p99 - clock) / 1e3, len(ordered))
