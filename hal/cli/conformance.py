"""`hal conformance`: judge a backend's implementations against the contract."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from hal.cli._console import console, line, table
from hal.cli.fuzz import fuzz
from hal.cli.kit import kit
from hal.cli.merge import merge
from hal.cli.power import power
from hal.cli.report import report as render

if TYPE_CHECKING:
    from hal.conformance.report import Report, Result
    from hal.conformance.runner import Plan
    from hal.conformance.runner import Progress as Callback

app = typer.Typer(no_args_is_help=True, help="Judge implementations against the float64 oracle.")

app.command("fuzz")(fuzz)
app.command("kit")(kit)
app.command("merge")(merge)
app.command("power")(power)
app.command("report")(render)

_MOST_FAILURES_SHOWN = 20
_SMALL = 40


class SuiteName(StrEnum):
    """The suites: quick for every change, full before a release."""

    quick = "quick"
    full = "full"


@app.callback()
def _conformance() -> None:
    """Judge implementations against the float64 oracle."""


@app.command("run")
def run(
    backend: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Backend, such as cpu or portable:cpu. Default: HAL_BACKEND, else auto."),
    ] = None,
    suite: Annotated[
        SuiteName, typer.Option(help="quick takes a minute on two CPU cores, full ten.")
    ] = SuiteName.quick,
    op: Annotated[list[str] | None, typer.Option(metavar="OP", help="Only this operator. Repeatable.")] = None,
    impl: Annotated[
        list[str] | None,
        typer.Option(metavar="IMPL", help="Only this implementation. Repeatable. Default: every one."),
    ] = None,
    case: Annotated[
        list[str] | None, typer.Option(metavar="ID", help="Only this case, of any suite. Repeatable.")
    ] = None,
    json_path: Annotated[Path | None, typer.Option("--json", metavar="PATH", help="Write the report as JSON.")] = None,
    junit_path: Annotated[
        Path | None, typer.Option("--junit", metavar="PATH", help="Write the report as JUnit XML.")
    ] = None,
    html_path: Annotated[
        Path | None, typer.Option("--html", metavar="PATH", help="Write the report as one HTML page.")
    ] = None,
    markdown_path: Annotated[
        Path | None, typer.Option("--markdown", metavar="PATH", help="Write the report as Markdown.")
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(
            min=0, help="Processes to judge in; 0 = this one. Default: one per core on the CPU, else one; few cases: 0."
        ),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(metavar="DEVICE", help="One of the backend's devices, such as cuda:1. Default: the first."),
    ] = None,
    shard: Annotated[
        str | None, typer.Option(metavar="I/N", help="Only share I of N; 'hal conformance merge' joins the reports.")
    ] = None,
    waivers_path: Annotated[
        Path | None, typer.Option("--waivers", metavar="PATH", help="Known failures, TOML or JSON, which fail no run.")
    ] = None,
    resume_path: Annotated[
        Path | None,
        typer.Option(
            "--resume", metavar="PATH", help="Keep each result here at once; go on from what an ended run left there."
        ),
    ] = None,
) -> None:
    """Run cases on every implementation of a backend and print what passed, by operator, dtype and implementation.

    Each failure is printed with a command that repeats that one case. Unsupported and skipped cases are counted
    apart and never as passed. Ctrl-C ends early with a whole report, marked incomplete.

    Exit status: 0 all good, 1 failures (failed, mistrusted, a waiver that is over or not needed), 2 could not run.

    Examples:

    - `hal conformance run`
    - `HAL_BACKEND=portable:cpu hal conformance run --suite full --json report.json --junit report.xml`
    - `hal conformance run --op rms_norm --op softmax --impl aten`
    - `hal conformance run --case 'ID' --backend cpu --impl aten`
    """
    from hal import files, settings
    from hal.conformance import html, junit, markdown, runner
    from hal.conformance.resume import State
    from hal.conformance.shards import Shard
    from hal.conformance.site import Site
    from hal.conformance.waivers import apply, read_waivers

    for path in (json_path, junit_path, html_path, markdown_path):
        if path is not None:
            files.check_writable(path)
    waivers = None if waivers_path is None else read_waivers(waivers_path)
    share = None if shard is None else Shard.parse(shard)
    site = Site.of(backend or settings.current().backend, device)
    what = runner.plan(site, suite.value, tuple(op or ()), tuple(impl or ()), tuple(case or ()), share)
    if workers is None:
        workers = _workers(what)
    with contextlib.ExitStack() as stack:
        state = None if resume_path is None else stack.enter_context(State(resume_path, what))
        if state is not None and state.results:
            line(f"going on from {resume_path}: {len(state.results)} of {what.size} results are there", stderr=True)
        report = runner.run(what, workers, stack.enter_context(_progress(what)), state)
    if waivers is not None:
        report = apply(report, waivers, datetime.now(UTC).date())
    if json_path is not None:
        report.write(json_path)
    if junit_path is not None:
        junit.write_junit(report, junit_path)
    if html_path is not None:
        html.write_html([report], html_path)
    if markdown_path is not None:
        markdown.write_markdown([report], markdown_path)
    if state is not None and report.complete:
        state.discard()
    show(report)
    raise typer.Exit(report.exit_status())


def _workers(what: Plan) -> int:
    from hal.conformance.workers import cores

    if what.size < _SMALL:
        return 0
    if what.site.target.device != "cpu":
        return 1
    return cores()


@contextmanager
def _progress(what: Plan) -> Iterator[Callback | None]:
    out = console(stderr=True)
    if not out.is_terminal:
        yield None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=out, transient=True) as bar:
        task = bar.add_task("judging", total=what.size)
        bad = 0

        def step(result: Result, done: int, planned: int) -> None:
            nonlocal bad
            bad += result.status in ("failed", "mistrusted")
            description = f"{result.op}, {bad} bad" if bad else result.op
            bar.update(task, completed=done, total=planned, description=description)

        yield step


def show(report: Report) -> None:
    """Print a report: a table by operator, dtype and implementation, the failures, the counts."""
    from hal.conformance.report import stack

    target, counts = report.target, report.counts
    simulated = " (simulated)" if target.simulated else ""
    device = f"{target.device}, {target.descriptor}" if target.descriptor else target.device
    suite = report.request.suite + (f", shard {report.request.shard}" if report.request.shard else "")
    line(
        f"backend {target.backend} on {device}{simulated}, suite {suite}, "
        f"hal {report.environment.hal}, {stack(report.environment)}"
    )
    rows, out = _rows(report), console()
    # a narrow terminal wraps lines; rich would cut names and figures
    out.width = max(out.width, rows.__rich_measure__(out, out.options.update(max_width=200)).minimum)
    out.print(rows)
    line("share: the largest error as a part of its budget; above 1 fails")
    if report.missing:
        line(f"no implementation of {', '.join(report.missing)}", "yellow")
    for failure in report.environment.plugin_failures:
        line(f"plug-in left out: {failure}", "yellow")
    _show_failures(report)
    for problem in report.waiver_problems:
        line(f"WAIVER {problem}", "red")
    if target.simulated:
        line("The device is simulated: this shows that conventions agree, not how a chip computes.", "yellow")
    if not report.complete:
        line(f"interrupted after {len(report.results)} of {report.planned} results", "red")
    total = ", ".join(f"{count} {status}" for status, count in counts.items())
    line(f"{len(report.results)} results in {report.seconds:.1f} s: {total or 'none'}", "bold")


def _rows(report: Report) -> Table:
    """A row per operator, dtype and implementation, within 80 columns: rare statuses only where they occur."""
    from hal.conformance.report import grouped

    statuses = ["passed", "failed", "unsupported"]
    statuses += [status for status in ("mistrusted", "skipped", "waived") if report.counts[status]]
    rows = table()
    for column in ("operator", "dtype", "by"):
        rows.add_column(column, no_wrap=True)
    narrow = {"unsupported": "unsup-\nported", "mistrusted": "mis-\ntrusted"}
    for column in ("cases", *statuses, "share"):
        rows.add_column(narrow.get(column, column), justify="right", no_wrap=True)
    for group in grouped(report.results):
        share = group.worst_share
        cells = [group.op, group.dtype, group.implementation, str(group.total)]
        cells += [str(group[status] or "–") for status in statuses]
        cells.append("–" if share is None else f"{share:.3f}" if share < 100 else f"{share:.1e}")
        rows.add_row(*cells, style="red" if group["failed"] or group["mistrusted"] else "")
    return rows


def _show_failures(report: Report) -> None:
    for result in report.bad[:_MOST_FAILURES_SHOWN]:
        line(f"{result.status.upper()} {result.op} {result.dtype} {result.implementation}", "red")
        for why in result.why:
            line(f"  {why}")
        line(f"  repeat: {result.repeat}")
    more = len(report.bad) - _MOST_FAILURES_SHOWN
    if more > 0:
        line(f"and {more} more; --json PATH writes all of them", "red")
