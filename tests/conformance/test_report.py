"""Reports: what they count, and how they are written and read."""

from __future__ import annotations

import json
import os
import stat
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
import torch

from hal import files, registry
from hal.conformance.environment import environment
from hal.conformance.junit import to_junit, write_junit
from hal.conformance.report import Environment, Finding, Report, Request, Result, Target, grouped, read_report, stack
from hal.errors import FileError


def result(status="passed", **changes):
    fields = {
        "case": f"rms_norm/float32/T=7~{status[:4]}", "op": "rms_norm", "dtype": "float32", "implementation": "aten",
        "kind": "native", "status": status, "seed": 7, "share": 0.25, "seconds": 0.5, "repeat": "hal conformance run …",
    }  # fmt: skip
    return Result(**(fields | changes))


def report(*results, complete=True, planned=None, simulated=False, plugin_failures=()):
    return Report(
        started="2026-01-02T03:04:05+00:00",
        seconds=1.5,
        complete=complete,
        planned=len(results) if planned is None else planned,
        request=Request(suite="quick"),
        target=Target(backend="cpu", device="cpu", descriptor="a CPU", simulated=simulated),
        environment=Environment(
            hal="0.1.0", git_commit=None, git_dirty=None, torch="2.13.0", python="3.11.7", platform="Linux",
            numerics={"threads": "2"}, settings={"backend": "cpu"}, plugin_failures=plugin_failures,
        ),
        results=results,
    )  # fmt: skip


ALL = [result(status) for status in ("passed", "failed", "mistrusted", "skipped", "unsupported", "waived")]


def test_a_report_reads_back_equal(tmp_path):
    written = report(*ALL, result("failed", findings=(Finding(rule="R1", message="y[3] = 1, but should be 2"),)))
    written.write(tmp_path / "r.json")
    assert read_report(tmp_path / "r.json") == written


def test_infinite_and_undefined_shares_stay_legal_json_and_read_back(tmp_path):
    path = tmp_path / "r.json"
    report(result("failed", share=float("inf")), result("failed", share=float("nan"))).write(path)

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    json.loads(path.read_text(), parse_constant=refuse)
    shares = [found.share for found in read_report(path).results]
    assert shares[0] == float("inf")
    assert shares[1] != shares[1]


@pytest.mark.parametrize(
    ("results", "status"),
    [
        (["passed"], 0),
        (["passed", "unsupported", "skipped", "waived"], 0),
        (["passed", "failed"], 1),
        (["passed", "mistrusted"], 1),
        (["unsupported"], 2),
        (["skipped"], 2),
        ([], 2),
    ],
)
def test_exit_status(results, status):
    assert report(*map(result, results)).exit_status() == status


def test_an_interrupted_run_is_never_good():
    assert report(result(), complete=False, planned=2).exit_status() == 2
    assert report(result("failed"), complete=False, planned=2).exit_status() == 1


def test_a_run_without_the_implementations_of_a_failed_plugin_is_not_good():
    assert report(result(), plugin_failures=("cpu.mine: ImportError: no",)).exit_status() == 2


def test_groups_count_by_op_dtype_and_implementation_and_keep_the_worst_share():
    found = grouped([
        result(share=0.1), result(share=0.7), result("failed", share=None), result(dtype="float16", share=None),
        result("unsupported", implementation="reference"),
    ])  # fmt: skip
    assert [(group.dtype, group.implementation, group.counts, group.worst_share) for group in found] == [
        ("float32", "aten", {"passed": 2, "failed": 1}, 0.7),
        ("float16", "aten", {"passed": 1}, None),
        ("float32", "reference", {"unsupported": 1}, 0.25),
    ]


def test_an_undefined_share_is_worse_than_any_number():
    (group,) = grouped([result(share=float("nan")), result(share=5.0)])
    assert group.worst_share != group.worst_share


