"""Trying a backend's tactics on real calls: each is checked against the oracle, timed, and the best is kept."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hal import dispatch, host
from hal.bench.device_time import device_times
from hal.conformance.agreement import agreement, gradient_agreement
from hal.contract import Args, BoundPlan, Op
from hal.errors import CaptureError, UnsupportedError
from hal.hookspec import Choice, Tuner

__all__ = ["Call", "Trial", "tune"]

# A tactic is kept for gains that outgrow what repeats of one measurement differ by.
GAIN = 0.98
Run = Callable[[], Any]


@dataclass(frozen=True)
class Trial:
    """One decision: the tactic that was in use, the one now, their microseconds, and what was refused and why.

    before_us is None where the tactic that was in use is among the refused.
    """

    choice: Choice
    before: str
    chosen: str
    before_us: float | None
    chosen_us: float
    refused: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Call:
    """A call of an operator, forward or its gradients, as it is tried."""

    op: Op
    arguments: dict[str, Any]
    backward: bool = False

    def run(self) -> Run:
        """The call, bound to a plan of its own."""
        plan, a = self._plan()
        if not self.backward:
            return torch.no_grad()(functools.partial(plan.call, **self.arguments))
        kept, grads, needs = self._kept(plan, a)
        return lambda: plan.backward(a, kept, grads, needs)

    def disagreement(self) -> str | None:
        """What is wrong under the tactics in force, by the oracle; None if nothing is.

        Operators that draw, or write, are compared by the conformance suite alone: the rows of a result that they
        leave open are not known here.
        """
        if self.op.accuracy.rule != "bound" or self.op.mutates:
            return None
        plan, a = self._plan()
        declares = plan.implementation.declares
        if not self.backward:
            with torch.no_grad():
                found = plan.call(**self.arguments)
            score = agreement(self.op, a, tuple(self.op.outs(a, found)), declares)
        else:
            kept, grads, needs = self._kept(plan, a)
            score = gradient_agreement(self.op, a, grads, plan.backward(a, kept, grads, needs), declares)
        return score.findings[0].message if score.findings else None

    def _plan(self) -> tuple[BoundPlan, Args]:
        a = self.op.bind((), self.arguments)
        return dispatch.new_plan(self.op, a), a

    def _kept(self, plan: BoundPlan, a: Args) -> tuple[dict[str, Tensor], tuple[Tensor | None, ...], tuple[bool, ...]]:
        """What a forward pass keeps for the gradients, a gradient for each result, and which are wanted."""
        op = self.op
        outs = plan.train(a)
        by_name = dict(zip((*op.results, *op.stats), outs, strict=True))
        grads: list[Tensor | None] = [torch.ones_like(out) for out in outs[: len(op.results)]]
        if op.optional_result is not None:
            grads[-1] = None  # not every implementation differentiates it
        wanted = tuple(isinstance(getattr(a, name), Tensor) for name in op.grad)
        return {name: by_name[name] for name in op.saves}, tuple(grads), wanted


def tune(call: Call, tuner: Tuner, device: torch.device) -> list[Trial]:
    """Try every tactic of every decision that this call makes, and keep the fastest that agrees with the oracle.

    Raises CaptureError inside a graph capture.
    """
    if host.capturing(device):
        raise CaptureError(f"{call.op.name} is not tuned inside a graph capture; tune before it (`hal warmup --tune`)")
    with tuner.watching() as choices:
        call.run()()
    return [_tried(call, tuner, device, choice) for choice in choices if len(choice.tactics) > 1]


def _tried(call: Call, tuner: Tuner, device: torch.device, choice: Choice) -> Trial:
    ready: dict[str, list[Run]] = {}
    refused: dict[str, str] = {}
    for tactic in choice.tactics:
        try:
            with tuner.using(choice, tactic):
                why = call.disagreement()
                run = call.run()
                run()
        except torch.OutOfMemoryError:  # of the oracle, which no tactic is to blame for
            raise
        except Exception as error:  # more registers or shared memory than there are: the compiler's own words
            why = f"{type(error).__name__}: {(str(error) or repr(error)).splitlines()[0]}"
        if why is None:
            ready[tactic] = [functools.partial(_using, tuner, choice, tactic, run)]
        else:
            refused[tactic] = why
    before = choice.tactics[0]
    times = {tactic: spread.median_us for tactic, spread in device_times(ready, device).items()}
    if not times:
        raise UnsupportedError(f"{choice.name} {choice.shape}: no tactic is right here: {refused}", {})
    best = min(times, key=lambda tactic: times[tactic])
    if before in times and times[best] > GAIN * times[before]:
        best = before
    if best != before:
        tuner.keep(choice, best)
    return Trial(choice, before, best, times.get(before), times[best], refused)


def _using(tuner: Tuner, choice: Choice, tactic: str, run: Run) -> Any:
    with tuner.using(choice, tactic):
        return run()
