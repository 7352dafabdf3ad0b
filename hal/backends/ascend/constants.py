"""Tensors that calls of one size have in common: made once, and kept."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec

from torch import Tensor

from hal.host import capturing

__all__ = ["constant"]

P = ParamSpec("P")


def constant(make: Callable[P, Tensor]) -> Callable[P, Tensor]:
    """`make`, called once for each set of arguments (hashable, given by position).

    What is made while a graph is recorded is that graph's: its memory holds the value only once the graph has run,
    and no longer than the graph lives. So it is not kept. What is kept is never dropped: a graph may have its address.
    """
    kept: dict[object, Tensor] = {}

    @wraps(make)
    def get(*args: P.args, **kwargs: P.kwargs) -> Tensor:
        found = kept.get(args)
        if found is None:
            found = make(*args, **kwargs)
            if not capturing(found.device):
                kept[args] = found
        return found

    return get
