"""What a program asks of the simulated CANN: every operator call, copy and synchronisation, in order."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from hal.errors import FileError

__all__ = ["Call", "Copy", "Event", "Recording", "Synchronisation", "describe", "recording"]


@dataclass(frozen=True)
class Call:
    """An operator that ran: its aclnn name, and what each argument was, by name.

    A tensor is {"dtype", "shape", "strides"}, a list a list, a dtype its name; numbers, strings and None stand as
    they are.
    """

    operator: str
    arguments: dict[str, Any]
    kind: Literal["call"] = "call"


@dataclass(frozen=True)
class Copy:
    """A copy of `bytes` bytes; `asynchronous`: the call may return before it is done."""

    direction: Literal["host_to_host", "host_to_device", "device_to_host", "device_to_device"]
    bytes: int
    asynchronous: bool
    kind: Literal["copy"] = "copy"


@dataclass(frozen=True)
class Synchronisation:
    """The host waited for a stream, a device or an event."""

    what: Literal["stream", "device", "event"]
    kind: Literal["synchronisation"] = "synchronisation"


Event = Call | Copy | Synchronisation


@dataclass
class Recording:
    """Events in the order in which they happened."""

    events: list[Event] = field(default_factory=list)

    @property
    def calls(self) -> list[Call]:
        return [event for event in self.events if isinstance(event, Call)]

    @property
    def copies(self) -> list[Copy]:
        return [event for event in self.events if isinstance(event, Copy)]

    @property
    def synchronisations(self) -> list[Synchronisation]:
        return [event for event in self.events if isinstance(event, Synchronisation)]


class Observers:
    """Those who are told of events; `changed` is called with whether there are any."""

    def __init__(self) -> None:
        self.listeners: list[Callable[[Event], None]] = []
        self.changed: Callable[[bool], None] = lambda any_left: None

    def add(self, listener: Callable[[Event], None]) -> None:
        self.listeners.append(listener)
        self.changed(True)

    def remove(self, listener: Callable[[Event], None]) -> None:
        self.listeners.remove(listener)
        self.changed(bool(self.listeners))

    def tell(self, event: Event) -> None:
        for listener in self.listeners:
            listener(event)


# The one set of observers of this process's simulated CANN.
OBSERVERS = Observers()


@contextmanager
def recording() -> Iterator[Recording]:
    """Record what this process's simulated CANN is asked for inside the block."""
    found = Recording()
    add = found.events.append
    OBSERVERS.add(add)
    try:
        yield found
    finally:
        OBSERVERS.remove(add)


def append_to(path: Path) -> None:
    """Append every event from now on to a file, one line of JSON each; processes may share the file.

    An event that cannot be written whole raises FileError where it is told.
    """
    handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)

    def write(event: Event) -> None:
        line = (json.dumps({"process": os.getpid(), **asdict(event)}) + "\n").encode()
        try:
            while line:
                line = line[os.write(handle, line) :]
        except OSError as error:
            raise FileError(
                f"the trace in {str(path)!r} is not whole: {error.strerror}; make room, or name another file"
            ) from error

    OBSERVERS.add(write)


def describe(name: str, parameters: Sequence[str], values: Sequence[Any]) -> Call:
    """The record of a call."""
    return Call(name, {parameter: _described(value) for parameter, value in zip(parameters, values, strict=True)})


def _described(value: Any) -> Any:
    if isinstance(value, Tensor):
        return {"dtype": _name(value.dtype), "shape": list(value.shape), "strides": list(value.stride())}
    if isinstance(value, list):
        return [_described(item) for item in value]
    return _name(value) if isinstance(value, torch.dtype) else value


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
