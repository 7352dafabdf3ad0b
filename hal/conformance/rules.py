"""The accuracy rules on one result: R1 element bound, R2 against the baseline, R3 bias, R4 special values, R6.

y is the candidate's result in its own dtype, Y the oracle's in float64 (unrounded), E the derived bound. All
tensors are on the CPU. A rule returns findings; the figures go into a `Score`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache

import torch
from torch import Tensor

from hal import philox
from hal.accuracy import unit_roundoff
from hal.capability import Declares
from hal.conformance.verdict import Finding, Rule

C = 4.0  # R1
FORWARD = 1.2  # R2
GRADIENT = 1.5  # R2
BIAS = 0.3  # R3
HONEST_BIAS = 0.1  # R3: what honest rounding shows
ENOUGH = 1000  # R2 and R3: elements
FEW = 8  # R6: with fewer elements, a shuffled result may be the same by chance
SIXTEEN = (torch.bfloat16, torch.float16)


@dataclass
class Score:
    """Figures and findings of a verdict in the making."""

    case_id: str
    findings: list[Finding] = field(default_factory=list)
    budget: float | None = None
    r2: float | None = None
    r3: float | None = None
    rules: set[Rule] = field(default_factory=set)

    def find(self, rule: Rule, message: str, result: str = "") -> None:
        """Record a broken rule."""
        self.findings.append(Finding(rule, f"{message} [{self.case_id}]", result))

    def use(self, share: float) -> None:
        """Record a share of R1's budget."""
        self.budget = share if self.budget is None else max(self.budget, share)


@dataclass(frozen=True)
class Expected:
    """One result of the oracle and how to judge it.

    exact: True where the contract fixes the value; open: True where it leaves the value open.
    """

    name: str
    dtype: torch.dtype
    Y: Tensor
    E: Tensor | None
    exact: Tensor | None = None
    open: Tensor | None = None
    accumulator: torch.dtype = torch.float32

    @property
    def judged(self) -> Tensor:
        """Where the value is not open."""
        return torch.ones_like(self.Y, dtype=torch.bool) if self.open is None else ~self.open

    @property
    def free(self) -> Tensor:
        """Where the value is judged, and not fixed by the contract."""
        return self.judged if self.exact is None else self.judged & ~self.exact

    def allowance(self, declares: Declares) -> tuple[Tensor, Tensor]:
        """u_out|Y| + ω, and 4E."""
        info = torch.finfo(self.dtype)
        omega = info.smallest_normal if declares.flushes_subnormals else info.smallest_normal * info.eps / 2
        if self.accumulator is torch.float32:
            omega += 2.0**-126
        rounding = unit_roundoff(self.dtype) * self.Y.abs() + omega
        return rounding, C * (torch.zeros_like(self.Y) if self.E is None else self.E)


def same_form(score: Score, expected: Expected, y: Tensor) -> bool:
    """Shape and dtype, without which nothing else can be judged."""
    if tuple(y.shape) != tuple(expected.Y.shape):
        score.find(
            "R8",
            f"{expected.name} has shape {tuple(y.shape)}, but should have {tuple(expected.Y.shape)}",
            expected.name,
        )
        return False
    if y.dtype != expected.dtype:
        score.find(
            "R8",
            f"{expected.name} has dtype {_short(y.dtype)}, but should have {_short(expected.dtype)}",
            expected.name,
        )
        return False
    return True


def special_values(score: Score, expected: Expected, y: Tensor, rule: Rule = "R4", what: str = "") -> None:
    """R4: NaN and Inf where the rounded oracle has them, and the values that the contract fixes."""
    score.rules.add(rule)
    rounded = expected.Y.to(expected.dtype)
    info = torch.finfo(expected.dtype)
    ulp = info.max * info.eps / 2
    size = expected.Y.abs()
    # For float64 the upper end is itself Inf: an infinite Y has no finite neighbour.
    edge = (size >= info.max - ulp) & (size <= info.max + 1.5 * ulp) & size.isfinite()
    wrong = y.isnan() != rounded.isnan()
    wrong |= ((y.isinf() | rounded.isinf()) & (y != rounded)) & ~y.isnan() & ~rounded.isnan() & ~edge
    _report(score, rule, expected, y, wrong & expected.judged, rounded, what)
    if expected.exact is not None:
        differs = (y != rounded) & ~(y.isnan() & rounded.isnan()) & ~wrong
        _report(score, rule, expected, y, differs & expected.exact & expected.judged, rounded, " exactly" + what)


