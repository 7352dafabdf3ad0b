"""Prepared calls that are remembered by what they were prepared for: training's, which no plan of an operator keeps."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

from torch import Tensor

from hal.op import OPS, Args

__all__ = ["forget", "planned", "remembered", "signature"]

# A model has a few dozen shapes; past this many, all are forgotten rather than the oldest searched for.
MOST = 1024
_calls: dict[tuple[Any, ...], Callable[..., Any]] = {}


def forget() -> None:
    """Forget all prepared calls: what they were prepared with, a tactic, has changed; and in a forked child."""
    _calls.clear()


os.register_at_fork(after_in_child=forget)


def signature(value: Any) -> Any:
    """All that a prepared call may depend on: of a tensor what it is, but not what it holds."""
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype, value.device
    return value


def remembered(key: tuple[Any, ...], prepare: Callable[[], Callable[..., Any]]) -> Callable[..., Any]:
    """What was prepared for this key before, or now."""
    found = _calls.get(key)
    if found is None:
        if len(_calls) >= MOST:
            forget()
        found = _calls[key] = prepare()
    return found


def planned(op: str, prepare: Callable[[Args], Callable[..., Any]]) -> Callable[..., Any]:
    """A function of the operator's signature that prepares once for all calls that are alike."""
    contract = OPS[op]
    parameters = len(contract.signature.parameters)

    @functools.wraps(contract.reference)
    def call(*args: Any, **kwargs: Any) -> Any:
        if args or len(kwargs) < parameters:
            kwargs = vars(contract.bind(args, kwargs))
        key = (op, prepare, *map(signature, kwargs.values()))
        return remembered(key, lambda: prepare(Args(**kwargs)))(**kwargs)

    return call
