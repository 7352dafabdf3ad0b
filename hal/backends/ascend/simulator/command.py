"""`hal simulate ascend`: run a program on the simulated CANN, or print the constraints that it checks."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated

import typer

from hal.backends.ascend.simulator import constraints, launch, settings
from hal.backends.ascend.simulator.settings import SimulatorSettings
from hal.errors import ArgumentError

__all__ = ["run"]

NAME = "hal simulate ascend"

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="markdown")

Option = typer.Option


@app.command(
    context_settings={"help_option_names": ["-h", "--help"], "allow_interspersed_args": False},
)
def simulate(
    command: Annotated[list[str] | None, typer.Argument(metavar="-- COMMAND …", help="The program to run.")] = None,
    soc: Annotated[str | None, Option(help="Chip: 310P3, 910B1 … 910B4, A3 or 910_9391 …, 950PR.")] = None,
    cann: Annotated[str | None, Option(help="CANN version to report; torch_npu chooses operators by it.")] = None,
    devices: Annotated[str | None, Option(help="How many devices.")] = None,
    memory: Annotated[str | None, Option(help="Memory of each device, such as 4GiB.")] = None,
    numerics: Annotated[str | None, Option(help="exact, or perturbed: as a device may compute.")] = None,
    strict: Annotated[bool | None, Option("--strict/--no-strict", help="Check documented constraints.")] = None,
    trace: Annotated[str | None, Option(help="File for each call, copy and synchronisation (JSON lines).")] = None,
    list_constraints: Annotated[bool, Option("--constraints", help="Print the constraints; run nothing.")] = False,
    as_json: Annotated[bool, Option("--json", help="Print them as JSON.")] = False,
) -> None:
    """Run a program that uses torch_npu on a simulated CANN: Huawei's own torch_npu over host memory.

    It shows that calls are accepted and results used rightly; never a device's numerics or speed.
    Options that are left out come from ASCEND_SIM_SOC, _CANN, _DEVICES, _MEMORY, _NUMERICS, _STRICT, _TRACE.
    `python` is the interpreter that hal runs on. Exit status: the program's.

    Examples:

    - `hal simulate ascend -- python train.py`
    - `hal simulate ascend --soc 310P3 --numerics perturbed -- python -m pytest tests`
    - `hal simulate ascend --constraints`
    """
    if list_constraints:
        if command:
            raise ArgumentError("--constraints prints and runs nothing; leave out the command or the option")
        _print_constraints(as_json)
        return
    if as_json:
        raise ArgumentError("--json goes with --constraints alone; leave it out")
    if not command:
        raise ArgumentError(f"no command was given; write {NAME} [options] -- COMMAND …")
    given = {
        "soc": soc,
        "cann": cann,
        "devices": devices,
        "memory": memory,
        "numerics": numerics,
        "strict": None if strict is None else str(int(strict)),
        "trace": trace,
    }
    asked = SimulatorSettings.parse(given, lambda name: f"--{name}")
    inherited = settings.from_environment()
    simulated = replace(inherited, **{name: getattr(asked, name) for name, text in given.items() if text})
    sys.stderr.write(f"{simulated}; nothing of this runs on a device\n")
    sys.stderr.flush()
    launch.execute(simulated, command)


def _print_constraints(as_json: bool) -> None:
    rows = constraints.load()
    if as_json:
        typer.echo(json.dumps([row.to_dict() for row in rows], indent=2, ensure_ascii=False))
        return
    for row in rows:
        limits = [*([f"CANN {row.cann}"] if row.cann else []), *sorted(row.socs or ())]
        where = f" [{', '.join(limits)}]" if limits else ""
        typer.echo(f"{', '.join(row.operators)}: {row.rule}{where} ({row.enforced_by}; page {row.page})")


def run(arguments: Sequence[str]) -> int:
    """Run the command line `arguments`; what returns has run no program."""
    app(list(arguments), prog_name=NAME, standalone_mode=False)
    return 0
