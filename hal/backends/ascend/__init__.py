"""The Ascend backend: CANN's operators through torch_npu, Triton-Ascend kernels second, references composed from ATen.

torch_npu is imported when a device is first asked for. The simulated CANN lives in this package and is loaded while
torch, and hal with it, is only half imported: so this module imports no operator.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from hal.hookspec import Backend, Conflict, hookimpl

if TYPE_CHECKING:
    from hal.capability import Implementation
    from hal.descriptor import DeviceDescriptor

NAME = "ascend"


@hookimpl
def hal_backend() -> Backend:
    return Backend(NAME, ("npu",), "CANN's operators through torch_npu on Huawei Ascend", packages=("torch_npu",))


@hookimpl
def hal_devices(backend: str) -> Sequence[DeviceDescriptor]:
    if backend != NAME:
        return []
    from hal.backends.ascend import devices

    return devices.present()


@hookimpl
def hal_implementations(backend: str) -> Sequence[Implementation]:
    if backend != NAME:
        return []
    from hal.backends.ascend import devices, implementations

    return implementations.for_chip(devices.chip())


@hookimpl
def hal_software() -> Mapping[str, str]:
    from hal.backends.ascend import simulator, software

    versions, cann = software.present()
    if "torch_npu" not in versions:
        return {}
    return {"CANN": f"{simulator.current().cann} (simulated)" if simulator.active() else cann or "unknown"}


@hookimpl
def hal_conflicts() -> Sequence[Conflict]:
    from hal import settings
    from hal.backends.ascend import simulator, software

    versions, cann = software.present()
    unset = software.without_cann(
        versions.get("torch_npu"), cann, settings.foreign("ASCEND_HOME_PATH"), simulator.active()
    )
    return [*software.conflicts(versions, cann), *unset]


@hookimpl
def hal_simulator(backend: str) -> Callable[[Sequence[str]], int] | None:
    if backend != NAME:
        return None
    from hal.backends.ascend.simulator import command

    return command.run
