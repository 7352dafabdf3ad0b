"""The conformance report: a versioned JSON document that says what ran, where, under which settings, and how it went.

Numbers that JSON lacks (infinite or undefined shares) are written as the strings "Infinity" and "NaN" and read back.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from datetime import date
from pathlib import Path
from typing import Literal, Protocol

from pydantic import BaseModel, ConfigDict, ValidationError

from hal.errors import FileError
from hal.files import write_whole

FORMAT = "hal-conformance-report"
VERSION = 3
"""2 added offers, waivers, shards and devices of results, 3 the environment's software; earlier ones still read."""

Status = Literal["passed", "failed", "mistrusted", "skipped", "unsupported", "waived"]
STATUSES: tuple[Status, ...] = ("passed", "failed", "mistrusted", "skipped", "unsupported", "waived")
BAD: frozenset[str] = frozenset({"failed", "mistrusted"})


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, ser_json_inf_nan="strings")


class Environment(_Model):
    """Everything outside hal that numbers may depend on.

    software: versions of vendors' packages and toolkits that are here, by name; what is simulated says so.
    """

    hal: str
    git_commit: str | None
    git_dirty: bool | None
    torch: str
    software: dict[str, str] = {}
    python: str
    platform: str
    numerics: dict[str, str]
    settings: dict[str, str]
    plugin_failures: tuple[str, ...] = ()


class HasStack(Protocol):
    """What says which torch and vendors' software it ran on."""

    @property
    def torch(self) -> str: ...

    @property
    def software(self) -> dict[str, str]: ...


class Target(_Model):
    """What was judged: a backend on a device. `simulated` results prove conventions, not a chip."""

    backend: str
    device: str
    descriptor: str | None
    simulated: bool


class Request(_Model):
    """What the run was asked for; an empty list means no restriction."""

    suite: str
    ops: tuple[str, ...] = ()
    implementations: tuple[str, ...] = ()
    cases: tuple[str, ...] = ()
    shard: str | None = None


class Bounds(_Model):
    """Inclusive bounds and divisibility of one dimension of a request; None = no bound."""

    min: int | None = None
    max: int | None = None
    multiple_of: int | None = None


class Accepts(_Model):
    """What an implementation says that it accepts; None means whatever the operator's contract allows."""

    dtypes: tuple[str, ...] | None = None
    features: tuple[str, ...] | None = None
    limits: dict[str, Bounds] = {}
    device_types: tuple[str, ...] | None = None
    architectures: tuple[str, ...] | None = None
    where: str | None = None


class Offer(_Model):
    """What one implementation says of itself: what it accepts, and what it declares (and is judged by)."""

    op: str
    implementation: str
    kind: str
    accepts: Accepts
    declares: dict[str, bool | tuple[str, ...] | dict[str, float]]


class WaiverNote(_Model):
    """A waiver that was in force, and what became of it.

    judged: how many results it matched; failing: how many of them did fail. problem: why the waiver itself makes the
    run fail (expired, matches nothing, no longer needed), else None.
    """

    case: str
    implementation: str = "*"
    backend: str = "*"
    dtype: str = "*"
    reason: str
    tracker: str
    expires: date
    judged: int = 0
    failing: int = 0
    problem: str | None = None


class Finding(_Model):
    """One broken rule: what was found, on which result of the op."""

    rule: str
    message: str
    result: str = ""


class Result(_Model):
    """One case judged on one implementation.

    share is the worst share of the error budget (1 = all of it), None where no element was judged against one;
    r2 and r3 are the figures of the rules against the baseline and for bias. `repeat` is a command that judges
    this case again, alone; `device` is the torch device that it was judged on.
    """

    case: str
    op: str
    dtype: str
    implementation: str
    kind: str
    status: Status
    tags: tuple[str, ...] = ()
    seed: int
    findings: tuple[Finding, ...] = ()
    reasons: tuple[str, ...] = ()
    rules: tuple[str, ...] = ()
    share: float | None = None
    r2: float | None = None
    r3: float | None = None
    seconds: float = 0.0
    repeat: str
    device: str | None = None

    @property
    def why(self) -> tuple[str, ...]:
        """The findings and reasons as lines."""
        return (*(f"{finding.rule}: {finding.message}" for finding in self.findings), *self.reasons)


