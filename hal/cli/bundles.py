"""`hal conformance record | verify | compare`: a run in one file, carried to another machine and compared there."""

from __future__ import annotations

from collections import Counter
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from hal.cli import conformance
from hal.cli._console import console, line, table
from hal.cli.conformance import SuiteName

if TYPE_CHECKING:
    from hal.conformance.archive import Bundle
    from hal.conformance.comparison import Comparison, Side
    from hal.conformance.record import Again
    from hal.conformance.report import Report
    from hal.conformance.runner import Plan
    from hal.conformance.site import Site

_MOST_SHOWN = 20
HERE = "this machine"

Backend = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="Backend, such as cpu or portable:cuda. Default: HAL_BACKEND, else auto."),
]
Ops = Annotated[list[str] | None, typer.Option(metavar="OP", help="Only this operator. Repeatable.")]
Impls = Annotated[list[str] | None, typer.Option(metavar="IMPL", help="Only this implementation. Repeatable.")]
Workers = Annotated[int | None, typer.Option(min=0, help="Processes to judge in, as for 'run'.")]
Json = Annotated[Path | None, typer.Option("--json", metavar="PATH", help="Write the comparison as JSON.")]


class Stored(StrEnum):
    """Which results a bundle stores."""

    none = "none"
    failures = "failures"
    all = "all"


Store = Annotated[Stored, typer.Option(help="Results to store as safetensors. Their digests are always there.")]


def record(
    output: Annotated[Path, typer.Option("--output", "-o", metavar="PATH", help="The bundle to write.")],
    backend: Backend = None,
    suite: Annotated[SuiteName, typer.Option(help="As for 'run'.")] = SuiteName.quick,
    op: Ops = None,
    impl: Impls = None,
    case: Annotated[
        list[str] | None, typer.Option(metavar="ID", help="Only this case, of any suite. Repeatable.")
    ] = None,
    tensors: Store = Stored.none,
    workers: Workers = None,
) -> None:
    """Run cases as `hal conformance run` does, and write the run as a bundle to carry to another machine.

    A bundle holds the environment, the device, and for each case and implementation the verdict, the share of the
    error budget used, and digests of the inputs and the results. Inputs are not stored: case ids regenerate them.

    Ctrl-C ends early with a whole bundle, marked incomplete.

    Exit status: 0 all good, 1 failures, 2 could not run, or not all of it.

    Examples:

    - `hal conformance record --backend portable:cuda -o h200.hal`
    - `hal conformance record --suite full --tensors failures -o full.hal`
    """
    from hal import files
    from hal.conformance import runner
    from hal.conformance.archive import write_bundle

    files.check_writable(output)
    what = runner.plan(_site(backend), suite.value, tuple(op or ()), tuple(impl or ()), tuple(case or ()))
    report, made = _judged(what, workers, tensors)
    write_bundle(made, output)
    conformance.show(report)
    lost = [v.lost for case in made.manifest.cases for v in case.verdicts if v.lost and v.status == "passed"]
    if lost:
        line(f"{len(lost)} verdicts lack the digests of their results, the first since: {lost[0]}", "yellow")
    line(f"wrote {output}, {output.stat().st_size:,} bytes")
    raise typer.Exit(report.exit_status())


def verify(
    bundle: Annotated[Path, typer.Argument(metavar="BUNDLE", help="A file written by 'hal conformance record'.")],
    backend: Backend = None,
    op: Ops = None,
    impl: Impls = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="PATH", help="Write this machine's run as a bundle too.")
    ] = None,
    workers: Workers = None,
    json_path: Json = None,
) -> None:
    """Judge a bundle's cases on a backend of this machine, and report both runs side by side.

    Each side is judged against the float64 oracle, never against the other: equal bits are counted but not asked for.
    The inputs' digests are checked first. Cases whose inputs come out with other bits here are not run: that is a
    fault of the generator, and says nothing of the backend.

    Exit status: 0 all good here, 1 failures here, 2 could not run, or not all of it.

    Examples:

    - `hal conformance verify h200.hal --backend cpu`
    - `hal conformance verify h200.hal --backend ascend --op attention --json side-by-side.json`
    """
    from hal import files
    from hal.conformance.archive import read_bundle, write_bundle
    from hal.conformance.comparison import compare as side_by_side

    for path in (output, json_path):
        if path is not None:
            files.check_writable(path)
    found, made = _again(read_bundle(bundle), backend, op, impl, workers)
    if output is not None:
        write_bundle(made, output)
    sources = (str(bundle), HERE)
    _finish(side_by_side(found.recorded, made, sources, found.differ, found.unknown), json_path)


