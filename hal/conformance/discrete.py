"""Rules for results that are not approximate: copies bit for bit, quantised codes, keep sets and drawn ids.

Shape letters: B rows, V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from hal.accuracy import Accumulator, growth, unit_roundoff
from hal.capability import Declares
from hal.conformance import rules
from hal.conformance.inputs import Results
from hal.conformance.rules import Expected, Score

if TYPE_CHECKING:
    from hal.conformance.subject import Subject

__all__ = ["loosened", "sampled", "vacuous", "written"]


def written(score: Score, expected: tuple[Expected, ...], y: Results, quotients: dict[str, Tensor]) -> None:
    """Copies and cache writes: equal bits; codes: equal, or adjacent where value / scale is next to a tie."""
    score.rules.add("R1")
    for want, got in zip(expected, y, strict=True):
        Y = want.Y.to(got.dtype)
        ratio = quotients.get(want.name)
        where = want.judged
        if ratio is not None:
            where = where & ~_adjacent(got, Y, ratio)
        if rules.bitwise(score, "R1", want.name, got, Y, "as written by the contract", where):
            score.use(0.0)


def _adjacent(y: Tensor, Y: Tensor, ratio: Tensor) -> Tensor:
    """Where y is the code on the other side of a tie that value / scale cannot be told from.

    A quotient that float32 holds exactly is told from any tie, and from the other side of its own.
    """
    eps = unit_roundoff(torch.float32)
    slack = 2 * eps * ratio.abs()
    got, want = y.double(), Y.double()
    middle = (got + want) / 2
    one_step = (got - want).abs() <= (1.0 if y.dtype is torch.int8 else _step(want, got))
    rounds = ratio.float().double() != ratio
    return ratio.isfinite() & rounds & one_step & ((ratio - middle).abs() <= slack)


def _step(a: Tensor, b: Tensor) -> Tensor:
    """The larger of the two spacings of fp8 e4m3fn around two values: 2⁻³ of the binade, 2⁻⁹ below the normals."""
    top = torch.maximum(a.abs(), b.abs())
    return torch.where(top >= 2.0**-6, torch.pow(2.0, top.clamp(min=2.0**-6).log2().floor() - 3), 2.0**-9)


def sampled(score: Score, subject: Subject, expected: tuple[Expected, ...], y: Results) -> None:
    """Probabilities: exact keep sets, R1 on what is kept; ids: within the bound of the oracle's best score."""
    if subject.op.name == "top_k_top_p_sample":
        _drawn(score, subject, expected[0], y[0])
    else:
        _kept(score, subject, expected[0], y[0])


def _filtered(subject: Subject) -> tuple[Tensor, Tensor, Tensor]:
    from hal.ops.sampling import filtered

    a = subject.args
    kept = filtered(a.logits.double(), a.temperature, a.top_k, a.top_p, a.min_p)
    return kept.score_BV, kept.keep_BV, kept.doubt_BV


def loosened(subject: Subject, expected: tuple[Expected, ...]) -> tuple[Expected, ...]:
    """What another path of the same call may answer: open in rows where rounding decides what is kept.

    A token within rounding of p or of min-p may be kept on one path and dropped on another, which moves the whole row.
    """
    if subject.op.accuracy.rule != "sampling":
        return expected
    score_BV, _, doubt_BV = _filtered(subject)
    open_B = (doubt_BV <= _slack(subject, score_BV)).any(-1)
    found = []
    for want in expected:
        rows = open_B.reshape(-1, *[1] * (want.Y.dim() - 1)).expand(want.Y.shape)
        found.append(replace(want, open=rows if want.open is None else want.open | rows))
    return tuple(found)


def _slack(subject: Subject, score_BV: Tensor) -> Tensor:
    """How far from p, or from min-p, float32 may put a token."""
    acc = Accumulator(unit_roundoff(torch.float64 if subject.case.dtype == "float64" else torch.float32))
    return growth(score_BV.shape[1], acc) + 2 * acc.eps * (1 + score_BV.abs())


