"""Faults that any backward pass can have: empty inputs, strides, and what it must leave as it is."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor

from hal.conformance.mutants._gradient_changes import gradient
from hal.conformance.mutants.conventions import GRADIENTS
from hal.conformance.mutants.everywhere import as_dense, last_bit_of_the_last_element, tensors
from hal.conformance.mutants.mutant import Candidate, Gradients, Mutant, differentiated, written
from hal.contract import OPS, Args
from hal.recording import recompute

__all__ = ["MUTANTS"]


def _no_launch_of_nothing(op: str) -> Candidate:
    def check(found: Gradients, a: Args, grads: Any) -> Gradients:
        if any(t.numel() == 0 for t in tensors(vars(a))):
            raise RuntimeError("invalid configuration argument: a grid of 0 blocks")
        return found

    return differentiated(op, check)


def _incoming_as_dense(op: str) -> Candidate:
    def formula(a: Args, grads: Any) -> tuple[Tensor | None, ...]:
        return recompute(OPS[op], a, tuple(None if g is None else as_dense(g) for g in grads), _needs(op, a))

    return written(op, formula, lse_grad=True)


def _first_as_dense(op: str) -> Candidate:
    def formula(a: Args, grads: Any) -> tuple[Tensor | None, ...]:
        first = OPS[op].grad[0]
        told = Args(**vars(a) | {first: as_dense(getattr(a, first))})
        return recompute(OPS[op], told, grads, _needs(op, a))

    return written(op, formula, lse_grad=True)


def _needs(op: str, a: Args) -> tuple[bool, ...]:
    told = (getattr(a, name) for name in OPS[op].grad)
    return tuple(isinstance(t, Tensor) and t.is_floating_point() for t in told)


def _into_incoming(scribble: Callable[[Tensor], object], op: str) -> Candidate:
    def change(found: Gradients, a: Args, grads: Any) -> Gradients:
        for grad in grads:
            if grad is not None and grad.numel():
                scribble(grad)
        return found

    return differentiated(op, change)


def _into_first(scribble: Callable[[Tensor], object], op: str) -> Candidate:
    """Past autograd, as a kernel writes."""

    def change(found: Gradients, a: Args, grads: Any) -> Gradients:
        first = getattr(a, OPS[op].grad[0])
        if first.numel():
            scribble(first.data)
        return found

    return differentiated(op, change)


_WAYS: dict[str, Callable[[Tensor], object]] = {
    "{} is used as scratch": Tensor.zero_,
    "one bit of {} changes": last_bit_of_the_last_element,
}
_STAYS = [
    mutant
    for name, scribble in _WAYS.items()
    for what, fault in (("the incoming gradient", _into_incoming), ("the first input", _into_first))
    for mutant in gradient(GRADIENTS["inputs stay"], name.format(what), "inputs stay",
                           functools.partial(fault, scribble))
]  # fmt: skip

# A rotation is linear in q and k: its backward pass reads neither.
_READING = tuple(op for op in GRADIENTS["strides"] if op != "rotary_embedding")

MUTANTS: list[Mutant] = [
    *gradient(GRADIENTS["empty inputs"], "nothing cannot be launched", "empty inputs", _no_launch_of_nothing,
              form=True),
    *gradient(GRADIENTS["strides"], "the incoming gradient is taken to be dense", "strides", _incoming_as_dense),
    *gradient(_READING, "the first input is taken to be dense", "strides", _first_as_dense),
    *_STAYS,
]  # fmt: skip
