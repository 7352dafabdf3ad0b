"""A judge that dies, hangs or answers, for the tests of processes that judge."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable


def setup() -> Callable[[str], int | str]:
    def judge(item: str) -> int | str:
        if item == "die":
            os.kill(os.getpid(), signal.SIGSEGV)
        if item == "hang":
            time.sleep(600)
        return os.getpid() if item == "who" else item

    return judge


def broken() -> Callable[[str], str]:
    raise SystemExit(3)
