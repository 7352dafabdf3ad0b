"""Two runs side by side (rule R9): each scored against the oracle, never against the other.

A case's verdicts are paired by the implementation's name where both sides have it. What is left is paired with the
other side's leading one: the first, in its backend's order of preference, that took the case. So runs of different
backends compare too, and no verdict stays out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Literal, TypeVar

import torch
from pydantic import BaseModel, ConfigDict

from hal.conformance.archive import Bundle
from hal.conformance.bundle import Manifest, StoredCase, StoredVerdict
from hal.conformance.report import BAD, Status, worst
from hal.conformance.runner import repeat_command
from hal.files import write_whole

__all__ = ["Comparison", "Difference", "Row", "Side", "compare"]

VERSION = 1
T = TypeVar("T")


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, ser_json_inf_nan="strings")


class Worst(_Model):
    """The verdict with the largest share of its error budget."""

    op: str
    dtype: str
    implementation: str
    case: str
    share: float


class Side(_Model):
    """One of the two runs. source: the bundle's file, or "this machine". missing: ops without an implementation."""

    source: str
    backend: str
    device: str
    descriptor: str | None
    simulated: bool
    suite: str
    hal: str
    torch: str
    software: dict[str, str]
    python: str
    platform: str
    started: str
    complete: bool
    missing: tuple[str, ...]
    plugin_failures: tuple[str, ...]
    counts: dict[str, int]
    worst: Worst | None


class Row(_Model):
    """The pairs of one op, dtype and pair of implementations.

    outputs: results that both sides have; equal: those of them with the same bits. differ: pairs whose statuses
    differ. passed and share are per side.
    """

    op: str
    dtype: str
    implementations: tuple[str, str]
    cases: int
    passed: tuple[int, int]
    bad: tuple[int, int]
    share: tuple[float | None, float | None]
    outputs: int
    equal: int
    differ: int


class Told(_Model):
    """A verdict of one side, with the command that judges it again there."""

    implementation: str
    status: Status
    share: float | None
    why: tuple[str, ...]
    repeat: str


class Difference(_Model):
    """A pair whose statuses differ, or that is bad on a side. `largest`: where both results are stored, the largest
    distance between them, in words."""

    case: str
    op: str
    dtype: str
    sides: tuple[Told, Told]
    largest: str | None = None

    @property
    def bad(self) -> bool:
        """Whether a side fails, rather than one only not supporting the case."""
        return any(side.status in BAD for side in self.sides)


class Comparison(_Model):
    """Both sides, the rows, and everything that keeps the sides from being the same.

    inputs_differ: cases whose inputs have other bits on the two machines, which is a fault of the generator and says
    nothing of a backend; unknown: cases that cannot be built here, and why; only: cases that one side alone ran.
    switches: numerics switches with two values.
    """

    format: Literal["hal-conformance-comparison"] = "hal-conformance-comparison"
    version: int = VERSION
    sides: tuple[Side, Side]
    switches: dict[str, tuple[str | None, str | None]]
    cases: int
    rows: tuple[Row, ...]
    differences: tuple[Difference, ...]
    inputs_differ: tuple[str, ...] = ()
    unknown: dict[str, str] = {}
    only: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())
    status: int

    @property
    def outputs(self) -> int:
        """Results that were compared bit by bit."""
        return sum(row.outputs for row in self.rows)

    @property
    def equal(self) -> int:
        """Those with the same bits."""
        return sum(row.equal for row in self.rows)

    def write(self, path: Path) -> None:
        """Write as JSON, whole or not at all."""
        write_whole(path, self.model_dump_json(indent=1) + "\n")


class _Pair(_Model):
    case: StoredCase
    sides: tuple[StoredVerdict, StoredVerdict]

    @property
    def status_differs(self) -> bool:
        return self.sides[0].status != self.sides[1].status

    @property
    def bits(self) -> tuple[int, int]:
        """Results that both have, and those of them that are equal. Without the digest of one there is nothing."""
        first, second = (side.outputs for side in self.sides)
        if not first or not second:
            return 0, 0
        return max(len(first), len(second)), sum(
            a.name == b.name and a.digest == b.digest for a, b in zip(first, second, strict=False)
        )


def compare(
    first: Bundle,
    second: Bundle,
    sources: tuple[str, str],
    inputs_differ: tuple[str, ...] = (),
    unknown: Mapping[str, str] | None = None,
    under_test: Literal["second", "both"] = "second",
) -> Comparison:
    """Compare two runs; neither is run again.

    inputs_differ, unknown: cases that were left out of a run for that reason. under_test: whose failures count.

    The status is 1 with a failure, else 2 where a side under test was interrupted or judged nothing, a case could not
    be compared because of its inputs or is unknown, or the sides have no case in common; else 0.
    """
    ours, theirs = ({case.id: case for case in side.manifest.cases} for side in (first, second))
    common = [case for case in ours if case in theirs]
    odd = {case for case in common if ours[case].inputs != theirs[case].inputs}
    pairs = [pair for case in common if case not in odd for pair in _pairs(ours[case], theirs[case])]
    left_out = {*inputs_differ, *(unknown or {})}
    manifests = (first.manifest, second.manifest)
    differ = (*inputs_differ, *sorted(odd))
    return Comparison(
        sides=(_side(manifests[0], sources[0]), _side(manifests[1], sources[1])),
        switches=_switches(*manifests),
        cases=len(common) - len(odd),
        rows=tuple(_rows(pairs)),
        differences=tuple(
            _difference(pair, (first, second))
            for pair in pairs
            if pair.status_differs or any(side.status in BAD for side in pair.sides)
        ),
        inputs_differ=differ,
        unknown=dict(unknown or {}),
        only=(
            tuple(case for case in ours if case not in theirs and case not in left_out),
            tuple(case for case in theirs if case not in ours and case not in left_out),
        ),
        status=_status(
            manifests[1:] if under_test == "second" else manifests, bool(pairs) and not differ and not unknown
        ),
    )


