"""What the commands share: consoles, JSON output, errors as one clear message with exit status 2."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import sys
from typing import Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from hal.errors import ArgumentError, HalError

COULD_NOT_RUN = 2
UNREAD = 141  # nobody reads on, as in `hal ops | head -1`: what a shell says of a program that SIGPIPE ended
# Off a terminal rich assumes 80 columns, which cuts case ids; a pipe has no width.
_PIPE_WIDTH = 200


def console(stderr: bool = False) -> Console:
    """A console for the present streams (tests replace them)."""
    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() else _PIPE_WIDTH
    return Console(file=stream, width=width, highlight=False, markup=False, emoji=False)


def print_json(value: Any) -> None:
    """Write a value as JSON on stdout, escaped where the stream's encoding has no such character."""
    text = json.dumps(value, indent=2, ensure_ascii=False, default=str)
    try:
        text.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:
        text = json.dumps(value, indent=2, default=str)
    typer.echo(text)


def table(title: str | None = None) -> Table:
    """An empty table in the house style."""
    return Table(title=title, title_justify="left", header_style="bold", box=None, pad_edge=False, padding=(0, 1, 0, 0))


def line(text: str, style: str = "", stderr: bool = False) -> None:
    """One line, wrapped by the terminal alone, so that it can be copied."""
    console(stderr).print(Text(text, style=style), soft_wrap=True)


def torch_device(text: str, used: bool = False) -> Any:
    """The torch device of --device; ArgumentError for none such, or with `used` for one that cannot hold a tensor."""
    import torch

    try:
        device = torch.device(text)
        if used:
            torch.empty(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError, ImportError) as error:
        why = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ArgumentError(f"--device {text}: {why}; 'hal devices' lists this machine's devices") from None
    return device


def open_streams() -> None:
    """Make both streams take whatever is printed: a closed one swallows it, an ASCII one shows ? for the rest."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115  (for the process's life)
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


class Group(typer.core.TyperGroup):
    """A group whose commands' HalErrors are printed as one message, with exit status 2."""

    def invoke(self, ctx: Any) -> Any:
        try:
            try:
                return super().invoke(ctx)
            finally:
                sys.stdout.flush()  # here, where a full disk can still be told of
        except OSError as error:
            if isinstance(error, HalError):
                line(f"{type(error).__name__}: {error}", "red", stderr=True)
            else:
                if error.errno != errno.EPIPE:
                    line(f"{type(error).__name__}: {error}", "red", stderr=True)
                with contextlib.suppress(OSError):  # what could not be written must not fail once more at exit
                    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
                if error.errno == errno.EPIPE:
                    raise typer.Exit(UNREAD) from None
            raise typer.Exit(COULD_NOT_RUN) from None
        except HalError as error:
            line(f"{type(error).__name__}: {error}", "red", stderr=True)
            raise typer.Exit(COULD_NOT_RUN) from None
        except KeyboardInterrupt:
            line("interrupted", "red", stderr=True)
            raise typer.Exit(COULD_NOT_RUN) from None
