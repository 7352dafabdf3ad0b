"""`hal conformance kit`: pack the suite into one file for a machine where nothing may be installed."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hal.cli._console import line


def kit(
    output: Annotated[Path, typer.Option("--output", "-o", metavar="PATH", help="The kit to write.")] = Path(
        "hal-kit.pyz"
    ),
    python: Annotated[
        list[str] | None,
        typer.Option(metavar="3.N", help="A Python it must run on. Repeatable. Default: 3.10 to 3.12."),
    ] = None,
    machine: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="A processor it must run on. Repeatable. Default: x86_64, aarch64."),
    ] = None,
    wheels: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Folder with the compiled packages' wheels. Default: pip downloads them."),
    ] = None,
) -> None:
    """Write one file that judges a machine which has Python and torch, without installing anything there.

    `python hal-kit.pyz` on that machine, with no network, runs the quick suite on its native and portable backends,
    within ten minutes, and writes `hal-results.zip` (at most 20 MB) to send back.

    The compiled packages that hal needs are packed for each Python and processor; pip brings them unless --wheels
    names a folder that has them. Nothing else touches the network.

    Exit status: 0 written, 2 could not.

    Examples:

    - `hal conformance kit -o hal-kit.pyz`
    - `hal conformance kit --python 3.11 --machine aarch64 -o ascend-kit.pyz`
    """
    from hal.conformance.kit import MACHINES, PYTHONS, build

    made = build(output, tuple(python or PYTHONS), tuple(machine or MACHINES), wheels)
    line(f"wrote {made.path}, {made.size:,} bytes")
    pythons, machines = ", ".join(made.pythons), ", ".join(made.machines)
    line(f"runs on CPython {pythons}, on Linux with glibc on {machines}, with torch 2.10 or later")
