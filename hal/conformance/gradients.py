"""Gradients under the same rules: what a case with `grad=yes` expects, and how it is judged.

Y is the float64 autograd of the reference's oracle; the baseline is the float32 autograd of the reference with the
roundings that the implementation declares; the candidate is called through the public op under autograd. The
gradients of the results are drawn from the case's seed, so that an id alone gives them back. A gradient is named d_q
after its argument q.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from hal import arithmetic
from hal.accuracy import Accumulator, unit_roundoff
from hal.capability import Declares
from hal.conformance import rules
from hal.conformance.candidate import Outcome, Target
from hal.conformance.case import Case
from hal.conformance.inputs import Draft, Draw, Guarded, Inputs, Results, clone, guard, poisoned
from hal.conformance.judge import Trial
from hal.conformance.recent import Recent
from hal.conformance.rules import Expected
from hal.conformance.subject import Subject, subject
from hal.contract import Args, Op
from hal.errors import TransformError

__all__ = [
    "GradientSubject",
    "GradientTrial",
    "bounded_gradients",
    "gradient_subject",
    "oracle_gradients",
    "recent",
]

# Ops whose rows of a fixed result (no visible key, padding, an ignored target) pass nothing on, whatever comes in.
SILENT = frozenset({"attention", "attention_varlen", "cross_entropy"})


class GradientSubject(Subject):
    """The gradients that a case expects. lse: whether the optional result gets a gradient too."""

    def __init__(self, case: Case, lse: bool) -> None:
        super().__init__(case)
        self.wanted = tuple(name for name in self.op.grad if _differentiable(getattr(self.args, name)))
        self.results: Subject = subject(case)
        self.upstream = self._drawn(lse)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the gradients."""
        return tuple(f"d_{name}" for name in self.wanted)

    def dtypes(self) -> tuple[torch.dtype, ...]:
        """A gradient has the dtype of its argument."""
        return tuple(getattr(self.args, name).dtype for name in self.wanted)

    def silent(self) -> tuple[Tensor | None, ...]:
        """Per result, where its gradient has no influence."""
        exact, others = self.op.accuracy.exact, (None,) * (len(self.op.results) - 1)
        if self.op.name not in SILENT or exact is None:
            return None, *others
        return exact(self.args, self.results.oracle)[0], *others

    def _drawn(self, lse: bool) -> tuple[Tensor | None, ...]:
        draw = Draw(self.case.seed)
        found: list[Tensor | None] = []
        told = zip(self.op.results, self.results.dtypes(), self.results.oracle, self.silent(), strict=True)
        for at, (name, dtype, y, silent) in enumerate(told):
            optional = self.op.optional_result is not None and at == len(self.op.results) - 1
            if at and (y.shape == (0,) or (optional and not lse)):  # an absent result, or one that takes no gradient
                found.append(None)
                continue
            grad = draw.normal(f"d_{name}", y.shape).to(dtype)
            found.append(grad if silent is None else grad.masked_fill(silent.expand(y.shape), 0.0))
        return tuple(found)

    def _bounded(self, u_p: float) -> tuple[Expected, ...]:
        Y, results = self.oracle, self.results.oracle
        return bounded_gradients(
            self.op, self.args, self.wanted, self.upstream, results, Y, u_p, self.case.dtype, self.draft.unused
        )

    def vacuous(self) -> tuple[str, str] | None:
        """R6, as for results."""
        for want in self.expected(Declares()):
            why = rules.vacuous(want, self.op.accuracy.free_share)
            if why is not None:
                return want.name, why
        return None

    def _run(self, mode: str, p_dtype: torch.dtype | None) -> Results:
        if mode == "oracle":
            return oracle_gradients(self.op, self.args, self.wanted, self.upstream, self.case.dtype)
        run = functools.partial(arithmetic.baseline, p_dtype)
        return _differentiated(self.op, clone(vars(self.args)), self.wanted, self.upstream, run)