def compare(
    a: Annotated[str, typer.Argument(metavar="A", help="A bundle, or a backend to run.")],
    b: Annotated[str, typer.Argument(metavar="B", help="A bundle, or a backend to run.")],
    suite: Annotated[SuiteName, typer.Option(help="Where both are backends.")] = SuiteName.quick,
    op: Ops = None,
    impl: Impls = None,
    workers: Workers = None,
    json_path: Json = None,
) -> None:
    """Compare two runs side by side: bundles as they are, without running anything, or backends of this machine.

    A backend beside a bundle runs the bundle's cases; two backends run a suite.

    Exit status: 0 both good, 1 a failure on either side, 2 not comparable, or not all of it.

    Examples:

    - `hal conformance compare h200.hal ascend.hal`
    - `hal conformance compare h200.hal cpu`
    - `hal conformance compare cpu portable:cpu --op rms_norm`
    """
    from hal import files
    from hal.conformance import runner
    from hal.conformance.archive import read_bundle
    from hal.conformance.comparison import compare as side_by_side
    from hal.conformance.record import cut

    if json_path is not None:
        files.check_writable(json_path)
    first, second = (read_bundle(Path(name)) if _is_file(name) else None for name in (a, b))
    sources = (HERE if first is None else a, HERE if second is None else b)
    differ: tuple[str, ...] = ()
    unknown: dict[str, str] = {}
    if first is None and second is None:
        what = runner.plan(_site(a), suite.value, tuple(op or ()), tuple(impl or ()))
        _, first = _judged(what, workers, Stored.none)
        impl = None  # named for the first; the second has implementations of its own
    if first is None:
        assert second is not None
        found, first = _again(second, a, op, impl, workers)
        second, differ, unknown = found.recorded, found.differ, found.unknown
    elif second is None:
        found, second = _again(first, b, op, impl, workers)
        first, differ, unknown = found.recorded, found.differ, found.unknown
    else:
        first, second = (cut(side, tuple(op or ()), tuple(impl or ())) for side in (first, second))
    _finish(side_by_side(first, second, sources, differ, unknown, under_test="both"), json_path)


def mount(app: typer.Typer) -> None:
    """Add the commands to `hal conformance`."""
    app.command("record")(record)
    app.command("verify")(verify)
    app.command("compare")(compare)


def _is_file(name: str) -> bool:
    """Whether an argument means a bundle: a missing file must not be taken for a backend's name."""
    return name.endswith(".hal") or "/" in name or Path(name).is_file()


def _again(
    recorded: Bundle, backend: str | None, op: list[str] | None, impl: list[str] | None, workers: int | None
) -> tuple[Again, Bundle]:
    """A bundle's cases on a backend of this machine."""
    from hal.conformance.record import again

    found = again(_site(backend), recorded, tuple(op or ()), tuple(impl or ()))
    return found, _judged(found.plan, workers, Stored.none, found.keep)[1]


def _site(backend: str | None) -> Site:
    from hal import settings
    from hal.conformance.site import Site

    return Site.of(backend or settings.current().backend)


def _judged(
    what: Plan, workers: int | None, tensors: Stored, keep: frozenset[str] = frozenset()
) -> tuple[Report, Bundle]:
    from hal.conformance.record import record as judge

    with conformance._progress(what) as callback:
        number = conformance._workers(what) if workers is None else workers
        return judge(what, number, callback, tensors.value, keep)


def _finish(comparison: Comparison, json_path: Path | None) -> None:
    if json_path is not None:
        comparison.write(json_path)
    _show(comparison)
    raise typer.Exit(comparison.status)


