"""A mutant: one implementation with one fault, and the tools to write it on top of the reference."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from hal.capability import Declares, Implementation
from hal.conformance.cases._family import DTYPES, HALVES
from hal.contract import OPS, Args
from hal.recording import recompute

__all__ = ["DTYPES", "HALVES", "Candidate", "Mutant", "after", "asked", "before", "differentiated", "each", "one",
           "reference", "weaker", "written"]  # fmt: skip

Candidate = Implementation | Callable[..., Any]
Fault = Callable[[str], Candidate]
Graded = Callable[[str, float], Candidate]
Arguments = dict[str, Any]
Gradients = list[Tensor | None]


@dataclass(frozen=True)
class Mutant:
    """One fault in one operator.

    name: what is wrong, in words. convention: the convention that it breaks, a key of `conventions.CONVENTIONS`.
    make: the candidate. Of a graded fault it takes the strength, and `strength` is the weakest that must be seen.
    gradient: the fault is in the backward pass. form: it is one that R8 alone sees, a crash or a result of the wrong
    form; any other mutant that R8 alone rejects is broken, not caught. invisible: dtypes in which no case can show it,
    with the derivation.
    """

    op: str
    name: str
    convention: str
    make: Callable[[float], Candidate]
    strength: float | None = None
    gradient: bool = False
    form: bool = False
    invisible: Mapping[str, str] = field(default_factory=dict)

    def candidate(self, strength: float | None = None) -> Candidate:
        """The faulty implementation, at its own strength unless told another."""
        return self.make(1.0 if self.strength is None else strength or self.strength)


def each(
    ops: str | Iterable[str],
    name: str,
    convention: str,
    fault: Fault,
    *,
    gradient: bool = False,
    form: bool = False,
    invisible: Mapping[str, str] | None = None,
) -> list[Mutant]:
    """The same fault in several operators."""
    listed = (ops,) if isinstance(ops, str) else tuple(ops)
    return [
        Mutant(op, name, convention, functools.partial(_plain, fault, op), None, gradient, form, invisible or {})
        for op in listed
    ]


def weaker(
    ops: str | Iterable[str],
    name: str,
    convention: str,
    fault: Graded,
    strength: float,
    *,
    gradient: bool = False,
    invisible: Mapping[str, str] | None = None,
) -> list[Mutant]:
    """The same graded fault in several operators; `strength` is the weakest that the suite must see."""
    listed = (ops,) if isinstance(ops, str) else tuple(ops)
    return [
        Mutant(op, name, convention, functools.partial(fault, op), strength, gradient, invisible=invisible or {})
        for op in listed
    ]


def _plain(fault: Fault, op: str, strength: float) -> Candidate:
    return fault(op)


def reference(op: str) -> Callable[..., Any]:
    """The honest implementation."""
    return OPS[op].reference


def after(op: str, change: Callable[[Any, Arguments], Any]) -> Candidate:
    """The reference with its result changed; `change` gets the result and the arguments."""

    @functools.wraps(reference(op))
    def call(*args: Any, **kwargs: Any) -> Any:
        a = vars(OPS[op].bind(args, kwargs))
        return change(reference(op)(**a), a)

    return call


def before(op: str, change: Callable[[Arguments], Arguments]) -> Candidate:
    """The reference with its arguments changed; `change` gives the new values of some."""

    @functools.wraps(reference(op))
    def call(*args: Any, **kwargs: Any) -> Any:
        a = dict(vars(OPS[op].bind(args, kwargs)))
        return reference(op)(**(a | change(a)))

    return call


def _backward(op: str, backward: Callable[..., Any], **declares: Any) -> Implementation:
    return Implementation(op, "mutant", reference(op), declares=Declares(**declares), backward=backward)


def differentiated(op: str, change: Callable[[Gradients, Args, tuple[Tensor | None, ...]], Gradients]) -> Candidate:
    """The reference's gradients, changed."""

    def backward(a: Args, outs: dict[str, Tensor], grads: Any, needs: tuple[bool, ...]) -> tuple[Tensor | None, ...]:
        return tuple(change(list(recompute(OPS[op], a, grads, needs)), a, grads))

    return _backward(op, backward, lse_grad=True)


def asked(op: str, **changes: Any) -> Candidate:
    """The reference's gradients of a call with other arguments."""

    def backward(a: Args, outs: dict[str, Tensor], grads: Any, needs: tuple[bool, ...]) -> tuple[Tensor | None, ...]:
        return recompute(OPS[op], Args(**vars(a) | changes), grads, needs)

    return _backward(op, backward, lse_grad=True)


def one(name: str, op: str, change: Callable[[Tensor, Args], Tensor | None]) -> Candidate:
    """The gradient of one argument, changed."""
    at = OPS[op].grad.index(name)

    def changed(found: Gradients, a: Args, grads: Any) -> Gradients:
        d = found[at]
        found[at] = None if d is None else change(d, a)
        return found

    return differentiated(op, changed)


def written(op: str, formula: Callable[[Args, Any], tuple[Tensor | None, ...]], **declares: Any) -> Candidate:
    """Gradients by a formula of the arguments and the gradients of the results."""

    def backward(a: Args, outs: dict[str, Tensor], grads: Any, needs: tuple[bool, ...]) -> tuple[Tensor | None, ...]:
        found = formula(a, grads)
        return tuple(d if need else None for d, need in zip(found, needs, strict=True))

    return _backward(op, backward, **declares)
