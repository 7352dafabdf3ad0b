"""Runs that end early and go on: nothing judged is lost, nothing of another run is mixed in."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from hal import registry
from hal.cli import app
from hal.conformance import resume, runner
from hal.conformance.report import read_report
from hal.conformance.resume import State
from hal.conformance.site import Site
from hal.errors import FileError

# The process of the 60th call ends itself, once.
KILL = """
    rms_norm.__dict__["n"] = rms_norm.__dict__.get("n", 0) + 1
    if rms_norm.__dict__["n"] == 60 and not os.path.exists(os.environ["ONCE"]):
        open(os.environ["ONCE"], "w").close()
        os.kill(int(os.environ["WHOM"]) or os.getpid(), signal.SIGKILL)
"""


def hal(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def plan(ops=("silu_and_mul",), **choice):
    return runner.plan(Site.of("cpu"), ops=ops, **({"implementations": ("reference",)} | choice))


def told(report):
    """A report without its times."""
    return report.model_dump(exclude={"started", "seconds"}) | {
        "results": [found.model_dump(exclude={"seconds"}) for found in report.results]
    }


def some(path, what, count):
    """A state with the first results of a run."""
    with State(path, what) as state:
        for piece in what.work[:count]:
            state.keep(runner.judge_case(what.site, runner.find(piece.case), piece.implementations[0]))


def test_a_run_killed_half_way_goes_on_and_tells_what_an_unbroken_one_tells(installed, tmp_path):
    environment = installed(KILL) | {"ONCE": str(tmp_path / "once"), "WHOM": "0"}
    state, path = tmp_path / "state.jsonl", tmp_path / "r.json"

    def run(*more):
        return subprocess.run(
            [sys.executable, "-m", "hal.cli", "conformance", "run", "--backend", "cpu", "--op", "rms_norm", "--impl",
             "throwaway", "--workers", "0", "--json", str(path), *more],
            env=environment, capture_output=True, text=True, timeout=120,
        )  # fmt: skip

    killed = run("--resume", str(state))
    assert killed.returncode == -9, killed.stderr
    assert not path.exists()
    kept = len(state.read_text().splitlines()) - 1
    assert kept > 0
    done = run("--resume", str(state))
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{kept} of" in done.stderr
    resumed = read_report(path)
    assert kept < len(resumed.results) == resumed.planned
    assert not state.exists()
    assert run().returncode == 0
    assert told(resumed) == told(read_report(path))


def test_ctrl_c_keeps_what_was_judged_and_the_rest_alone_is_judged_later(monkeypatch, tmp_path):
    honest, calls = runner.judge, []

    def interrupted(*arguments, **options):
        calls.append(arguments)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return honest(*arguments, **options)

    monkeypatch.setattr(runner, "judge", interrupted)
    arguments = ("conformance", "run", "--backend", "cpu", "--op", "silu_and_mul", "--impl", "reference", "--workers",
                 0, "--resume", tmp_path / "s.jsonl", "--json", tmp_path / "r.json")  # fmt: skip
    first = hal(*arguments)
    assert first.exit_code == 2
    partial = read_report(tmp_path / "r.json")
    assert len(partial.results) == 3
    second = hal(*arguments)
    assert second.exit_code == 0, second.output
    whole = read_report(tmp_path / "r.json")
    assert whole.complete
    assert len(calls) == 4 + whole.planned - 3
    assert told(whole)["results"][:3] == told(partial)["results"]


def test_every_result_is_on_disk_when_it_is_kept(tmp_path, monkeypatch):
    what, synced = plan(), []
    honest = os.fsync
    monkeypatch.setattr(os, "fsync", lambda handle: (synced.append(handle), honest(handle)))
    some(tmp_path / "s.jsonl", what, 3)
    lines = (tmp_path / "s.jsonl").read_text().splitlines()
    assert [json.loads(line)["case"] for line in lines[1:]] == [piece.case for piece in what.work[:3]]
    assert len(synced) == 4


def test_workers_keep_their_results_too(tmp_path):
    what = plan()
    some(tmp_path / "s.jsonl", what, 5)
    with State(tmp_path / "s.jsonl", what) as state:
        report = runner.run(what, workers=1, state=state)
    assert told(report) == told(runner.run(what))
    assert len((tmp_path / "s.jsonl").read_text().splitlines()) == 1 + what.size


@pytest.mark.parametrize("cut", [1, 40, 100_000])
def test_a_last_line_cut_short_is_dropped_and_judged_again(tmp_path, cut):
    what, path = plan(), tmp_path / "s.jsonl"
    some(path, what, 3)
    text = path.read_bytes()
    last = len(text.splitlines(keepends=True)[-1])
    path.write_bytes(text[: -min(cut, last - 1)])
    with State(path, what) as state:
        assert [result.case for result in state.results] == [piece.case for piece in what.work[:2]]
    assert path.read_bytes() == b"".join(text.splitlines(keepends=True)[:3])


def test_a_first_line_cut_short_begins_anew(tmp_path):
    what, path = plan(), tmp_path / "s.jsonl"
    some(path, what, 0)
    path.write_bytes(path.read_bytes()[:25])
    some(path, what, 1)
    with State(path, what) as state:
        assert len(state.results) == 1


def test_damage_in_the_middle_is_refused(tmp_path):
    what, path = plan(), tmp_path / "s.jsonl"
    some(path, what, 3)
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*lines[:2], lines[2][:30] + "\n", *lines[3:]]))
    with pytest.raises(FileError, match="line 3 is damaged"):
        State(path, what)


def test_a_result_that_does_not_belong_there_is_refused(tmp_path):
    what, path = plan(), tmp_path / "s.jsonl"
    some(path, what, 2)
    with path.open("a") as file:
        file.write(path.read_text().splitlines(keepends=True)[-1])
    with pytest.raises(FileError, match="does not belong"):
        State(path, what)


@pytest.mark.parametrize("content", ["precious", "precious\n", '{"format": "hal-conformance-report"}\n'])
def test_a_file_that_is_no_state_is_refused_and_left_alone(tmp_path, content):
    path = tmp_path / "precious"
    path.write_text(content)
    with pytest.raises(FileError, match="cannot resume"):
        State(path, plan())
    assert path.read_text() == content


@pytest.mark.parametrize(
    ("choice", "words"),
    [
        ({"ops": ("gelu_and_mul",)}, "ops"),
        ({"suite": "full"}, r"suite \(quick there, full now\)"),
        ({"implementations": ("aten",)}, "implementations"),
    ],
)
def test_the_state_of_another_request_is_refused_with_what_differs(tmp_path, choice, words):
    some(tmp_path / "s.jsonl", plan(), 1)
    with pytest.raises(FileError, match=f"state of another run.*{words}"):
        State(tmp_path / "s.jsonl", plan(**choice))


def test_the_state_of_another_backend_is_refused(tmp_path):
    some(tmp_path / "s.jsonl", plan(), 1)
    other = runner.plan(Site.of("portable:cpu"), ops=("silu_and_mul",))
    with pytest.raises(FileError, match=r"backend \(cpu there, portable:cpu now\)"):
        State(tmp_path / "s.jsonl", other)


@pytest.mark.parametrize(("field", "words"), [("hal", "hal "), ("sources", "source files"), ("torch", "torch ")])
def test_the_state_of_another_version_is_refused(tmp_path, field, words):
    path = tmp_path / "s.jsonl"
    some(path, plan(), 1)
    head, *rest = path.read_text().splitlines(keepends=True)
    path.write_text(json.dumps(json.loads(head) | {field: "0.0.9"}, separators=(",", ":")) + "\n" + "".join(rest))
    with pytest.raises(FileError, match=words):
        State(path, plan())


def test_the_state_of_a_run_on_other_software_is_refused(tmp_path, monkeypatch):
    some(tmp_path / "s.jsonl", plan(), 1)
    monkeypatch.setattr(registry, "software", lambda: {"toolkit": "9.2"})
    with pytest.raises(FileError, match=r"toolkit \(None there, 9.2 now\)"):
        State(tmp_path / "s.jsonl", plan())


def test_a_newer_state_is_refused(tmp_path, monkeypatch):
    some(tmp_path / "s.jsonl", plan(), 1)
    monkeypatch.setattr(resume, "VERSION", 0)
    with pytest.raises(FileError, match="version 1"):
        State(tmp_path / "s.jsonl", plan())


def test_two_runs_cannot_write_one_state(tmp_path):
    what = plan()
    with State(tmp_path / "s.jsonl", what), pytest.raises(FileError, match="in use"):
        State(tmp_path / "s.jsonl", what)
    State(tmp_path / "s.jsonl", what).discard()


def test_a_state_that_cannot_be_written_is_refused(tmp_path):
    done = hal("conformance", "run", "--backend", "cpu", "--op", "softmax", "--resume", tmp_path / "no" / "s.jsonl")
    assert done.exit_code == 2
    assert "cannot resume" in done.output