def oracle_gradients(
    op: Op, a: Args, wanted: Sequence[str], upstream: Sequence[Tensor | None], dtype: str
) -> tuple[Tensor, ...]:
    """Gradients of the arguments `wanted`, float64, given one (or None) of each result; `dtype` is the call's."""
    arguments = clone(vars(a))
    for name in wanted:
        arguments[name] = arguments[name].double()
    run = functools.partial(arithmetic.oracle_of, getattr(torch, dtype))
    return _differentiated(op, arguments, wanted, upstream, run)


def _differentiated(
    op: Op,
    arguments: dict[str, Any],
    wanted: Sequence[str],
    upstream: Sequence[Tensor | None],
    run: Callable[..., Any],
) -> tuple[Tensor, ...]:
    leaves = [arguments[name].requires_grad_() for name in wanted]
    with torch.enable_grad():
        outs = op.outs(Args(**arguments), run(op.reference, **arguments))
        pairs = [(y, grad.to(y.dtype)) for y, grad in zip(outs, upstream, strict=True) if grad is not None]
        found = torch.autograd.grad([y for y, _ in pairs], leaves, [grad for _, grad in pairs], allow_unused=True)
    return tuple(torch.zeros_like(t) if d is None else d for t, d in zip(leaves, found, strict=True))


def bounded_gradients(
    op: Op,
    a: Args,
    wanted: Sequence[str],
    upstream: Sequence[Tensor | None],
    results: Results,
    Y: Results,
    u_p: float,
    dtype: str,
    unused: Mapping[str, Tensor],
) -> tuple[Expected, ...]:
    """Each of the oracle's gradients Y with the bound E that the contract derives; `results` are the oracle's too."""
    bound = op.accuracy.gradient_bound
    assert bound is not None, f"{op.name} has gradients and no gradient_bound"
    wide = torch.float64 if dtype == "float64" else torch.float32
    widened = Args(**{name: _double(value) for name, value in vars(a).items()})
    acc = Accumulator(unit_roundoff(wide), u_p, op.meta(a)[0].dtype)
    grads = tuple(None if grad is None else grad.double() for grad in upstream)
    if op.name == "cross_entropy":  # its loss is float32 whatever the logits are
        acc = replace(acc, dtype=getattr(torch, dtype))
    bounds = dict(zip(op.grad, bound(widened, results, grads, acc), strict=True))
    expected = []
    for name, y in zip(wanted, Y, strict=True):
        e = bounds[name]
        assert e is not None, f"{op.name} bounds no gradient of {name}"
        e = e.double().expand(y.shape)
        exact = (y == 0) & (e == 0)
        if name in unused:
            exact = exact | (unused[name].expand(y.shape) & (y == 0))
        expected.append(Expected(f"d_{name}", getattr(a, name).dtype, y, e, exact, None, wide))
    return tuple(expected)


recent: Recent[GradientSubject] = Recent(4)  # several implementations are judged in turn


def gradient_subject(case: Case, lse: bool) -> GradientSubject:
    """The subject of a case's gradients; `lse`: with a gradient of the lse."""
    return recent.get((case.id, lse), lambda: GradientSubject(case, lse))


@dataclass
class _Asked(Inputs):
    """Inputs, with a gradient (or None) of each result."""

    upstream: tuple[Tensor | None, ...] = ()


