"""Waivers: what they cover, when they make a run fail themselves, and which files are refused."""

from __future__ import annotations

import os
import subprocess
import sys
from datetime import date
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hal.cli import app
from hal.conformance.case import cases
from hal.conformance.junit import to_junit
from hal.conformance.report import Environment, Report, Request, Result, Target, read_report
from hal.conformance.waivers import Waiver, apply, read_waivers
from hal.errors import FileError

ROOT = Path(__file__).resolve().parents[2]
TODAY = date(2030, 6, 15)
DAMAGE = "y = y * 1.01"
CASE = next(case.id for case in cases("rms_norm") if case.dtype == "float32" and case.tags == {"grid"})
OTHER = next(case.id for case in cases("rms_norm") if case.dtype == "float16" and case.tags == {"grid"})


def waiver(case=CASE, expires=TODAY, **more):
    return Waiver(case=case, reason="known", tracker="https://example.org/7", expires=expires, **more)


def result(status, case=CASE, implementation="reference"):
    op, dtype, _ = case.split("/", 2)
    return Result(case=case, op=op, dtype=dtype, implementation=implementation, kind="native", status=status, seed=1,
                  repeat="hal conformance run …")  # fmt: skip


def report(*results, suite="quick"):
    environment = Environment(
        hal="0.1.0", git_commit=None, git_dirty=None, torch="2.13.0", python="3.11", platform="Linux", numerics={},
        settings={},
    )  # fmt: skip
    return Report(
        started="2030-06-15T00:00:00+00:00", seconds=1.0, complete=True, planned=len(results),
        request=Request(suite=suite), results=results, environment=environment,
        target=Target(backend="cpu", device="cpu", descriptor=None, simulated=False),
    )  # fmt: skip


def written(tmp_path, expires="2099-12-31", case=CASE, **more):
    lines = {"case": case, "reason": "known", "tracker": "https://example.org/7", **more}
    path = tmp_path / "waivers.toml"
    body = "".join(f'{name} = "{value}"\n' for name, value in lines.items())
    path.write_text(f"[[waiver]]\n{body}expires = {expires}\n")
    return path


@pytest.mark.parametrize("status", ["failed", "mistrusted"])
def test_a_covered_failure_is_waived_with_tracker_and_day_and_fails_no_run(status):
    whole = apply(report(result(status), result("passed", OTHER)), [waiver()], TODAY)
    waived = whole.results[0]
    assert waived.status == "waived"
    assert "2030-06-15 (https://example.org/7): known" in waived.reasons[-1]
    assert whole.exit_status() == 0
    assert whole.waivers[0].failing == 1


def test_what_no_waiver_covers_still_fails():
    whole = apply(report(result("failed"), result("failed", OTHER)), [waiver()], TODAY)
    assert [found.status for found in whole.results] == ["waived", "failed"]
    assert whole.exit_status() == 1


@pytest.mark.parametrize(
    "narrowed", [{"implementation": "aten"}, {"dtype": "float16"}, {"case": "rms_norm/float32/nothing*"}]
)
def test_a_waiver_covers_only_what_all_its_patterns_match(narrowed):
    assert apply(report(result("failed")), [waiver(**narrowed)], TODAY).results[0].status == "failed"


def test_a_waiver_of_another_backend_is_left_out_of_the_run():
    whole = apply(report(result("failed")), [waiver(backend="portable:*")], TODAY)
    assert whole.results[0].status == "failed"
    assert whole.waivers == ()


def test_a_waiver_that_is_over_covers_nothing_and_fails_the_run_by_itself():
    late = apply(report(result("passed")), [waiver(expires=date(2030, 6, 14))], TODAY)
    assert late.exit_status() == 1
    assert "expired on 2030-06-14" in late.waiver_problems[0]
    assert apply(report(result("failed")), [waiver(expires=date(2030, 6, 14))], TODAY).results[0].status == "failed"


def test_a_waiver_whose_cases_all_pass_fails_the_run():
    whole = apply(report(result("passed")), [waiver(implementation="reference")], TODAY)
    assert whole.exit_status() == 1
    assert "no longer needed" in whole.waiver_problems[0]


