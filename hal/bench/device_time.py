"""Time of calls on the device itself: replays of captured graphs, inputs rotated so that no cache holds them.

Candidates take turns in rounds, so that whatever the machine does in the meantime meets all of them; medians with the
spread of the rounds. What cannot be captured is timed by events around calls in a row, which includes launches where
they are what takes longest; a device without either, by the clock.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["CACHES", "Spread", "device_times", "sets_of"]

# Inputs together hold so many times what the last cache does.
CACHES = 2.5
MOST_SETS = 24
CALLS = 24
Calls = Sequence[Callable[[], Any]]


@dataclass(frozen=True)
class Spread:
    """Microseconds a call: median, and first and last decile, of the rounds; `how` it was timed."""

    median_us: float
    low_us: float
    high_us: float
    how: str


def sets_of(nbytes: int, device: torch.device) -> int:
    """How many sets of inputs of this size outgrow the device's caches."""
    if device.type != "cuda":
        return 1
    cache = torch.cuda.get_device_properties(device).L2_cache_size
    return int(max(1, min(MOST_SETS, -(-CACHES * cache // max(nbytes, 1)))))


def device_times(candidates: Mapping[str, Calls], device: torch.device, rounds: int = 15) -> dict[str, Spread]:
    """Time each candidate, a call for each set of inputs, `rounds` times in turn."""
    ready = {name: _prepared(calls, device) for name, calls in candidates.items()}
    samples: dict[str, list[float]] = {name: [] for name in candidates}
    for turn in range(rounds + 2):
        for name, (once, _, calls) in ready.items():
            took = once()
            if turn >= 2:
                samples[name].append(took / calls)
    return {name: _spread(times, ready[name][1]) for name, times in samples.items()}


def _prepared(calls: Calls, device: torch.device) -> tuple[Callable[[], float], str, int]:
    """(microseconds of one turn, how, calls a turn)."""
    for call in calls:
        call()
    if device.type != "cuda":
        return (lambda: _clocked(calls)), "clock", len(calls)
    repeats = max(1, -(-CALLS // len(calls)))
    total = repeats * len(calls)
    graph = _captured(calls, repeats, device)
    if graph is None:
        return (lambda: _between_events(lambda: [call() for _ in range(repeats) for call in calls])), "events", total
    return (lambda: _between_events(graph.replay)), "graph", total


def _captured(calls: Calls, repeats: int, device: torch.device) -> torch.cuda.CUDAGraph | None:
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        for call in calls[:2]:
            call()
    torch.cuda.current_stream(device).wait_stream(side)
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    try:
        # Gradients are computed by a thread of their own, whose first calls a stricter mode would forbid.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            for _ in range(repeats):
                for call in calls:
                    call()
    except RuntimeError:  # a synchronisation, or a stream that capture does not know
        torch.cuda.synchronize(device)
        return None
    return graph


def _between_events(run: Callable[[], Any]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) * 1e3


def _clocked(calls: Calls) -> float:
    start = time.perf_counter_ns()
    for call in calls:
        call()
    return (time.perf_counter_ns() - start) / 1e3


def _spread(times: Sequence[float], how: str) -> Spread:
    ordered = sorted(times)
    last = len(ordered) - 1
    return Spread(statistics.median(ordered), ordered[last // 10], ordered[last - last // 10], how)
