"""From a draft on the CPU to guarded, poisoned, strided inputs on a device.

A family drafts plain contiguous CPU tensors and says which of their elements the contract declares without
influence, and how each tensor is to lie in memory. `place` then copies every tensor into a larger buffer whose
rest holds a canary, puts poison where nothing may look, and keeps a snapshot: a write outside, a changed input
or a read of what must not be read all become visible.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hal import philox

LAYOUTS = ("contiguous", "offset", "sliced", "stepped", "transposed", "gapped", "reversed", "swapped")
GUARD = 64  # bytes on either side; a multiple of the alignment that allocators give, so it does not change it
Results = tuple[Tensor, ...]


class Draw:
    """Named, independent streams of random values from one seed, drawn on the CPU."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def stream(self, name: str) -> int:
        """The Philox key of a name."""
        digest = hashlib.blake2b(f"{self.seed}/{name}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big") >> 1

    def normal(self, name: str, shape: Sequence[int]) -> Tensor:
        """Float64, mean 0, variance 1."""
        return philox.normal(self.stream(name), tuple(shape))

    def uniform(self, name: str, shape: Sequence[int], low: float = 0.0, high: float = 1.0) -> Tensor:
        """Float64 between low and high."""
        return philox.uniform(self.stream(name), tuple(shape)) * (high - low) + low

    def integers(self, name: str, shape: Sequence[int], low: int, high: int) -> Tensor:
        """Int64, low ≤ value < high."""
        return philox.integers(self.stream(name), tuple(shape), low, high)

    def permutation(self, name: str, n: int) -> Tensor:
        """Int64, a permutation of 0 … n−1."""
        return philox.permutation(self.stream(name), n)

    def pick(self, name: str, options: Sequence[Any]) -> Any:
        """One of the options."""
        return options[int(self.integers(name, (1,), 0, len(options)))]


@dataclass(frozen=True)
class Variant:
    """The same question asked another way, whose answer must agree with part of the main one.

    calls: arguments (CPU, contiguous) of each call. combine: the calls' results to one set. expects: the part
    of a main set of results that they must equal. declared: the `Declares` field that makes it bitwise; None
    or undeclared means under R1. extra: what the detour itself may add to |y − Y|, per result.
    """

    name: str
    calls: tuple[Mapping[str, Any], ...]
    expects: Callable[[Results], Results] = lambda results: results
    combine: Callable[[list[Results]], Results] = lambda parts: parts[0]
    declared: str | None = None
    extra: Callable[[list[Results]], tuple[Tensor | float, ...]] | None = None


@dataclass
class Draft:
    """What a family says about a case, on the CPU.

    args: public parameters, contiguous or stride-0 expanded tensors. unused: per parameter, True where the
    contract gives the value no influence. layouts: per parameter, one of LAYOUTS. unjudged: per result, True
    where the contract leaves the value open. raises: the error a bad input must give; mentions: what its
    message must contain. quotients: for written codes, value / scale per element, NaN where nothing is written.
    """

    args: dict[str, Any]
    unused: dict[str, Tensor] = field(default_factory=dict)
    layouts: dict[str, str] = field(default_factory=dict)
    unjudged: dict[str, Tensor] = field(default_factory=dict)
    variants: list[Variant] = field(default_factory=list)
    raises: str | None = None
    mentions: tuple[str, ...] = ()
    quotients: dict[str, Tensor] = field(default_factory=dict)


