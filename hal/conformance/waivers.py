"""Waivers: failures that an adopter knows of, each with a reason, a tracker and a day on which it ends.

The file is TOML (`[[waiver]]` tables) or JSON (`{"waiver": [...]}`), owned by the adopter, never by hal.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import date
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from hal.conformance.report import BAD, Report, Result
from hal.conformance.report import WaiverNote as Note
from hal.errors import FileError, HalError

__all__ = ["Note", "Waiver", "apply", "read_waivers", "waive"]

Text = Annotated[str, Field(min_length=1)]


class Waiver(BaseModel):
    """Failures that do not fail a run until `expires` is over (the day itself included).

    case, implementation, backend and dtype are patterns of fnmatch (`*`, `?`, `[…]`), case-sensitive.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, str_strip_whitespace=True)

    case: Text
    implementation: Text = "*"
    backend: Text = "*"
    dtype: Text = "*"
    reason: Text
    tracker: Text
    expires: date

    @classmethod
    def of(cls, note: Note) -> Waiver:
        """The waiver that a report's note is about."""
        return cls(**note.model_dump(exclude={"judged", "failing", "problem"}))

    def covers(self, backend: str) -> bool:
        """Whether it is about this backend at all."""
        return fnmatchcase(backend, self.backend)

    def matches(self, case_id: str, implementation: str) -> bool:
        """Whether it is about this case on this implementation."""
        dtype = case_id.partition("/")[2].partition("/")[0]
        return (
            fnmatchcase(case_id, self.case)
            and fnmatchcase(implementation, self.implementation)
            and fnmatchcase(dtype, self.dtype)
        )


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid")
    waiver: list[Waiver]


def read_waivers(path: Path) -> tuple[Waiver, ...]:
    """Read a waiver file, TOML or (with the suffix .json) JSON. FileError for one that is missing or malformed."""
    asked = f"cannot read {str(path)!r} as waivers"
    try:
        return tuple(_File.model_validate(_parsed(path)).waiver)
    except (OSError, UnicodeDecodeError, ValueError) as error:
        if isinstance(error, ValidationError):
            first = error.errors()[0]
            place = ".".join(str(part + 1 if isinstance(part, int) else part) for part in first["loc"])
            told = f"{place or 'the document'}: {first['msg']}"
        else:
            told = str(error)
        raise FileError(
            f"{asked}: {told}. It holds [[waiver]] tables with case, reason, tracker and expires (a date), and "
            "optionally implementation, backend and dtype."
        ) from error


def _parsed(path: Path) -> Any:
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".json":
        return json.loads(text)
    import tomllib

    return tomllib.loads(text)


@dataclass
class _Tally:
    """What one waiver met in a run."""

    waiver: Waiver
    judged: set[tuple[str, str]] = field(default_factory=set)
    failing: int = 0


def apply(report: Report, waivers: Iterable[Waiver], today: date) -> Report:
    """The report with the failures that `waivers` cover marked as waived, and a note on each waiver.

    A waiver whose day is over covers nothing. A problem, which makes the run fail, is a waiver that is over, one
    that matches no case there is, and one all of whose cases in this suite were judged without a failure; where only
    part of them was judged (a shard, a choice of operators, an interrupted run) nothing is known yet. Waivers of
    other backends are left out.
    """
    tallies = [_Tally(waiver) for waiver in waivers if waiver.covers(report.target.backend)]
    told = [tally.waiver for tally in tallies]
    for result in report.results:
        for tally in tallies:
            if tally.waiver.matches(result.case, result.implementation):
                tally.judged.add((result.case, result.implementation))
                tally.failing += result.status in BAD or result.status == "waived"
    results = tuple(waive(result, told, report.target.backend, today) for result in report.results)
    scope = _Scope(report)
    notes = tuple(
        Note(
            **tally.waiver.model_dump(),
            judged=len(tally.judged),
            failing=tally.failing,
            problem=_problem(tally, scope, today),
        )
        for tally in tallies
    )
    return report.model_copy(update={"results": results, "waivers": notes})


def waive(result: Result, waivers: Iterable[Waiver], backend: str, today: date) -> Result:
    """The result, waived if it fails and one of the waivers covers it."""
    if result.status not in BAD:
        return result
    for waiver in waivers:
        in_force = today <= waiver.expires and waiver.covers(backend)
        if in_force and waiver.matches(result.case, result.implementation):
            told = f"{result.status}, waived until {waiver.expires} ({waiver.tracker}): {waiver.reason}"
            return result.model_copy(update={"status": "waived", "reasons": (*result.reasons, told)})
    return result


def _problem(tally: _Tally, scope: _Scope, today: date) -> str | None:
    waiver = tally.waiver
    what = f"the waiver of {waiver.case!r} ({waiver.tracker})"
    if today > waiver.expires:
        return f"{what} expired on {waiver.expires}: mend what it covers, or renew it with a new reason."
    if tally.failing:
        return None
    everything = scope.matches(waiver)
    if not everything and not tally.judged:
        if scope.known(waiver):
            return None
        return (
            f"{what} matches no case of any suite on an implementation of backend {scope.backend!r}: "
            "correct its pattern, name the backend that it is about, or remove it."
        )
    if everything <= tally.judged:
        return f"{what} is no longer needed: of the {len(tally.judged)} results that it matches none fails. Remove it."
    return None


class _Scope:
    """What there is to match: the cases of the report's suite and of all, with the backend's implementations."""

    def __init__(self, report: Report) -> None:
        self.backend, self.suite = report.target.backend, report.request.suite
        self._told = {(result.op, result.implementation) for result in report.results}

    def matches(self, waiver: Waiver) -> set[tuple[str, str]]:
        """The cases of the suite, with implementations, that a waiver is about."""
        return self._matches(waiver, "quick" if self.suite == "quick" else "full")

    def known(self, waiver: Waiver) -> bool:
        """Whether a waiver matches anything in any suite."""
        return bool(self._matches(waiver, "full"))

    def _matches(self, waiver: Waiver, suite: Any) -> set[tuple[str, str]]:
        from hal.conformance.case import cases

        return {
            (case.id, name)
            for case in cases(suite=suite, backend=self.backend)
            for name in self._implementations(case.op)
            if waiver.matches(case.id, name)
        }

    def _implementations(self, op: str) -> set[str]:
        """Those that the backend registers; where it is not installed (a merge elsewhere), those of the report."""
        from hal import registry

        try:
            return {found.name for found in registry.implementations(self.backend.partition(":")[0], op)}
        except HalError:
            return {name for of, name in self._told if of == op}
