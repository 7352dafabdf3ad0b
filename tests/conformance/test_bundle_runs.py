"""Bundles at work: recorded here, verified there, compared with each other."""

from __future__ import annotations

import dataclasses
import json
import shlex
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from hal import registry
from hal.cli import app
from hal.conformance import evidence, record, runner
from hal.conformance.archive import Bundle, read_bundle, write_bundle
from hal.conformance.case import cases
from hal.conformance.comparison import compare
from hal.conformance.site import Site
from hal.errors import ArgumentError, BundleError

RIGHT, WRONG = "pass", "y = y * 1.01"


def some_ids(op="rms_norm", dtype="float32", count=2):
    return tuple(case.id for case in cases(op) if case.dtype == dtype and case.tags == {"grid"})[:count]


def hal(*arguments):
    return CliRunner().invoke(app, ["conformance", *map(str, arguments)])


def recorded(backend="cpu", ids=None, tensors="none", implementations=()):
    what = runner.plan(Site.of(backend), implementations=implementations, case_ids=ids or some_ids())
    return record.record(what, tensors=tensors)[1]


def edited(bundle, change):
    """The bundle with its first case changed by `change(fields)`."""
    fields = json.loads(bundle.manifest.model_dump_json())
    change(fields["cases"][0])
    return Bundle(type(bundle.manifest).model_validate(fields), bundle.packed)


def judged(names, share=0.5):
    """A bundle of one case with the named verdicts, name -> status."""

    def change(case):
        blank = case["verdicts"][0] | {"outputs": [], "findings": [], "reasons": []}
        case["verdicts"] = [blank | {"implementation": n, "status": s, "share": share} for n, s in names.items()]

    return edited(recorded(ids=some_ids(count=1)), change)


def side_by_side(first, second, **how):
    return compare(first, second, ("a.hal", "b.hal"), **how)


@pytest.fixture
def run_hal(tmp_path):
    path = tmp_path / "run.hal"
    done = hal("record", "--backend", "cpu", "--op", "rms_norm", "--workers", "0", "-o", path)
    assert done.exit_code == 0, done.output
    assert f"wrote {path}" in done.output
    return path


def test_a_run_recorded_on_cpu_is_verified_on_portable(run_hal, tmp_path):
    out, report = tmp_path / "here.hal", tmp_path / "side.json"
    done = hal("verify", run_hal, "--backend", "portable:cpu", "--workers", "0", "--json", report, "-o", out)
    assert done.exit_code == 0, done.output
    told = json.loads(report.read_text())
    assert [side["backend"] for side in told["sides"]] == ["cpu", "portable:cpu"]
    assert {row["implementations"][1] for row in told["rows"]} == {"composed"}
    assert {row["implementations"][0] for row in told["rows"]} == {"reference", "aten"}
    assert told["inputs_differ"] == [] and told["unknown"] == {}
    assert told["cases"] == len(cases("rms_norm"))
    assert sum(row["equal"] for row in told["rows"]) > 0
    assert f"{told['cases']} cases side by side" in done.output
    for side in told["sides"]:
        assert side["worst"]["case"] in done.output
    here = read_bundle(out).manifest
    assert {case.id for case in here.cases} == {case.id for case in read_bundle(run_hal).manifest.cases}


def test_comparing_the_two_bundles_afterwards_says_the_same_and_runs_nothing(run_hal, tmp_path, monkeypatch):
    out = tmp_path / "here.hal"
    done = hal(
        "verify", run_hal, "--backend", "portable:cpu", "--workers", "0", "-o", out, "--json", tmp_path / "v.json"
    )
    assert done.exit_code == 0, done.output

    def never(*_, **__):
        raise AssertionError("ran")

    monkeypatch.setattr(runner, "run", never)
    monkeypatch.setattr(evidence, "gather", never)
    monkeypatch.setattr(registry, "devices", never)
    done = hal("compare", run_hal, out, "--json", tmp_path / "c.json")
    assert done.exit_code == 0, done.output
    verified, compared = (json.loads((tmp_path / name).read_text()) for name in ("v.json", "c.json"))
    for told in (verified, compared):
        told["sides"][1].pop("source")
    assert verified == compared


