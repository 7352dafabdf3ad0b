"""Starting a program on the simulated CANN: the environment that a CANN's set_env.sh would make."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from hal.backends.ascend.simulator import settings, without_cuda
from hal.backends.ascend.simulator.build import build
from hal.backends.ascend.simulator.settings import CACHE, LIBRARIES, PREFIX, SimulatorSettings
from hal.errors import ArgumentError, FileError
from hal.files import check_writable

__all__ = ["environment", "execute"]


def environment(simulated: SimulatorSettings) -> dict[str, str]:
    """This process's environment with what makes torch_npu load the simulated CANN; builds it if need be.

    Its own interpreter comes first on the search path. Raises what `build` raises.
    """
    home = build()
    result = settings.process_environment()
    result |= {PREFIX + name.upper(): text for name, text in simulated.texts().items()}
    result[LIBRARIES] = str(home)
    if result.get(CACHE):  # children may start from another directory
        result[CACHE] = str(settings.cache_root())
    result["LD_LIBRARY_PATH"] = os.pathsep.join(filter(None, (str(home / "lib64"), result.get("LD_LIBRARY_PATH"))))
    stand_ins = without_cuda.preloaded(home)
    if stand_ins:
        result["LD_PRELOAD"] = ":".join(filter(None, (*stand_ins, result.get("LD_PRELOAD"))))
    result["ASCEND_HOME_PATH"] = str(home)
    result["ASCEND_OPP_PATH"] = str(home / "opp")
    # Operators run where they are called, so that an error is raised by the line that made it.
    result.setdefault("TASK_QUEUE_ENABLE", "0")
    # Without a CANN it keeps torch loadable; here it would leave torch without its npu.
    result.pop("TORCH_DEVICE_BACKEND_AUTOLOAD", None)
    return result


def execute(simulated: SimulatorSettings, command: Sequence[str]) -> NoReturn:
    """Replace this process by `command`, run on the simulated CANN.

    Raises ArgumentError for a command that does not exist, FileError for a trace file that cannot be written.
    """
    if simulated.trace is not None:
        check_writable(simulated.trace)
    variables = environment(simulated)
    program = shutil.which(command[0], path=variables["PATH"])
    if program is None:
        raise ArgumentError(f"{command[0]!r} is no program on the search path; correct the command after --")
    if simulated.trace is not None:  # the last thing that can fail: what it held is lost
        start_trace(simulated.trace)
    os.execve(program, list(command), variables)


def start_trace(path: Path) -> None:
    """An empty file: processes append to it."""
    try:
        path.write_bytes(b"")
    except OSError as error:
        raise FileError(f"cannot write the trace to {str(path)!r}: {error.strerror}; name another file") from error
