"""Calling the candidate: through the public op with the choice forced, in poisoned and fenced memory."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hal import memory, recording
from hal.capability import Accepted, Answer, Declares, Implementation
from hal.conformance.inputs import GUARD, Results
from hal.conformance.subject import results
from hal.contract import Args, Op, Tally

__all__ = ["Fences", "Outcome", "Target"]


@dataclass
class Fences:
    """An allocator that fills each allocation with poison and fences it on both sides."""

    byte: int
    taken: list[tuple[Tensor, int, int]] = field(default_factory=list)

    def __call__(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        count = 1
        for n in shape:
            count *= int(n)
        size = count * dtype.itemsize
        room = size + (-size) % GUARD
        buffer = torch.full((room + 2 * GUARD,), self.byte, dtype=torch.uint8, device=device)
        self.taken.append((buffer, GUARD, size))
        flat = buffer.view(dtype)
        start = GUARD // dtype.itemsize
        return flat[start : start + count].view(tuple(int(n) for n in shape))

    def damage(self) -> list[str]:
        """Each allocation that was written outside its bounds."""
        found = []
        for i, (buffer, start, size) in enumerate(self.taken):
            fence = torch.cat([buffer[:start], buffer[start + size :]])
            if bool((fence != self.byte).any()):
                found.append(f"allocation {i} of {size} bytes was written outside its bounds")
        return found


@dataclass
class Outcome:
    """What a call gave: results (on the device), or the exception; and what happened to memory."""

    results: Results | None
    error: BaseException | None
    damage: list[str]
    allocations: int


@dataclass(frozen=True)
class Target:
    """A candidate: a registered implementation, one that is not, or a callable with the public signature."""

    op: Op
    name: str
    declares: Declares
    call: Callable[..., Any]
    implementation: Implementation | None = None
    backend: str | None = None

    @classmethod
    def of(cls, op: Op, implementation: Implementation | Callable[..., Any], backend: str | None = None) -> Target:
        """The candidate for an implementation; a registered one is called through the public op."""
        if not isinstance(implementation, Implementation):
            return cls(op, getattr(implementation, "__name__", "callable"), Declares(), implementation)
        if backend is None or not _registered(op, implementation, backend):
            return cls(op, implementation.name, implementation.declares, implementation.forward, implementation)
        public = getattr(importlib.import_module(op.reference.__module__), op.name)
        return cls(op, implementation.name, implementation.declares, public, implementation, backend)

    @property
    def registered(self) -> bool:
        """Whether calls go through the dispatcher."""
        return self.backend is not None

    def answer(self, a: Args, device: torch.device) -> Answer:
        """Whether the implementation says that it takes the request."""
        if self.implementation is None:
            return Accepted()
        if self.backend is None:
            return self.implementation.judge(self.op, a, device.type, None)
        from hal import selection

        with self.forced():
            found = selection.explain(self.op, a, device)
        return next(c.answer for c in found.candidates if c.implementation is self.implementation)

    @contextlib.contextmanager
    def forced(self, **settings: Any) -> Iterator[None]:
        """The choice forced to this candidate within the block."""
        if self.backend is None:
            yield
            return
        import hal

        with hal.use(backend=self.backend, impl=f"{self.op.name}={self.name}", **settings):
            yield

    def run(self, arguments: dict[str, Any], byte: int = 0xFF, **settings: Any) -> Outcome:
        """One call. Never raises for what the candidate does."""
        fences = Fences(byte)
        try:
            with torch.no_grad(), self.forced(**settings), memory.allocator(fences):
                public = self.call(**arguments)
                found = results(self.op, arguments, public)
        except Exception as error:
            return Outcome(None, error, fences.damage(), len(fences.taken))
        return Outcome(found, None, fences.damage(), len(fences.taken))

    def differentiate(
        self,
        arguments: dict[str, Any],
        names: Sequence[str],
        upstream: Sequence[Tensor | None],
        byte: int = 0xFF,
    ) -> Outcome:
        """The gradients of the named arguments, given one (or None) of each result. Never raises.

        A gradient that autograd leaves out is None among the results.
        """
        fences = Fences(byte)
        try:
            with torch.enable_grad(), self.forced(), memory.allocator(fences):
                leaves = {name: arguments[name].detach().requires_grad_() for name in names}
                outs = results(self.op, arguments, self._recorded(arguments | leaves))
                pairs = [(y, grad) for y, grad in zip(outs, upstream, strict=True) if grad is not None]
                # A result that depends on none of them has nothing to say; if none does, torch says so.
                pairs = [(y, grad) for y, grad in pairs if y.requires_grad] or pairs
                ys, grads = [y for y, _ in pairs], [grad for _, grad in pairs]
                found = torch.autograd.grad(ys, list(leaves.values()), grads, allow_unused=True)
        except Exception as error:
            return Outcome(None, error, fences.damage(), len(fences.taken))
        return Outcome(found, None, fences.damage(), len(fences.taken))

    def _recorded(self, arguments: dict[str, Any]) -> Any:
        if self.backend is not None or self.implementation is None:
            return self.call(**arguments)
        packed = self.op.pack(**arguments)
        outs = recording.recorder(self.op)(_Unregistered(self.op, self.implementation), *packed)
        return self.op.public(outs[: len(self.op.results)], packed)


class _Unregistered:
    """The plan of an implementation that the dispatcher does not know; it differentiates as the dispatcher's do."""

    id = 0

    def __init__(self, op: Op, implementation: Implementation) -> None:
        self.op, self.implementation = op, implementation
        self.call = implementation.forward
        self.tally = Tally(op.name, "", implementation.name, implementation.kind, "")

    def train(self, a: Args) -> Results:
        train = self.implementation.train
        return self.op.trained(self.call, a) if train is None else tuple(train(**vars(a)))

    def backward(
        self, a: Args, outs: dict[str, Tensor], grads: tuple[Tensor | None, ...], needs: tuple[bool, ...]
    ) -> tuple[Tensor | None, ...]:
        backward = self.implementation.backward
        if backward is None:
            return recording.recompute(self.op, a, grads, needs)
        return tuple(backward(a, outs, grads, needs))


def _registered(op: Op, implementation: Implementation, backend: str) -> bool:
    from hal import registry

    return any(found is implementation for found in registry.implementations(backend.partition(":")[0], op.name))