def test_a_corrupted_implementation_is_found_with_a_command_that_repeats_it(installed, tmp_path):
    def conformance(environment, *arguments):
        command = [sys.executable, "-m", "hal.cli", "conformance", *map(str, arguments)]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)

    good, name = tmp_path / "good.hal", some_ids(count=1)[0]
    environment = installed(RIGHT)
    done = conformance(environment, "record", "--backend", "cpu", "--case", name, "-o", good)
    assert done.returncode == 0, done.stdout + done.stderr
    plugin = tmp_path / "site" / "throwaway.py"
    plugin.write_text(plugin.read_text().replace("    pass\n", f"    {WRONG}\n"))
    done = conformance(environment, "verify", good, "--backend", "cpu")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "A throwaway passed, B throwaway failed" in done.stdout
    assert "A reference passed, B reference failed" not in done.stdout
    assert "B: R1: y[" in done.stdout
    repeat = next(line for line in done.stdout.splitlines() if line.strip().startswith("repeat B: "))
    words = shlex.split(repeat.partition("repeat B: ")[2])
    assert words[:3] == ["hal", "conformance", "run"]
    again = conformance(environment, *words[2:])
    assert again.returncode == 1 and name in again.stdout


def test_only_this_machines_failures_decide_a_verification():
    bad, good = judged({"reference": "failed"}), judged({"reference": "passed"})
    assert side_by_side(bad, good).status == 0
    assert side_by_side(good, bad).status == 1
    assert side_by_side(bad, good, under_test="both").status == 1
    (difference,) = side_by_side(bad, good).differences
    assert [side.status for side in difference.sides] == ["failed", "passed"]
    assert "--backend cpu" in difference.sides[0].repeat and difference.case in difference.sides[0].repeat


def test_a_failure_on_both_sides_is_shown_too():
    bad = judged({"reference": "mistrusted"})
    (difference,) = side_by_side(bad, bad).differences
    assert difference.bad


def test_implementations_pair_by_name_and_what_is_left_with_the_others_leading_one():
    first = judged({"fused": "unsupported", "aten": "passed", "reference": "passed"})
    second = judged({"mine": "passed", "reference": "passed"})
    assert [row.implementations for row in side_by_side(first, second).rows] == [
        ("fused", "mine"), ("aten", "mine"), ("reference", "reference"),
    ]  # fmt: skip
    assert [row.implementations for row in side_by_side(second, first).rows] == [
        ("mine", "aten"), ("reference", "reference"), ("mine", "fused"),
    ]  # fmt: skip


def test_a_lack_of_support_is_a_difference_but_no_failure():
    comparison = side_by_side(judged({"aten": "passed"}), judged({"aten": "unsupported"}), under_test="both")
    assert [difference.bad for difference in comparison.differences] == [False]
    assert comparison.status == 2  # a side that judged nothing
    mixed = judged({"aten": "unsupported", "reference": "passed"})
    assert side_by_side(judged({"aten": "passed"}), mixed).status == 0


def test_each_side_has_its_own_share_and_worst_case():
    comparison = side_by_side(judged({"aten": "passed"}, 0.25), judged({"aten": "passed"}, float("nan")))
    (row,) = comparison.rows
    assert row.share[0] == 0.25 and row.share[1] != row.share[1]
    assert comparison.sides[0].worst.share == 0.25
    assert comparison.sides[0].worst.case == some_ids()[0]
    json.loads(comparison.model_dump_json(), parse_constant=pytest.fail)


def test_equal_bits_are_counted_by_digest():
    one = recorded(implementations=("reference",))
    same = side_by_side(one, recorded(implementations=("reference",)))
    assert (same.outputs, same.equal) == (2, 2)

    def flip(case):
        case["verdicts"][0]["outputs"][0]["digest"] = "0" * 64

    apart = side_by_side(one, edited(one, flip))
    assert (apart.outputs, apart.equal) == (2, 1)
    assert apart.status == 0


def test_stored_results_of_a_failure_are_held_against_each_other(registered):
    registered(WRONG)
    bad = recorded(tensors="failures", implementations=("throwaway",), ids=some_ids(count=1))
    registry.unregister("cpu.throwaway")
    registered(RIGHT)
    found = record.again(Site.of("cpu"), bad, implementations=("throwaway",))
    _, here = record.record(found.plan, keep=found.keep)
    (difference,) = side_by_side(found.recorded, here).differences
    name, _, values = difference.largest.partition(" = ")
    first, second = (float(value) for value in values.split(" and "))
    assert name.startswith("y[")
    assert first == pytest.approx(1.01 * second, rel=1e-5)


