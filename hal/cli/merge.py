"""`hal conformance merge`: the reports of a run's shards, made into one."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def merge(
    reports: Annotated[list[Path], typer.Argument(metavar="REPORT…", help="The shards' JSON reports.")],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="PATH", help="Write the whole report here.")],
) -> None:
    """Join the JSON reports of a run's shards into one, as if the run had not been shared out.

    Waivers are judged anew on the whole. A shard that is missing leaves the report incomplete.

    Exit status: that of the whole run; 2 too for reports that are no shards of one run.

    Example: `hal conformance merge one.json two.json -o all.json`
    """
    from hal import files
    from hal.cli.conformance import show
    from hal.conformance.report import read_report
    from hal.conformance.shards import merge as join

    files.check_writable(output)
    whole = join([read_report(path) for path in reports])
    whole.write(output)
    show(whole)
    raise typer.Exit(whole.exit_status())