def test_a_waiver_that_matches_no_case_there_is_fails_the_run():
    whole = apply(report(result("passed")), [waiver("rms_norn/*")], TODAY)
    assert whole.exit_status() == 1
    assert "matches no case" in whole.waiver_problems[0]


def test_a_waiver_of_what_was_not_judged_here_is_no_problem():
    full_only = next(case.id for case in cases("rms_norm", "full") if case.suite == "full")
    partly = "rms_norm/*"  # one of its cases was judged, the others were not
    whole = apply(report(result("passed")), [waiver(OTHER), waiver(full_only), waiver(partly)], TODAY)
    assert whole.waiver_problems == ()
    assert whole.exit_status() == 0


def test_junit_has_an_error_for_each_problem_of_a_waiver():
    whole = apply(report(result("passed")), [waiver("rms_norn/*")], TODAY)
    assert 'errors="1"' in to_junit(whole)
    assert "matches no case" in to_junit(whole)


def test_toml_and_json_say_the_same(tmp_path):
    toml = written(tmp_path, "2030-01-02", implementation="aten")
    json = tmp_path / "waivers.json"
    json.write_text(
        f'{{"waiver": [{{"case": "{CASE}", "implementation": "aten", "reason": "known", '
        '"tracker": "https://example.org/7", "expires": "2030-01-02"}]}'
    )
    assert read_waivers(toml) == read_waivers(json) == (waiver(expires=date(2030, 1, 2), implementation="aten"),)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[[waiver", "Expected"),
        ("", "waiver: Field required"),
        ('[[waiver]]\ncase = "x"', "waiver.1.reason: Field required"),
        ('[[waiver]]\ncase = ""\nreason = "r"\ntracker = "t"\nexpires = 2030-01-01', "waiver.1.case"),
        ('[[waiver]]\ncase = "x"\nreason = "r"\ntracker = "t"\nexpires = "soon"', "waiver.1.expires"),
        ('[[waiver]]\ncase = "x"\nreason = "r"\ntracker = "t"\nexpires = 2030-01-01\nexpiry = 1', "waiver.1.expiry"),
    ],
)
def test_a_malformed_file_is_refused_with_the_place(tmp_path, text, told):
    path = tmp_path / "w.toml"
    path.write_text(text)
    with pytest.raises(FileError, match=told) as refusal:
        read_waivers(path)
    assert str(path) in str(refusal.value)


def test_a_missing_file_is_refused_before_anything_is_judged(tmp_path):
    done = CliRunner().invoke(app, ["conformance", "run", "--backend", "cpu", "--waivers", str(tmp_path / "none.toml")])
    assert done.exit_code == 2
    assert "FileError" in done.output


def run(path, *arguments):
    return CliRunner().invoke(
        app, ["conformance", "run", "--backend", "cpu", "--case", CASE, "--waivers", str(path), *arguments]
    )


def test_a_run_with_a_waived_failure_succeeds_and_counts_it_apart(registered, tmp_path):
    registered(DAMAGE)
    done = run(written(tmp_path, implementation="throwaway"), "--json", str(tmp_path / "r.json"))
    assert done.exit_code == 0, done.output
    assert "1 waived" in done.output
    assert read_report(tmp_path / "r.json").counts["waived"] == 1


@pytest.mark.parametrize(("expires", "told"), [("2020-01-01", "expired on 2020-01-01"), ("2099-01-01", "no longer")])
def test_a_run_says_which_waiver_fails_it(registered, tmp_path, expires, told):
    registered("pass")
    done = run(written(tmp_path, expires, implementation="throwaway"))
    assert done.exit_code == 1, done.output
    assert f"WAIVER the waiver of '{CASE}' (https://example.org/7)" in done.output
    assert told in done.output


@pytest.mark.parametrize(("body", "code", "told"), [(DAMAGE, 0, "1 xfailed"), ("pass", 1, "no longer needed")])
def test_pytest_knows_waivers(installed, tmp_path, body, code, told):
    path, environment = written(tmp_path, implementation="throwaway"), installed(body)
    environment["PYTHONPATH"] += os.pathsep + str(ROOT)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--pyargs", "hal.conformance", "--hal-backend=cpu",
         f"--hal-case={CASE}", f"--hal-waivers={path}"],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == code, done.stdout
    assert told in done.stdout
