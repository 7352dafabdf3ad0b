"""Where kernels are interpreted, they are among the CPU's implementations."""

from __future__ import annotations

import contextlib
import os

import pytest

_stack = contextlib.ExitStack()


def pytest_configure(config: pytest.Config) -> None:
    if os.environ.get("TRITON_INTERPRET") == "1":
        from cuda_judging import interpreted

        _stack.enter_context(interpreted())


def pytest_unconfigure(config: pytest.Config) -> None:
    _stack.close()
