"""The proof of power: its mutants cover the contract, and it fails when one survives or a case proves nothing.

That no mutant survives is shown by `hal conformance power` itself, which CI runs beside these tests.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from hal.cli import app
from hal.conformance import power
from hal.conformance.case import cases
from hal.conformance.mutants import Mutant, mutants
from hal.conformance.mutants.conventions import CONVENTIONS, GRADIENTS, UNSEEN
from hal.conformance.mutants.mutant import DTYPES, after, reference, weaker
from hal.conformance.subject import Subject
from hal.contract import OPS


def planted(monkeypatch: pytest.MonkeyPatch, *found: Mutant) -> None:
    monkeypatch.setattr(power, "mutants", lambda: found)


def mutant(make: Callable[[float], Any], **how: Any) -> Mutant:
    return Mutant("softmax", "planted", "softmax", make, **how)


def test_every_convention_has_a_mutant_in_every_operator_that_it_touches() -> None:
    for listed, gradient in ((CONVENTIONS, False), (GRADIENTS, True)):
        wanted = {(convention, op) for convention, ops in listed.items() for op in ops}
        there = {(mutant.convention, mutant.op) for mutant in mutants() if mutant.gradient is gradient}
        assert wanted - there == set()
        assert there - wanted == set()


def test_what_no_case_can_show_is_said_with_the_reason_and_has_no_mutant() -> None:
    assert not set(UNSEEN) & {mutant.convention for mutant in mutants()}
    assert all(len(why) > 20 for why in UNSEEN.values())


def test_every_operator_of_the_contract_has_mutants_and_every_differentiable_one_in_its_gradients() -> None:
    assert {mutant.op for mutant in mutants()} == {op for op in OPS if cases(op)}
    assert {mutant.op for mutant in mutants() if mutant.gradient} == {name for name, op in OPS.items() if op.grad}


def test_names_are_unique_and_invisible_ones_are_derived() -> None:
    names = [(mutant.op, mutant.gradient, mutant.name) for mutant in mutants()]
    assert len(set(names)) == len(names)
    for mutant in mutants():
        assert set(mutant.invisible) < set(DTYPES)
        assert all(len(why) > 20 for why in mutant.invisible.values())


def test_a_mutant_that_no_case_kills_fails_the_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    planted(monkeypatch, mutant(lambda strength: reference("softmax")))
    report = power.prove(("softmax",))
    assert [cell.status for cell in report.cells] == ["survived"] * 4
    assert report.exit_status() == 1 and report.bad == report.cells


def test_a_crash_is_no_kill_unless_it_is_the_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    def crash(y: Any, a: Any) -> Any:
        raise RuntimeError("broken")

    def make(strength: float) -> Any:
        return after("softmax", crash)

    planted(monkeypatch, mutant(make))
    assert {cell.status for cell in power.prove(("softmax",)).cells} == {"survived"}
    planted(monkeypatch, mutant(make, form=True))
    assert {(cell.status, cell.rule) for cell in power.prove(("softmax",)).cells} == {("killed", "R8")}
    planted(monkeypatch, mutant(make, invisible=dict.fromkeys(DTYPES, "no case shows it")))
    assert {cell.status for cell in power.prove(("softmax",)).cells} == {"misjudged"}


def test_a_kill_names_its_case_and_rule_and_a_graded_fault_its_floor(monkeypatch: pytest.MonkeyPatch) -> None:
    (off,) = weaker("softmax", "values are off", "softmax", lambda op, s: after(op, lambda y, a: y * (1 + s)), 2.0**-6)
    planted(monkeypatch, off)
    report = power.prove(("softmax",), strength=True)
    assert report.exit_status() == 0
    for cell in report.cells:
        assert cell.status == "killed" and cell.rule == "R1" and cell.case is not None and cell.dtype in cell.case
        # bfloat16 holds 8 bits: a fault below its rounding cannot be told from it
        assert cell.floor is not None and 2.0**-50 < cell.floor <= 2.0**-6
        assert cell.finding is not None and cell.case in cell.finding
    floors = {cell.dtype: cell.floor for cell in report.cells}
    assert floors["float64"] < floors["float32"] < floors["float16"] <= floors["bfloat16"]
    seen = [sight.weakest for sight in report.sights if sight.dtype == "float32" and sight.weakest is not None]
    assert min(seen) == floors["float32"]


def test_one_that_is_marked_invisible_and_is_seen_fails_the_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    planted(monkeypatch, mutant(lambda strength: after("softmax", lambda y, a: y * 2), invisible={"float16": "so"}))
    report = power.prove(("softmax",))
    assert {cell.dtype: cell.status for cell in report.cells} == {
        "float64": "killed", "float32": "killed", "bfloat16": "killed", "float16": "misjudged"
    }  # fmt: skip
    assert report.exit_status() == 1


def test_one_that_is_invisible_by_derivation_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    planted(monkeypatch, mutant(lambda strength: reference("softmax"), invisible=dict.fromkeys(DTYPES, "honest")))
    report = power.prove(("softmax",))
    assert {cell.status for cell in report.cells} == {"invisible"} and report.exit_status() == 0


def test_a_case_that_proves_too_little_convicts_nobody_and_fails_the_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    planted(monkeypatch, mutant(lambda strength: after("softmax", lambda y, a: y * 2)))
    monkeypatch.setattr(Subject, "vacuous", lambda self: ("y", "zeros would pass"))
    report = power.prove(("softmax",))
    assert report.exit_status() == 1 and report.suspects
    assert {suspect.status for suspect in report.suspects} == {"mistrusted"}
    assert "zeros would pass" in report.suspects[0].findings[0]


def test_the_command_prints_the_table_and_writes_the_whole(tmp_path: Path) -> None:
    path = tmp_path / "power.json"
    done = CliRunner().invoke(app, ["conformance", "power", "--op", "softmax", "--workers", "0", "--json", str(path)])
    assert done.exit_code == 0, done.output
    report = json.loads(path.read_text())
    assert report["format"] == "hal-conformance-power" and report["ops"] == ["softmax"]
    killed = [cell for cell in report["cells"] if cell["status"] == "killed"]
    assert all(cell["case"] in done.output for cell in killed)
    assert "detection floor" in done.output and "0 bad" in done.output


def test_an_operator_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["conformance", "power", "--op", "sofmax"])
    assert done.exit_code == 2 and "did you mean 'softmax'" in done.output.lower()
