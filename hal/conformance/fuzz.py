"""Fuzzing: fresh cases from each operator's space, judged on every implementation, each failure shrunk to a small one.

What is drawn follows from the seed alone (and the version of hypothesis); the time only decides how far it gets.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict

from hal.conformance import runner
from hal.conformance.case import Case, cases, find
from hal.conformance.environment import environment
from hal.conformance.report import Environment, Request, Result, Target
from hal.conformance.site import Site, settings_in_force
from hal.conformance.spaces import hypothesis_version, space
from hal.conformance.workers import Apart, Done
from hal.files import write_whole

__all__ = ["Found", "FuzzReport", "Fuzzed", "fuzz"]

BATCH = 20
"""Cases of an operator before the next one's turn; the first turns are shorter, so that all get one."""
SHRINKS = 400
"""What shrinking one failure may cost, in cases; a lost process counts as LOST of them."""
LOST = 20
HANGS = 120.0
"""Seconds after which a case that is judged in a process of its own counts as hanging."""
Progress = Callable[[str, float, int, int], None]


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, ser_json_inf_nan="strings")


class Found(_Model):
    """A failure: the smallest case that shows it, and the one that it was first seen on.

    also: how many more cases failed in the same way (operator, implementation, rules, results). repeatable: whether
    the small case failed again when it was judged once more. shrunk: whether shrinking came to its end.
    """

    result: Result
    first: str
    also: int
    repeatable: bool
    shrunk: bool


class Fuzzed(_Model):
    """What was drawn of one operator: results by status, and recipes left out (listed already, or no case)."""

    op: str
    cases: int
    results: dict[str, int]
    left_out: dict[str, int]


class FuzzReport(_Model):
    """A fuzzing run. `complete` is False for one that was interrupted."""

    format: Literal["hal-conformance-fuzz"] = "hal-conformance-fuzz"
    version: int = 1
    started: str
    seconds: float
    complete: bool
    seed: int
    hypothesis: str
    request: Request
    target: Target
    environment: Environment
    ops: tuple[Fuzzed, ...]
    found: tuple[Found, ...]

    def exit_status(self) -> int:
        """0 nothing found, 1 failures, 2 interrupted or nothing judged."""
        if self.found:
            return 1
        return 0 if self.complete and any(op.results.get("passed") for op in self.ops) else 2

    def write(self, path: Path) -> None:
        """Write as JSON, whole or not at all."""
        write_whole(path, self.model_dump_json(indent=1) + "\n")


@dataclass(frozen=True)
class Answer:
    """What a case gave: a result per implementation, or why it is no case. lost: whether it cost the process."""

    results: tuple[Result, ...] = ()
    left_out: str | None = None
    lost: bool = False


def fuzz(
    what: runner.Plan,
    seed: int = 0,
    seconds: float = 60.0,
    most: int | None = None,
    here: bool = False,
    progress: Progress | None = None,
) -> FuzzReport:
    """Draw cases of the plan's operators and judge them on its implementations until the time is over.

    what: says site, operators and implementations; its cases are not run. most: the end after so many cases. here:
    judges in this process; else in one of its own, whose death or hanging is its case's failure. progress: called
    with the operator, the seconds gone, the cases judged and the failures found.
    """
    version = hypothesis_version()
    implementations: dict[str, tuple[str, ...]] = {}
    for piece in what.work:
        implementations.setdefault(piece.case.partition("/")[0], piece.implementations)
    started = datetime.now(UTC)
    judge = _Here(what.site) if here else _Apart(what.site)
    run = _Run(judge, implementations, _Clock(seconds, most), progress)
    complete = True
    try:
        run.go(seed)
    except KeyboardInterrupt:
        complete = False
        run.close_round()
    finally:
        judge.stop()
    return FuzzReport(
        started=started.isoformat(timespec="seconds"),
        seconds=run.clock.gone,
        complete=complete,
        seed=seed,
        hypothesis=version,
        request=what.request,
        target=what.site.target,
        environment=environment(settings_in_force(), what.site.plugin_failures()),
        ops=tuple(of.told() for of in run.tallies.values()),
        found=tuple(run.found.values()),
    )