def test_switches_that_differ_are_named():
    one = recorded(ids=some_ids(count=1))
    fields = json.loads(one.manifest.model_dump_json())
    fields["environment"]["numerics"] |= {"float32_matmul_precision": "high", "npu.matmul.allow_hf32": "True"}
    other = Bundle(type(one.manifest).model_validate(fields))
    assert side_by_side(one, other).switches == {
        "float32_matmul_precision": (one.manifest.environment.numerics["float32_matmul_precision"], "high"),
        "npu.matmul.allow_hf32": (None, "True"),
    }


def broken_generator(case):
    case["inputs"] = "f" * 64


def strange(case):
    case["id"] = "rms_norm/float32/T=7,colour=red~0000"


@pytest.mark.parametrize(
    ("change", "words"),
    [(broken_generator, "fault of the generator of inputs, not of a backend"), (strange, "cannot be built here")],
)
def test_a_case_whose_inputs_differ_or_cannot_be_built_is_left_out_and_said(tmp_path, change, words):
    path = tmp_path / "x.hal"
    write_bundle(edited(recorded(), change), path)
    done = hal("verify", path, "--backend", "cpu", "--workers", "0", "--json", tmp_path / "v.json")
    assert done.exit_code == 2, done.output
    assert words in done.output
    told = json.loads((tmp_path / "v.json").read_text())
    assert len(told["inputs_differ"]) + len(told["unknown"]) == 1
    assert told["cases"] == 1
    assert told["only"] == [[], []]


def test_inputs_are_checked_before_anything_is_run(monkeypatch):
    one = edited(recorded(), broken_generator)
    monkeypatch.setattr(runner, "judge_case", lambda *_: pytest.fail("ran"))
    found = record.again(Site.of("cpu"), one)
    assert found.differ == (some_ids()[0],)
    assert [piece.case for piece in found.plan.work] == [some_ids()[1]]


def test_a_bundle_of_which_nothing_can_be_run_is_an_answer_too(tmp_path):
    path = tmp_path / "x.hal"
    write_bundle(edited(recorded(ids=some_ids(count=1)), broken_generator), path)
    done = hal("verify", path, "--backend", "cpu", "--workers", "0")
    assert done.exit_code == 2
    assert "nothing to compare" in done.output


def test_two_bundles_whose_inputs_differ_are_not_compared_on_those_cases():
    one = recorded()
    comparison = side_by_side(one, edited(one, broken_generator))
    assert comparison.inputs_differ == (some_ids()[0],)
    assert comparison.cases == 1
    assert comparison.status == 2


def test_cases_of_one_side_alone_are_named():
    both, one = recorded(), recorded(ids=some_ids()[:1])
    assert side_by_side(both, one).only == ((some_ids()[1],), ())
    assert side_by_side(one, both).only == ((), (some_ids()[1],))
    assert side_by_side(one, recorded(ids=some_ids()[1:])).status == 2


def test_an_interrupted_run_is_a_bundle_that_says_so(monkeypatch, tmp_path):
    honest, calls = runner.judge, []

    def interrupted(*arguments, **options):
        calls.append(arguments)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return honest(*arguments, **options)

    monkeypatch.setattr(runner, "judge", interrupted)
    path = tmp_path / "x.hal"
    done = hal("record", "--backend", "cpu", "--op", "rms_norm", "--workers", "0", "-o", path)
    assert done.exit_code == 2
    manifest = read_bundle(path).manifest
    assert not manifest.complete
    assert sum(manifest.counts.values()) == 2 < manifest.planned


def test_verify_takes_part_of_a_bundle(tmp_path):
    ids = (*some_ids(count=1), *some_ids("softmax", count=1))
    one = recorded(ids=ids)
    found = record.again(Site.of("cpu"), one, ops=("softmax",), implementations=("reference",))
    assert [piece.implementations for piece in found.plan.work] == [("reference",)]
    assert [[v.implementation for v in case.verdicts] for case in found.recorded.manifest.cases] == [["reference"]]
    with pytest.raises(ArgumentError, match="it has cases of rms_norm, softmax"):
        record.again(Site.of("cpu"), one, ops=("linear",))
    with pytest.raises(ArgumentError, match="no implementation 'nobody'"):
        record.again(Site.of("cpu"), one, implementations=("nobody",))


def test_a_bundle_without_cases_is_refused():
    empty = recorded()
    empty = dataclasses.replace(empty, manifest=empty.manifest.model_copy(update={"cases": ()}))
    with pytest.raises(BundleError, match="no cases"):
        record.again(Site.of("cpu"), empty)


