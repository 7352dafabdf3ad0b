"""The heat map of the HTML page: ops down; target, implementation and dtype across."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby

from hal.conformance.html_tables import MOST_FAILURES, plain_table, target_cells, target_head, wide
from hal.conformance.markup import Html, Node, el, join
from hal.conformance.overview import Cell, Column, Overview, counted, figure, target_name
from hal.conformance.report import Report

__all__ = ["STEPS", "heat_map", "step"]

# Upper ends of the steps of the scale; what is above the last has failed.
STEPS = (0.0, 0.1, 0.25, 0.5, 0.75, 1.0)
_LEGEND = ("none of it", "up to 0.1", "up to 0.25", "up to 0.5", "up to 0.75", "up to 1")


def heat_map(reports: Sequence[Report], table: Overview) -> Html:
    """Ops down; target, implementation and dtype across; each cell the worst share of the error budget."""
    groups = [(key, list(columns)) for key, columns in groupby(table.columns, lambda c: (c.report, c.implementation))]
    targets = [(at, [c for _, cs in group for c in cs]) for at, group in groupby(groups, lambda g: g[0][0])]
    first = _first_failures(reports)
    rows: list[Node] = []
    if len(reports) > 1:
        cells = (
            el("th", target_name(reports[at]), colspan=_span(columns), scope="colgroup", class_="group")
            for at, columns in targets
        )
        rows.append(el("tr", el("td", class_="corner"), *_gaps(cells)))
    names = (el("th", el("code", key[1]), colspan=len(cs), scope="colgroup", class_="group") for key, cs in groups)
    rows.append(el("tr", el("td", class_="corner"), *_gaps(names)))
    dtypes = (join(*(el("th", el("abbr", c.short, title=c.dtype), scope="col") for c in cs)) for _, cs in groups)
    rows.append(el("tr", el("th", "operator", scope="col", class_="corner"), *_gaps(dtypes)))
    body = []
    for op in table.ops:
        cells = (join(*(_heat_cell(table.cells.get((op, c)), op, c, first) for c in cs)) for _, cs in groups)
        body.append(el("tr", el("th", el("code", _breakable(op)), scope="row"), *_gaps(cells)))
    return join(
        el("p", "The largest error of each operator, dtype and implementation as a share of its error budget: 1 is all "
           "of it, and more fails. ✓ = judged without a budget (bit for bit, for example).", class_="note"),
        _legend(),
        wide("The heat map", el("table", el("thead", *rows), el("tbody", *body), class_="heat")),
        el("details", el("summary", "The numbers behind the map"), _numbers(reports, table)),
    )  # fmt: skip


def step(share: float) -> str:
    """The class of a share's colour."""
    return next((f"h{i}" for i, top in enumerate(STEPS) if share <= top), "hbad")


def _heat_cell(cell: Cell | None, op: str, column: Column, first: dict[tuple[int, str, str, str], int]) -> Html:
    if cell is None:
        return el("td", el("span", "no cases", class_="vh"))
    told = counted(cell.counts)
    hidden = el("span", f" {told}", class_="vh")
    title = f"{op}, {column.dtype}, {column.implementation}: {told}"
    if cell.bad:
        at = first.get((column.report, op, column.dtype, column.implementation))
        text = join(f"✕ {cell.bad}", hidden)
        return el("td", el("a", text, href=f"#failure-{at}") if at is not None else text, class_="hbad", title=title)
    if not cell.judged:
        return el("td", "–", hidden, class_="hnone", title=title)
    share = cell.share
    if share is None:
        return el("td", "✓", hidden, class_="h0", title=title)
    return el("td", figure(share), hidden, class_=step(share), title=title)


def _first_failures(reports: Sequence[Report]) -> dict[tuple[int, str, str, str], int]:
    """Position, among the failures shown, of the first one of each cell."""
    found: dict[tuple[int, str, str, str], int] = {}
    every = ((at, result) for at, report in enumerate(reports) for result in report.bad)
    for position, (at, result) in enumerate(every):
        if position < MOST_FAILURES:
            found.setdefault((at, result.op, result.dtype, result.implementation), position)
    return found


def _numbers(reports: Sequence[Report], table: Overview) -> Html:
    rows = []
    for op in table.ops:
        for column in table.columns:
            cell = table.cells.get((op, column))
            if cell is not None:
                rows.append((op, *target_cells(reports, reports[column.report]), column.implementation, column.dtype,
                             counted(cell.counts), figure(cell.share) or "–"))  # fmt: skip
    heads = ("operator", *target_head(reports), "implementation", "dtype", "results", "worst share")
    return plain_table(None, heads, rows, {"worst share": "num"})


def _legend() -> Html:
    steps = [el("li", el("i", class_=f"h{i}"), text) for i, text in enumerate(_LEGEND)]
    steps += [
        el("li", el("i", "✕", class_="hbad"), "failed, how many"),
        el("li", el("i", "–", class_="hnone"), "not judged"),
    ]
    return el("ul", *steps, class_="legend", aria_label="Scale")


def _gaps(groups: Iterable[Html]) -> Iterable[Html]:
    """A thin empty column between groups."""
    for position, group in enumerate(groups):
        if position:
            yield el("td", class_="gap", aria_hidden="true")
        yield group


def _span(columns: Sequence[Column]) -> int:
    return len(columns) + len({column.implementation for column in columns}) - 1


def _breakable(name: str) -> Html:
    """A name that may break after its underscores, where the screen is narrow."""
    first, *rest = name.split("_")
    return join(first, *(join(Html("_<wbr>"), part) for part in rest))