def test_junit_counts_failures_and_never_shows_unsupported_as_passed(tmp_path):
    write_junit(report(*ALL), tmp_path / "r.xml")
    root = ET.parse(tmp_path / "r.xml").getroot()
    assert {name: root.get(name) for name in ("tests", "failures", "errors", "skipped")} == {
        "tests": "6", "failures": "2", "errors": "0", "skipped": "3",
    }  # fmt: skip
    outcome = {case.get("name"): [child.tag for child in case] for case in root.iter("testcase")}
    assert list(outcome.values()) == [[], ["failure"], ["failure"], ["skipped"], ["skipped"], ["skipped"]]


def test_junit_says_why_and_how_to_repeat():
    failed = result("failed", findings=(Finding(rule="R1", message="y[0] = 1 < 2 & more \x00\x1b"),))
    failure = ET.fromstring(to_junit(report(failed)).encode()).find(".//failure")
    assert failure.text.startswith("R1: y[0] = 1 < 2 & more")
    assert f"repeat: {failed.repeat}" in failure.text


def test_junit_of_an_interrupted_run_has_an_error():
    root = ET.fromstring(to_junit(report(result(), complete=False, planned=9)).encode())
    assert root.get("errors") == "1"
    assert "1 of 9" in root.find(".//error").get("message")


def test_a_report_names_the_software_that_is_here_and_one_without_still_reads(monkeypatch, tmp_path):
    monkeypatch.setattr(registry, "software", lambda: {"toolkit": "9.1 (simulated)"})
    found = environment({})
    assert found.software == {"toolkit": "9.1 (simulated)"}
    assert stack(found) == f"torch {torch.__version__}, toolkit 9.1 (simulated)"
    written = report(result()).model_copy(update={"environment": found})
    assert '<property name="toolkit" value="9.1 (simulated)" />' in to_junit(written)
    document = json.loads(written.model_dump_json()) | {"version": 2}
    del document["environment"]["software"]
    (tmp_path / "r.json").write_text(json.dumps(document))
    assert read_report(tmp_path / "r.json").environment.software == {}


def test_a_simulated_device_is_marked_in_both_reports():
    simulated = report(result(), simulated=True)
    assert json.loads(simulated.model_dump_json())["target"]["simulated"] is True
    assert '<property name="simulated" value="true" />' in to_junit(simulated)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "Invalid JSON"),
        ("{}", "format"),
        ('{"format": "something-else", "version": 1}', "format"),
        ('{"format": "hal-conformance-report", "version": 99}', "version 99"),
        ('{"format": "hal-conformance-report", "version": 1}', "Field required"),
    ],
)
def test_what_is_no_report_is_refused_by_name(tmp_path, text, told):
    path = tmp_path / "r.json"
    path.write_text(text)
    with pytest.raises(FileError, match=told) as refusal:
        read_report(path)
    assert str(path) in str(refusal.value)


def test_a_missing_report_is_a_file_error(tmp_path):
    with pytest.raises(FileError, match="absent"):
        read_report(tmp_path / "absent.json")


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "r.json"
    path.write_text("old")

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(FileError, match="No space left"):
        report(result()).write(path)
    assert [found.name for found in tmp_path.iterdir()] == ["r.json"]
    assert path.read_text() == "old"


def test_the_check_before_a_run_leaves_nothing(tmp_path):
    files.check_writable(tmp_path / "r.json")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("where", ["no/such/folder/r.json", "."])
def test_a_path_that_cannot_be_a_file_is_refused_before_the_run(tmp_path, where):
    with pytest.raises(FileError, match="cannot write"):
        files.check_writable(tmp_path / where)


def test_a_written_file_has_the_modes_that_the_umask_gives(tmp_path):
    before = os.umask(0o027)
    try:
        files.write_whole(tmp_path / "r.json", "x")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "r.json").stat().st_mode) == 0o640


def test_a_link_is_followed_and_a_device_is_not_replaced(tmp_path):
    (tmp_path / "real.json").write_text("old")
    (tmp_path / "link.json").symlink_to(tmp_path / "real.json")
    files.write_whole(tmp_path / "link.json", "new")
    assert (tmp_path / "link.json").is_symlink()
    assert (tmp_path / "real.json").read_text() == "new"

    files.check_writable(Path(os.devnull))
    files.write_whole(Path(os.devnull), "x")
    assert stat.S_ISCHR(os.stat(os.devnull).st_mode)
