"""Fuzzing: what is drawn, what is found, how small it gets, and when it ends."""

from __future__ import annotations

import shlex
import sys
import time
from collections import Counter

import apart_judges
import pytest
from typer.testing import CliRunner

from hal.cli import app
from hal.conformance import fuzz as fuzzing
from hal.conformance import runner
from hal.conformance.case import cases, find
from hal.conformance.cases import families
from hal.conformance.fuzz import FuzzReport, fuzz
from hal.conformance.inputs import LAYOUTS
from hal.conformance.site import Site
from hal.conformance.spaces import DTYPES, space
from hal.conformance.workers import Apart, Crashed, Done
from hal.errors import HalError, UnsupportedError


def hal(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def plan(op="rms_norm", implementation="reference"):
    return runner.plan(Site.of("cpu"), ops=(op,), implementations=(implementation,))


def drawn(op, seed, count):
    """The first cases that a seed draws, and the report; nothing is judged."""
    asked = []

    def note(site, work):
        asked.append(work.case)
        return fuzzing.Answer((runner.failed(site, find(work.case), "reference", "").model_copy(
            update={"status": "passed"}),))  # fmt: skip

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fuzzing, "judge", note)
        report = fuzz(plan(op), seed, 60.0, count, here=True)
    return asked, report


def test_a_seed_draws_the_same_cases_and_another_one_others():
    first, second, other = (drawn("rms_norm", seed, 30)[0] for seed in (1, 1, 2))
    assert len(first) == 30
    assert first == second
    assert len(set(first) & set(other)) < 12


def test_no_listed_case_is_drawn():
    asked, _ = drawn("silu_and_mul", 0, 60)
    assert not set(asked) & {case.id for case in cases("silu_and_mul", "full")}


def test_the_space_has_every_dtype_layout_and_kind_of_input():
    asked, _ = drawn("rms_norm", 0, 450)
    found = [find(case_id) for case_id in asked]
    assert {case.dtype for case in found} == set(DTYPES)
    assert {case.params.get("layout", "contiguous") for case in found} == set(LAYOUTS)
    assert {"special", "mean1000", "tiny"} <= {case.params.get("x") for case in found}
    assert {case.params.get("T") for case in found} > {0, 1}
    assert {True, False} == {"bad" in case.params for case in found}
    assert {True, False} == {case.gradient for case in found}
    for option in ("weight", "eps", "weight_offset", "round_before_weight", "broadcast", "poison"):
        assert any(option in case.params for case in found), option


@pytest.mark.parametrize("op", sorted(families()))
def test_what_is_drawn_can_be_drafted_and_named(op):
    from hypothesis import HealthCheck, Phase, given, seed, settings

    @seed(3)
    @settings(max_examples=25, database=None, phases=[Phase.generate], deadline=None,
              suppress_health_check=list(HealthCheck))  # fmt: skip
    @given(space(op))
    def drafted(case):
        assert find(case.id).params == case.params
        families()[op].drafted(case)

    drafted()


WRONG = """
    if x.dtype.itemsize == 2 and x.shape[-1] > 40:
        y = y * 1.05
"""


def test_a_wrong_implementation_is_found_and_the_case_shrunk(registered, tmp_path):
    registered(WRONG)
    report = fuzz(plan(implementation="throwaway"), 0, 60.0, 600, here=True)
    assert report.exit_status() == 1
    values = [found for found in report.found if any(finding.rule == "R1" for finding in found.result.findings)]
    assert values
    # Rules that need a thousand elements break as kinds of their own.
    smallest = min(values, key=lambda found: find(found.result.case).params["F"])
    case = find(smallest.result.case)
    assert smallest.repeatable
    assert smallest.shrunk
    assert case.dtype == "bfloat16"
    assert 40 < case.params["F"] <= 60
    assert case.params["T"] <= 2
    assert set(case.params) <= {"T", "F"}
    assert len(case.id) <= len(smallest.first)


def test_failures_of_one_kind_count_as_one(registered):
    registered("y = y * 1.05")
    report = fuzz(plan(implementation="throwaway"), 0, 60.0, 60, here=True)
    kinds = Counter(fuzzing.kind_of(found.result) for found in report.found)
    assert set(kinds.values()) == {1}
    assert sum(found.also for found in report.found) > 10


