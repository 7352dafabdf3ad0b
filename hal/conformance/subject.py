"""What a case expects: the oracle's results, their bounds and the honest baseline, computed once on the CPU."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hal import arithmetic
from hal.accuracy import Accumulator, unit_roundoff
from hal.capability import Declares
from hal.conformance import discrete
from hal.conformance.case import Case
from hal.conformance.inputs import Draft, Results, clone
from hal.conformance.recent import Recent
from hal.conformance.rules import Expected, vacuous
from hal.contract import OPS, Args, Op

__all__ = ["Subject", "bounded", "recent", "subject"]


class Subject:
    """The draft of a case with everything that does not depend on the candidate."""

    def __init__(self, case: Case) -> None:
        from hal.conformance.cases import family

        self.case = case
        self.op: Op = OPS[case.op]
        self.family = family(case.op)
        self.draft: Draft = self.family.drafted(case)
        self.args = Args(**self.op.bind((), self.draft.args).__dict__)
        self._oracle: Results | None = None
        self._baselines: dict[torch.dtype | None, Results] = {}
        self._expected: dict[float, tuple[Expected, ...]] = {}
        self._weighed = False
        self._vacuous: tuple[str, str] | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the results; of the tensors that the op writes, where it has no results."""
        if not self.op.mutates:
            return self.op.results
        return tuple(name for name, _ in named(self.op, vars(self.args)))

    @property
    def before(self) -> Results:
        """The tensors that the op writes, as they are before the call."""
        return tuple(t for _, t in named(self.op, vars(self.args)))

    @property
    def oracle(self) -> Results:
        """Y of each result, float64 and unrounded (or the written tensors, in their own dtype)."""
        if self._oracle is None:
            self._oracle = self._run("oracle", None)
        return self._oracle

    def baseline(self, p_dtype: torch.dtype | None) -> Results:
        """The honest baseline's results, with the roundings that an implementation declares."""
        if p_dtype not in self._baselines:
            self._baselines[p_dtype] = self._run("baseline", p_dtype)
        return self._baselines[p_dtype]

    def dtypes(self) -> tuple[torch.dtype, ...]:
        """Dtype of each result."""
        if self.op.mutates:
            return tuple(t.dtype for _, t in named(self.op, vars(self.args)))
        return tuple(meta.dtype for meta in self.op.meta(self.args)[: len(self.op.results)])

    def expected(self, declares: Declares) -> tuple[Expected, ...]:
        """Each result with its bound E for an implementation that declares this u_p."""
        u_p = float(declares.u_p.get(self.case.dtype, 0.0))
        if u_p not in self._expected:
            self._expected[u_p] = self._bounded(u_p)
        return self._expected[u_p]

    def _bounded(self, u_p: float) -> tuple[Expected, ...]:
        return bounded(self.op, self.args, self.names, self.dtypes(), self.oracle, u_p, self.draft.unjudged)

    def vacuous(self) -> tuple[str, str] | None:
        """R6: the result on which zeros or a shuffled result would pass, and why; None for a case that proves."""
        if not self._weighed:
            self._weighed, self._vacuous = True, self._found_vacuous()
        return self._vacuous

    def _found_vacuous(self) -> tuple[str, str] | None:
        if "special" in self.case.tags or self.draft.raises is not None:
            return None
        if self.op.accuracy.rule != "bound" or self.op.mutates:
            return discrete.vacuous(self)
        for want in self.expected(Declares()):
            why = vacuous(want, self.op.accuracy.free_share)
            if why is not None:
                return want.name, why
        return None

    @property
    def special(self) -> bool:
        """Whether NaN or Inf goes in, where it has influence, or comes out (−Inf alone goes in by every mask)."""
        told = (v for v in vars(self.args).values() if isinstance(v, Tensor) and v.is_floating_point())
        goes_in = any(bool((t.isnan() | (t == math.inf)).any()) for t in told if t.dtype.itemsize > 1)
        rounded = (y.to(dtype) for y, dtype in zip(self.oracle, self.dtypes(), strict=True) if y.is_floating_point())
        return goes_in or any(bool((t.isnan() | (t == math.inf)).any()) for t in rounded if t.dtype.itemsize > 1)

    def _run(self, mode: str, p_dtype: torch.dtype | None) -> Results:
        arguments = clone(vars(self.args))
        with torch.no_grad():
            if mode == "oracle":
                public = arithmetic.oracle(self.op.reference, **arguments)
            else:
                public = arithmetic.baseline(p_dtype, self.op.reference, **arguments)
        return results(self.op, arguments, public)


def bounded(
    op: Op,
    a: Args,
    names: Sequence[str],
    dtypes: Sequence[torch.dtype],
    Y: Results,
    u_p: float,
    unjudged: Mapping[str, Tensor],
) -> tuple[Expected, ...]:
    """Each of the oracle's results Y with the bound E that the operator's contract derives for these arguments."""
    wide = torch.float64 if op.traits(a).dtype == "float64" else torch.float32
    accuracy = op.accuracy
    E: tuple[Tensor | None, ...] = (None,) * len(Y)
    widened = Args(**{name: _double(value) for name, value in vars(a).items()})
    if accuracy.bound is not None and not op.mutates:
        E = tuple(accuracy.bound(widened, Y, Accumulator(unit_roundoff(wide), u_p, dtypes[0])))
    exact = accuracy.exact(a, Y) if accuracy.exact is not None else (None,) * len(Y)
    return tuple(
        Expected(
            name,
            dtype,
            y,
            None if e is None else _like(e.double(), y),
            None if x is None else _like(x, y),
            unjudged.get(name),
            wide,
        )
        for name, dtype, y, e, x in zip(names, dtypes, Y, E, exact, strict=True)
    )


recent: Recent[Subject] = Recent(4)  # several implementations are judged in turn


def subject(case: Case) -> Subject:
    """The subject of a case."""
    return recent.get(case.id, lambda: Subject(case))


def named(op: Op, arguments: dict[str, Any]) -> list[tuple[str, Tensor]]:
    """The tensors that an op writes, with their names; lists are spelt out."""
    found: list[tuple[str, Tensor]] = []
    for name in op.mutates:
        value = arguments[name]
        if isinstance(value, list | tuple):
            found.extend((f"{name}[{i}]", t) for i, t in enumerate(value))
        elif value is not None:
            found.append((name, value))
    return found


def results(op: Op, arguments: dict[str, Any], public: Any) -> Results:
    """The results of a call as one tuple; the written tensors, for an op that has no results."""
    if op.mutates:
        return tuple(t for _, t in named(op, arguments))
    return tuple(op.outs(Args(**arguments), public))


def p_dtype(declares: Declares, dtype: str) -> torch.dtype | None:
    """The dtype whose unit roundoff the implementation declares for P, or None for no rounding."""
    u_p = float(declares.u_p.get(dtype, 0.0))
    for candidate in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        if u_p and unit_roundoff(candidate) == u_p:
            return candidate
    return None


def _like(t: Tensor, y: Tensor) -> Tensor:
    # An optional result that nobody asked for is (0,), whatever its bound's shape.
    return t.expand(y.shape) if y.numel() else torch.empty_like(y, dtype=t.dtype)


def _double(value: Any) -> Any:
    if isinstance(value, Tensor) and value.is_floating_point() and value.dtype.itemsize > 1:
        return value.double()  # fp8 tensors hold codes
    return [_double(item) for item in value] if isinstance(value, list) else value