def _kept(score: Score, subject: Subject, want: Expected, y_BV: Tensor) -> None:
    score.rules.add("R4")
    score_BV, keep_BV, doubt_BV = _filtered(subject)
    open_BV = doubt_BV <= _slack(subject, score_BV)
    got_BV = y_BV > 0
    # Underflow: a kept token whose probability is below float32's smallest number may read 0.
    tiny_BV = keep_BV & (torch.finfo(torch.float32).smallest_normal > want.Y)
    wrong = (got_BV != keep_BV) & ~open_BV & ~tiny_BV
    if wrong.any():
        row, token = (int(i) for i in wrong.nonzero()[0])
        told = "is dropped, but should be kept" if keep_BV[row, token] else "is kept, but should be dropped"
        score.find(
            "R4",
            f"probs[{row},{token}] = {float(y_BV[row, token]):.6g}: token {token} {told} ({int(wrong.sum())} tokens)",
            "probs",
        )
        return
    # A token in doubt may be kept or not; the others renormalise by what this result chose.
    chosen_BV = torch.where(open_BV, got_BV, keep_BV)
    mass_BV = torch.where(chosen_BV, score_BV, float("-inf")).exp()
    Y = mass_BV / mass_BV.sum(-1, keepdim=True)
    E = Y * (_slack(subject, score_BV) + unit_roundoff(torch.float32) * (1 + score_BV.abs()))
    judged = Expected(want.name, want.dtype, Y, torch.where(Y > 0, E, 0.0), ~chosen_BV, want.open, want.accumulator)
    rules.special_values(score, judged, y_BV)
    rules.element_bound(score, judged, y_BV, Declares())


class _Drawn(NamedTuple):
    """How ids compare with the best ones: share_B of the allowance used, 0 for the best and inf for what is dropped."""

    share_B: Tensor
    gap_B: Tensor
    allowed_B: Tensor
    best_B: Tensor
    dropped_B: Tensor


def _compared(subject: Subject, want: Expected, id_B: Tensor) -> _Drawn:
    """Ids, all of them in the vocabulary, by what they score."""
    from hal.ops.sampling import gumbel

    a = subject.args
    score_BV, keep_BV, doubt_BV = _filtered(subject)
    noise_BV = gumbel(a.seed, a.logits, torch.float64)
    # A token in doubt may be kept or not; whatever the choice, the drawn one beats all that are kept for sure.
    open_BV = doubt_BV <= _slack(subject, score_BV)
    may_BV = keep_BV | open_BV
    mass_B1 = torch.where(keep_BV, score_BV, float("-inf")).logsumexp(-1, keepdim=True)
    log_p_BV = torch.where(may_BV, score_BV, float("-inf")) - mass_B1
    eps = unit_roundoff(torch.float64 if subject.case.dtype == "float64" else torch.float32)
    total_BV = log_p_BV + noise_BV
    bound_BV = 2 * eps * (2 + torch.where(may_BV, log_p_BV, 0.0).abs() + noise_BV.abs())
    best_B = torch.where(keep_BV & ~open_BV, total_BV, float("-inf")).argmax(-1)
    at_B = id_B[:, None]
    gap_B = total_BV.gather(-1, best_B[:, None])[:, 0] - total_BV.gather(-1, at_B)[:, 0]
    allowed_B = rules.C * (bound_BV.gather(-1, best_B[:, None])[:, 0] + bound_BV.gather(-1, at_B)[:, 0])
    kept_B = may_BV.gather(-1, at_B)[:, 0]
    share_B = torch.where(gap_B > 0, gap_B / allowed_B, 0.0)
    share_B = torch.where(kept_B, share_B, float("inf"))
    share_B = torch.where(share_B.isnan() & (id_B != want.Y.long()), float("inf"), share_B.nan_to_num(0.0, math.inf))
    return _Drawn(share_B, gap_B, allowed_B, best_B, ~kept_B)