def test_the_command_prints_a_repeat_command_that_fails_again(registered, tmp_path):
    registered(WRONG)
    path = tmp_path / "found.json"
    done = hal("conformance", "fuzz", "--backend", "cpu", "--op", "rms_norm", "--impl", "throwaway", "--cases", 90,
               "--here", "--json", path)  # fmt: skip
    assert done.exit_code == 1, done.output
    repeat = next(line for line in done.output.splitlines() if line.strip().startswith("repeat: "))
    words = shlex.split(repeat.partition("repeat: ")[2])
    assert words[:3] == ["hal", "conformance", "run"]
    assert hal(*words[1:]).exit_code == 1
    report = FuzzReport.model_validate_json(path.read_text())
    assert report.found[0].result.repeat in done.output
    assert report.seed == 0


def test_nothing_found_is_exit_status_0():
    done = hal("conformance", "fuzz", "--backend", "cpu", "--op", "silu_and_mul", "--impl", "reference", "--cases", 30,
               "--here", "--seed", 5)  # fmt: skip
    assert done.exit_code == 0, done.output
    assert "0 kinds of failure" in done.output


@pytest.mark.parametrize(
    "arguments", [("--op", "rmsnorm"), ("--impl", "none"), ("--json", "/no/such/folder/f.json"), ("--minutes", "0")]
)
def test_what_cannot_run_is_exit_status_2(arguments):
    assert hal("conformance", "fuzz", "--backend", "cpu", "--here", *arguments).exit_code == 2


def test_a_recipe_that_cannot_be_drafted_is_a_failure_of_its_case_alone(monkeypatch):
    of = families()["rms_norm"]
    honest = of.draft

    def draft(p, draw, dtype):
        if p.T >= 3:
            raise IndexError("no such row")
        return honest(p, draw, dtype)

    monkeypatch.setattr(of, "draft", draft)
    report = fuzz(plan(), 0, 60.0, 120, here=True)
    (found,) = report.found
    assert "no such row" in found.result.reasons[0]
    assert find(found.result.case).params["T"] == 3
    assert report.complete


def test_without_hypothesis_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "hypothesis", None)
    with pytest.raises(UnsupportedError, match="pip install hypothesis"):
        fuzz(plan(), 0, 1.0, here=True)


def test_a_run_ends_when_its_time_is_over(monkeypatch):
    def slow(site, work):
        time.sleep(0.1)
        return fuzzing.Answer((runner.failed(site, find(work.case), "reference", "always"),))

    monkeypatch.setattr(fuzzing, "judge", slow)
    start = time.perf_counter()
    report = fuzz(plan(), 0, 0.7, here=True)
    assert time.perf_counter() - start < 5
    assert report.complete
    assert report.seconds < 5


def test_an_interrupt_keeps_what_was_found(monkeypatch):
    calls = []

    def interrupted(site, work):
        calls.append(work)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return fuzzing.Answer((runner.failed(site, find(work.case), "reference", "always"),))

    monkeypatch.setattr(fuzzing, "judge", interrupted)
    report = fuzz(plan(), 0, 60.0, here=True)
    assert not report.complete
    assert [found.result.reasons for found in report.found] == [("always",)]


def test_a_failure_that_does_not_repeat_says_so(monkeypatch):
    calls = []

    def flaky(site, work):
        calls.append(work)
        result = runner.failed(site, find(work.case), "reference", "once")
        return fuzzing.Answer((result if len(calls) == 1 else result.model_copy(update={"status": "passed"}),))

    monkeypatch.setattr(fuzzing, "judge", flaky)
    report = fuzz(plan(), 0, 60.0, 40, here=True)
    assert [found.repeatable for found in report.found] == [False]


def test_a_process_that_dies_or_hangs_answers_for_its_case_and_is_replaced():
    process = Apart(apart_judges.setup, ())
    try:
        first = process.ask("who", 60)
        died = process.ask("die", 60)
        second = process.ask("who", 60)
        hung = process.ask("hang", 0.5)
    finally:
        process.stop()
    assert isinstance(first, Done) and isinstance(second, Done)
    assert first.value != second.value
    assert died == Crashed("die", "signal SIGSEGV")
    assert isinstance(hung, Crashed)
    assert "no answer" in hung.how


def test_a_process_that_cannot_begin_is_an_error():
    with pytest.raises(HalError, match="--here"):
        Apart(apart_judges.broken, ()).ask("who", 60)


def test_a_crash_of_an_implementation_is_found(monkeypatch):
    class Dying:
        def __init__(self, *_):
            pass

        def ask(self, item, seconds):
            return Crashed(item, "signal SIGSEGV")

        def stop(self):
            pass

    monkeypatch.setattr(fuzzing, "Apart", Dying)
    report = fuzz(plan(), 0, 60.0, 5)
    assert "SIGSEGV" in report.found[0].result.reasons[0]
