"""The portable backend: every operator's reference, composed from ATen, on any torch device type.

Asked for as `portable:<torch device type>`. It needs nothing but a device that torch knows, so a new chip
runs the whole conformance suite on its first day. `portable:simdev` brings its own device: a simulated one
(see `simdev`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from hal.backends.portable import composed
from hal.capability import Implementation
from hal.hookspec import Backend, hookimpl

if TYPE_CHECKING:
    from hal.descriptor import DeviceDescriptor

NAME = "portable"


@hookimpl
def hal_backend() -> Backend:
    return Backend(NAME, (), "references composed from ATen, on any torch device type", parameterised=True)


@hookimpl
def hal_devices(backend: str) -> Sequence[DeviceDescriptor]:
    name, _, device_type = backend.partition(":")
    if name != NAME:
        return []
    from hal.backends.portable.devices import present

    return present(device_type)


@hookimpl
def hal_implementations(backend: str) -> Sequence[Implementation]:
    return composed.IMPLEMENTATIONS if backend == NAME else []