def _drawn(score: Score, subject: Subject, want: Expected, id_B: Tensor) -> None:
    score.rules.add("R1")
    vocabulary = subject.args.logits.shape[1]
    if bool(((id_B < 0) | (id_B >= vocabulary)).any()):
        row = int(((id_B < 0) | (id_B >= vocabulary)).nonzero()[0])
        score.find("R4", f"ids[{row}] = {int(id_B[row])}, but should lie in 0 … {vocabulary - 1}", "ids")
        return
    found = _compared(subject, want, id_B)
    if id_B.numel():
        score.use(float(found.share_B.max()))
    wrong = found.share_B > 1
    if wrong.any():
        row = int(found.share_B.argmax())
        why = f"its score is lower by {float(found.gap_B[row]):.4g}, more than {float(found.allowed_B[row]):.3g}"
        if found.dropped_B[row]:
            why = "the filters drop it"
        score.find(
            "R1",
            f"ids[{row}] = {int(id_B[row])}, but should be {int(found.best_B[row])}: {why} ({int(wrong.sum())} rows)",
            "ids",
        )


def vacuous(subject: Subject) -> tuple[str, str] | None:
    """R6: the result on which a call that does nothing, or a shuffled result, would pass, and why; None if none would.

    A case tagged empty is one in which nothing is to be done.
    """
    if "empty" in subject.case.tags:
        return None
    share = subject.op.accuracy.free_share
    if subject.op.mutates:
        told = zip(subject.names, subject.oracle, subject.before, strict=True)
        found = ((name, _idle(name, Y, held, share)) for name, Y, held in told)
        return next(((name, why) for name, why in found if why is not None), None)
    want = subject.expected(Declares())[0]
    why = _any_id(subject, want, share) if subject.op.name == "top_k_top_p_sample" else _level(want, share)
    return None if why is None else (want.name, why)


def _idle(name: str, Y: Tensor, held: Tensor, share: float) -> str | None:
    """Of a written tensor: whether it would do to leave it as it was, or to write the same values elsewhere."""
    Y, held = (t.float() if t.element_size() == 1 else t for t in (Y.to(held.dtype), held))
    changed = rules.different(Y, held)
    if not changed.any():
        return f"a call that leaves {name} as it was would pass"
    vectors = changed.any(-1)
    same = float((~changed[vectors]).double().mean())
    if same > share:
        return f"a call that leaves {name} as it was would pass on {same:.0%} of what is written"
    written = Y[vectors].flatten()
    if written.numel() < rules.FEW:
        return None
    shuffled = float((~rules.different(rules.shuffled(written), written)).double().mean())
    return f"shuffled values would pass on {shuffled:.0%} of what is written to {name}" if shuffled > share else None


def _level(want: Expected, share: float) -> str | None:
    """Of probabilities: whether it would do to give each token that of the one before."""
    rounding, bound = want.allowance(Declares())
    same_BV = (want.Y.roll(1, -1) - want.Y).abs() <= rounding + bound
    passed = float(same_BV.all(-1).double().mean())
    return f"rotated tokens would pass in {passed:.0%} of the rows of {want.name}" if passed > share else None


def _any_id(subject: Subject, want: Expected, share: float) -> str | None:
    """Of drawn ids: whether it would do to draw 0 everywhere, or to shuffle the rows."""
    id_B = want.Y.long()
    tried = {"zeros": torch.zeros_like(id_B)}
    if id_B.numel() >= rules.FEW:
        tried["shuffled rows"] = rules.shuffled(id_B)
    for what, ids in tried.items():
        passed = float((_compared(subject, want, ids).share_B <= 1).double().mean())
        if passed > share:
            return f"{what} would pass in {passed:.0%} of the {id_B.numel()} rows of {want.name}"
    return None