class Report(_Model):
    """A run, whole or interrupted (`complete` False: `planned` says how many results there would have been).

    missing: the ops asked for of which the backend has no implementation at all. offers: what each implementation
    that was judged accepts and declares.
    """

    format: Literal["hal-conformance-report"] = "hal-conformance-report"
    version: int = VERSION
    started: str
    seconds: float
    complete: bool
    planned: int
    request: Request
    target: Target
    environment: Environment
    missing: tuple[str, ...] = ()
    offers: tuple[Offer, ...] = ()
    waivers: tuple[WaiverNote, ...] = ()
    results: tuple[Result, ...]

    @property
    def counts(self) -> Counter[str]:
        """How many results have each status."""
        return Counter(result.status for result in self.results)

    @property
    def bad(self) -> tuple[Result, ...]:
        """The results that make a run fail."""
        return tuple(result for result in self.results if result.status in BAD)

    @property
    def waiver_problems(self) -> tuple[str, ...]:
        """What makes the run fail in the waivers themselves."""
        return tuple(note.problem for note in self.waivers if note.problem is not None)

    def exit_status(self) -> int:
        """0 all good, 1 failures, 2 could not run.

        1 is also for a waiver that has expired or is no longer needed; 2 for a run that judged nothing, was
        interrupted, or lacks the implementations of a plug-in that failed. One shard of a run may judge nothing.
        """
        if self.bad or self.waiver_problems:
            return 1
        judged = self.counts["passed"] + self.counts["waived"] or self.request.shard is not None
        return 0 if self.complete and judged and not self.environment.plugin_failures else 2

    def write(self, path: Path) -> None:
        """Write as JSON, whole or not at all."""
        write_whole(path, self.model_dump_json(indent=1) + "\n")


class Group(_Model):
    """The results of one op, dtype and implementation, counted."""

    op: str
    dtype: str
    implementation: str
    counts: dict[str, int]
    worst_share: float | None

    @property
    def total(self) -> int:
        return sum(self.counts.values())

    def __getitem__(self, status: str) -> int:
        return self.counts.get(status, 0)


def grouped(results: Iterable[Result]) -> list[Group]:
    """Aggregate by op, dtype and implementation, in the order of first appearance."""
    groups: dict[tuple[str, str, str], list[Result]] = {}
    for result in results:
        groups.setdefault((result.op, result.dtype, result.implementation), []).append(result)
    return [
        Group(
            op=op,
            dtype=dtype,
            implementation=implementation,
            counts=dict(Counter(member.status for member in members)),
            worst_share=worst(member.share for member in members),
        )
        for (op, dtype, implementation), members in groups.items()
    ]


def worst(shares: Iterable[float | None]) -> float | None:
    """The largest share that was measured; an undefined one (NaN) is worse than any number."""
    measured = [share for share in shares if share is not None]
    if any(share != share for share in measured):
        return float("nan")
    return max(measured, default=None)


def read_report(path: Path) -> Report:
    """Read a report; FileError for a file that is missing, no report, damaged, or of a newer version."""
    asked = f"cannot read {str(path)!r} as a conformance report"
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise FileError(f"{asked}: {error}. Name a file written by 'hal conformance run --json'.") from error
    try:
        head = _Head.model_validate_json(text)
        if head.version > VERSION:
            raise FileError(
                f"{asked}: it has version {head.version}, this hal reads up to {VERSION}. Upgrade torch-hal to read it."
            )
        return Report.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"]) or "the document"
        raise FileError(
            f"{asked}: {place}: {first['msg']}. Name a whole file written by 'hal conformance run --json'."
        ) from error


def stack(of: HasStack) -> str:
    """The versions under hal in one line, such as "torch 2.10.0, torch_npu 2.10.0.post7, CANN 8.5.0 (simulated)"."""
    return ", ".join(f"{name} {version}" for name, version in {"torch": of.torch, **of.software}.items())


class _Head(BaseModel):
    model_config = ConfigDict(extra="ignore")
    format: Literal["hal-conformance-report"]
    version: int
