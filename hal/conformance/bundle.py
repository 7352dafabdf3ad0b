"""A bundle: one run in one file, to be carried to another machine and another day (rule R9).

A zip with `manifest.json` and, where asked for, results as `tensors/<digest>.safetensors`. Inputs are never stored: a
case's id regenerates them bit for bit, and their digest proves it. Everything that depends on the clock stands in the
field `recorded`, so that two equal runs differ there and nowhere else.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, StringConstraints, model_validator

from hal.conformance.report import BAD, Environment, Finding, Report, Request, Result, Status, Target, worst

__all__ = [
    "FORMAT", "MAJOR", "MINOR", "Manifest", "Output", "Recorded", "StoredCase", "StoredVerdict", "Tensors", "of_report",
    "of_result",
]  # fmt: skip

FORMAT = "hal-conformance-bundle"
MAJOR = 1
"""Raised by a change that older readers cannot pass over; a reader refuses what is newer."""
MINOR = 0
"""Raised by a field that older readers may pass over."""

Digest = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
Tensors = Literal["none", "failures", "all"]


class _Part(BaseModel):
    # a later minor version may say more
    model_config = ConfigDict(extra="ignore", frozen=True, ser_json_inf_nan="strings")


class _Environment(Environment):
    model_config = ConfigDict(extra="ignore")


class _Target(Target):
    model_config = ConfigDict(extra="ignore")


class _Request(Request):
    model_config = ConfigDict(extra="ignore")


class _Finding(Finding):
    model_config = ConfigDict(extra="ignore")


class Output(_Part):
    """One result of an op: sha256 over dtype, shape and the little-endian bytes of the contiguous CPU tensor."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    digest: Digest


class StoredVerdict(_Part):
    """How one implementation did on one case; the fields are those of the report.

    outputs: the results of a call of its own, made as the judged one; empty where the op was not to be called (bad
    input, a refusal) and where that call failed, for which `lost` has the reason.
    """

    implementation: str
    kind: str
    status: Status
    share: float | None = None
    r2: float | None = None
    r3: float | None = None
    findings: tuple[_Finding, ...] = ()
    reasons: tuple[str, ...] = ()
    outputs: tuple[Output, ...] = ()
    lost: str | None = None

    @property
    def why(self) -> tuple[str, ...]:
        """The findings and reasons as lines."""
        return (*(f"{finding.rule}: {finding.message}" for finding in self.findings), *self.reasons)


class StoredCase(_Part):
    """A case with the digest of its inputs, and its verdicts in the backend's order of preference."""

    id: str
    op: str
    dtype: str
    seed: int
    tags: tuple[str, ...] = ()
    inputs: Digest
    verdicts: tuple[StoredVerdict, ...]

    @model_validator(mode="after")
    def _once_each(self) -> StoredCase:
        _unique("implementation", (verdict.implementation for verdict in self.verdicts))
        return self


class Recorded(_Part):
    """When the run began (ISO 8601, UTC) and how long it took: all that differs between two equal runs."""

    started: str
    seconds: float


class Manifest(_Part):
    """What ran, where, under which switches, and how it went.

    device: the descriptor of the device, what it leaves open left out. stored: digests of the results that are stored.
    complete False: the run was interrupted; `planned` says how many verdicts there would have been.
    """

    format: Literal["hal-conformance-bundle"] = "hal-conformance-bundle"
    version: int = MAJOR
    minor: int = MINOR
    recorded: Recorded
    complete: bool
    planned: int
    request: _Request
    target: _Target
    environment: _Environment
    device: dict[str, Any] | None = None
    missing: tuple[str, ...] = ()
    stored: tuple[Digest, ...] = ()
    cases: tuple[StoredCase, ...]

    @model_validator(mode="after")
    def _each_case_once(self) -> Manifest:
        _unique("case", (case.id for case in self.cases))
        return self

    @property
    def counts(self) -> Counter[str]:
        """How many verdicts have each status."""
        return Counter(verdict.status for case in self.cases for verdict in case.verdicts)

    @property
    def bad(self) -> int:
        """How many verdicts make a run fail."""
        return sum(self.counts[status] for status in BAD)

    @property
    def worst_share(self) -> float | None:
        """The largest share of an error budget that any verdict used."""
        return worst(verdict.share for case in self.cases for verdict in case.verdicts)

    def exit_status(self) -> int:
        """As a report's: 0 all good, 1 failures, 2 could not run."""
        if self.bad:
            return 1
        judged = self.counts["passed"] + self.counts["waived"]
        return 0 if self.complete and judged and not self.environment.plugin_failures else 2


def of_report(
    report: Report,
    cases: Iterable[StoredCase],
    device: dict[str, Any] | None,
    stored: Iterable[str] = (),
) -> Manifest:
    """The manifest of a run."""
    return Manifest(
        recorded=Recorded(started=report.started, seconds=report.seconds),
        complete=report.complete,
        planned=report.planned,
        request=_Request(**report.request.model_dump()),
        target=_Target(**report.target.model_dump()),
        environment=_Environment(**report.environment.model_dump()),
        device=device,
        missing=report.missing,
        stored=tuple(sorted(set(stored))),
        cases=tuple(cases),
    )


def of_result(result: Result, outputs: Iterable[Output], lost: str | None = None) -> StoredVerdict:
    """A report's result with the digests of what it came to."""
    return StoredVerdict(
        implementation=result.implementation,
        kind=result.kind,
        status=result.status,
        share=result.share,
        r2=result.r2,
        r3=result.r3,
        findings=tuple(_Finding(**finding.model_dump()) for finding in result.findings),
        reasons=result.reasons,
        outputs=tuple(outputs),
        lost=lost,
    )


def _unique(what: str, names: Iterable[str]) -> None:
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise ValueError(f"{what} {twice[0]!r} stands there twice")