def _status(manifests: tuple[Manifest, ...], whole: bool) -> int:
    told = [manifest.exit_status() for manifest in manifests]
    return 1 if 1 in told else max(told) if whole else 2


def _pairs(first: StoredCase, second: StoredCase) -> Iterator[_Pair]:
    if not first.verdicts or not second.verdicts:
        return
    ours, theirs = ({verdict.implementation: verdict for verdict in case.verdicts} for case in (first, second))
    leading = _leading(first), _leading(second)
    names = dict.fromkeys((name, name if name in theirs else leading[1]) for name in ours)
    names |= dict.fromkeys((leading[0], name) for name in theirs if name not in ours)
    for mine, other in names:
        yield _Pair(case=first, sides=(ours[mine], theirs[other]))


def _leading(case: StoredCase) -> str:
    took = [verdict for verdict in case.verdicts if verdict.status not in ("unsupported", "skipped")]
    return (took or list(case.verdicts))[0].implementation


def _rows(pairs: list[_Pair]) -> Iterator[Row]:
    groups: dict[tuple[str, str, str, str], list[_Pair]] = {}
    for pair in pairs:
        mine, other = (side.implementation for side in pair.sides)
        groups.setdefault((pair.case.op, pair.case.dtype, mine, other), []).append(pair)
    for (op, dtype, mine, other), members in groups.items():
        bits = [pair.bits for pair in members]
        yield Row(
            op=op,
            dtype=dtype,
            implementations=(mine, other),
            cases=len(members),
            passed=_each(partial(_count, members, frozenset({"passed"}))),
            bad=_each(partial(_count, members, BAD)),
            share=_each(partial(_worst, members)),
            outputs=sum(outputs for outputs, _ in bits),
            equal=sum(equal for _, equal in bits),
            differ=sum(pair.status_differs for pair in members),
        )


def _count(pairs: list[_Pair], statuses: frozenset[str], at: int) -> int:
    return sum(pair.sides[at].status in statuses for pair in pairs)


def _worst(pairs: list[_Pair], at: int) -> float | None:
    return worst(pair.sides[at].share for pair in pairs)


def _difference(pair: _Pair, bundles: tuple[Bundle, Bundle]) -> Difference:
    def told(at: int) -> Told:
        side = pair.sides[at]
        backend = bundles[at].manifest.target.backend
        return Told(
            implementation=side.implementation,
            status=side.status,
            share=side.share,
            why=side.why,
            repeat=repeat_command(backend, pair.case.id, side.implementation),
        )

    return Difference(
        case=pair.case.id,
        op=pair.case.op,
        dtype=pair.case.dtype,
        sides=_each(told),
        largest=_largest(pair, bundles),
    )


def _largest(pair: _Pair, bundles: tuple[Bundle, Bundle]) -> str | None:
    """The largest distance between results that both sides have stored."""
    for a, b in zip(pair.sides[0].outputs, pair.sides[1].outputs, strict=False):
        if a.digest == b.digest or a.shape != b.shape or a.name != b.name:
            continue
        first, second = bundles[0].tensor(a.digest), bundles[1].tensor(b.digest)
        if first is None or second is None or not first.numel():
            continue
        apart = (first.double() - second.double()).abs().nan_to_num(float("inf")).flatten()
        apart[(first.isnan() & second.isnan()).flatten() | (first == second).flatten()] = 0.0
        at = int(apart.argmax())
        place = ",".join(str(int(i)) for i in torch.unravel_index(torch.tensor(at), first.shape))
        x, y = (float(t.flatten()[at].double()) for t in (first, second))
        return f"{a.name}[{place}] = {x:.9g} and {y:.9g}"
    return None


def _side(manifest: Manifest, source: str) -> Side:
    target, environment = manifest.target, manifest.environment
    top: Worst | None = None
    for case in manifest.cases:
        for verdict in case.verdicts:
            # a NaN is worse than any number
            if verdict.share is not None and (top is None or not verdict.share <= top.share):
                top = Worst(
                    op=case.op,
                    dtype=case.dtype,
                    implementation=verdict.implementation,
                    case=case.id,
                    share=verdict.share,
                )
    return Side(
        source=source,
        backend=target.backend,
        device=target.device,
        descriptor=target.descriptor,
        simulated=target.simulated,
        suite=manifest.request.suite,
        hal=environment.hal,
        torch=environment.torch,
        software=environment.software,
        python=environment.python,
        platform=environment.platform,
        started=manifest.recorded.started,
        complete=manifest.complete,
        missing=manifest.missing,
        plugin_failures=environment.plugin_failures,
        counts=dict(manifest.counts),
        worst=top,
    )


def _switches(first: Manifest, second: Manifest) -> dict[str, tuple[str | None, str | None]]:
    ours, theirs = first.environment.numerics, second.environment.numerics
    both = {name: (ours.get(name), theirs.get(name)) for name in sorted({*ours, *theirs})}
    return {name: values for name, values in both.items() if values[0] != values[1]}


def _each(of: Callable[[int], T]) -> tuple[T, T]:
    return of(0), of(1)
