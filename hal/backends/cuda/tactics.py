"""Which tile, how many warps and stages a kernel gets: a table's choice by shape class, or what tuning found better.

A function decorated with `tuned` makes one such decision from numbers alone (a row's length, a capability). Tuning
tries what else would do and keeps the best for this device, in a file of the user's cache directory that is named after
all that it depends on: the device, the release of triton, the source of the kernels and of their launches, the decision
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
from typing import Any, TypeVar, cast

from hal import dispatch, files, settings
from hal.backends.cuda import plans
from hal.hookspec import Choice

__all__ = ["TUNER", "Tactic", "other_options", "tuned"]

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


Decide = TypeVar("Decide", bound=Callable[..., Tactic | None])
Others = Callable[..., Sequence[Tactic]]
Key = tuple[str, str]

MOST_WARPS, MOST_STAGES = 16, 5

_decisions: dict[str, tuple[Callable[..., Tactic | None], Others]] = {}
_asked: ContextVar[dict[Key, tuple[Any, ...]] | None] = ContextVar("asked", default=None)
_forced: ContextVar[dict[Key, Tactic]] = ContextVar("forced", default={})  # noqa: B039  (never written to)


def other_options(taken: Tactic) -> list[Tactic]:
    """The same tile with half and twice the warps, and one stage fewer and more where stages are chosen."""
    warps, stages = taken.options.get("num_warps", 4), taken.options.get("num_stages")
    found = []
    for w in (warps // 2, warps, 2 * warps):
        for s in (None,) if stages is None else (stages - 1, stages, stages + 1):
            if 1 <= w <= MOST_WARPS and (s is None or 1 <= s <= MOST_STAGES):
                options = {"num_warps": w} if s is None else {"num_warps": w, "num_stages": s}
                found.append(Tactic(taken.constants, {**taken.options, **options}))
    return found


def tuned(others: Others | None = None) -> Callable[[Decide], Decide]:
    """Make a function of a shape class's numbers a decision that can be tuned; None is no decision.

    `others` names what else may do; without it, other numbers of warps and stages.
    """

    def decorate(default: Decide) -> Decide:
        name = f"{default.__module__.rpartition('.')[2]}.{default.__name__.lstrip('_')}"

        def options_of(*numbers: Any) -> Sequence[Tactic]:
            taken = default(*numbers)
            return () if taken is None else other_options(taken)

        _decisions[name] = default, options_of if others is None else others

        @functools.wraps(default)
        def decide(*numbers: Any) -> Tactic | None:
            key = name, repr(numbers)
            forced = _forced.get().get(key)
            chosen = forced or _kept(*key) or default(*numbers)
            seen = _asked.get()
            if seen is not None and chosen is not None:
                seen[key] = numbers
            return chosen

        return cast(Decide, decide)

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
            known = [_kept(name, shape), default(*numbers), *others(*numbers)]
            labels = dict.fromkeys(tactic.label for tactic in known if tactic is not None)
            found.append(Choice(name, shape, tuple(labels), numbers))

    @contextlib.contextmanager
    def using(self, choice: Choice, tactic: str) -> Iterator[None]:
        token = _forced.set({**_forced.get(), (choice.name, choice.shape): _tactic(choice, tactic)})
        plans.forget()
        try:
            yield
        finally:
            _forced.reset(token)
            plans.forget()

    def keep(self, choice: Choice, tactic: str) -> None:
        found = _tactic(choice, tactic)
        path = _path(choice.name, choice.shape)
        path.parent.mkdir(parents=True, exist_ok=True)
        content = {"name": choice.name, "shape": choice.shape, "constants": found.constants, "options": found.options}
        files.write_whole(path, json.dumps(content, indent=1) + "\n")
        _kept.cache_clear()
        plans.forget()
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
