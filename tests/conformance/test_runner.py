"""Runs: what is judged, what a wrong implementation comes to, and what ends a run early."""

from __future__ import annotations

import shlex
import signal
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from hal.cli import app
from hal.conformance import runner
from hal.conformance.case import cases
from hal.conformance.report import read_report
from hal.conformance.site import Site
from hal.errors import ArgumentError, ConfigError, DeviceError

DAMAGE = "y = y * 1.01"


def case_id(op="rms_norm", dtype="float32"):
    return next(case.id for case in cases(op) if case.dtype == dtype and case.tags == {"grid"})


def hal(*arguments):
    return CliRunner().invoke(app, list(arguments))


def command(environment, *arguments):
    return subprocess.run(
        [sys.executable, "-m", "hal.cli", *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        # A shell starts what it runs in the background with Ctrl-C ignored, and children inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def test_every_registered_implementation_is_judged_not_only_the_chosen_one(registered, tmp_path):
    registered("pass")
    done = hal("conformance", "run", "--backend", "cpu", "--case", case_id(), "--json", str(tmp_path / "r.json"))
    assert done.exit_code == 0, done.output
    names = {result.implementation for result in read_report(tmp_path / "r.json").results}
    assert {"reference", "throwaway"} <= names


def test_a_corrupted_implementation_fails_with_the_reason_and_only_it(registered, tmp_path):
    registered(DAMAGE)
    done = hal("conformance", "run", "--backend", "cpu", "--case", case_id(), "--json", str(tmp_path / "r.json"))
    assert done.exit_code == 1
    status = {result.implementation: result for result in read_report(tmp_path / "r.json").results}
    assert status["reference"].status == "passed"
    assert status["throwaway"].status == "failed"
    assert status["throwaway"].share > 1
    assert {finding.rule for finding in status["throwaway"].findings} >= {"R1"}
    assert "R1: y[" in done.output
    assert "1 failed" in done.output


def test_the_printed_command_repeats_a_failure_in_a_process_of_its_own(installed, tmp_path):
    environment = installed(DAMAGE)
    first = command(environment, "conformance", "run", "--op", "rms_norm", "--impl", "throwaway", "--workers", "0")
    assert first.returncode == 1, first.stderr
    repeat = next(line for line in first.stdout.splitlines() if line.strip().startswith("repeat: "))
    words = shlex.split(repeat.partition("repeat: ")[2])
    assert words[0] == "hal"
    second = command(environment, *words[1:], "--json", str(tmp_path / "r.json"))
    assert second.returncode == 1, second.stderr
    (result,) = read_report(tmp_path / "r.json").results
    assert result.status == "failed"
    assert result.case in first.stdout
    assert result.findings[0].message in first.stdout


def test_unsupported_is_counted_apart_and_never_passes(registered, tmp_path):
    registered("pass", 'Supports(dtypes=frozenset({"float32"}))')
    arguments = ("conformance", "run", "--backend", "cpu", "--impl", "throwaway", "--json", str(tmp_path / "r.json"))
    both = hal(*arguments, "--case", case_id(), "--case", case_id(dtype="float16"))
    assert both.exit_code == 0, both.output
    assert read_report(tmp_path / "r.json").counts == {"passed": 1, "unsupported": 1}
    alone = hal(*arguments, "--case", case_id(dtype="float16"))
    assert alone.exit_code == 2
    (result,) = read_report(tmp_path / "r.json").results
    assert "float16" in result.reasons[0]


def test_a_refusal_stays_a_refusal_when_the_settings_let_others_stand_in(registered, monkeypatch):
    registered("pass", 'Supports(dtypes=frozenset({"float32"}))')
    monkeypatch.setenv("HAL_FALLBACK", "portable")
    done = hal("conformance", "run", "--backend", "cpu", "--impl", "throwaway", "--case", case_id(dtype="float16"))
    assert "1 unsupported" in done.output


def test_progress_counts_up_to_the_plan():
    what = runner.plan(Site.of("cpu"), ops=("rms_norm",), implementations=("reference",))
    seen = []
    report = runner.run(what, progress=lambda result, done, planned: seen.append((done, planned)))
    assert seen == [(done, what.size) for done in range(1, what.size + 1)]
    assert len(report.results) == what.size
    assert report.complete


def test_workers_find_what_one_process_finds_in_the_same_order():
    what = runner.plan(Site.of("cpu"), ops=("rms_norm",), implementations=("reference",))
    alone, shared = runner.run(what), runner.run(what, workers=2)
    told = [[(r.case, r.implementation, r.status, r.why) for r in report.results] for report in (alone, shared)]
    assert told[0] == told[1]


def test_a_case_that_the_judge_chokes_on_fails_alone(monkeypatch):
    what = runner.plan(Site.of("cpu"), ops=("rms_norm",), implementations=("reference",))
    honest, broken = runner.judge, what.work[1].case

    def choke(case, *rest, **options):
        if case.id == broken:
            raise ZeroDivisionError("oops")
        return honest(case, *rest, **options)

    monkeypatch.setattr(runner, "judge", choke)
    report = runner.run(what)
    assert [result.case for result in report.bad] == [broken]
    assert "ZeroDivisionError: oops" in report.bad[0].reasons[0]
    assert len(report.results) == what.size


def test_a_crash_of_the_interpreter_is_that_cases_failure(installed, tmp_path):
    environment = installed("if x.dtype.itemsize == 8: os.kill(os.getpid(), signal.SIGSEGV)")
    done = command(
        environment, "conformance", "run", "--backend", "cpu", "--workers", "1", "--json", str(tmp_path / "r.json"),
        "--case", case_id(), "--case", case_id(dtype="float64"),
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    found = {(result.dtype, result.implementation): result for result in read_report(tmp_path / "r.json").results}
    crashed = found.pop(("float64", "throwaway"))
    assert crashed.status == "failed"
    assert "SIGSEGV" in crashed.reasons[0]
    assert {result.status for result in found.values()} == {"passed"}


def test_a_device_that_is_lost_to_a_process_costs_no_other_case(installed, tmp_path):
    lost = "import hal.conformance.runner as r; r._usable = lambda device: False; raise RuntimeError('lost')"
    environment = installed(f"if x.dtype.itemsize == 8: exec({lost!r})")
    done = command(
        environment, "conformance", "run", "--backend", "cpu", "--workers", "1", "--json", str(tmp_path / "r.json"),
        "--case", case_id(dtype="float64"), "--case", case_id(), "--case", case_id(dtype="bfloat16"),
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    found = {(result.dtype, result.implementation): result for result in read_report(tmp_path / "r.json").results}
    crashed = found.pop(("float64", "throwaway"))
    assert crashed.status == "failed"
    assert "a device that no longer answers" in crashed.reasons[0]
    assert {result.status for result in found.values()} == {"passed"}


def test_an_interrupt_leaves_a_whole_report_marked_incomplete(monkeypatch, tmp_path):
    honest, calls = runner.judge, []

    def interrupted(*arguments, **options):
        calls.append(arguments)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return honest(*arguments, **options)

    monkeypatch.setattr(runner, "judge", interrupted)
    done = hal(
        "conformance", "run", "--backend", "cpu", "--op", "rms_norm", "--workers", "0",
        "--json", str(tmp_path / "r.json"), "--junit", str(tmp_path / "r.xml"),
    )  # fmt: skip
    assert done.exit_code == 2
    report = read_report(tmp_path / "r.json")
    assert not report.complete
    assert len(report.results) == 2 < report.planned
    assert "interrupted after 2 of" in done.output
    assert sorted(path.name for path in tmp_path.iterdir()) == ["r.json", "r.xml"]


ONCE = """
    try:
        os.close(os.open(os.environ["ONCE"], os.O_CREAT | os.O_EXCL))
        os.kill(os.getppid(), signal.{signal})
    except FileExistsError:
        pass
"""


def run_and_signal(installed, tmp_path, name):
    out = tmp_path / "out"
    out.mkdir()
    environment = installed(ONCE.format(signal=name)) | {"ONCE": str(tmp_path / "once")}
    done = command(
        environment, "conformance", "run", "--backend", "cpu", "--op", "rms_norm", "--workers", "2",
        "--json", str(out / "r.json"),
    )  # fmt: skip
    return done, out


def test_ctrl_c_with_workers_leaves_a_whole_report(installed, tmp_path):
    done, out = run_and_signal(installed, tmp_path, "SIGINT")
    assert done.returncode == 2, done.stderr
    assert [path.name for path in out.iterdir()] == ["r.json"]
    report = read_report(out / "r.json")
    assert not report.complete
    assert "Traceback" not in done.stderr


def test_a_killed_run_leaves_no_half_file(installed, tmp_path):
    done, out = run_and_signal(installed, tmp_path, "SIGKILL")
    assert done.returncode == -9
    assert list(out.iterdir()) == []


def test_a_plugin_of_the_backend_that_fails_is_told_and_the_run_is_not_good(installed):
    environment = installed("pass\n    return y\n\nraise ImportError('no vendor library')\n\ndef unused(y):")
    done = command(environment, "conformance", "run", "--backend", "cpu", "--case", case_id())
    assert done.returncode == 2
    assert "no vendor library" in done.stdout


def test_an_unknown_operator_is_refused_with_the_nearest_one():
    with pytest.raises(ArgumentError, match="Did you mean 'rms_norm'"):
        runner.plan(Site.of("cpu"), ops=("rmsnorm",))


def test_an_unknown_implementation_is_refused_with_the_nearest_one():
    with pytest.raises(ArgumentError, match="Did you mean 'reference'"):
        runner.plan(Site.of("cpu"), implementations=("referenc",))


def test_an_unknown_case_is_refused_with_the_nearest_one():
    wrong = case_id()[:-1] + "_"
    with pytest.raises(ArgumentError, match="Did you mean") as refusal:
        runner.plan(Site.of("cpu"), case_ids=(wrong,))
    assert case_id() in str(refusal.value)


@pytest.mark.parametrize(
    ("backend", "error", "told"),
    [
        ("cup", ConfigError, "did you mean 'cpu'"),
        ("cpu:0", ConfigError, "takes no device type"),
        ("portable", ConfigError, "portable:cpu"),
        ("portable:quantum", DeviceError, "quantum"),
        ("portable:mps", DeviceError, "mps"),
    ],
)
def test_a_backend_that_cannot_run_is_refused(backend, error, told):
    with pytest.raises(error, match=told):
        Site.of(backend)


def test_results_on_a_simulated_device_say_so(installed, tmp_path):
    done = command(
        installed("pass"), "conformance", "run", "--backend", "portable:simdev", "--case", case_id(),
        "--json", str(tmp_path / "r.json"),
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    assert "(simulated)" in done.stdout
    assert "not how a chip computes" in done.stdout
    assert read_report(tmp_path / "r.json").target.simulated
