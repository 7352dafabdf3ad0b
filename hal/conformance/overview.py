"""Reports as tables of figures: what the Markdown and the HTML form show, computed once and without any markup."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from hal.conformance.report import BAD, STATUSES, Report, Result, worst

__all__ = [
    "Cell",
    "Column",
    "Overview",
    "clean",
    "counted",
    "facts",
    "figure",
    "one_line",
    "overview",
    "reasons",
    "target_name",
    "tightest",
    "verdict",
]

_DTYPES = ("float64", "float32", "bfloat16", "float16")
_SHORT = {"float64": "f64", "float32": "f32", "bfloat16": "bf16", "float16": "f16"}
# C0 and C1 controls, lone surrogates and the marks that reorder text: none of them says anything in a report.
_STRANGE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]")


@dataclass(frozen=True, order=True)
class Column:
    """A column of the heat map: the report's position, implementation and dtype."""

    report: int
    implementation: str
    rank: int
    dtype: str

    @property
    def short(self) -> str:
        """The dtype's short name."""
        return _SHORT.get(self.dtype, self.dtype)


@dataclass
class Cell:
    """The results of one op, dtype and implementation on one target.

    share: the worst share of the error budget, None where nothing was judged against one.
    first: position in `Report.results` of the first result that makes the run fail.
    """

    results: list[Result] = field(default_factory=list)

    @property
    def counts(self) -> dict[str, int]:
        """How many results have each status, in the order of the statuses."""
        found = Counter(result.status for result in self.results)
        return {status: found[status] for status in STATUSES if found[status]}

    @property
    def bad(self) -> int:
        return sum(result.status in BAD for result in self.results)

    @property
    def judged(self) -> int:
        """How many passed, failed or were mistrusted or waived."""
        return sum(result.status not in ("skipped", "unsupported") for result in self.results)

    @property
    def share(self) -> float | None:
        return worst(result.share for result in self.results)


@dataclass(frozen=True)
class Overview:
    """The heat map: ops down, target by implementation by dtype across."""

    ops: tuple[str, ...]
    columns: tuple[Column, ...]
    cells: dict[tuple[str, Column], Cell]


def overview(reports: Sequence[Report]) -> Overview:
    """Every result of the reports in its cell; ops and implementations in the order of first appearance."""
    cells: dict[tuple[str, Column], Cell] = defaultdict(Cell)
    ops: dict[str, None] = {}
    order: dict[tuple[int, str], int] = {}
    for at, report in enumerate(reports):
        for result in report.results:
            ops.setdefault(result.op)
            order.setdefault((at, result.implementation), len(order))
            rank = _DTYPES.index(result.dtype) if result.dtype in _DTYPES else len(_DTYPES)
            cells[result.op, Column(at, result.implementation, rank, result.dtype)].results.append(result)
    columns = {column for _, column in cells}
    return Overview(
        tuple(ops),
        tuple(sorted(columns, key=lambda c: (order[c.report, c.implementation], c.rank, c.dtype))),
        dict(cells),
    )


def tightest(reports: Iterable[Report], count: int = 10) -> list[tuple[Report, Result]]:
    """The results that passed with the largest shares of their budget."""
    passed = [
        (report, result)
        for report in reports
        for result in report.results
        if result.status == "passed" and result.share is not None and result.share > 0
    ]
    return sorted(passed, key=lambda pair: -(pair[1].share or 0.0))[:count]


def reasons(report: Report) -> list[tuple[str, str, str, str, int]]:
    """(status, op, implementation, reason, how many) of the results that were not judged or were waived."""
    found: Counter[tuple[str, str, str, str]] = Counter()
    for result in report.results:
        if result.status in ("unsupported", "skipped", "waived"):
            found[result.status, result.op, result.implementation, "; ".join(result.reasons) or "no reason given"] += 1
    return [(*key, count) for key, count in sorted(found.items())]


def target_name(report: Report) -> str:
    """Backend and device in one line."""
    target = report.target
    name = target.backend if target.backend.endswith(target.device) else f"{target.backend} on {target.device}"
    return f"{name} (simulated)" if target.simulated else name


def verdict(report: Report) -> tuple[str, str]:
    """("good" | "bad" | "open", a sentence): what the exit status of the run means."""
    bad, status = len(report.bad), report.exit_status()
    if status == 0:
        return "good", "Every judged case passed" if not report.counts[
            "waived"
        ] else "Nothing failed but what is waived"
    if bad:
        one = bad == 1
        doubt = (" or is mistrusted" if one else " or are mistrusted") if report.counts["mistrusted"] else ""
        return "bad", f"{bad} {'case' if one else 'cases'} failed{doubt}"
    if status == 1:
        return "bad", "A waiver is out of date"
    if not report.complete:
        return "open", f"Interrupted after {len(report.results)} of {report.planned} results; none of them failed"
    if report.environment.plugin_failures:
        return "open", "A plug-in failed, so its implementations were not judged"
    return "open", "Nothing was judged"


def counted(counts: dict[str, int]) -> str:
    """ "62 passed, 3 unsupported"."""
    return ", ".join(f"{count} {status}" for status, count in counts.items()) or "none"


def figure(share: float | None) -> str:
    """A share of the budget in few characters."""
    if share is None:
        return ""
    if math.isnan(share):
        return "NaN"
    if math.isinf(share):
        return "∞"
    if share == 0:
        return "0"
    if 0 < share < 0.005:
        return "<.01"
    return f"{share:.2f}" if share < 100 else f"{share:.0e}"


def clean(text: str) -> str:
    """The text without control characters, lone surrogates and marks that reorder what is read."""
    return _STRANGE.sub("\ufffd", text)


def one_line(text: str) -> str:
    """Cleaned, on one line: a pasted command must not run half of itself."""
    return " ".join(clean(text.replace("\r", " ")).split())


def facts(report: Report) -> dict[str, str]:
    """Target, request and environment as names and values."""
    of, target, request = report.environment, report.target, report.request
    commit = of.git_commit[:12] + (" with changes" if of.git_dirty else "") if of.git_commit else "unknown"
    found = {
        "backend": target.backend,
        "device": target.device + (" (simulated)" if target.simulated else ""),
        "chip": target.descriptor or "unknown",
        "suite": request.suite,
        "only operators": ", ".join(request.ops),
        "only implementations": ", ".join(request.implementations),
        "only cases": ", ".join(request.cases),
        "shard": request.shard or "",
        "begun": report.started,
        "seconds": f"{report.seconds:.1f}",
        "hal": of.hal,
        "commit": commit,
        "torch": of.torch,
        **of.software,
        "python": of.python,
        "platform": of.platform,
    }
    found = {name: value for name, value in found.items() if value}
    found |= {f"numerics: {name}": value for name, value in of.numerics.items()}
    found |= {f"setting: {name}": value or "none" for name, value in of.settings.items()}
    return found | {f"plug-in left out {i}": failure for i, failure in enumerate(of.plugin_failures, 1)}