class _Clock:
    """When to stop: after some time, or after some cases."""

    def __init__(self, seconds: float, most: int | None) -> None:
        self.start, self.seconds, self.most, self.cases = time.perf_counter(), seconds, most, 0

    @property
    def gone(self) -> float:
        return time.perf_counter() - self.start

    @property
    def over(self) -> bool:
        return self.gone >= self.seconds or (self.most is not None and self.cases >= self.most)


@dataclass
class _Tally:
    op: str
    cases: int = 0
    results: Counter[str] = field(default_factory=Counter)
    left_out: Counter[str] = field(default_factory=Counter)

    def told(self) -> Fuzzed:
        return Fuzzed(op=self.op, cases=self.cases, results=dict(self.results), left_out=dict(self.left_out))


class _Failed(Exception):
    """Tells hypothesis that an example fails."""


Kind = tuple[str, str, tuple[str, ...]]


def kind_of(result: Result) -> Kind:
    """What makes two failures one: operator, implementation, the rules broken and on which results."""
    rules = sorted({f"{finding.rule} {finding.result}" for finding in result.findings})
    return result.op, result.implementation, tuple(rules) or tuple(reason[:60] for reason in result.reasons)


class _Run:
    """A fuzzing run under way."""

    def __init__(
        self, judge: _Here | _Apart, ops: dict[str, tuple[str, ...]], clock: _Clock, progress: Progress | None
    ) -> None:
        self.judge, self.ops, self.clock, self.progress = judge, ops, clock, progress
        self.found: dict[Kind, Found] = {}
        self.tallies = {op: _Tally(op) for op in ops}
        self._also: Counter[Kind] = Counter()
        self._answers: dict[str, Answer] = {}
        self._kind: Kind | None = None
        self._first = ""
        self._smallest: Result | None = None
        self._effort = 0

    def go(self, seed: int) -> None:
        """Rounds over all operators until the clock says that it is over."""
        turn = 0
        while not self.clock.over:
            for op in self.ops:
                if not self.clock.over:
                    examples = min(BATCH, 5 * (turn + 1))
                    self._round(op, random.Random(f"{seed}/{op}/{turn}").getrandbits(48), examples)
            turn += 1

    def _round(self, op: str, seed: int, examples: int) -> None:
        from hypothesis import HealthCheck, Phase, Verbosity, given, settings
        from hypothesis import seed as seeded

        @seeded(seed)
        @settings(
            max_examples=examples,
            database=None,
            phases=[Phase.generate, Phase.shrink],
            verbosity=Verbosity.quiet,
            deadline=None,
            print_blob=False,
            report_multiple_bugs=False,
            suppress_health_check=list(HealthCheck),
        )
        @given(space(op))
        def probe(case: Case) -> None:
            self._probe(case)

        self._kind, self._smallest, self._effort = None, None, 0
        self._answers.clear()  # within a round a case has one answer, or shrinking could contradict itself
        with contextlib.suppress(_Failed):
            probe()
        self.close_round()

    def _probe(self, case: Case) -> None:
        answer = self._answers.get(case.id)
        if answer is None:
            if self.clock.over or self._effort >= SHRINKS:
                return
            answer = self._answers[case.id] = self._ask(case)
            if self._kind is not None:
                self._effort += LOST if answer.lost else 1
        for result in answer.results:
            if result.status != "failed":
                continue
            kind = kind_of(result)
            if self._kind is None and kind not in self.found:
                self._kind, self._first = kind, case.id
            if kind == self._kind:
                self._smallest = result
                raise _Failed
            self._also[kind] += 1

    def _ask(self, case: Case) -> Answer:
        tally = self.tallies[case.op]
        if case.id in _listed(case.op):
            tally.left_out["listed"] += 1
            return Answer()
        answer = self.judge.ask(runner.Work(case.id, self.ops[case.op]))
        self.clock.cases += 1
        if answer.left_out is not None:
            tally.left_out[answer.left_out] += 1
        else:
            tally.cases += 1
            tally.results.update(result.status for result in answer.results)
        if self.progress is not None:
            self.progress(case.op, self.clock.gone, self.clock.cases, len(self.found) + (self._kind is not None))
        return answer

    def close_round(self) -> None:
        """Take down what the round found."""
        if self._kind is not None and self._smallest is not None:
            small = self._smallest
            again = self.judge.ask(runner.Work(small.case, (small.implementation,)))
            self.found[self._kind] = Found(
                result=small,
                first=self._first,
                also=0,
                repeatable=any(result.status == "failed" for result in again.results),
                shrunk=not self.clock.over and self._effort < SHRINKS,
            )
        self._kind = None
        for kind, found in self.found.items():
            self.found[kind] = found.model_copy(update={"also": self._also[kind]})


