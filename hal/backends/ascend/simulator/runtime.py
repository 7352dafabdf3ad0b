"""The Python side of the simulated CANN, in the process that uses torch_npu.

Native code imports this module and calls `attach` when torch_npu first asks CANN for anything. From then on each aclnn
call arrives here twice: `prepare` decodes its arguments and checks the constraints, `execute` computes. A call in a
graph is kept instead, and executed at each replay.
"""

from __future__ import annotations

import _thread
import atexit
import ctypes
import itertools
import logging
import os
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hal.backends.ascend.simulator import constraints, operators, settings, trace
from hal.backends.ascend.simulator.arguments import Decoder
from hal.backends.ascend.simulator.settings import SimulatorSettings
from hal.errors import ConfigError, FileError

__all__ = ["Bridge", "attach", "attached"]

logger = logging.getLogger("hal")

_INNER_ERROR = 561000  # ACLNN_ERR_INNER
_DIRECTIONS = ("host_to_host", "host_to_device", "device_to_host", "device_to_device")
_WAITS = ("stream", "device", "event")
_COPY = 3  # Event::copy

_PREPARE = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int, ctypes.c_void_p, ctypes.c_int64)
_EXECUTE = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int64)
_KEEP = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int)
_NOTE = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_int)
_INITIALISED = ctypes.CFUNCTYPE(None)


class _Interrupt:
    """`_ = ~_INTERRUPT` interrupts the program once the callback that says it has returned.

    An exception cannot leave a callback. Calling interrupt_main there would raise in the callback again, after the
    call; behind an operator Python looks for signals only when the function has returned.
    """

    __invert__ = staticmethod(_thread.interrupt_main)


_INTERRUPT = _Interrupt()

_Check = Callable[[Sequence[Any]], None]
# The operator's index, its arguments, and the same as the native side read them.
_Pending = tuple[int, list[Any], bytes]


