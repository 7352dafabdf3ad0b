"""Which NPUs there are, described live and by their data sheets. torch_npu is imported here, on the first question."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import torch

from hal.backends.ascend import simulator
from hal.backends.ascend.chips import architecture
from hal.backends.ascend.versions import cann_text
from hal.descriptor import DeviceDescriptor, describe
from hal.errors import DeviceError

__all__ = ["present"]


def present() -> list[DeviceDescriptor]:
    """A descriptor of each NPU. Empty without torch_npu; DeviceError where it is installed but does not load."""
    torch_npu = _torch_npu()
    if torch_npu is None or not torch_npu.npu.is_available():
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


def _torch_npu() -> Any:
    if importlib.util.find_spec("torch_npu") is None:
        return None
    try:
        return importlib.import_module("torch_npu")
    except (ImportError, OSError, RuntimeError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise DeviceError(
            f"torch_npu is installed but does not load ({reason}); source CANN's set_env.sh, or run on the simulated "
            "one with 'hal simulate ascend -- COMMAND'"
        ) from error
