"""Which tile, how many warps and stages a kernel gets: a table's choice by shape class, or what tuning found better.

A function decorated with `tuned` makes one such decision from numbers alone (a row's length, a capability). Tuning
tries its `others` and keeps the best for this device, in a file of the user's cache directory that is named after all
that it depends on: the device, the release of triton, the source of the kernels and of their launches, the decision
and its numbers. A file for anything else is never read. Nothing is ever timed by a call of an operator.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import logging
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache
from importlib import metadata, resources
from pathlib import Path
from typing import Any

from hal import dispatch, files, settings
from hal.hookspec import Choice

__all__ = ["TUNER", "Tactic", "tuned"]

logger = logging.getLogger("hal")


@dataclass(frozen=True)
class Tactic:
    """The kernel's constants and the compiler's options."""

    constants: dict[str, int] = field(default_factory=dict)
    options: dict[str, int] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """Such as BLOCK_M=128 BLOCK_N=64 num_warps=8."""
        return " ".join(f"{name}={value}" for name, value in (*self.constants.items(), *self.options.items()))


Decide = Callable[..., Tactic]
Key = tuple[str, str]

_decisions: dict[str, tuple[Decide, Callable[..., Sequence[Tactic]]]] = {}
_asked: ContextVar[dict[Key, tuple[Any, ...]] | None] = ContextVar("asked", default=None)
_forced: ContextVar[dict[Key, Tactic]] = ContextVar("forced", default={})  # noqa: B039  (never written to)


def tuned(others: Callable[..., Sequence[Tactic]]) -> Callable[[Decide], Decide]:
    """Make a function of a shape class's numbers a decision that can be tuned; `others` names what else may do."""

    def decorate(default: Decide) -> Decide:
        name = f"{default.__module__.rpartition('.')[2]}.{default.__name__.lstrip('_')}"
        _decisions[name] = default, others

        @functools.wraps(default)
        def decide(*numbers: Any) -> Tactic:
            key = name, repr(numbers)
            seen = _asked.get()
            if seen is not None:
                seen[key] = numbers
            forced = _forced.get().get(key)
            if forced is not None:
                return forced
            kept = _kept(*key)
            return default(*numbers) if kept is None else kept

        return decide

    return decorate


class Tuner:
    """Tries and keeps tactics; see `hal.hookspec.Tuner`."""

    @contextlib.contextmanager
    def watching(self) -> Iterator[list[Choice]]:
        seen: dict[Key, tuple[Any, ...]] = {}
        found: list[Choice] = []
        token = _asked.set(seen)
        try:
            yield found
        finally:
            _asked.reset(token)
        for (name, shape), numbers in seen.items():
            default, others = _decisions[name]
            used = _kept(name, shape) or default(*numbers)
            labels = dict.fromkeys([used.label, default(*numbers).label, *(t.label for t in others(*numbers))])
            found.append(Choice(name, shape, tuple(labels), numbers))

    @contextlib.contextmanager
    def using(self, choice: Choice, tactic: str) -> Iterator[None]:
        token = _forced.set({**_forced.get(), (choice.name, choice.shape): _tactic(choice, tactic)})
        try:
            yield
        finally:
            _forced.reset(token)

    def keep(self, choice: Choice, tactic: str) -> None:
        found = _tactic(choice, tactic)
        path = _path(choice.name, choice.shape)
        path.parent.mkdir(parents=True, exist_ok=True)
        content = {"name": choice.name, "shape": choice.shape, "constants": found.constants, "options": found.options}
        files.write_whole(path, json.dumps(content, indent=1) + "\n")
        _kept.cache_clear()
        dispatch.clear()


TUNER = Tuner()


def _tactic(choice: Choice, label: str) -> Tactic:
    default, others = _decisions[choice.name]
    known = [default(*choice.numbers), *others(*choice.numbers), _kept(choice.name, choice.shape)]
    return next(tactic for tactic in known if tactic is not None and tactic.label == label)


@cache
def _kept(name: str, shape: str) -> Tactic | None:
    """What tuning kept, if it still means something."""
    path = _path(name, shape)
    try:
        read = json.loads(path.read_text())
        return Tactic(dict(read["constants"]), dict(read["options"])) if read["shape"] == shape else None
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        logger.warning("the tuned tactic in %s cannot be read (%s) and is left out; tune again", path, error)
        return None


def _path(name: str, shape: str) -> Path:
    return _folder() / f"{name}-{hashlib.sha256(shape.encode()).hexdigest()[:16]}.json"


@cache
def _folder() -> Path:
    """Where this device's tactics lie, for these sources."""
    import torch

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    base = settings.foreign("XDG_CACHE_HOME")
    root = Path(base) if base else Path.home() / ".cache"
    made = "".join(character if character.isalnum() else "-" for character in device)
    return root / "torch-hal" / "tactics" / f"{made}-{_sources()}"


@cache
def _sources() -> str:
    """A digest of the kernels, of what launches them, and of the release of triton."""
    try:
        digest = hashlib.sha256(metadata.version("triton").encode())
    except metadata.PackageNotFoundError:
        digest = hashlib.sha256()
    for package in ("hal.kernels", "hal.backends.cuda"):
        for found in sorted(resources.files(package).iterdir(), key=lambda path: path.name):
            if found.name.endswith(".py"):
                digest.update(found.read_bytes())
    return digest.hexdigest()[:16]

