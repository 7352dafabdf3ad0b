"""The plug-in contract: what a backend, or an extension of one, tells hal about itself.

A plug-in is a module found through the entry-point group `hal.backends`. The entry's name is the backend's name, or
`backend.extra` for a plug-in that adds implementations, devices or cases to an existing backend.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import pluggy
import torch

from hal.capability import Implementation

if TYPE_CHECKING:
    from hal.descriptor import DeviceDescriptor

__all__ = ["PROJECT", "Backend", "Choice", "Conflict", "Tuner", "hookimpl", "hookspec"]

PROJECT = "hal"

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@dataclass(frozen=True)
class Backend:
    """A backend: its name, the torch device types that it serves, and whether it takes a device it is shown.

    parameterised: the backend is asked for as `name:<torch device type>` and serves that type only.
    claims: says whether `auto` may give the backend this device; None = every device of its types.
    packages: vendor distributions that its devices need; `hal doctor` tries them in processes of their own and asks for
    the devices only if they import. Conformance records their versions.
    """

    name: str
    device_types: tuple[str, ...]
    description: str = ""
    parameterised: bool = False
    claims: Callable[[torch.device], bool] | None = None
    packages: tuple[str, ...] = ()


@dataclass(frozen=True)
class Conflict:
    """Two things of this machine that do not go together, and what to do about it; for `hal doctor`."""

    what: str
    found: str
    wanted: str
    remedy: str


@dataclass(frozen=True)
class Choice:
    """A decision that a call's speed depends on, not its meaning: a kernel's tile, its warps.

    name: of the decision. shape: the shape class that it is made for, as text; `numbers` are its numbers. tactics: what
    there is to choose from, by label, the one in use first.
    """

    name: str
    shape: str
    tactics: tuple[str, ...]
    numbers: tuple[Any, ...] = ()


class Tuner(Protocol):
    """How a backend's decisions are tried and kept; `hal warmup --tune` times them and checks their results."""

    def watching(self) -> AbstractContextManager[list[Choice]]:
        """Decisions made within the block, each once, are in the list when it ends."""
        ...

    def using(self, choice: Choice, tactic: str) -> AbstractContextManager[None]:
        """What is decided within the block, by plans that are made there too, is decided so."""
        ...

    def keep(self, choice: Choice, tactic: str) -> None:
        """Decide so from now on, in later processes too."""
        ...


@hookspec
def hal_backend() -> Backend | None:
    """The backend that this plug-in brings, or None if it extends another."""


@hookspec
def hal_devices(backend: str) -> Sequence[DeviceDescriptor]:  # type: ignore[empty-body]
    """Descriptors of the devices that are present, for this backend (`name` or `name:<device type>`)."""


@hookspec
def hal_implementations(backend: str) -> Sequence[Implementation]:  # type: ignore[empty-body]
    """Implementations that this plug-in brings to this backend (`name`, without a device type)."""


@hookspec
def hal_cases(op: str) -> Sequence[Any]:  # type: ignore[empty-body]
    """Further conformance cases for an operator."""


@hookspec
def hal_descriptors() -> Sequence[DeviceDescriptor]:  # type: ignore[empty-body]
    """Further data sheets of devices."""


@hookspec
def hal_simulator(backend: str) -> Callable[[Sequence[str]], int] | None:
    """The command line of a simulator of this backend's devices, or None if there is none.

    `hal simulate NAME …` calls it with the arguments after the name. It returns an exit status, or becomes the program
    that it was asked to run.
    """


@hookspec
def hal_software() -> Mapping[str, str]:  # type: ignore[empty-body]
    """Versions of what this backend's devices run on beside its packages, such as a vendor's toolkit, by name.

    Conformance records them. A version of something simulated says so. It may import no vendor package.
    """


@hookspec
def hal_conflicts() -> Sequence[Conflict]:  # type: ignore[empty-body]
    """What is installed here for this backend's devices and does not go together. It may import no vendor package."""


@hookspec
def hal_tuner(backend: str) -> Tuner | None:
    """Tries and keeps this backend's tactics, or None if there is nothing to tune."""