@dataclass
class Guarded:
    """A tensor inside its canary-filled buffer, with a snapshot of the whole."""

    name: str
    view: Tensor
    buffer: Tensor
    snapshot: Tensor

    def damage(self, writable: bool = False) -> str | None:
        """What was written where nothing may be written, or None. `writable`: the view itself may change."""
        now, before = self.buffer.cpu(), self.snapshot.cpu()
        if torch.equal(now, before):
            return None
        changed = now != before
        inside = self._inside()
        outside = changed & ~inside
        if outside.any():
            first = int(outside.nonzero()[0, 0])
            start = int(inside.nonzero()[0, 0]) if inside.any() else 0
            return f"{int(outside.sum())} bytes around {self.name} were overwritten, the first at {first - start:+d}"
        if writable:
            return None
        return f"{self.name} was modified: {int(changed.sum())} of its bytes changed"

    def _inside(self) -> Tensor:
        size = self.view.element_size()
        places = torch.zeros(self.buffer.numel() // size, dtype=torch.bool)
        cpu_view = places.as_strided(self.view.shape, self.view.stride(), self.view.storage_offset())
        cpu_view.fill_(True) if 0 not in self.view.stride() else _touch(places, self.view)
        return places.repeat_interleave(size)


@dataclass
class Inputs:
    """A case on a device.

    args: what the call gets. clean: the same values on the CPU, contiguous, with zeros for poison: what oracle
    and baseline get. guarded: every tensor argument with its guards.
    """

    args: dict[str, Any]
    clean: dict[str, Any]
    guarded: list[Guarded]
    draft: Draft

    def damage(self, writable: Sequence[str] = ()) -> list[str]:
        """Each write outside what may be written."""
        found = (held.damage(held.name.partition("[")[0] in writable) for held in self.guarded)
        return [text for text in found if text]


def place(
    draft: Draft,
    device: str | torch.device,
    poison: str | None = "nan",
    host: Sequence[str] = (),
    layouts: Mapping[str, str] | None = None,
) -> Inputs:
    """The draft's tensors on `device`; `poison` is nan, inf, huge or None; `host` names tensors that stay on CPU."""
    args: dict[str, Any] = {}
    guarded: list[Guarded] = []
    kinds = draft.layouts if layouts is None else layouts
    for name, value in draft.args.items():
        where = torch.device("cpu") if name in host else torch.device(device)
        unused = draft.unused.get(name) if poison else None
        if isinstance(value, Tensor) and value.device.type == "meta":
            args[name] = value  # on another device on purpose: bad input
        elif isinstance(value, Tensor):
            held = guard(name, poisoned(value, unused, poison or "nan"), kinds.get(name, "contiguous"), where)
            guarded.append(held)
            args[name] = held.view
        elif isinstance(value, list) and value and isinstance(value[0], Tensor):
            many = [guard(f"{name}[{i}]", t, kinds.get(name, "contiguous"), where) for i, t in enumerate(value)]
            guarded.extend(many)
            args[name] = [held.view for held in many]
        else:
            args[name] = value
    return Inputs(args, clone(draft.args), guarded, draft)


def clone(args: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments with every tensor cloned, contiguous."""

    def one(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.clone(memory_format=torch.contiguous_format)
        return [one(item) for item in value] if isinstance(value, list) else value

    return {name: one(value) for name, value in args.items()}


def poisoned(value: Tensor, unused: Tensor | None, poison: str) -> Tensor:
    """`value` with poison where `unused` says that nothing may look."""
    if unused is None or not unused.any():
        return value
    bad = value.clone(memory_format=torch.contiguous_format)
    if value.dtype in (torch.int8, torch.float8_e4m3fn, torch.float8_e5m2):
        as_bytes = bad.view(torch.uint8)
        as_bytes[unused.expand_as(as_bytes)] = 0x7F  # NaN in e4m3fn and e5m2, the largest code in int8
    elif value.is_floating_point():
        figure = {"nan": math.nan, "inf": math.inf, "huge": torch.finfo(value.dtype).max}[poison]
        bad[unused.expand_as(bad)] = figure
    else:
        bad[unused.expand_as(bad)] = {"nan": torch.iinfo(value.dtype).max, "inf": -1, "huge": 1 << 30}[poison]
    return bad


def guard(name: str, value: Tensor, layout: str = "contiguous", device: str | torch.device = "cpu") -> Guarded:
    """A copy of `value` on `device`, laid out as asked, inside guard bands."""
    steps = [0 if n > 1 and s == 0 else 1 for n, s in zip(value.shape, value.stride(), strict=True)]
    core = value[tuple(slice(None) if step else slice(0, 1) for step in steps)]
    strides, length = _strides(core.shape, layout)
    before = GUARD // value.element_size() + (1 if layout == "offset" else 0)
    total = before + length + GUARD // value.element_size()
    total += -total % 16  # whole bytes of every view
    buffer = torch.full((total * value.element_size(),), canary(value.dtype), dtype=torch.uint8, device=device)
    flat = buffer.view(value.dtype)
    view = flat.as_strided(core.shape, strides, before)
    view.copy_(core)
    view = view.expand(value.shape)
    return Guarded(name, view, buffer, buffer.clone())


def canary(dtype: torch.dtype) -> int:
    """The byte that fills guard bands: NaN for floats, a huge number for integers, True for bool."""
    if dtype is torch.bool:
        return 0x01
    return 0xFF if dtype.is_floating_point else 0x7F


def _strides(shape: Sequence[int], layout: str) -> tuple[list[int], int]:
    """Strides of a layout and the elements that it spans."""
    rank = len(shape)
    order = list(range(rank))
    room = [max(n, 1) for n in shape]
    step = 1
    if layout == "transposed" and rank >= 2:
        order[-1], order[-2] = order[-2], order[-1]
    elif layout == "swapped" and rank >= 3:
        order[-2], order[-3] = order[-3], order[-2]  # heads before positions, the last axis still dense
    elif layout == "reversed":
        order.reverse()
    elif layout == "sliced" and rank:
        room[-1] += 5
    elif layout == "gapped" and rank >= 2:
        room[1] *= 2
    elif layout == "stepped" or (layout == "transposed" and rank == 1):
        step = 2
    strides = [0] * rank
    running = step
    for axis in reversed(order):
        strides[axis] = running
        running *= room[axis]
    return strides, running


def differs(shape: Sequence[int], layout: str) -> bool:
    """Whether a tensor of this shape lies in memory otherwise than a dense one, the start aside."""
    dense, other = _strides(shape, "contiguous")[0], _strides(shape, layout)[0]
    return any(n > 1 and a != b for n, a, b in zip(shape, dense, other, strict=True))


def _touch(places: Tensor, view: Tensor) -> None:
    shape = [1 if s == 0 else n for n, s in zip(view.shape, view.stride(), strict=True)]
    places.as_strided(shape, view.stride(), view.storage_offset()).fill_(True)