def _show(comparison: Comparison) -> None:
    for label, side in zip("AB", comparison.sides, strict=True):
        _show_side(label, side)
    for name, (first, second) in comparison.switches.items():
        line(f"switch {name}: A {first or 'has none'}, B {second or 'has none'}")
    if comparison.rows:
        rows, out = _rows(comparison), console()
        # a narrow terminal wraps lines; rich would cut names and figures
        out.width = max(out.width, rows.__rich_measure__(out, out.options.update(max_width=200)).minimum)
        out.print(rows)
        line("share: the largest error as a part of its budget, against the float64 oracle; above 1 fails")
    _show_differences(comparison)
    _show_left_out(comparison)
    if any(side.simulated for side in comparison.sides):
        line("A device is simulated: this shows that conventions agree, not how a chip computes.", "yellow")
    if not comparison.rows:
        line("there is nothing to compare: no case of the choice was judged on both sides", "red")
    equal = f", {comparison.equal} of {comparison.outputs} results bitwise equal" if comparison.outputs else ""
    line(f"{comparison.cases} cases side by side{equal}", "bold")


def _show_side(label: str, side: Side) -> None:
    from hal.conformance.report import stack

    device = f"{side.device}, {side.descriptor}" if side.descriptor else side.device
    line(
        f"{label}  {side.source}: {side.backend} on {device}{' (simulated)' if side.simulated else ''}, "
        f"suite {side.suite}, hal {side.hal}, {stack(side)}, {side.started}"
    )
    counts = ", ".join(f"{count} {status}" for status, count in side.counts.items()) or "nothing judged"
    line(f"   {counts}{'' if side.complete else '; interrupted'}")
    if side.missing:
        line(f"   no implementation of {', '.join(side.missing)}", "yellow")
    for failure in side.plugin_failures:
        line(f"   plug-in left out: {failure}", "yellow")
    if side.worst is not None:
        worst = side.worst
        line(f"   worst share {_figure(worst.share)}: {worst.op} {worst.dtype} {worst.implementation}, {worst.case}")


def _rows(comparison: Comparison) -> Table:
    rows = table()
    for column in ("operator", "dtype", "by A", "by B"):
        rows.add_column(column, no_wrap=True)
    for column in ("cases", "bad A", "bad B", "share A", "share B", "equal", "differ"):
        rows.add_column(column.replace(" ", "\n"), justify="right", no_wrap=True)
    for row in comparison.rows:
        rows.add_row(
            row.op,
            row.dtype,
            *row.implementations,
            str(row.cases),
            *(str(bad or "–") for bad in row.bad),
            *(_figure(share) for share in row.share),
            f"{100 * row.equal // row.outputs} %" if row.outputs else "–",
            str(row.differ or "–"),
            style="red" if any(row.bad) else "",
        )
    return rows


def _figure(share: float | None) -> str:
    return "–" if share is None else f"{share:.3f}" if share < 100 else f"{share:.1e}"


def _show_differences(comparison: Comparison) -> None:
    bad = [difference for difference in comparison.differences if difference.bad]
    for difference in bad[:_MOST_SHOWN]:
        first, second = difference.sides
        line(f"{difference.op} {difference.dtype}: A {first.implementation} {first.status}, "
             f"B {second.implementation} {second.status}", "red")  # fmt: skip
        if difference.largest is not None:
            line(f"  A and B: {difference.largest}")
        for label, side in zip("AB", difference.sides, strict=True):
            if side.status in ("failed", "mistrusted"):
                for why in side.why:
                    line(f"  {label}: {why}")
                line(f"  repeat {label}: {side.repeat}")
    if len(bad) > _MOST_SHOWN:
        line(f"and {len(bad) - _MOST_SHOWN} more; --json PATH writes all of them", "red")
    kinds = Counter(
        (difference.sides[0].status, difference.sides[1].status) for difference in comparison.differences
        if not difference.bad
    )  # fmt: skip
    for (first_status, second_status), count in kinds.items():
        line(f"{count} verdicts {first_status} on A and {second_status} on B; --json PATH names them", "yellow")


def _show_left_out(comparison: Comparison) -> None:
    differ, unknown = comparison.inputs_differ, comparison.unknown
    if differ:
        line(
            f"{len(differ)} cases not compared: their inputs come out with other bits on the two machines. That is a "
            f"fault of the generator of inputs, not of a backend; please report it. The first: {differ[0]}",
            "red",
        )
    if unknown:
        line(
            f"{len(unknown)} cases not compared: they cannot be built here; use the hal that recorded them. The first: "
            f"{next(iter(unknown))} ({next(iter(unknown.values()))})",
            "red",
        )
    for label, only in zip("AB", comparison.only, strict=True):
        if only:
            line(f"{len(only)} cases ran on {label} alone; the first: {only[0]}", "yellow")