class GradientTrial(Trial):
    """One judgement of gradients under way.

    Declared properties are about results: here run_to_run holds bit for bit, other layouts agree under R1.
    """

    closeness = rules.GRADIENT
    subject: GradientSubject

    def __init__(self, case: Case, target: Target, device: torch.device) -> None:
        super().__init__(case, target, device)
        self.subject = gradient_subject(case, target.declares.lse_grad)
        self.draft = self.subject.draft

    def place(self, poison: str | None, draft: Draft | None = None, layouts: dict[str, str] | None = None) -> _Asked:
        inputs = super().place(poison, draft, layouts)
        grads: list[Tensor | None] = []
        layout = "contiguous" if layouts is None else "stepped"
        for name, grad, silent in zip(
            self.subject.op.results, self.subject.upstream, self.subject.silent(), strict=True
        ):
            held: Guarded | None = None
            if grad is not None:
                unused = None if silent is None or poison is None else silent.expand(grad.shape)
                held = guard(f"the gradient of {name}", poisoned(grad, unused, poison or "nan"), layout, self.device)
                inputs.guarded.append(held)
            grads.append(None if held is None else held.view)
        return _Asked(inputs.args, inputs.clean, inputs.guarded, inputs.draft, tuple(grads))

    def ask(self, inputs: Inputs, byte: int = 0xFF, names: tuple[str, ...] | None = None) -> Outcome:
        assert isinstance(inputs, _Asked)
        wanted = self.subject.wanted if names is None else names
        outcome = self.target.differentiate(inputs.args, wanted, inputs.upstream, byte)
        if outcome.results is None:
            return outcome
        missing = [name for name, d in zip(wanted, outcome.results, strict=True) if d is None]
        for name in missing:
            shape = tuple(inputs.args[name].shape)
            self.score.find("R8", f"d_{name} is None, but should have shape {shape}", f"d_{name}")
        return replace(outcome, results=None) if missing else outcome

    @property
    def unused(self) -> tuple[str, ...]:
        grads = zip(self.subject.op.results, self.subject.upstream, self.subject.silent(), strict=True)
        silent = (name for name, grad, mask in grads if grad is not None and mask is not None and bool(mask.any()))
        return *super().unused, *(f"the gradient of {name}" for name in silent)

    def more(self, y: Results, expected: tuple[Expected, ...]) -> None:
        self._again(y, expected)
        self._strided(y, expected)
        for names in _subsets(self.subject.wanted):
            self._alone(names, y, expected)
        self._into_lse()

    def _alone(self, names: tuple[str, ...], y: Results, expected: tuple[Expected, ...]) -> None:
        """A gradient is right whatever others are asked for: another call, so other bits within the bound."""
        inputs = self.place(self.subject.family.poison(self.case))
        outcome = self.ask(inputs, 0x7F, names)
        what = f" when asked for the gradients of {', '.join(names)} alone"
        if outcome.error is not None:
            self.score.find("R8", f"{self.target.name} fails{what}: {type(outcome.error).__name__}: {outcome.error}")
        if outcome.results is None:
            return
        at = [self.subject.wanted.index(name) for name in names]
        part = tuple(y[i] for i in at), tuple(expected[i] for i in at)
        self._agree(outcome, *part, False, "", what.strip())

    def _agree(
        self, outcome: Outcome, y: Results, expected: tuple[Expected, ...], declared: bool, name: str, what: str
    ) -> None:
        super()._agree(outcome, y, expected, declared and name == "run_to_run", name, what)

    def _into_lse(self) -> None:
        """R8: a gradient into an optional result raises, unless the implementation declares that it takes one."""
        op, args = self.subject.op, self.subject.args
        if op.optional_result is None or not getattr(args, op.optional_result):
            return
        if self.target.declares.lse_grad or not self.target.registered:
            return
        inputs = self.place(None)
        shape, dtype = self.subject.results.oracle[-1].shape, self.subject.results.dtypes()[-1]
        upstream = (*inputs.upstream[:-1], torch.ones(shape, dtype=dtype, device=self.device))
        outcome = self.target.differentiate(inputs.args, self.subject.wanted, upstream)
        if not isinstance(outcome.error, TransformError):
            told = "nothing was raised" if outcome.error is None else f"{type(outcome.error).__name__} was raised"
            self.score.find(
                "R8",
                f"{self.target.name} does not declare lse_grad: a gradient into {op.results[-1]} should raise "
                f"TransformError, but {told}",
                op.results[-1],
            )

    def contiguous(self, y: Tensor) -> bool:
        """Autograd may leave the gradients of a bare function in any layout; the dispatcher's are contiguous."""
        return y.is_contiguous() or self.target.implementation is None


def _subsets(names: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """Every choice of some but not all: of many, each alone and each left out."""
    sizes = range(1, len(names)) if len(names) < 4 else (1, len(names) - 1)
    for size in sizes:
        yield from itertools.combinations(names, size)


def _differentiable(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _double(value: Any) -> Any:
    return value.double() if _differentiable(value) else value
