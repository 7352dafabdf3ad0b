"""A report, or several, as Markdown: for a pull request, an issue or a results folder."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path

from hal.conformance.overview import (
    Cell,
    clean,
    counted,
    facts,
    figure,
    one_line,
    overview,
    reasons,
    target_name,
    verdict,
)
from hal.conformance.report import Offer, Report, Result
from hal.errors import ArgumentError
from hal.files import write_whole

__all__ = ["to_markdown", "write_markdown"]

MOST_FAILURES = 50
_SPECIAL = re.compile(r"([\\`*_\[\]|~@#])")


def to_markdown(reports: Sequence[Report]) -> str:
    """The document for one report, or for several side by side. ArgumentError for none."""
    if not reports:
        raise ArgumentError(
            "Markdown needs at least one report; give the files that 'hal conformance run --json' wrote."
        )
    parts = ["# Conformance report\n"]
    for report in reports:
        told = counted({status: count for status, count in report.counts.items() if count})
        parts.append(
            f"- **{_text(verdict(report)[1])}** on {_text(target_name(report))}, "
            f"{_text(report.target.descriptor or 'unknown device')}: {told}"
        )
    parts += [
        "",
        *_failures(reports),
        *_shares(reports),
        *_apart(reports),
        *_capabilities(reports),
        *_environment(reports),
    ]
    return "\n".join(parts).rstrip() + "\n"


def write_markdown(reports: Sequence[Report], path: Path) -> None:
    """Write the document, whole or not at all."""
    write_whole(path, to_markdown(reports))


def _failures(reports: Sequence[Report]) -> list[str]:
    found = [(report, result) for report in reports for result in report.bad]
    if not found:
        return []
    parts = ["## Failures\n"]
    for report, result in found[:MOST_FAILURES]:
        where = f" on {_text(target_name(report))}" if len(reports) > 1 else ""
        parts.append(f"### {_code(f'{result.op} {result.dtype} {result.implementation}')} {result.status}{where}\n")
        parts += [f"- {_code(why)}" for why in result.why]
        parts += ["", _fenced(_repeat(result)), ""]
    if len(found) > MOST_FAILURES:
        parts.append(f"And {len(found) - MOST_FAILURES} more, which stand in the JSON report.\n")
    return parts


def _shares(reports: Sequence[Report]) -> list[str]:
    table = overview(reports)
    groups = [(key, list(cs)) for key, cs in groupby(table.columns, lambda c: (c.report, c.implementation))]
    if not groups:
        return []
    names = [_name(reports, at, implementation) for (at, implementation), _ in groups]
    rows = []
    for op in table.ops:
        cells = []
        for _, columns in groups:
            said = [(c.short, table.cells.get((op, c))) for c in columns]
            cells.append("<br>".join(f"{_text(dtype)} {_share(cell)}" for dtype, cell in said if cell is not None))
        rows.append([_cell(op), *cells])
    note = "The largest error as a share of its budget: above 1 fails; ✓ = judged without a budget, – = not judged.\n"
    return ["## Budget used\n", note, *_table(["operator", *names], rows), ""]


def _share(cell: Cell) -> str:
    if cell.bad:
        return f"**✕ {cell.bad} failed**"
    if not cell.judged:
        return "–"
    return "✓" if cell.share is None else _text(figure(cell.share))


def _apart(reports: Sequence[Report]) -> list[str]:
    rows = []
    for report in reports:
        for status, op, name, reason, count in reasons(report)[:MOST_FAILURES]:
            rows.append([_text(target_name(report)), status, _cell(op), _cell(name), _cell(reason), str(count)])
    heads = ["target", "status", "operator", "implementation", "reason", "cases"]
    return ["## Not judged\n", *_table(heads, rows), ""] if rows else []


def _capabilities(reports: Sequence[Report]) -> list[str]:
    rows = []
    for report in reports:
        for offer in report.offers:
            accepts = offer.accepts.model_dump(exclude_none=True, exclude_defaults=True)
            limits = ", ".join(f"{key} {_plain(value)}" for key, value in accepts.items())
            rows.append([_text(target_name(report)), _cell(offer.op), _cell(offer.implementation), offer.kind,
                         _text(limits) or "any", _text(_declared(offer)) or "–"])  # fmt: skip
    heads = ["target", "operator", "implementation", "class", "accepts", "declares"]
    return ["## Capabilities\n", *_table(heads, rows), ""] if rows else []


def _declared(offer: Offer) -> str:
    said = (name if value is True else f"{name} {_plain(value)}" for name, value in offer.declares.items() if value)
    return ", ".join(said)


def _environment(reports: Sequence[Report]) -> list[str]:
    columns = [facts(report) for report in reports]
    names = dict.fromkeys(name for column in columns for name in column)
    rows = [[_text(name), *(_text(column.get(name, "–")) for column in columns)] for name in names]
    heads = ["", *(_text(target_name(report)) for report in reports)]
    return ["## Environment\n", *_table(heads, rows)]


def _name(reports: Sequence[Report], at: int, implementation: str) -> str:
    return _cell(implementation) + (f" on {_text(target_name(reports[at]))}" if len(reports) > 1 else "")


def _plain(value: object) -> str:
    if isinstance(value, dict):
        return " ".join(f"{key}: {_plain(item)}" for key, item in value.items() if item is not None)
    return ", ".join(map(str, value)) if isinstance(value, tuple | list) else str(value)


def _repeat(result: Result) -> str:
    return one_line(result.repeat)


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(cells)} |" for cells in (heads, ["---"] * len(heads), *rows)]


def _text(text: str) -> str:
    """Text as text: neither markup nor HTML, on one line."""
    return _SPECIAL.sub(r"\\\1", html.escape(one_line(text), quote=False))


def _code(text: str) -> str:
    """A code span: what stands in it is no markup, whatever it is."""
    text = one_line(text) or "–"
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    fence = "`" * (longest + 1)
    pad = " " if "`" in text else ""
    return f"{fence}{pad}{text}{pad}{fence}"


def _cell(text: str) -> str:
    """A code span in a table, where a bar would end the cell."""
    return _code(text).replace("|", "\\|")


def _fenced(text: str) -> str:
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}sh\n{clean(text)}\n{fence}"
