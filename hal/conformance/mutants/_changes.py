"""Changes of arguments and results of which faults of several operators are made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hal.conformance.mutants.mutant import Arguments, Candidate, after, before

__all__ = ["Step", "changed", "finite", "given", "same"]

Step = Callable[[Tensor], Tensor]


def same(t: Tensor) -> Tensor:
    return t


def changed(op: str, change: Callable[[Any, Arguments], Any]) -> Candidate:
    """The result changed; of rotary_embedding each of the two."""
    return after(
        op,
        lambda r, a: tuple(None if t is None else change(t, a) for t in r) if isinstance(r, tuple) else change(r, a),
    )


def given(**changes: Any) -> Callable[[str], Candidate]:
    """Arguments that are not heeded."""
    return lambda op: before(op, lambda a: changes)


def finite(a: Arguments) -> Arguments:
    name = "q" if "q" in a else "x"
    largest = torch.finfo(a[name].dtype).max
    return {name: a[name].clamp(-largest, largest)}
