"""Registers operators that come in many versions, whose long argument lists are subsets of one another."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from hal.backends.ascend.simulator.operators import operator

__all__ = ["refuse", "version"]


def version(name: str, arguments: str, function: Callable[..., None]) -> None:
    """Register `name` with arguments `letter:parameter …`, in order; `function` takes them by name."""
    pairs = [argument.split(":") for argument in arguments.split()]
    names = [parameter for _, parameter in pairs]

    def call(*values: Any) -> None:
        function(**dict(zip(names, values, strict=True)))

    call.__qualname__ = function.__qualname__
    call.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [inspect.Parameter(parameter, inspect.Parameter.POSITIONAL_OR_KEYWORD) for parameter in names]
    )
    operator(name, "".join(letter for letter, _ in pairs))(call)


def refuse(arguments: dict[str, Any]) -> None:
    """Refuse a call that gives what is not simulated. Raises NotImplementedError that names it."""
    given = [name for name, value in arguments.items() if value is not None and value != []]
    if given:
        raise NotImplementedError(f"{', '.join(given)}: not simulated")