def test_an_argument_of_compare_is_a_bundle_or_a_backend(tmp_path):
    path = tmp_path / "x.hal"
    write_bundle(recorded(), path)
    orders = {}
    for a, b in ((path, "portable:cpu"), ("portable:cpu", path)):
        done = hal("compare", a, b, "--workers", "0", "--json", tmp_path / "c.json")
        assert done.exit_code == 0, done.output
        orders[str(a)] = [side["backend"] for side in json.loads((tmp_path / "c.json").read_text())["sides"]]
    assert orders == {str(path): ["cpu", "portable:cpu"], "portable:cpu": ["portable:cpu", "cpu"]}
    missing = hal("compare", path, "absent.hal")
    assert missing.exit_code == 2 and "FileError" in missing.output
    unknown = hal("compare", path, "nobody")
    assert unknown.exit_code == 2 and "nobody" in unknown.output


def test_two_backends_are_compared_on_a_suite(tmp_path):
    done = hal("compare", "cpu", "portable:cpu", "--op", "merge_attention", "--workers", "0", "--json", tmp_path / "c")
    assert done.exit_code == 0, done.output
    assert json.loads((tmp_path / "c").read_text())["cases"] == len(cases("merge_attention"))


def test_a_damaged_bundle_is_one_message_and_exit_status_2(tmp_path):
    path = tmp_path / "x.hal"
    path.write_text("hello")
    for command in (("verify", path), ("compare", path, path)):
        done = hal(*command)
        assert done.exit_code == 2
        assert "BundleError" in done.output and "Traceback" not in done.output


def test_a_path_that_cannot_be_written_is_refused_before_the_run(tmp_path):
    done = hal("record", "--op", "rms_norm", "-o", tmp_path / "no" / "x.hal")
    assert done.exit_code == 2 and "FileError" in done.output


def test_a_crash_of_one_implementation_costs_only_its_own_results(installed, tmp_path):
    environment = installed("os.kill(os.getpid(), signal.SIGSEGV)")
    path, name = tmp_path / "x.hal", some_ids(count=1)[0]
    done = subprocess.run(
        [sys.executable, "-m", "hal.cli", "conformance", "record", "--backend", "cpu", "--case", name,
         "--workers", "1", "-o", str(path)], env=environment, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 1, done.stdout + done.stderr
    (case,) = read_bundle(path).manifest.cases
    found = {verdict.implementation: (verdict.status, len(verdict.outputs)) for verdict in case.verdicts}
    assert found == {"throwaway": ("failed", 0), "aten": ("passed", 1), "reference": ("passed", 1)}
    (lost,) = [verdict.lost for verdict in case.verdicts if verdict.lost]
    assert "SIGSEGV" in lost


def test_the_quick_suite_fits_easily_in_two_megabytes(tmp_path):
    """From a part of it: what a verdict takes in a bundle, times how many there are."""
    site = Site.of("cpu")
    total = sum(len(piece.implementations) for piece in runner.plan(site).work)
    some = tuple(case.id for case in cases("attention"))[:40]
    _, made = record.record(runner.plan(site, case_ids=some))
    path = tmp_path / "x.hal"
    write_bundle(made, path)
    assert path.stat().st_size / sum(made.manifest.counts.values()) * total < 1_000_000


def test_results_that_the_further_call_does_not_give_are_missed_aloud(monkeypatch, tmp_path):
    def spent(*_):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(evidence, "_results", spent)
    path = tmp_path / "x.hal"
    done = hal("record", "--backend", "cpu", "--case", some_ids()[0], "--impl", "reference", "-o", path)
    assert done.exit_code == 0
    assert "1 verdicts lack the digests of their results" in done.output
    (verdict,) = read_bundle(path).manifest.cases[0].verdicts
    assert (verdict.status, verdict.outputs, verdict.lost) == ("passed", (), "RuntimeError: out of memory")


def test_a_case_about_gradients_has_the_gradients_for_results():
    case = next(case for case in cases("softmax") if case.gradient and case.dtype == "float32")
    made = recorded(ids=(case.id,), implementations=("reference",))
    (verdict,) = made.manifest.cases[0].verdicts
    assert [output.name for output in verdict.outputs] == ["d_x"]


def test_the_digest_of_a_gradient_case_holds_the_gradients_that_come_in(monkeypatch):
    case = next(case for case in cases("softmax") if case.gradient)
    before = evidence.inputs_digest(case)
    assert evidence.inputs_digest(case) == before
    made = evidence.gradient_subject(case, lse=False)
    monkeypatch.setattr(made, "upstream", tuple(grad * 2 for grad in made.upstream))
    monkeypatch.setattr(evidence, "gradient_subject", lambda case, lse: made)
    assert evidence.inputs_digest(case) != before
