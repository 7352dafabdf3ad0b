"""The simulated CANN: runs programs that use the real torch_npu where there is no device.

`hal simulate ascend -- COMMAND` starts a program in an environment in which torch_npu's libraries find this CANN
instead of Huawei's: device memory is host memory, streams run in order at once, and each aclnn operator is a Python
function over CPU tensors. torch_npu itself (dispatch, autograd, shape and host checks, allocator, choice of operator
versions) is the real one. It shows that calls are accepted and results used rightly; never a device's numerics or
speed.
"""

from __future__ import annotations

import ctypes
import os

from hal.backends.ascend.simulator import settings
from hal.backends.ascend.simulator.settings import SimulatorSettings

__all__ = ["active", "current"]


def active() -> bool:
    """Whether torch_npu runs on the simulated CANN in this process, or would once it is loaded."""
    try:
        loaded = ctypes.CDLL("libascendcl.so", mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
    except OSError:
        return settings.libraries() is not None
    return hasattr(loaded, "sim_configure")


def current() -> SimulatorSettings:
    """The settings of this process's simulated CANN."""
    return settings.from_environment()
