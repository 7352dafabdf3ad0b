"""`hal bench`: the operators' calls timed beside other libraries' in one run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hal.cli._console import console, line, table, torch_device

if TYPE_CHECKING:
    from hal.bench.record import Record

DTYPES = ("bfloat16", "float16", "float32")


def bench(
    ops: Annotated[list[str] | None, typer.Argument(metavar="[OP]...", help="Only these operators.")] = None,
    device: Annotated[str, typer.Option(help="Torch device.")] = "cpu",
    dtype: Annotated[str, typer.Option(help=f"One of {', '.join(DTYPES)}.")] = "bfloat16",
    suite: Annotated[str, typer.Option(help="core: sizes of real models; smoke: seconds on any device.")] = "core",
    match: Annotated[str, typer.Option(metavar="TEXT", help="Only workloads whose name contains this.")] = "",
    against: Annotated[
        str, typer.Option(help="Peers, comma-separated: torch, compile, cudnn, flash, flex, liger, quack; none = ''.")
    ] = "torch,compile",
    impl: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Time this implementation instead of the one selected. Repeatable."),
    ] = None,
    json_path: Annotated[
        Path | None, typer.Option("--json", metavar="PATH", help="Write every figure as JSON.")
    ] = None,
) -> None:
    """Time calls of the operators, and the same calls by other libraries, in turn and on the same inputs.

    Device time is that of replayed graphs on rotated inputs (on a CPU, by the clock), host time that of the call alone;
    medians. "floor" is the least time that the call's bytes and flops allow at the rates measured in this run: a copy
    of the same bytes, and a large matrix product; "share" is the floor over the time. "peer" is the time of the
    fastest peer over hal's own: above 1, hal is faster. Peers that are not installed are left out.

    Exit status: 0 measured, 2 could not run.

    Examples:

    - `hal bench --suite smoke`
    - `hal bench rms_norm softmax --device cuda --against torch,compile,liger --json bench.json`
    """
    from hal import files

    if json_path is not None:
        files.check_writable(json_path)
    check_dtype(dtype)
    where = torch_device(device, used=True)
    record = _measured(tuple(ops or ()), where, dtype, suite, match, _peers(against), tuple(impl or (None,)))
    if json_path is not None:
        record.write(json_path)
    _show(record)


def check_dtype(name: str) -> None:
    """ArgumentError unless it is a dtype that workloads are drawn in."""
    from hal.errors import ArgumentError

    if name not in DTYPES:
        raise ArgumentError(f"--dtype {name}: there are {', '.join(DTYPES)}")


def _peers(text: str) -> tuple[str, ...]:
    from hal.bench.peers import PEERS
    from hal.errors import ArgumentError

    names = tuple(name for name in text.split(",") if name)
    strange = sorted(set(names) - set(PEERS))
    if strange:
        raise ArgumentError(f"--against {text}: no peer is named {', '.join(strange)}; there are {', '.join(PEERS)}")
    return names


def _measured(
    ops: tuple[str, ...],
    where: object,
    dtype: str,
    suite: str,
    match: str,
    peers: tuple[str, ...],
    implementations: tuple[str | None, ...],
) -> Record:
    import torch

    from hal.bench.comparison import compare
    from hal.bench.record import Record, matrix_rate
    from hal.bench.workload import workloads
    from hal.descriptor import describe
    from hal.errors import ArgumentError, UnsupportedError

    assert isinstance(where, torch.device)
    wanted = [w for w in workloads(suite) if (not ops or w.op.name in ops) and match in w.name]
    if not wanted:
        raise ArgumentError("no workload is left by these operators and --match; `hal bench --help` tells of both")
    kind = getattr(torch, dtype)
    record = Record(describe(where).name, dtype, matrix_rate(where, kind))
    for workload in wanted:
        line(workload.name, "dim", stderr=True)
        try:
            record.rows += compare(workload, where, kind, implementations, peers, record.flops_per_us)
        except (UnsupportedError, torch.OutOfMemoryError) as error:
            record.left_out[workload.name] = str(error).splitlines()[0]
    return record


def _show(record: Record) -> None:
    from hal.bench.comparison import COPY, DIFFERENCE

    rows = table(f"{record.device}, {record.dtype}: µs a call, medians")
    rows.add_column("workload")
    for name in ("by", "device", "10 to 90 %", "host", "floor", "share", "peer"):
        rows.add_column(name, justify="left" if name == "by" else "right")
    for workload in record.workloads:
        best = record.best_peer(workload)
        for row in record.of(workload):
            own = row.candidate.startswith("hal/")
            rows.add_row(
                workload if row is record.of(workload)[0] else "",
                row.candidate + (f" (differs by {row.difference:.0e})" if (row.difference or 0) > DIFFERENCE else ""),
                f"{row.device_us:.1f}" + ("" if row.how == "graph" else f" {row.how}"),
                f"{row.low_us:.1f} {row.high_us:.1f}",
                "" if row.host_us is None else f"{row.host_us:.1f}",
                f"{row.floor_us:.1f}" if own and row.floor_us is not None else "",
                f"{row.share:.0%}" if row.candidate != COPY and row.share is not None else "",
                f"{best.device_us / row.device_us:.2f} {best.candidate}" if own and best is not None else "",
                style="bold" if own else "",
            )
    console().print(rows)
    for name, why in record.left_out.items():
        line(f"left out: {name}: {why}", "yellow")
