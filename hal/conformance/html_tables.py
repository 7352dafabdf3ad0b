"""The tables of the HTML page: failures, what was not judged, capability matrix, environment."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from hal.conformance.markup import Html, el, join
from hal.conformance.overview import facts, figure, one_line, reasons, target_name, tightest
from hal.conformance.report import Report, Result

__all__ = [
    "MOST_FAILURES",
    "apart",
    "environment",
    "failures",
    "plain_table",
    "target_cells",
    "target_head",
    "tight",
    "waivers",
    "wide",
]

MOST_FAILURES = 200
MOST_REASONS = 200


def failures(reports: Sequence[Report]) -> Html | None:
    """Every result that makes the run fail, with its findings and the command that repeats it."""
    found = [(at, result) for at, report in enumerate(reports) for result in report.bad]
    if not found:
        return None
    more = len(found) - MOST_FAILURES
    shown = (_failure(reports, at, result, position) for position, (at, result) in enumerate(found[:MOST_FAILURES]))
    rest = el("p", f"And {more} more, which stand in the JSON report.", class_="note") if more > 0 else None
    return join(*shown, rest)


def _failure(reports: Sequence[Report], at: int, result: Result, position: int) -> Html:
    where = f"on {target_name(reports[at])}, " if len(reports) > 1 else ""
    device = f"device {result.device}, " if result.device and result.device != reports[at].target.device else ""
    return el(
        "article",
        el(
            "header",
            el("h3", f"{result.op}, {result.dtype}, {result.implementation}"),
            el("span", result.status, class_="pill bad"),
        ),
        el("ul", *(el("li", why) for why in result.why or ("no reason was given",))),
        el("p", f"{where}{device}share {figure(result.share) or 'not measured'}, case ", el("code", result.case)),
        el(
            "div",
            el("pre", el("code", one_line(result.repeat))),
            el("button", "Copy", type="button", hidden=True, aria_label=f"Copy the command that repeats {result.case}"),
            class_="repeat",
        ),
        class_="failure",
        id=f"failure-{position}",
    )


def tight(reports: Sequence[Report]) -> Html | None:
    """The cases that passed with least to spare."""
    rows = [
        (
            *target_cells(reports, report),
            result.op,
            result.dtype,
            result.implementation,
            el("code", result.case),
            figure(result.share),
        )
        for report, result in tightest(reports)
    ]
    if not rows:
        return None
    heads = (*target_head(reports), "operator", "dtype", "implementation", "case", "share")
    return plain_table("The cases that passed with the largest shares", heads, rows, {"share": "num", "case": "id"})


def waivers(reports: Sequence[Report]) -> Html | None:
    """The waivers that were in force."""
    rows = [
        (note.case, note.implementation, note.dtype, note.reason, note.tracker, note.expires.isoformat(),
         f"{note.failing} of {note.judged}", note.problem or "–")
        for report in reports for note in report.waivers
    ]  # fmt: skip
    if not rows:
        return None
    heads = ("cases", "implementation", "dtype", "reason", "tracker", "expires", "failing", "problem")
    return plain_table("Failures that are waived", heads, rows, {"reason": "text", "problem": "text"})


def apart(reports: Sequence[Report]) -> Html | None:
    """What was not judged, or failed with leave, counted by reason."""
    rows = [
        (*target_cells(reports, report), status, op, name, reason, str(count))
        for report in reports
        for status, op, name, reason, count in reasons(report)
    ]
    for report in reports:
        at = target_cells(reports, report)
        rows += [(*at, "missing", op, "–", "the backend has no implementation", "–") for op in report.missing]
    if not rows:
        return None
    more = len(rows) - MOST_REASONS
    heads = (*target_head(reports), "status", "operator", "implementation", "reason", "cases")
    return join(
        plain_table(
            "Unsupported, skipped and waived cases by reason",
            heads,
            rows[:MOST_REASONS],
            {"reason": "text", "cases": "num"},
        ),
        el("p", f"And {more} more reasons, which stand in the JSON report.", class_="note") if more > 0 else None,
    )


def environment(reports: Sequence[Report]) -> Html:
    """Everything outside hal that the numbers may depend on; with several runs, what differs is marked."""
    columns = [facts(report) for report in reports]
    names = list(dict.fromkeys(name for column in columns for name in column))
    rows: list[tuple[str, ...]] = []
    marked: set[int] = set()
    for name in names:
        values = [column.get(name, "–") for column in columns]
        if len(set(values)) > 1:
            marked.add(len(rows))
        rows.append((name, *values))
    heads = ("", *(target_name(report) for report in reports)) if len(reports) > 1 else ("", "value")
    caption = "Marked rows differ between the runs" if len(reports) > 1 else None
    return plain_table(caption, heads, rows, dict.fromkeys(heads[1:], "text"), marked)


def plain_table(
    caption: str | None,
    heads: Sequence[str],
    rows: Iterable[Sequence[str]],
    classes: dict[str, str],
    marked: set[int] | frozenset[int] = frozenset(),
) -> Html:
    head = el("tr", *(el("th", name, scope="col", class_=classes.get(name)) for name in heads))
    body = []
    for at, (first, *rest) in enumerate(rows):
        cells = (el("td", cell, class_=classes.get(name)) for name, cell in zip(heads[1:], rest, strict=True))
        mark = el("span", " (differs)", class_="vh") if at in marked else None
        body.append(
            el("tr", el("th", el("code", first), mark, scope="row"), *cells, class_="differs" if at in marked else None)
        )
    title = None if caption is None else el("caption", caption)
    return wide(caption or "Table", el("table", title, el("thead", head), el("tbody", *body), class_="plain"))


def wide(label: str, table: Html) -> Html:
    # focusable, so that the keyboard can scroll it
    return el("div", table, class_="wide", role="region", aria_label=label, tabindex=0)


def target_head(reports: Sequence[Report]) -> tuple[str, ...]:
    return ("target",) if len(reports) > 1 else ()


def target_cells(reports: Sequence[Report], report: Report) -> tuple[str, ...]:
    return (target_name(report),) if len(reports) > 1 else ()
