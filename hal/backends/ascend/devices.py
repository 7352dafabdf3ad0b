"""Which NPUs there are, described live and by their data sheets. torch_npu is imported here, on the first question."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import torch

from hal import settings
from hal.backends.ascend import NAME, simulator, software
from hal.backends.ascend.chips import architecture
from hal.backends.ascend.versions import cann_text
from hal.descriptor import DeviceDescriptor, describe
from hal.errors import ConfigError, DeviceError

__all__ = ["chip", "present"]


def chip() -> str | None:
    """The architecture of the NPUs of this machine; None without any, or where torch_npu does not load."""
    try:
        torch_npu = _torch_npu()
    except DeviceError:  # told where the devices themselves are asked for
        return None
    if torch_npu is None or not torch_npu.npu.is_available():
        return None
    return architecture(int(torch_npu.npu.get_soc_version()))


def present() -> list[DeviceDescriptor]:
    """A descriptor of each NPU; empty where there is none.

    Raises DeviceError where torch_npu is installed but does not load, and, where HAL_BACKEND asks for this backend, for
    any other reason why there is no NPU.
    """
    torch_npu = _torch_npu()
    if torch_npu is None or not torch_npu.npu.is_available():
        if _asked_for():
            versions, toolkit = software.present()
            raise DeviceError(
                software.missing(versions["torch"], versions.get("torch_npu"), toolkit, simulator.active())
                or software.NO_NPU
            )
        return []
    soc = int(torch_npu.npu.get_soc_version())
    notes = (f"torch_npu {torch_npu.__version__}", f"CANN {cann_text() or 'of unknown version'}")
    # A host has one kind of NPU. Describing each would put a context, and memory, of this process on all of them.
    live = describe(torch.device("npu", torch_npu.npu.current_device()))
    update: dict[str, Any] = {
        "architecture": architecture(soc) or live.architecture,
        "simulated": live.simulated or simulator.active(),
        "notes": (*live.notes, *notes),
    }
    return [
        live.model_copy(update=update | {"device": f"npu:{index}"}) for index in range(torch_npu.npu.device_count())
    ]


def _asked_for() -> bool:
    try:
        return settings.current().backend == NAME
    except ConfigError:  # told where the setting is read; it is no fault of the devices
        return False


def _torch_npu() -> Any:
    if importlib.util.find_spec("torch_npu") is None:
        return None
    try:
        return importlib.import_module("torch_npu")
    except (ImportError, OSError, RuntimeError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        versions, toolkit = software.present()
        advice = software.missing(versions["torch"], versions.get("torch_npu"), toolkit, simulator.active())
        raise DeviceError(f"torch_npu does not load: {reason}. {advice or ''}".strip()) from error
