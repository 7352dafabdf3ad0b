"""Whether the results of any call, or its gradients, agree with the oracle's on the same inputs: R1 and R4, no case."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hal import arithmetic
from hal.capability import Declares
from hal.conformance import rules
from hal.conformance.gradients import bounded_gradients, oracle_gradients
from hal.conformance.inputs import Results, clone
from hal.conformance.rules import Expected, Score
from hal.conformance.subject import bounded, results
from hal.contract import Args, Op

__all__ = ["agreement", "gradient_agreement"]


def agreement(op: Op, a: Args, found: Results, declares: Declares) -> Score:
    """Score the results of a call by R4 and R1, the oracle computed on the device where the arguments lie.

    For operators that are judged by a bound and write nothing. `budget` is the largest share of R1's budget used.
    """
    dtypes = [meta.dtype for meta in op.meta(a)[: len(op.results)]]
    expected = bounded(op, a, op.results, dtypes, _oracle(op, a), _u_p(op, a, declares), {})
    return _scored(op, expected, found, declares)


def gradient_agreement(
    op: Op,
    a: Args,
    upstream: Sequence[Tensor | None],
    found: Sequence[Tensor | None],
    declares: Declares,
) -> Score:
    """Score the gradients of a call, one or None for each differentiable argument, given one or None of each result."""
    wanted = [name for name, gradient in zip(op.grad, found, strict=True) if gradient is not None]
    dtype = op.traits(a).dtype
    Y = oracle_gradients(op, a, wanted, upstream, dtype)
    expected = bounded_gradients(op, a, wanted, upstream, _oracle(op, a), Y, _u_p(op, a, declares), dtype, {})
    return _scored(op, expected, tuple(gradient for gradient in found if gradient is not None), declares)


def _oracle(op: Op, a: Args) -> Results:
    arguments = clone(vars(a))
    with torch.no_grad():
        return results(op, arguments, arithmetic.oracle(op.reference, **arguments))


def _u_p(op: Op, a: Args, declares: Declares) -> float:
    return float(declares.u_p.get(op.traits(a).dtype, 0.0))


def _scored(op: Op, expected: Sequence[Expected], found: Results, declares: Declares) -> Score:
    score = Score(op.name)
    for want, y in zip(expected, found, strict=True):
        if rules.same_form(score, want, y) and y.numel():
            rules.special_values(score, want, y)
            rules.element_bound(score, want, y, declares)
    return score
