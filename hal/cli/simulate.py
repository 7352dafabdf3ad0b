"""`hal simulate NAME …`: hand over to the simulator that a backend brings."""

from __future__ import annotations

from typing import Annotated

import typer

CONTEXT = {"allow_extra_args": True, "ignore_unknown_options": True, "allow_interspersed_args": False}


def simulate(
    context: typer.Context,
    backend: Annotated[str, typer.Argument(metavar="BACKEND", help="Whose devices to simulate, such as ascend.")],
) -> None:
    """Run a program on simulated devices, where there are none.

    What follows the backend's name is its simulator's own command line: `hal simulate ascend --help`.
    Exit status: the program's, or 2 where it could not be started.

    Examples:

    - `hal simulate ascend -- python train.py`
    - `hal simulate ascend --soc 310P3 -- python -m pytest tests`
    """
    from hal import registry

    raise typer.Exit(registry.simulator(backend)(context.args))