def element_bound(
    score: Score,
    expected: Expected,
    y: Tensor,
    declares: Declares,
    rule: Rule = "R1",
    extra: Tensor | float = 0.0,
    what: str = "",
) -> bool:
    """R1: |y − Y| ≤ u_out|Y| + ω + 4E on every free, finite element. True if it holds."""
    score.rules.add(rule)
    rounding, bound = expected.allowance(declares)
    finite = expected.Y.isfinite() & y.isfinite() & expected.free
    if bound.isnan()[finite].any() or (bound < 0)[finite].any():
        score.find(
            "R6",
            f"the bound of {expected.name} is NaN or negative for finite elements: the contract is wrong",
            expected.name,
        )
        return False
    error = (y.double() - expected.Y).abs()
    excess = (error - rounding - extra).clamp_min(0)
    share = torch.where(excess > 0, excess / bound, 0.0)
    share = torch.where(finite, share, 0.0)
    if rule == "R1" and share.numel() and finite.any():
        score.use(float(share.max()))
    wrong = share > 1
    return _report(score, rule, expected, y, wrong, expected.Y, what, rounding + bound + extra, share)


def against_baseline(score: Score, expected: Expected, y: Tensor, b: Tensor, k: float = FORWARD) -> None:
    """R2: RMSE(y, Y) ≤ k(1 + 2/√N)·RMSE(b, Y) + u_out·RMS(Y)/8, for 16-bit results of 1,000 elements and more."""
    finite = expected.free & expected.Y.isfinite() & y.isfinite() & b.isfinite()
    n = int(finite.sum())
    if expected.dtype not in SIXTEEN or n < ENOUGH:
        return
    score.rules.add("R2")
    Y = expected.Y[finite]

    def rms(t: Tensor) -> float:
        return float(t.square().mean().sqrt())

    limit = k * (1 + 2 / n**0.5) * rms(b[finite].double() - Y) + unit_roundoff(expected.dtype) * rms(Y) / 8
    got = rms(y[finite].double() - Y)
    ratio = 0.0 if got == 0 else got / limit if limit else float("inf")
    score.r2 = max(score.r2 or 0.0, ratio)
    if ratio > 1:
        score.find(
            "R2",
            f"{expected.name} has an RMS error of {got:.4g}, but should have at most {limit:.4g}, "
            f"by the honest baseline, over {n} elements",
            expected.name,
        )


def bias(score: Score, expected: Expected, y: Tensor, b: Tensor) -> None:
    """R3: |Σ sgn(Y)(y − Y)| ≤ 0.3·Σ|y − Y|, for 16-bit and narrower results of 1,000 distinct |Y| and more.

    The limit rests on many roundings that are independent. So the rule says nothing where fewer than 1,000 results
    differ from the oracle's (one that the contract itself rounds is exact but for ties), nor where the honest baseline
    b has a bias above 0.1 itself (few distinct inputs, results next to the grid).
    """
    if expected.dtype.itemsize > 2:
        return
    finite = expected.free & expected.Y.isfinite() & y.isfinite() & b.isfinite()
    Y = expected.Y[finite]
    if Y.numel() < ENOUGH or Y.abs().unique().numel() < ENOUGH:
        return
    if int((y[finite].double() != Y).sum()) < ENOUGH or abs(_drift(b[finite], Y)) > HONEST_BIAS:
        return
    score.rules.add("R3")
    drift = _drift(y[finite], Y)
    score.r3 = max(score.r3 or 0.0, abs(drift))
    if abs(drift) > BIAS:
        way = "outward" if drift > 0 else "toward zero"
        score.find(
            "R3",
            f"{expected.name} errs {way}: bias {abs(drift):.3f} of the summed error, but should be at most {BIAS}",
            expected.name,
        )


