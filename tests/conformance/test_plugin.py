"""The pytest plug-in: `pytest --pyargs hal.conformance` from anywhere, and nothing for who does not ask for it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from hal.conformance.case import cases

CASE = next(case.id for case in cases("rms_norm") if case.dtype == "float32" and case.tags == {"grid"})


@pytest.fixture
def run(tmp_path, installed):
    """Runs pytest in an empty folder; `body` spoils the throw-away implementation."""

    def run(*arguments, body="pass"):
        return subprocess.run(
            [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments],
            cwd=tmp_path, env=installed(body), capture_output=True, text=True, timeout=120,
        )  # fmt: skip

    return run


def test_test_ids_are_case_ids_and_the_header_names_target_versions_and_settings(run):
    done = run("--pyargs", "hal.conformance", "--hal-backend=cpu", f"--hal-case={CASE}", "-v")
    assert done.returncode == 0, done.stdout
    assert f"test_conforms[{CASE}-reference] PASSED" in done.stdout
    assert f"test_conforms[{CASE}-throwaway] PASSED" in done.stdout
    for told in ("hal target: backend cpu on cpu", "torch 2.", "fallback=error", "float32_matmul_precision="):
        assert told in done.stdout


def test_a_wrong_implementation_fails_with_the_finding_and_a_repeat_command(run):
    done = run("--pyargs", "hal.conformance", "--hal-backend=cpu", f"--hal-case={CASE}", body="y = y * 1.01")
    assert done.returncode == 1
    assert "1 failed, " in done.stdout
    assert "R1: y[" in done.stdout
    assert f"repeat: hal conformance run --case {CASE}" in done.stdout.replace("'", "")
    assert "plugin.py" not in done.stdout


@pytest.mark.parametrize(
    ("option", "told"),
    [
        ("--hal-backend=cup", "did you mean 'cpu'"),
        ("--hal-op=rmsnorm", "Did you mean 'rms_norm'"),
        ("--hal-suite=slow", "quick and full"),
    ],
)
def test_what_cannot_run_is_a_usage_error(run, option, told):
    done = run("--pyargs", "hal.conformance", option)
    assert done.returncode == 4
    assert told in done.stderr
    assert "Traceback" not in done.stderr


def test_a_run_of_other_tests_imports_neither_torch_nor_hal(run, tmp_path):
    (tmp_path / "test_other.py").write_text(
        "import sys\n\ndef test_clean():\n    assert '_hal_pytest' in sys.modules\n"
        "    assert not {'torch', 'hal', 'pydantic'} & set(sys.modules)\n"
    )
    done = run("test_other.py")
    assert done.returncode == 0, done.stdout
