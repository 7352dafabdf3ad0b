"""These tests drive the real torch_npu, which needs a CANN: the simulated one."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from hal.backends.ascend import simulator


def pytest_configure(config):
    if not simulator.active():
        raise pytest.UsageError(
            "tests/ascend/npu runs on the simulated CANN: hal simulate ascend -- python -m pytest tests/ascend/npu"
        )


@pytest.fixture(scope="session")
def simulated():
    """Runs Python code in a process of its own on a simulated CANN with other options; returns what it printed."""

    def run(code, *options, fails=False, **variables):
        command = [os.path.join(os.path.dirname(sys.executable), "hal"), "simulate", "ascend", *options]
        done = subprocess.run(
            [*command, "--", "python", "-c", code],
            env=os.environ | variables,
            capture_output=True,
            text=True,
            timeout=240,
        )
        assert (done.returncode != 0) == fails, f"{options} exited with {done.returncode}\n{done.stdout}{done.stderr}"
        return done.stderr if fails else done.stdout.strip()

    return run
