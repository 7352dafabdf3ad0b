"""`hal conformance fuzz`: fresh cases, judged until the time is over."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from hal.cli._console import console, line, table

if TYPE_CHECKING:
    from hal.conformance.fuzz import FuzzReport
    from hal.conformance.fuzz import Progress as Callback


def fuzz(
    minutes: Annotated[float, typer.Option(min=0.0, help="How long to draw and judge.")] = 1.0,
    seed: Annotated[int, typer.Option(help="What is drawn follows from it.")] = 0,
    backend: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Backend, such as cpu or portable:cpu. Default: HAL_BACKEND, else auto."),
    ] = None,
    op: Annotated[list[str] | None, typer.Option(metavar="OP", help="Only this operator. Repeatable.")] = None,
    impl: Annotated[
        list[str] | None,
        typer.Option(metavar="IMPL", help="Only this implementation. Repeatable. Default: every one."),
    ] = None,
    device: Annotated[
        str | None, typer.Option(metavar="DEVICE", help="One of the backend's devices. Default: the first.")
    ] = None,
    most: Annotated[int | None, typer.Option("--cases", metavar="N", min=1, help="End after so many cases.")] = None,
    here: Annotated[
        bool, typer.Option("--here", help="Judge in this process, where a crash ends the run. Default: one of its own.")
    ] = False,
    json_path: Annotated[
        Path | None, typer.Option("--json", metavar="PATH", help="Write what was found as JSON.")
    ] = None,
) -> None:
    """Draw cases that no suite lists, in every dtype, size, layout and option, and judge them on each implementation.

    Each failure is shrunk to a small case, printed with a command that repeats it; failures of one kind count as one.
    The same seed draws the same cases; the time only says how far it gets.

    Exit status: 0 nothing found, 1 failures, 2 could not run or was interrupted.

    Examples:

    - `hal conformance fuzz --minutes 10 --seed 7`
    - `hal conformance fuzz --op softmax --impl aten --cases 200 --json found.json`
    """
    from hal import files, settings
    from hal.conformance import runner
    from hal.conformance.fuzz import fuzz as run
    from hal.conformance.site import Site

    if json_path is not None:
        files.check_writable(json_path)
    site = Site.of(backend or settings.current().backend, device)
    what = runner.plan(site, "quick", tuple(op or ()), tuple(impl or ()))
    with _progress(minutes * 60) as callback:
        report = run(what, seed, minutes * 60, most, here, callback)
    if json_path is not None:
        report.write(json_path)
    _show(report)
    raise typer.Exit(report.exit_status())


@contextmanager
def _progress(seconds: float) -> Iterator[Callback | None]:
    out = console(stderr=True)
    if not out.is_terminal:
        yield None
        return
    with Progress(
        TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn(), console=out, transient=True
    ) as bar:
        task = bar.add_task("fuzzing", total=seconds)

        def step(op: str, gone: float, cases: int, found: int) -> None:
            told = f"{op}, {cases} cases" + (f", {found} found" if found else "")
            bar.update(task, completed=min(gone, seconds), description=told)

        yield step


def _show(report: FuzzReport) -> None:
    target = report.target
    simulated = " (simulated)" if target.simulated else ""
    line(f"backend {target.backend} on {target.device}{simulated}, seed {report.seed}, hypothesis {report.hypothesis}")
    rows = table()
    rows.add_column("operator", no_wrap=True)
    for column in ("cases", "passed", "failed", "unsupported", "skipped", "proves little", "left out"):
        rows.add_column(column, justify="right")
    for of in report.ops:
        statuses = ("passed", "failed", "unsupported", "skipped", "mistrusted")
        counts = [str(of.results.get(status) or "–") for status in statuses]
        rows.add_row(of.op, str(of.cases), *counts, str(sum(of.left_out.values()) or "–"))
    console().print(rows)
    for found in report.found:
        result = found.result
        also = f", and {found.also} more of the kind" if found.also else ""
        line(f"FAILED {result.op} {result.dtype} {result.implementation}{also}", "red")
        for why in result.why:
            line(f"  {why}")
        if not found.repeatable:
            line("  not repeatable: it passed when judged once more", "yellow")
        line(f"  repeat: {result.repeat}")
    if not report.complete:
        line("interrupted", "red")
    cases = sum(of.cases for of in report.ops)
    line(f"{cases} cases in {report.seconds:.0f} s: {len(report.found)} kinds of failure", "bold")
