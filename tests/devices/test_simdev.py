"""The portable backend on a device that torch does not know: the simulated PrivateUse1 stack, two devices.

torch can rename PrivateUse1 once a process, and the stack then is the process's accelerator. So each module
of tests that needs it runs as a pytest session of its own.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ENVIRONMENT = {k: v for k, v in os.environ.items() if not k.startswith(("HAL_", "PYTEST_"))} | {"OMP_NUM_THREADS": "1"}


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True, text=True, timeout=280, env=ENVIRONMENT | environment, cwd=HERE.parents[1],
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("module", ["simdev_stack", "simdev_ops", "simdev_conformance"])
def test_module_passes_in_a_process_with_the_simulated_device(module):
    done = run("-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", str(HERE / f"{module}.py"))
    print(done.stdout[-6000:], done.stderr[-2000:])
    assert done.returncode == 0
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None
    assert int(passed[1]) > 0
    assert "skipped" not in done.stdout


def test_importing_hal_and_the_portable_backend_registers_no_device():
    script = """
import torch, hal
from hal import registry
registry.load_all()
print(torch._C._get_privateuse1_backend_name())
"""
    assert run("-c", script).stdout.strip() == "privateuseone"


def test_hal_backend_names_the_simulated_device_without_any_preparation():
    script = """
import json, torch
from hal import registry
devices = registry.devices("portable:simdev")
import hal
x = torch.ones(2, 8, device=devices[1].device)
y = hal.ops.rms_norm(x)
print(json.dumps([[d.device, d.simulated] for d in devices] + [str(y.device)]))
"""
    done = run("-c", script, HAL_BACKEND="portable:simdev")
    assert json.loads(done.stdout) == [["simdev:0", True], ["simdev:1", True], "simdev:1"], done.stderr


def test_a_taken_slot_is_a_typed_error_that_names_who_holds_it():
    script = """
import torch
torch.utils.rename_privateuse1_backend("other")
from hal.backends.portable import simdev
from hal.errors import DeviceError
try:
    simdev.install()
except DeviceError as error:
    print(error)
"""
    done = run("-c", script)
    assert "other holds it" in done.stdout, done.stderr
