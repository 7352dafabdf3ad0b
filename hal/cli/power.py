"""`hal conformance power`: the suite's own test."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from hal.cli._console import console, line, table

if TYPE_CHECKING:
    from hal.conformance.power import Cell, PowerReport
    from hal.conformance.power import Progress as Callback


def power(
    op: Annotated[list[str] | None, typer.Option(metavar="OP", help="Only this operator. Repeatable.")] = None,
    strength: Annotated[
        bool, typer.Option("--strength", help="Also find out how weak a fault each single case still sees.")
    ] = False,
    json_path: Annotated[Path | None, typer.Option("--json", metavar="PATH", help="Write the whole as JSON.")] = None,
    workers: Annotated[int | None, typer.Option(min=0, help="Processes; 0 = this one. Default: one per core.")] = None,
) -> None:
    """Prove that the quick suite rejects wrong implementations: every convention of the contract broken on purpose.

    Prints each mutant with the case that kills it in each dtype, then the detection floors: the weakest fault of
    each kind that the suite still sees. Faults are planted in the reference, on the CPU, whatever HAL_BACKEND is.
    Takes about ten minutes on two cores, one or two for an operator.

    Exit status: 0 no survivor and no case that proves too little, 1 otherwise, 2 could not run.

    Examples:

    - `hal conformance power`
    - `hal conformance power --op attention --strength --json power.json`
    """
    from hal import files
    from hal.conformance.power import prove
    from hal.conformance.workers import cores

    if json_path is not None:
        files.check_writable(json_path)
    if workers is None:
        workers = cores()
    with _progress() as callback:
        report = prove(tuple(op or ()), strength, workers, callback)
    if json_path is not None:
        report.write(json_path)
    _show(report)
    raise typer.Exit(report.exit_status())


@contextmanager
def _progress() -> Iterator[Callback | None]:
    out = console(stderr=True)
    if not out.is_terminal:  # a log gets a line now and then: the whole takes minutes
        yield lambda what, done, planned: line(f"{done} of {planned}: {what}", stderr=True)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=out, transient=True) as bar:
        task = bar.add_task("examining", total=None)
        yield lambda what, done, planned: bar.update(task, description=what, completed=done, total=planned)


def _show(report: PowerReport) -> None:
    for op in report.ops:
        _show_op(op, [cell for cell in report.cells if cell.op == op])
    _show_floors(report)
    if report.sights:
        _show_sights(report)
    for suspect in report.suspects:
        line(f"{suspect.status.upper()} with the reference itself: {suspect.case}", "red")
        for finding in suspect.findings:
            line(f"  {finding}")
    for cell in report.bad:
        told = "SURVIVED" if cell.status == "survived" else "SEEN, though marked invisible"
        line(f"{told}: {cell.op} {cell.dtype}: {_name(cell)}", "red")
    counts = {status: sum(cell.status == status for cell in report.cells) for status in ("killed", "invisible")}
    faults = len({(cell.op, cell.mutant, cell.gradient) for cell in report.cells})
    line(
        f"{faults} mutants, {len(report.cells)} in all dtypes: {counts['killed']} killed, "
        f"{counts['invisible']} invisible by derivation, {len(report.bad)} bad; "
        f"{report.cases} cases, {len(report.suspects)} suspect; {report.seconds:.0f} s",
        "bold",
    )


def _name(cell: Cell) -> str:
    return f"{cell.mutant} (backward)" if cell.gradient else cell.mutant


def _show_op(op: str, cells: list[Cell]) -> None:
    rows = table(op)
    for column in ("mutant", "dtype", "by"):
        rows.add_column(column, no_wrap=column != "mutant", overflow="fold")
    rows.add_column("killed by the case", overflow="fold")
    before = ""
    for cell in sorted(cells, key=lambda cell: (cell.gradient, cell.convention, cell.mutant)):
        name = _name(cell)
        shown = "" if name == before else name
        what = cell.case if cell.status == "killed" else f"{cell.status}: {cell.why}" if cell.why else cell.status
        bad = cell.status in ("survived", "misjudged")
        rows.add_row(shown, cell.dtype, cell.rule or "–", what, style="red" if bad else "")
        before = name
    out = console()
    out.print(rows)
    out.print()


def _show_floors(report: PowerReport) -> None:
    """A row per operator and graded fault: the weakest strength seen in each dtype."""
    from hal.conformance.mutants.mutant import DTYPES

    rows = table("detection floor: the weakest fault that the suite still sees")
    for column in ("operator", "fault"):
        rows.add_column(column)
    for dtype in DTYPES:
        rows.add_column(dtype, justify="right")
    graded = [cell for cell in report.cells if cell.strength is not None]
    for op, name in dict.fromkeys((cell.op, _name(cell)) for cell in graded):
        of = {cell.dtype: cell for cell in graded if (cell.op, _name(cell)) == (op, name)}
        rows.add_row(op, name, *(_floor(of.get(dtype)) for dtype in DTYPES))
    if rows.row_count:
        console().print(rows)


def _floor(cell: Cell | None) -> str:
    return "" if cell is None else cell.status if cell.floor is None else _strength(cell.floor)


def _strength(value: float) -> str:
    return f"2^{round(math.log2(value))}"


def _show_sights(report: PowerReport) -> None:
    rows = table("how weak a fault single cases see")
    for column in ("operator", "fault", "dtype", "weakest", "median", "cases", "blind"):
        rows.add_column(column)
    for op, name, dtype in dict.fromkeys((sight.op, sight.mutant, sight.dtype) for sight in report.sights):
        of = [sight for sight in report.sights if (sight.op, sight.mutant, sight.dtype) == (op, name, dtype)]
        seen = [sight.weakest for sight in of if sight.weakest is not None]
        weakest, median = (_strength(f(seen)) if seen else "–" for f in (min, statistics.median_low))
        rows.add_row(op, name, dtype, weakest, median, str(len(of)), str(len(of) - len(seen)))
    console().print(rows)
