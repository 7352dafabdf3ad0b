"""Runs cases on every implementation of a backend and makes the report."""

from __future__ import annotations

import shlex
import time
import traceback
from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from typing import TYPE_CHECKING

import torch

from hal.conformance.case import Case, Suite, cases, find
from hal.conformance.environment import environment
from hal.conformance.judge import judge
from hal.conformance.offers import offers
from hal.conformance.report import Finding, Report, Request, Result
from hal.conformance.site import Site, closest, settings_in_force
from hal.conformance.workers import Done, end_unusable, share_out
from hal.errors import ArgumentError
from hal.settings import use

if TYPE_CHECKING:
    from hal.conformance.resume import State
    from hal.conformance.shards import Shard
    from hal.conformance.verdict import Verdict

Progress = Callable[[Result, int, int], None]


@dataclass(frozen=True)
class Work:
    """A case and the names of the implementations to judge on it."""

    case: str
    implementations: tuple[str, ...]


@dataclass(frozen=True)
class Plan:
    """What a run will do."""

    site: Site
    request: Request
    work: tuple[Work, ...]
    missing: tuple[str, ...]

    @property
    def size(self) -> int:
        """How many results there will be."""
        return sum(len(piece.implementations) for piece in self.work)


def plan(
    site: Site,
    suite: Suite = "quick",
    ops: tuple[str, ...] = (),
    implementations: tuple[str, ...] = (),
    case_ids: tuple[str, ...] = (),
    shard: Shard | None = None,
) -> Plan:
    """Choose cases and implementations. ArgumentError for a name that does not exist or a choice that is empty."""
    chosen = _choose(site, suite, ops, case_ids)
    registered = {case.op: site.implementations(case.op) for case in chosen}
    known = sorted({name for names in registered.values() for name in names})
    for name in implementations:
        if name not in known:
            raise ArgumentError(
                f"backend {site.target.backend!r} has no implementation {name!r} of the operators asked for; "
                f"it has {', '.join(known) or 'none'}.{closest(name, known)}"
            )
    work = []
    for case in chosen:
        names = tuple(name for name in registered[case.op] if not implementations or name in implementations)
        if names:
            work.append(Work(case.id, names))
    if not work:
        raise ArgumentError(
            f"nothing to judge: backend {site.target.backend!r} has no implementation of "
            f"{', '.join(sorted(registered)) or 'any operator with cases'}. 'hal ops' lists what each backend has."
        )
    if shard is not None:
        mine = shard.part([piece.case for piece in work])
        work = [piece for piece in work if piece.case in mine]
    told = None if shard is None else str(shard)
    request = Request(suite=suite, ops=ops, implementations=implementations, cases=case_ids, shard=told)
    missing = tuple(sorted(op for op, names in registered.items() if not names))
    return Plan(site, request, tuple(work), missing)


def _choose(site: Site, suite: Suite, ops: tuple[str, ...], case_ids: tuple[str, ...]) -> list[Case]:
    if case_ids:
        return [_named(case_id, site.target.backend) for case_id in case_ids]
    listed = cases(suite=suite, backend=site.target.backend)
    known = sorted({case.op for case in listed})
    for op in ops:
        if op not in known:
            raise ArgumentError(
                f"no operator {op!r} has cases in the suite {suite!r}; those with cases are {', '.join(known)}."
                f"{closest(op, known)}"
            )
    chosen = [case for case in listed if not ops or case.op in ops]
    if not chosen:
        raise ArgumentError(f"the suite {suite!r} has no cases for this choice; choose other operators.")
    return chosen


def _named(case_id: str, backend: str) -> Case:
    try:
        return find(case_id)
    except ArgumentError as error:
        hint = closest(case_id, [case.id for case in cases(suite="full", backend=backend)])
        raise ArgumentError(f"{error}.{hint}") from None


def run(what: Plan, workers: int = 0, progress: Progress | None = None, state: State | None = None) -> Report:
    """Judge everything in the plan and report.

    workers: 0 judges in this process; more share the cases out among as many processes, where a crash is a failure
    of its case. Ctrl-C ends the run early with a whole report of what was judged, marked incomplete. state: keeps
    each result as it comes; those that it holds already are not judged again.
    """
    started, clock = datetime.now(timezone.utc), time.perf_counter()
    results: list[Result] = [] if state is None else list(state.results)
    complete = True
    left = _left(what, results)
    stream = _in_workers(left, workers) if workers else _in_process(left)
    try:
        for result in stream:
            if state is not None:
                state.keep(result)
            results.append(result)
            if progress is not None:
                progress(result, len(results), what.size)
    except KeyboardInterrupt:
        complete = False
    finally:
        stream.close()
    order = {(piece.case, name): at for at, piece in enumerate(what.work) for name in piece.implementations}
    results.sort(key=lambda result: order[result.case, result.implementation])
    return Report(
        started=started.isoformat(timespec="seconds"),
        seconds=time.perf_counter() - clock,
        complete=complete,
        planned=what.size,
        request=what.request,
        target=what.site.target,
        environment=environment(settings_in_force(), what.site.plugin_failures()),
        missing=what.missing,
        offers=offers(what.site, results),
        results=tuple(results),
    )