class Bridge:
    """What stands between the native libraries and the operators: one a process."""

    def __init__(self, simulated: SimulatorSettings, native: ctypes.CDLL) -> None:
        self.settings = simulated
        self._native = native
        self._decoder: Decoder | None = None
        self._pending: dict[int, _Pending] = {}
        self._kept: dict[int, _Pending] = {}  # by graphs
        self._running = threading.local()
        self._untold: FileError | None = None  # why the trace lacks an event
        self._numbers = itertools.count(1)
        self._table: list[operators.Operator | None] = [None] * native.sim_operator_count()
        # Of shapes and dtypes before a call, of values when it runs.
        self._checks: list[Sequence[_Check]] = [()] * len(self._table)
        self._value_checks = list(self._checks)
        # The dispatcher's state of a thread on which no kernel runs.
        with torch._C._InferenceMode(False):
            self._include = torch._C._dispatch_tls_local_include_set()
            self._exclude = torch._C._dispatch_tls_local_exclude_set()
        # ctypes' callbacks live as long as the native side may call them: as long as the process.
        self._callbacks = (_PREPARE(self._prepare), _EXECUTE(self._execute), _INITIALISED(self._mark))
        self._keeper = _KEEP(self._keep)
        self._note = _NOTE(self._tell)

    def start(self) -> None:
        """Hand settings, operators and callbacks to the native side."""
        native, simulated = self._native, self.settings
        native.sim_configure(
            simulated.soc.name.encode(),
            simulated.cann.encode(),
            simulated.devices,
            ctypes.c_uint64(simulated.memory),
            ctypes.c_int64(simulated.soc.cube_cores),
            ctypes.c_int64(simulated.soc.vector_cores),
            ctypes.c_int64(simulated.soc.l2),
        )
        native.sim_callbacks(*self._callbacks)
        native.sim_keep_with(self._keeper)
        native.sim_operator_name.restype = ctypes.c_char_p
        loaded = operators.load()
        rows = constraints.load() if simulated.strict else ()
        before, running = (
            constraints.bind([row for row in rows if row.values == values], loaded, simulated)
            for values in (False, True)
        )
        for index in range(len(self._table)):
            name = native.sim_operator_name(index).decode()
            found = loaded.get(name)
            if found is not None:
                self._table[index] = found
                self._checks[index] = before.get(name, ())
                self._value_checks[index] = running.get(name, ())
                native.sim_define(index, found.signature.encode())
        trace.OBSERVERS.changed = self._observe
        # What torch_npu does after Python has ended must not call back into it.
        atexit.register(self._detach)
        if simulated.trace is not None:
            trace.append_to(simulated.trace)

    def used(self, device: int) -> int:
        """Bytes of a device's memory that are allocated."""
        self._native.sim_used.restype = ctypes.c_uint64
        return int(self._native.sim_used(device))

    def set_shape(self, result: Tensor, shape: Sequence[int]) -> None:
        """Tell the caller of the running operator the shape of a result whose size depends on values.

        result: the operator's own argument, which has room for the greatest one; the values stand at its start.
        """
        index, values, raw = self._running.call
        operator = self._table[index]
        position = next(i for i, value in enumerate(values) if value is result)
        assert operator is not None and self._decoder is not None
        handle = self._decoder.handle(operator.signature, raw, position)
        extents = (ctypes.c_int64 * len(shape))(*shape)
        self._native.sim_set_shape(ctypes.c_void_p(handle), extents, ctypes.c_uint64(len(shape)))

    def _prepare(self, index: int, address: int, count: int) -> int:
        operator = self._table[index]
        assert operator is not None  # the native side has a signature for it
        try:
            raw = ctypes.string_at(address, 8 * count)
            # Views are kept: a tensor made in inference mode could not be written to outside of it.
            with torch._C._InferenceMode(False):
                decoder = self._decoder or self._open()
                values = decoder.decode(operator.signature, raw)
                for check in self._checks[index]:
                    check(values)
        except Exception as error:
            self._fail(operator, error)
            return -1
        except BaseException as error:
            self._fail(operator, error)
            _ = ~_INTERRUPT
            return -1
        number = next(self._numbers)
        self._pending[number] = index, values, raw
        return number

    def _keep(self, number: int, on: int) -> None:
        """A graph holds a call, or lets go of it. What the host holds of its arguments is copied, as a launch does."""
        if not on:
            del self._kept[number]
            return
        index, values, raw = self._pending.pop(number)
        assert self._decoder is not None
        self._kept[number] = index, [self._decoder.lasting(value) for value in values], raw

    def _execute(self, number: int) -> int:
        self._running.call = index, values, _ = self._kept.get(number) or self._pending.pop(number)
        operator = self._table[index]
        assert operator is not None
        try:
            if self._untold is not None:
                raise self._untold
            # A kernel's thread excludes dispatch keys and may stand below modes: an operator is none of theirs. Leaving
            # inference mode turns gradients on, and restores what was when it ends.
            with torch._C._InferenceMode(False):
                torch._C._set_grad_enabled(False)
                for check in self._value_checks[index]:
                    check(values)
                if trace.OBSERVERS.listeners:
                    trace.OBSERVERS.tell(trace.describe(operator.name, operator.parameters, values))
                with (
                    torch._C._ForceDispatchKeyGuard(self._include, self._exclude),
                    torch._C.DisableTorchFunction(),
                ):
                    operator.function(*values)
        except Exception as error:
            self._fail(operator, error)
            return _INNER_ERROR
        except BaseException:
            # An error here would hide the interrupt, which comes before the program sees a result.
            _ = ~_INTERRUPT
        return 0

    def _fail(self, operator: operators.Operator, error: BaseException) -> None:
        text = str(error) or type(error).__name__
        if not isinstance(error, ValueError | NotImplementedError):
            text = f"{type(error).__name__}: {text}"
            logger.debug("%s failed", operator.name, exc_info=error)
        self._native.sim_set_error(f"simulated CANN: {operator.name}: {text}".encode())

    def _open(self) -> Decoder:
        size = ctypes.c_uint64()
        self._native.sim_arena.restype = ctypes.c_void_p
        start = self._native.sim_arena(ctypes.byref(size))
        self._decoder = Decoder(start, size.value)
        return self._decoder

    def _mark(self) -> None:
        """What reads a device module learns that no hardware stands behind it."""
        torch.npu.simulated = True  # type: ignore[attr-defined]
        # Before A2 torch_npu takes operators older than aclnn, compiled one by one, unless told otherwise.
        torch.npu.set_compile_mode(jit_compile=False)  # type: ignore[attr-defined]

    def _observe(self, any_left: bool) -> None:
        self._native.sim_observe(self._note if any_left else None)

    def _detach(self) -> None:
        self._observe(False)
        self._native.sim_keep_with(None)
        if self._untold is not None:
            # Nothing else makes a program that has ended well exit otherwise.
            sys.stderr.write(f"hal: {self._untold}\n")
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
            os._exit(1)

    def _tell(self, event: int, detail: int, size: int, asynchronous: int) -> None:
        try:
            if event == _COPY:
                trace.OBSERVERS.tell(
                    trace.Copy(_DIRECTIONS[detail], size, bool(asynchronous))  # type: ignore[arg-type]
                )
            else:
                trace.OBSERVERS.tell(trace.Synchronisation(_WAITS[event]))  # type: ignore[arg-type]
        except FileError as error:
            self._untold = error  # told by the next operator, or at the end: a copy has no way to fail


_bridge: Bridge | None = None


def attach() -> None:
    """Start the Python side in this process. Raises ConfigError for settings or libraries that do not fit."""
    global _bridge
    home = settings.libraries()
    if home is None:
        raise ConfigError(
            f"the simulated CANN is loaded, but {settings.LIBRARIES} is not set; start the program with "
            "`hal simulate ascend -- COMMAND`"
        )
    bridge = Bridge(settings.from_environment(), load(home))
    bridge.start()
    _bridge = bridge


def load(home: Path) -> ctypes.CDLL:
    """The native side, which is loaded already."""
    return ctypes.CDLL(str(home / "lib64" / "libascendcl.so"), mode=ctypes.RTLD_GLOBAL)


def attached() -> Bridge | None:
    """The bridge of this process, once torch_npu has asked for anything."""
    return _bridge
