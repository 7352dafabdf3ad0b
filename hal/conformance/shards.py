"""Shares of a run: one suite on several machines or devices, and their reports made into one again."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime

from hal.conformance import waivers
from hal.conformance.report import Environment, Offer, Report, Request, Result, Target
from hal.errors import ArgumentError

__all__ = ["Shard", "merge"]


@dataclass(frozen=True)
class Shard:
    """Share `index` (from 1) of `count` shares."""

    index: int
    count: int

    @classmethod
    def parse(cls, text: str) -> Shard:
        """`2/4` is the second of four. Raises ArgumentError for anything else."""
        match = re.fullmatch(r"([0-9]{1,6})/([0-9]{1,6})", text.strip())
        if match is not None and 1 <= int(match[1]) <= int(match[2]):
            return cls(int(match[1]), int(match[2]))
        raise ArgumentError(f"a shard of {text!r} was asked for; write i/n with 1 ≤ i ≤ n, such as 1/4 … 4/4.")

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"

    def part(self, case_ids: Sequence[str]) -> frozenset[str]:
        """The cases of this share: the same on every machine, disjoint, and together all of `case_ids`.

        Each operator's cases are dealt out in an order that their hashes give, so that no share gets more than one
        case more than another, and the costly cases, which stand together in the lists, are spread. Raises
        ArgumentError for a share that would be empty.
        """
        ops: dict[str, list[str]] = {}
        for case_id in dict.fromkeys(case_ids):
            ops.setdefault(case_id.partition("/")[0], []).append(case_id)
        dealt = [case_id for op in sorted(ops) for case_id in sorted(ops[op], key=_digest)]
        mine = frozenset(dealt[self.index - 1 :: self.count])
        if not mine:
            raise ArgumentError(
                f"shard {self} has nothing to judge: there are {len(dealt)} cases; ask for at most {len(dealt)} shards."
            )
        return mine


def _digest(case_id: str) -> bytes:
    return hashlib.blake2b(case_id.encode(), digest_size=8).digest()


def merge(reports: Sequence[Report], today: date | None = None) -> Report:
    """One report of the reports of a run's shards: what the run would have told if it had not been shared out.

    It is complete if every shard is there and complete. Waivers are judged anew on the whole. Raises ArgumentError
    for reports that are no shards of one run: another request, backend, chip, hal, torch or setting, or a result
    that two of them have.
    """
    if not reports:
        raise ArgumentError("no reports to merge; name the JSON files that the shards wrote.")
    first = reports[0]
    shards = [_shard(report) for report in reports]
    for report, shard in zip(reports, shards, strict=True):
        for what, mine, other in _differences(first, report):
            raise ArgumentError(
                f"the reports of shards {shards[0]} and {shard} cannot be merged: {what} is {mine} in one and {other} "
                "in the other. Merge shards of one run; put side by side what ran differently with "
                "'hal conformance compare'."
            )
    twice = sorted({str(shard) for shard in shards if shards.count(shard) > 1})
    if twice:
        raise ArgumentError(f"shard {', '.join(twice)} is given more than once; name each shard's report once.")
    results = _in_order(first.request, [result for report in reports for result in report.results], first)
    merged = Report(
        started=min(report.started for report in reports),
        seconds=sum(report.seconds for report in reports),
        complete=len(shards) == shards[0].count and all(report.complete for report in reports),
        planned=_planned(reports, shards),
        request=first.request.model_copy(update={"shard": None}),
        target=_target(reports),
        environment=_environment(reports),
        missing=first.missing,
        offers=_offers(reports, results),
        results=tuple(results),
    )
    told = [waivers.Waiver.of(note) for note in dict.fromkeys(_bare(reports))]
    return waivers.apply(merged, told, today or datetime.now(UTC).date()) if told else merged


def _shard(report: Report) -> Shard:
    if report.request.shard is None:
        raise ArgumentError(
            f"the report of {report.started} on {report.target.device} is of a whole run; "
            "only reports of 'hal conformance run --shard i/n' are merged."
        )
    return Shard.parse(report.request.shard)


def _differences(a: Report, b: Report) -> Iterator[tuple[str, object, object]]:
    """What two shards of one run have in common, where they have not."""
    pairs: list[tuple[str, object, object]] = [
        ("the number of shards", _shard(a).count, _shard(b).count),
        ("the backend", a.target.backend, b.target.backend),
        ("the chip", a.target.descriptor, b.target.descriptor),
        *(
            (f"the request's {name}", getattr(a.request, name), getattr(b.request, name))
            for name in ("suite", "ops", "implementations", "cases")
        ),
        *(
            (name, getattr(a.environment, name), getattr(b.environment, name))
            for name in ("hal", "git_commit", "git_dirty", "torch", "software", "settings")
        ),
        ("numerics", _numerics(a), _numerics(b)),
    ]
    return (pair for pair in pairs if pair[1] != pair[2])


def _numerics(report: Report) -> dict[str, str]:
    """The switches; how many threads a host has is its own affair."""
    return {name: value for name, value in report.environment.numerics.items() if name != "threads"}


def _planned(reports: Sequence[Report], shards: Sequence[Shard]) -> int:
    """How many results the whole run has; shards that are not there are as large as the others."""
    told = sum(report.planned for report in reports)
    return told if len(shards) == shards[0].count else round(told * shards[0].count / len(shards))


def _target(reports: Sequence[Report]) -> Target:
    devices = dict.fromkeys(report.target.device for report in reports)
    simulated = any(report.target.simulated for report in reports)
    return reports[0].target.model_copy(update={"device": ", ".join(sorted(devices)), "simulated": simulated})


def _environment(reports: Sequence[Report]) -> Environment:
    def all_of(name: str) -> str:
        return ", ".join(dict.fromkeys(getattr(report.environment, name) for report in reports))

    failures = dict.fromkeys(failure for report in reports for failure in report.environment.plugin_failures)
    changes = {"python": all_of("python"), "platform": all_of("platform"), "plugin_failures": tuple(failures)}
    return reports[0].environment.model_copy(update=changes)


def _in_order(request: Request, results: list[Result], report: Report) -> list[Result]:
    """The results in the order of a run that is not shared out."""
    from hal.conformance.case import cases

    listed: Iterable[str] = request.cases or (case.id for case in cases(suite="full", backend=report.target.backend))
    rank = {case_id: at for at, case_id in enumerate(listed)}
    seen: set[tuple[str, str]] = set()
    for result in results:
        key = (result.case, result.implementation)
        if key in seen:
            raise ArgumentError(f"case {result.case} on {result.implementation} is in more than one of the reports.")
        seen.add(key)
    # sorted is stable: the implementations of a case keep their order
    return sorted(results, key=lambda result: rank.get(result.case, len(rank)))


def _offers(reports: Sequence[Report], results: Sequence[Result]) -> tuple[Offer, ...]:
    """What each implementation offers, once, in the order of the results."""
    found = {(offer.op, offer.implementation): offer for report in reports for offer in report.offers}
    order = dict.fromkeys((result.op, result.implementation) for result in results)
    return tuple(found[key] for key in order if key in found)


def _bare(reports: Sequence[Report]) -> Iterator[waivers.Note]:
    for report in reports:
        for note in report.waivers:
            yield note.model_copy(update={"judged": 0, "failing": 0, "problem": None})