def _left(what: Plan, results: list[Result]) -> Plan:
    """What of the plan is not judged yet."""
    done = {(result.case, result.implementation) for result in results}
    if not done:
        return what
    pieces = (
        Work(piece.case, tuple(name for name in piece.implementations if (piece.case, name) not in done))
        for piece in what.work
    )
    return replace(what, work=tuple(piece for piece in pieces if piece.implementations))


def judge_case(site: Site, case: Case, name: str) -> Result:
    """Judge one case on the implementation of that name."""
    implementation = site.implementation(case.op, name)
    # a refusal must show as a refusal, whatever the user's settings let stand in for it
    try:
        with use(fallback="error"):
            verdict = judge(case, implementation, site.target.device, backend=site.target.backend)
    except Exception as error:  # one case that cannot be judged must not cost the report of all others
        place = traceback.extract_tb(error.__traceback__)[-1]
        told = f"the case could not be judged: {type(error).__name__}: {error} ({place.filename}:{place.lineno})"
        return failed(site, case, name, told)
    return _result(site, case, name, verdict)


def repeat_command(backend: str, case_id: str, implementation: str, device: str | None = None) -> str:
    """A command line that judges one case on one implementation again."""
    arguments = ["--case", case_id, "--backend", backend, "--impl", implementation]
    if device is not None:
        arguments += ["--device", device]
    return "hal conformance run " + " ".join(shlex.quote(argument) for argument in arguments)


def _result(site: Site, case: Case, name: str, verdict: Verdict) -> Result:
    return Result(
        case=case.id,
        op=case.op,
        dtype=case.dtype,
        implementation=name,
        kind=site.implementation(case.op, name).kind,
        status=verdict.status,
        tags=tuple(sorted(case.tags)),
        seed=case.seed,
        findings=tuple(
            Finding(rule=finding.rule, message=finding.message, result=finding.result) for finding in verdict.findings
        ),
        reasons=verdict.reasons,
        rules=verdict.rules,
        share=verdict.budget,
        r2=verdict.r2,
        r3=verdict.r3,
        seconds=verdict.seconds,
        repeat=repeat_command(site.target.backend, case.id, name, site.pinned),
        device=site.target.device,
    )


def _in_process(what: Plan) -> Generator[Result, None, None]:
    for piece in what.work:
        case = find(piece.case)
        for name in piece.implementations:
            yield judge_case(what.site, case, name)


def _in_workers(what: Plan, workers: int) -> Generator[Result, None, None]:
    threads = max(1, torch.get_num_threads() // workers)
    left: list[Work] = list(what.work)
    while left:
        again: list[Work] = []
        setup = (what.site.target.backend, threads, what.site.pinned)
        for outcome in share_out(left, workers, _judge_in_worker, setup):
            piece: Work = outcome.item
            if isinstance(outcome, Done):
                yield from outcome.value
            elif len(piece.implementations) > 1:
                # whichever of them it was: alone, each answers for itself
                again.extend(Work(piece.case, (name,)) for name in piece.implementations)
            else:
                told = f"the process that judged it ended with {outcome.how}"
                yield failed(what.site, find(piece.case), piece.implementations[0], told)
        left = again


def failed(site: Site, case: Case, name: str, told: str) -> Result:
    """The result of a case that could not be judged to the end, for the reason `told`."""
    return Result(
        case=case.id,
        op=case.op,
        dtype=case.dtype,
        implementation=name,
        kind=site.implementation(case.op, name).kind,
        status="failed",
        tags=tuple(sorted(case.tags)),
        seed=case.seed,
        reasons=(told,),
        repeat=repeat_command(site.target.backend, case.id, name, site.pinned),
        device=site.target.device,
    )


def _judge_in_worker(backend: str, threads: int, device: str | None = None) -> Callable[[Work], list[Result]]:
    torch.set_num_threads(threads)
    site = Site.of(backend, device)

    def work(piece: Work) -> list[Result]:
        case = find(piece.case)
        results = []
        for name in piece.implementations:
            results.append(judge_case(site, case, name))
            if results[-1].status == "failed" and not _usable(site.target.device):
                end_unusable()  # whatever is asked of it from now on fails, and tells nothing of who is asked
        return results

    return work


def _usable(device: str) -> bool:
    """Whether the device still does anything: some faults leave it lost to the whole process."""
    try:
        torch.ones(1, device=device).sum().item()
    except Exception:
        return False
    return True
