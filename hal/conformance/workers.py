"""Processes that judge cases side by side, and outlive none of them: a crash is that case's failure, not the run's."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any, NoReturn

from hal.errors import HalError

Judge = Callable[[Any], Any]
MOST = 16
# Exit status of a process whose device was lost to it.
UNUSABLE = 71


def cores() -> int:
    """How many processes are worth having here."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(usable, MOST)


@dataclass(frozen=True)
class Crashed:
    """The process ended while it worked on `item`; `how` says with what."""

    item: Any
    how: str


@dataclass(frozen=True)
class Done:
    """What the judge returned for `item`."""

    item: Any
    value: Any


def end_unusable() -> NoReturn:
    """End this process at once, as one whose device is lost to it: another takes over."""
    os._exit(UNUSABLE)  # the runtime's own clean-up would wait for the device


class _Worker:
    def __init__(self, setup: Callable[..., Judge], arguments: tuple[Any, ...]) -> None:
        # spawn: a forked child of a process that holds a device or threads cannot be relied on
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process: SpawnProcess = context.Process(target=_serve, args=(theirs, setup, arguments), daemon=True)
        self.process.start()
        theirs.close()
        self.ready = False
        self.item: Any = None
        self.since = 0.0

    def give(self, item: Any) -> None:
        self.item, self.since = item, time.monotonic()
        # a worker that has just died is found by its closed pipe
        with contextlib.suppress(OSError):
            self.connection.send(item)

    def how_it_ended(self) -> str:
        self.process.join(5)
        code = self.process.exitcode
        if code is not None and code < 0:
            with contextlib.suppress(ValueError):
                return f"signal {signal.Signals(-code).name}"
        return "a device that no longer answers" if code == UNUSABLE else f"exit status {code}"

    def stop(self) -> None:
        self.connection.close()
        self.process.terminate()
        self.process.join(5)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()


def share_out(
    items: Iterable[Any], workers: int, setup: Callable[..., Judge], arguments: tuple[Any, ...]
) -> Iterator[Done | Crashed]:
    """Apply the judge that `setup(*arguments)` makes in each process to all items, in whatever order they finish.

    `setup`, its arguments, the items and the judge's results must pickle.
    """
    left = deque(items)
    pool = [_Worker(setup, arguments) for _ in range(min(workers, len(left)))]
    try:
        while left or any(worker.item is not None for worker in pool):
            by_connection: dict[Any, _Worker] = {worker.connection: worker for worker in pool}
            for connection in wait(list(by_connection)):
                worker = by_connection[connection]
                try:
                    message = worker.connection.recv()
                except (EOFError, OSError):
                    how = worker.how_it_ended()
                    pool.remove(worker)
                    worker.stop()
                    if not worker.ready:
                        raise HalError(
                            f"a worker process ended before it could judge anything ({how}); "
                            "run with --workers 0 to see why"
                        ) from None
                    if worker.item is not None:
                        yield Crashed(worker.item, how)
                    if left:
                        pool.append(_Worker(setup, arguments))
                    continue
                if worker.ready:
                    item, worker.item = worker.item, None
                    yield Done(item, message)
                worker.ready = True
                if left:
                    worker.give(left.popleft())
    finally:
        for worker in pool:
            worker.stop()


class Apart:
    """One process that answers a question at a time and is replaced when it dies or takes too long."""

    def __init__(self, setup: Callable[..., Judge], arguments: tuple[Any, ...]) -> None:
        self._setup, self._arguments = setup, arguments
        self._worker: _Worker | None = None

    def ask(self, item: Any, seconds: float) -> Done | Crashed:
        """The judge's answer to `item`; Crashed if its process dies of it, or takes longer than `seconds`.

        Raises HalError if the process cannot be started.
        """
        worker = self._worker or self._start()
        worker.give(item)
        if not worker.connection.poll(seconds):
            self.stop()
            return Crashed(item, f"no answer within {seconds:.0f} s")
        try:
            return Done(item, worker.connection.recv())
        except (EOFError, OSError):
            how = worker.how_it_ended()
            self.stop()
            return Crashed(item, how)

    def stop(self) -> None:
        """End the process; the next question starts another."""
        if self._worker is not None:
            self._worker.stop()
            self._worker = None

    def _start(self) -> _Worker:
        worker = _Worker(self._setup, self._arguments)
        try:
            worker.connection.recv()
        except (EOFError, OSError):
            how = worker.how_it_ended()
            worker.stop()
            raise HalError(f"the process that is to judge ended at once ({how}); run with --here to see why") from None
        self._worker = worker
        return worker


def _serve(connection: Connection[Any, Any], setup: Callable[..., Judge], arguments: tuple[Any, ...]) -> None:
    # Ctrl-C reaches the whole process group; the parent decides what becomes of the run.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    judge = setup(*arguments)
    # a closed pipe means that nobody waits for the answer any more
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        connection.send("ready")
        while True:
            item = connection.recv()
            value = judge(item)
            connection.send(value)
