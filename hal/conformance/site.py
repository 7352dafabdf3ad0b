"""Where a run takes place: a backend, the device it is judged on, and the implementations it registers."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from hal import registry, selection, settings
from hal.capability import Implementation
from hal.conformance.report import Target
from hal.descriptor import DeviceDescriptor
from hal.errors import ConfigError, DeviceError

__all__ = ["Site", "closest", "settings_in_force"]


@dataclass(frozen=True)
class Site:
    """A backend (`cpu`, `portable:npu`, never `auto`) on one device; `pinned` is the device that was asked for."""

    target: Target
    pinned: str | None = None

    @classmethod
    def of(cls, backend: str, device: str | None = None) -> Site:
        """The site of a backend by name; `auto` takes the accelerator if there is one, else the CPU.

        device: one of the backend's devices, such as `cuda:1`; None takes the first. Raises ConfigError for a name
        that no plug-in has, DeviceError if the backend has no such device here.
        """
        if backend == "auto":
            accelerator = torch.accelerator.current_accelerator(check_available=True)
            found = torch.device("cpu") if accelerator is None else accelerator
            backend = selection.auto_backend(found)
        types = _types(backend)
        # Asking for the devices is what brings some device types into torch; a backend that is asked for by name says
        # why it has none.
        with settings.use(backend=backend):
            present = [descriptor for descriptor in registry.devices(backend) if descriptor.torch_device in types]
        device_name = (present[0].device or present[0].torch_device or types[0]) if present else types[0]
        if device is not None:
            device_name = _named_device(backend, device, types)
            present = [descriptor for descriptor in present if descriptor.device == device_name] or present
        _try_device(backend, device_name)
        return cls(
            Target(
                backend=backend,
                device=device_name,
                descriptor=_title(present[0]) if present else None,
                simulated=any(descriptor.simulated for descriptor in present[:1]),
            ),
            device,
        )

    def devices(self) -> list[str]:
        """The torch devices of this backend that are present, by name."""
        of_type = torch.device(self.target.device).type
        present = (descriptor.device for descriptor in registry.devices(self.target.backend))
        return [name for name in present if name and torch.device(name).type == of_type] or [self.target.device]

    @property
    def _plugin(self) -> str:
        return self.target.backend.partition(":")[0]

    def implementations(self, op: str) -> tuple[str, ...]:
        """Names of the registered implementations of an operator, preferred ones first."""
        return tuple(found.name for found in registry.implementations(self._plugin, op))

    def implementation(self, op: str, name: str) -> Implementation:
        """One registered implementation."""
        return next(found for found in registry.implementations(self._plugin, op) if found.name == name)

    def plugin_failures(self) -> tuple[str, ...]:
        """What plug-ins of this backend failed with; their implementations were not judged."""
        return tuple(
            f"{failure.name}: {failure.type}: {failure.message}"
            for failure in registry.failures()
            if failure.name.partition(".")[0].partition("@")[0] == self._plugin
        )


def _title(descriptor: DeviceDescriptor) -> str:
    vendor, name = descriptor.vendor, descriptor.name
    return name if name.lower().startswith(vendor.lower()) else f"{vendor} {name}"


def _types(backend: str) -> tuple[str, ...]:
    name, _, parameter = backend.partition(":")
    found = registry.backend(name)
    if found.parameterised and not parameter:
        raise ConfigError(f"backend {name!r} needs a torch device type: {name}:cpu, {name}:cuda, {name}:npu …")
    if parameter and not found.parameterised:
        raise ConfigError(f"backend {backend!r} was asked for, but {name!r} takes no device type; write {name}.")
    return (parameter.partition(":")[0],) if parameter else found.device_types


def _named_device(backend: str, device: str, types: tuple[str, ...]) -> str:
    try:
        found = torch.device(device)
    except RuntimeError as error:
        raise DeviceError(f"{device!r} is no torch device; name one such as {types[0]}:0.") from error
    if found.type not in types:
        raise DeviceError(
            f"device {device!r} was asked for, but backend {backend!r} runs on {', '.join(types)}; "
            f"name one such as {types[0]}:0, or another backend."
        )
    return str(found)


def _try_device(backend: str, device: str) -> None:
    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError, ImportError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise DeviceError(
            f"backend {backend!r} has no usable device here: torch cannot allocate on {device!r} ({reason}). "
            f"'hal devices' lists what is present."
        ) from error


def settings_in_force() -> dict[str, str]:
    """The settings as text, by name."""
    return {name: str(value) for name, value in settings.current().model_dump().items() if value is not None}


def closest(name: str, known: Iterable[str]) -> str:
    """ " Did you mean …?" or nothing."""
    near = difflib.get_close_matches(name, list(known), 1)
    return f" Did you mean {near[0]!r}?" if near else ""
