"""R5 on devices that have graphs: a call captured at other lengths and values replays rightly at the case's own.

A captured launch keeps what it was given as numbers: a grid, a split, a maximum that came from the host. So the call is
captured while its tensors hold shorter lengths and other values, and replayed after the case's are copied in.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from hal import memory
from hal.conformance.candidate import Fences, Outcome, Target
from hal.conformance.inputs import Inputs, Results
from hal.conformance.subject import results

__all__ = ["Graph", "graph_of", "replayed"]

LENGTHS = frozenset({"seq_lens", "cu_seqlens_q", "cu_seqlens_k"})
# Block ids, of which those past a sequence's end are poison: moved, they would be followed.
FIXED = frozenset({"block_table"})


class Graph(Protocol):
    """A device's graph: captures a call once, then replays its launches on the memory that they were captured on."""

    def capture(self, call: Callable[[], Results]) -> Results: ...

    def replay(self) -> None: ...


class _DeviceGraph:
    """torch.cuda.CUDAGraph, or its like on another device (torch.npu.NPUGraph)."""

    def __init__(self, device: torch.device) -> None:
        self.module: Any = torch.get_device_module(device)
        self.device = device
        self.graph = _maker(self.module)()

    def capture(self, call: Callable[[], Results]) -> Results:
        with self.module.device(self.device):
            stream = self.module.Stream()
            stream.wait_stream(self.module.current_stream())
            with self.module.stream(stream):  # compiles kernels and fills caches, which a capture forbids
                call()
            self.module.current_stream().wait_stream(stream)
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "The CUDA Graph is empty")  # a call that has nothing to do
                with self.module.graph(self.graph):
                    return call()

    def replay(self) -> None:
        self.graph.replay()
        self.module.synchronize()


def _maker(module: Any) -> Any:
    return getattr(module, "CUDAGraph", None) or getattr(module, "NPUGraph", None)


def graph_of(device: torch.device) -> Graph | None:
    """A new graph for the device, or None where there are no graphs."""
    if device.type == "cpu" or _maker(torch.get_device_module(device)) is None:
        return None
    return _DeviceGraph(device)


def replayed(target: Target, graph: Graph, inputs: Inputs) -> Outcome:
    """Capture with other lengths and values in the inputs' memory, put the case's back, replay. Never raises for what
    the candidate does."""
    saved = [(held.view, held.view.clone()) for held in inputs.guarded]
    fences: list[Fences] = []

    def call() -> Results:
        fences.append(Fences(0xFF))
        with torch.no_grad(), target.forced(), memory.allocator(fences[-1]):
            return results(target.op, inputs.args, target.call(**inputs.args))

    for held in inputs.guarded:
        _alter(held.name, held.view, held.name in inputs.draft.unused)
    try:
        found = graph.capture(call)
        for view, value in saved:
            if _own(view):
                view.copy_(value)
        graph.replay()
        found = tuple(t.cpu().clone() for t in found)  # what was written is put back
    except Exception as error:
        return Outcome(None, error, [], len(fences))
    finally:
        with contextlib.suppress(RuntimeError):  # a device that the candidate broke says so at the next call
            for view, value in saved:
                if _own(view):
                    view.copy_(value)
    taken = fences[-1]
    return Outcome(found, None, taken.damage(), len(taken.taken))


def _alter(name: str, view: Tensor, poisoned: bool) -> None:
    if not _own(view):
        return
    if name.removesuffix("_cpu") in LENGTHS:  # the host's copy tells the same story
        view.copy_(view.div(2, rounding_mode="floor"))
    elif view.dim() and not (name in FIXED or (poisoned and not view.is_floating_point())):
        view.copy_(view.roll(1, 0) if view.dtype.itemsize > 1 else view.view(torch.uint8).roll(1, 0).view(view.dtype))


def _own(view: Tensor) -> bool:
    """Whether each element has memory of its own; a broadcast view has not."""
    return all(step or n <= 1 for n, step in zip(view.shape, view.stride(), strict=True))
