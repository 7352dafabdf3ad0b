"""The proof of power (R6, R7): every mutant against the quick suite, and every case against the honest reference.

A mutant that no quick case of a dtype rejects has survived; a case that would let zeros or a shuffled result pass is
mistrusted; either fails the proof. The faults that come in strengths give the suite's detection floor.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict

from hal.conformance import gradients, subject
from hal.conformance.case import Case, cases
from hal.conformance.environment import environment
from hal.conformance.judge import judge
from hal.conformance.mutants import Mutant, mutants
from hal.conformance.mutants.mutant import DTYPES, reference
from hal.conformance.report import Environment
from hal.conformance.site import closest, settings_in_force
from hal.conformance.verdict import Finding, Verdict
from hal.conformance.workers import Crashed, share_out
from hal.errors import ArgumentError, HalError
from hal.files import write_whole

__all__ = ["Cell", "PowerReport", "Sight", "Suspect", "prove"]

WEAKEST = 2.0**-52
_KEPT = 600  # subjects: each is asked for by every mutant of its operator

Progress = Callable[[str, int, int], None]


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Cell(_Model):
    """One mutant in one dtype, and the case that killed it.

    strength and floor: of a graded fault, the one that must be seen and the weakest that is. why: the derivation, of
    one that is marked invisible in this dtype (marked and yet seen is wrong too: status misjudged).
    """

    op: str
    mutant: str
    convention: str
    dtype: str
    gradient: bool
    status: Literal["killed", "survived", "invisible", "misjudged"]
    case: str | None = None
    rule: str | None = None
    finding: str | None = None
    strength: float | None = None
    floor: float | None = None
    floor_case: str | None = None
    why: str | None = None


class Suspect(_Model):
    """A case that the honest reference does not pass, or that proves too little."""

    op: str
    dtype: str
    case: str
    status: str
    findings: tuple[str, ...]


class Sight(_Model):
    """How weak a graded fault one case still sees; None where it sees not even the whole fault."""

    op: str
    dtype: str
    mutant: str
    case: str
    weakest: float | None


class PowerReport(_Model):
    """What the suite sees. `cases` counts those of the quick suite that took part; bad input convicts nobody."""

    format: Literal["hal-conformance-power"] = "hal-conformance-power"
    version: int = 1
    started: str
    seconds: float
    ops: tuple[str, ...]
    cases: int
    environment: Environment
    cells: tuple[Cell, ...]
    suspects: tuple[Suspect, ...]
    sights: tuple[Sight, ...] = ()

    @property
    def bad(self) -> tuple[Cell, ...]:
        """Mutants that no case killed, or that are marked invisible and are not."""
        return tuple(cell for cell in self.cells if cell.status in ("survived", "misjudged"))

    def exit_status(self) -> int:
        """0 if the suite has power: no survivor and no suspect."""
        return 1 if self.bad or self.suspects else 0

    def write(self, path: Path) -> None:
        """Write the report as JSON, whole or not at all."""
        write_whole(path, (self.model_dump_json(indent=1) + "\n").encode())


class _Examined(_Model):
    cases: int
    cells: tuple[Cell, ...]
    suspects: tuple[Suspect, ...]
    sights: tuple[Sight, ...]


def prove(
    ops: tuple[str, ...] = (), strength: bool = False, workers: int = 0, progress: Progress | None = None
) -> PowerReport:
    """Put every mutant of these operators (all if empty) to the quick suite, dtype by dtype.

    strength: also find out for each case how weak a graded fault it sees. workers: processes; 0 works in this one.
    Raises ArgumentError for an operator without mutants.
    """
    started, clock = datetime.now(timezone.utc), time.perf_counter()
    known = tuple(dict.fromkeys(mutant.op for mutant in mutants()))
    for op in ops:
        if op not in known:
            raise ArgumentError(f"no operator {op!r} has mutants; those with some are {', '.join(known)}."
                                f"{closest(op, list(known))}")  # fmt: skip
    chosen = tuple(op for op in known if not ops or op in ops)
    items = [(op, dtype, strength) for op in chosen for dtype in DTYPES]
    found: dict[tuple[str, str], _Examined] = {}
    for (op, dtype, _), examined in _examine_all(items, workers):
        found[op, dtype] = examined
        if progress is not None:
            progress(f"{op} {dtype}", len(found), len(items))
    parts = [found[op, dtype] for op, dtype, _ in items]
    return PowerReport(
        started=started.isoformat(timespec="seconds"),
        seconds=time.perf_counter() - clock,
        ops=chosen,
        cases=sum(part.cases for part in parts),
        environment=environment(settings_in_force(), ()),
        cells=tuple(cell for part in parts for cell in part.cells),
        suspects=tuple(suspect for part in parts for suspect in part.suspects),
        sights=tuple(sight for part in parts for sight in part.sights),
    )


Item = tuple[str, str, bool]


def _examine_all(items: list[Item], workers: int) -> Iterator[tuple[Item, _Examined]]:
    if not workers:
        for item in items:
            yield item, examine(*item)
        return
    threads = max(1, torch.get_num_threads() // workers)
    for outcome in share_out(items, workers, _examiner, (threads,)):
        if isinstance(outcome, Crashed):
            op, dtype, _ = outcome.item
            raise HalError(f"the process that examined {op} in {dtype} ended with {outcome.how}; --workers 0 shows why")
        yield outcome.item, outcome.value


def _examiner(threads: int) -> Callable[[Item], _Examined]:
    torch.set_num_threads(threads)
    return lambda item: examine(*item)


def examine(op: str, dtype: str, strength: bool = False) -> _Examined:
    """Every mutant of one operator in one dtype."""
    with subject.recent.keeping(_KEPT), gradients.recent.keeping(_KEPT):
        trusted, suspects = _trusted(case for case in cases(op) if case.dtype == dtype and not case.bad_input)
        cells, sights = [], []
        for mutant in mutants():
            if mutant.op != op:
                continue
            asked = trusted[mutant.gradient]
            cells.append(_hunt(mutant, dtype, asked))
            if strength and mutant.strength is not None:
                sights += [_sight(mutant, dtype, case) for case in asked]
    count = sum(len(of) for of in trusted.values()) + len(suspects)
    return _Examined(cases=count, cells=tuple(cells), suspects=tuple(suspects), sights=tuple(sights))


def _trusted(listed: Iterable[Case]) -> tuple[dict[bool, list[Case]], list[Suspect]]:
    """Cases of results and of gradients that the honest reference passes: only those can convict."""
    trusted: dict[bool, list[Case]] = {False: [], True: []}
    suspects = []
    for case in listed:
        verdict = judge(case, reference(case.op))
        if verdict.status == "passed":
            trusted[case.gradient].append(case)
        else:
            told = tuple(finding.message for finding in verdict.findings) or verdict.reasons
            suspects.append(
                Suspect(op=case.op, dtype=case.dtype, case=case.id, status=verdict.status, findings=told)
            )
    return trusted, suspects


def _hunt(mutant: Mutant, dtype: str, asked: list[Case]) -> Cell:
    why = mutant.invisible.get(dtype)
    # A crash says nothing of the rules that the fault should break; yet it belies that no case can show the fault.
    form = mutant.form or why is not None
    kill = _kill(mutant.candidate(), asked, form)
    cell = Cell(
        op=mutant.op,
        mutant=mutant.name,
        convention=mutant.convention,
        dtype=dtype,
        gradient=mutant.gradient,
        status="survived" if kill is None else "killed",
        strength=mutant.strength,
        why=why,
    )
    if kill is None:
        return cell if why is None else cell.model_copy(update={"status": "invisible"})
    case, rule, finding = kill
    told: dict[str, Any] = {"case": case.id, "rule": rule, "finding": finding}
    if why is not None:
        told["status"] = "misjudged"
    if mutant.strength is not None:
        told["floor"], told["floor_case"] = mutant.strength, case.id
        weaker = mutant.strength / 2
        while weaker >= WEAKEST and (kill := _kill(mutant.candidate(weaker), asked, form)) is not None:
            told["floor"], told["floor_case"] = weaker, kill[0].id
            weaker /= 2
    return cell.model_copy(update=told)


def _kill(candidate: Any, asked: list[Case], form: bool) -> tuple[Case, str, str] | None:
    """The first case that rejects the candidate; it goes to the front, as the likeliest to reject the next one."""
    for at, case in enumerate(asked):
        finding = _finding(judge(case, candidate), form)
        if finding is not None:
            asked.insert(0, asked.pop(at))
            return case, finding.rule, finding.message
    return None


def _finding(verdict: Verdict, form: bool) -> Finding | None:
    """What convicts; R8, which looks at crashes and at the form of results, convicts only where `form` says so."""
    if verdict.status != "failed":
        return None
    told = (finding for finding in verdict.findings if finding.rule != "R6" and (form or finding.rule != "R8"))
    return next(told, None)


def _sight(mutant: Mutant, dtype: str, case: Case) -> Sight:
    """By halving: a case that sees a fault sees the stronger ones."""
    strength, weakest = 1.0, None
    while strength >= WEAKEST and _finding(judge(case, mutant.candidate(strength)), mutant.form) is not None:
        weakest = strength
        strength /= 2
    return Sight(op=mutant.op, dtype=dtype, mutant=mutant.name, case=case.id, weakest=weakest)