class _Here:
    """Judges in this process."""

    def __init__(self, site: Site) -> None:
        self.site = site

    def ask(self, work: runner.Work) -> Answer:
        """The answer of one case."""
        return judge(self.site, work)

    def stop(self) -> None:
        """Nothing to end."""


class _Apart:
    """Judges in a process of its own, begun anew after a crash, a hang, or a failure that may outlive its case."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self._process = Apart(_judge_apart, (site.target.backend, torch.get_num_threads(), site.pinned))

    def ask(self, work: runner.Work) -> Answer:
        """The answer of one case; where it costs the process, each implementation is asked alone."""
        outcome = self._process.ask(work, HANGS)
        if isinstance(outcome, Done):
            answer: Answer = outcome.value
            if self.site.target.device != "cpu" and any(result.status == "failed" for result in answer.results):
                self._process.stop()  # an illegal access spoils the device for all that follows in its process
            return answer
        if len(work.implementations) > 1:
            alone = [self.ask(runner.Work(work.case, (name,))) for name in work.implementations]
            return Answer(tuple(result for answer in alone for result in answer.results), lost=True)
        told = f"the process that judged it ended with {outcome.how}"
        return Answer((runner.failed(self.site, find(work.case), work.implementations[0], told),), lost=True)

    def stop(self) -> None:
        """End the process."""
        self._process.stop()


def _judge_apart(backend: str, threads: int, device: str | None) -> Callable[[runner.Work], Answer]:
    torch.set_num_threads(threads)
    site = Site.of(backend, device)
    return lambda work: judge(site, work)


def judge(site: Site, work: runner.Work) -> Answer:
    """A result per implementation, or why the recipe is no case of its operator."""
    case = find(work.case)
    why = _no_case(case)
    if why is not None:
        return Answer(left_out=why)
    return Answer(tuple(runner.judge_case(site, case, name) for name in work.implementations))


def _no_case(case: Case) -> str | None:
    """Why bad input makes no case: its damage cannot be done, or is none in this dtype."""
    from hal.conformance.cases import family

    of = family(case.op)
    if case.bad_input:
        try:
            draft = of.drafted(case)
        except Exception:
            return "not drafted"
        told: dict[str, Any] = {name: value for name, value in case.params.items() if name != "bad"}
        sound = of.case(case.dtype, **told)
        before = of.draft(of.params(sound), _draw(case), getattr(torch, case.dtype)).args
        if all(_same(before.get(name), value) for name, value in draft.args.items()):
            return "not bad"
    return None


def _draw(case: Case) -> Any:
    from hal.conformance.inputs import Draw

    return Draw(case.seed)


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        form = a.dtype is b.dtype and a.shape == b.shape and a.device == b.device
        return form and (a.device.type == "meta" or torch.equal(a.nan_to_num(), b.nan_to_num()))
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(_same, a, b))
    return type(a) is type(b) and bool(a == b)


_LISTED: dict[str, frozenset[str]] = {}


def _listed(op: str) -> frozenset[str]:
    """The cases that the suites hold already."""
    if op not in _LISTED:
        _LISTED[op] = frozenset(case.id for case in cases(op, "full"))
    return _LISTED[op]