def _drift(y: Tensor, Y: Tensor) -> float:
    error = y.double() - Y
    total = float(error.abs().sum())
    return float((Y.sign() * error).sum()) / total if total else 0.0


def vacuous(expected: Expected, share: float) -> str | None:
    """R6: why the case would let the zero tensor or a shuffled result pass, or None."""
    free = expected.free & expected.Y.isfinite()
    n = int(free.sum())
    if n == 0 or not expected.dtype.is_floating_point:
        return None
    rounding, bound = expected.allowance(Declares())
    allowed = (rounding + bound)[free]
    Y = expected.Y[free]
    zero = float((Y.abs() <= allowed).double().mean())
    if zero > share:
        return f"zeros would pass on {zero:.0%} of the {n} free elements of {expected.name}"
    if n >= FEW:
        passed = float(((shuffled(Y) - Y).abs() <= allowed).double().mean())
        if passed > share:
            return f"a shuffled result would pass on {passed:.0%} of the {n} free elements of {expected.name}"
    return None


def bitwise(
    score: Score, rule: Rule, name: str, y: Tensor, other: Tensor, what: str, where: Tensor | None = None
) -> bool:
    """Equal bits, but for the sign of zero and the payload of NaN. True if they are."""
    score.rules.add(rule)
    differs = different(y, other)
    if where is not None:
        differs &= where
    if not differs.any():
        return True
    at = _first(differs)
    score.find(
        rule,
        f"{_place(name, at)} = {_pair(y[at], other[at])} bit for bit {what} "
        f"({int(differs.sum())} of {differs.numel()} elements)",
        name,
    )
    return False


def different(y: Tensor, other: Tensor) -> Tensor:
    """Where two tensors of one dtype differ, the sign of zero and the payload of NaN aside."""
    if y.dtype.itemsize == 1 and y.is_floating_point():
        a, b = y.view(torch.uint8), other.view(torch.uint8)
        y, other = y.float(), other.float()
        return (a != b) & ~(y.isnan() & other.isnan()) & ~((y == 0) & (other == 0))
    differs = y != other
    if y.is_floating_point():
        differs &= ~(y.isnan() & other.isnan())
    return differs


def shuffled(t: Tensor) -> Tensor:
    """The values in another order along the first axis, always the same one."""
    return t[_shuffle(t.shape[0])]


@lru_cache(maxsize=8)
def _shuffle(n: int) -> Tensor:
    return philox.permutation(0, n)


def _report(
    score: Score,
    rule: Rule,
    expected: Expected,
    y: Tensor,
    wrong: Tensor,
    should: Tensor,
    what: str,
    allowed: Tensor | None = None,
    share: Tensor | None = None,
) -> bool:
    if not wrong.any():
        return True
    at = _first(wrong) if share is None else _worst(share)
    message = f"{_place(expected.name, at)} = {_pair(y[at], should[at])}"
    if allowed is not None:
        message += f" ± {float(allowed[at]):.3g}"
    message += f"{what} ({int(wrong.sum())} of {wrong.numel()} elements"
    if share is not None:
        message += f", {float(share[at]):.3g} times the budget"
    score.find(rule, message + ")", expected.name)
    return False


def _first(mask: Tensor) -> tuple[int, ...]:
    return tuple(int(i) for i in mask.nonzero()[0])


def _worst(share: Tensor) -> tuple[int, ...]:
    return tuple(int(i) for i in torch.unravel_index(share.argmax(), share.shape))


def _place(name: str, at: tuple[int, ...]) -> str:
    return f"{name}[{','.join(map(str, at))}]" if at else name


def _pair(y: Tensor, other: Tensor) -> str:
    """Both values, with the digits that it takes to tell them apart."""
    a, b = (t.item() if t.dtype.itemsize > 1 or not t.is_floating_point() else t.float().item() for t in (y, other))
    digits = next((n for n in (6, 9, 12) if f"{a:.{n}g}" != f"{b:.{n}g}"), 17) if isinstance(a, float) else 0
    if not digits:
        return f"{a}, but should be {b}"
    return f"{a:.{digits}g}, but should be {b:.{digits}g}"


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
