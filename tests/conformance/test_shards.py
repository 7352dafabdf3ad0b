"""Shards: how cases are shared out, on which device they are judged, and how the reports become one."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from datetime import date
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hal.cli import app
from hal.conformance import runner, waivers
from hal.conformance.case import cases
from hal.conformance.plugin import plan_for
from hal.conformance.report import read_report
from hal.conformance.shards import Shard, merge
from hal.conformance.site import Site
from hal.errors import ArgumentError, DeviceError

ROOT = Path(__file__).resolve().parents[2]
IDS = [case.id for case in cases()]


def hal(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.mark.parametrize("count", [1, 2, 3, 7, 64])
def test_shards_are_disjoint_and_together_the_whole(count):
    parts = [Shard(index, count).part(IDS) for index in range(1, count + 1)]
    assert sum(map(len, parts)) == len(IDS)
    assert frozenset().union(*parts) == frozenset(IDS)


def test_shards_are_balanced_in_all_and_by_operator():
    parts = [Shard(index, 4).part(IDS) for index in range(1, 5)]
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    by_op = [Counter(case_id.partition("/")[0] for case_id in part) for part in parts]
    for op in by_op[0]:
        assert max(counts[op] for counts in by_op) - min(counts[op] for counts in by_op) <= 1


def test_a_shard_does_not_depend_on_the_order_of_the_list():
    assert Shard(2, 5).part(IDS) == Shard(2, 5).part(IDS[::-1])


@pytest.mark.parametrize("text", ["", "1", "0/2", "3/2", "1/0", "a/b", "1/2/3", "-1/2"])
def test_what_is_no_shard_is_refused(text):
    with pytest.raises(ArgumentError, match="i/n"):
        Shard.parse(text)


def test_a_shard_without_a_case_is_refused():
    with pytest.raises(ArgumentError, match="at most 2 shards"):
        Shard(3, 3).part(IDS[:2])


def parts_of(count, **choice):
    site = Site.of("cpu")
    choice = {"ops": ("rms_norm", "softmax"), "implementations": ("reference",)} | choice
    return [runner.run(runner.plan(site, shard=Shard(i, count), **choice)) for i in range(1, count + 1)]


@pytest.fixture(scope="module")
def halves():
    return parts_of(2)


def told(report):
    return report.model_dump(exclude={"started", "seconds"}) | {
        "results": [found.model_dump(exclude={"seconds"}) for found in report.results]
    }


def test_merged_shards_tell_what_the_whole_run_tells(halves):
    whole = runner.run(runner.plan(Site.of("cpu"), ops=("rms_norm", "softmax"), implementations=("reference",)))
    assert told(merge(halves[::-1])) == told(whole)


def test_a_missing_shard_leaves_the_merged_report_incomplete(halves):
    part = merge(halves[:1])
    assert not part.complete
    assert part.exit_status() == 2
    assert part.planned == 2 * halves[0].planned


def test_a_shard_given_twice_is_refused(halves):
    with pytest.raises(ArgumentError, match="shard 1/2 is given more than once"):
        merge([halves[0], halves[0]])


def test_shards_of_different_runs_are_refused_with_what_differs(halves):
    other = halves[1].model_copy(update={"target": halves[1].target.model_copy(update={"backend": "cuda"})})
    with pytest.raises(ArgumentError, match="the backend is cpu in one and cuda"):
        merge([halves[0], other])


def test_shards_on_different_software_are_refused(halves):
    environment = halves[1].environment.model_copy(update={"software": {"toolkit": "9.2"}})
    with pytest.raises(ArgumentError, match=r"software is .* in one and .*toolkit.*9\.2"):
        merge([halves[0], halves[1].model_copy(update={"environment": environment})])


def test_a_whole_run_is_no_shard(halves):
    whole = halves[0].model_copy(update={"request": halves[0].request.model_copy(update={"shard": None})})
    with pytest.raises(ArgumentError, match="--shard"):
        merge([whole])


def test_overlapping_reports_are_refused(halves):
    other = halves[1].model_copy(update={"results": halves[1].results + halves[0].results[:1]})
    with pytest.raises(ArgumentError, match="in more than one"):
        merge([halves[0], other])


def test_merging_names_every_device(halves):
    other = halves[1].model_copy(update={"target": halves[1].target.model_copy(update={"device": "cpu:1"})})
    assert merge([halves[0], other]).target.device == "cpu, cpu:1"


def test_a_waiver_is_needed_if_one_shard_needs_it_and_not_if_none_does(halves):
    day = date(2030, 1, 1)
    case = halves[1].results[0].case
    needed = waivers.Waiver(case="*", implementation="reference", reason="r", tracker="t", expires=day)
    failing = halves[1].results[0].model_copy(update={"status": "failed"})
    bad = halves[1].model_copy(update={"results": (failing, *halves[1].results[1:])})
    waived = [waivers.apply(part, [needed], day) for part in (halves[0], bad)]
    assert all(part.exit_status() == 0 for part in waived)
    assert merge(waived, day).exit_status() == 0
    needless = waivers.Waiver(case=case, implementation="reference", reason="r", tracker="t", expires=day)
    waived = [waivers.apply(part, [needless], day) for part in halves]
    assert merge(waived, day).exit_status() == 1


def test_the_command_merges_what_runs_wrote(tmp_path):
    for index in (1, 2):
        done = hal(
            "conformance", "run", "--backend", "cpu", "--op", "softmax", "--impl", "reference", "--workers", 0,
            "--shard", f"{index}/2", "--json", tmp_path / f"{index}.json",
        )  # fmt: skip
        assert done.exit_code == 0, done.output
        assert f"shard {index}/2" in done.output
    done = hal("conformance", "merge", tmp_path / "1.json", tmp_path / "2.json", "-o", tmp_path / "all.json")
    assert done.exit_code == 0, done.output
    assert read_report(tmp_path / "all.json").complete
    assert hal("conformance", "merge", tmp_path / "1.json", "-o", tmp_path / "all.json").exit_code == 2


def test_the_device_that_was_asked_for_is_told_and_repeated():
    site = Site.of("cpu", "cpu:0")
    report = runner.run(runner.plan(site, implementations=("reference",), case_ids=(IDS[0],)))
    assert report.target.device == report.results[0].device == "cpu:0"
    assert "--device cpu:0" in report.results[0].repeat


@pytest.mark.parametrize(("device", "words"), [("cuda:0", "runs on cpu"), ("no such", "no torch device")])
def test_a_device_that_the_backend_does_not_run_on_is_refused(device, words):
    with pytest.raises(DeviceError, match=words):
        Site.of("cpu", device)


@pytest.mark.parametrize(("worker", "device"), [(None, "cpu:0"), (0, "cpu:0"), (1, "cpu"), (2, "cpu:0")])
def test_worker_k_takes_device_k_in_turn(worker, device):
    what = plan_for("cpu", None, ("softmax",), (), (), None, "cpu:0, cpu", worker)
    assert what.site.target.device == device


def test_pytest_refuses_a_device_of_another_kind_and_a_bad_shard():
    for arguments in ((None, "cuda:0"), ("5/4", None)):
        with pytest.raises(pytest.UsageError, match="Error"):
            plan_for("cpu", None, ("softmax",), (), (), *arguments)


@pytest.mark.slow
def test_pytest_workers_share_out_the_devices_of_a_host(tmp_path):
    few = [case.id for case in cases("softmax") if case.dtype == "float32"][:6]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-n", "2", "--dist", "each", "--pyargs",
         "hal.conformance", "--hal-backend=portable:simdev", *(f"--hal-case={case_id}" for case_id in few)],
        cwd=tmp_path, env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}, capture_output=True,
        text=True, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    found = re.search(r"devices: (\d+) on simdev:0, (\d+) on simdev:1", done.stdout)
    assert found is not None, done.stdout
    assert found.groups() == ("6", "6")
