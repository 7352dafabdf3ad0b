"""The command line: `hal devices | ops | explain | doctor | conformance | bench | warmup | generate`."""

from __future__ import annotations

from typing import Annotated

import typer

import hal
from hal.cli import bench, bundles, conformance, devices, doctor, explain, ops, simulate, warmup
from hal.cli._console import Group, open_streams
from hal.cli.generate import generate

__all__ = ["app", "main"]

app = typer.Typer(
    name="hal",
    cls=Group,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"torch-hal {hal.__version__}")
        raise typer.Exit


Version = Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")]


@app.callback()
def root(version: Version = False) -> None:
    """LLM operators on PyTorch, one meaning on every backend.

    The backend is chosen by `HAL_BACKEND` (auto, cpu, `portable:<torch device>`, or a plug-in's name),
    implementations by `HAL_IMPL` (`attention=aten,rms_norm=reference`).

    Exit status: 0 all good, 1 something failed, 2 could not run.
    """


app.command("devices")(devices.devices)
app.command("ops")(ops.ops)
app.command("explain")(explain.explain)
app.command("doctor")(doctor.doctor)
bundles.mount(conformance.app)
app.add_typer(conformance.app, name="conformance")
app.command("bench")(bench.bench)
app.command("warmup")(warmup.warmup)
app.command("generate")(generate)
app.command("simulate", context_settings=simulate.CONTEXT)(simulate.simulate)


def main() -> None:
    """Entry point of the `hal` command."""
    open_streams()
    app()
