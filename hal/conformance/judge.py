"""The judge: one case, one implementation, one verdict, by rules R1 to R6 and R8."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hal import errors
from hal.capability import Implementation, Rejected
from hal.conformance import discrete, rules
from hal.conformance.candidate import Outcome, Target
from hal.conformance.case import Case
from hal.conformance.inputs import Draft, Inputs, Results, Variant, place
from hal.conformance.replay import graph_of, replayed
from hal.conformance.rules import Expected, Score
from hal.conformance.subject import Subject, p_dtype, subject
from hal.conformance.variants import restrict
from hal.conformance.verdict import Finding, Rule, Status, Verdict
from hal.contract import OPS, Args

__all__ = ["Finding", "Rule", "Status", "Trial", "Verdict", "judge"]


def judge(
    case: Case,
    implementation: Implementation | Callable[..., Any],
    device: str | torch.device = "cpu",
    *,
    backend: str | None = None,
) -> Verdict:
    """Judge `implementation` on `case`.

    A registered Implementation is called through the public op with the choice forced to (`backend`, its
    name); one that is not registered, or a bare callable with the op's public signature, is called directly.
    Never raises for what the implementation does: a crash is a finding.
    """
    import hal.ops  # noqa: F401  (fills OPS)

    start = time.perf_counter()
    device = torch.device(device)
    target = Target.of(OPS[case.op], implementation, backend)
    trial = _trial(case, target, device)
    trial.run()
    seconds = time.perf_counter() - start
    score = trial.score
    broken = {finding.rule for finding in score.findings}
    status = trial.status or ("passed" if not broken else "mistrusted" if broken == {"R6"} else "failed")
    return Verdict(
        case_id=case.id,
        op=case.op,
        dtype=case.dtype,
        implementation=target.name,
        device=str(device),
        status=status,
        findings=tuple(score.findings),
        reasons=trial.reasons,
        budget=score.budget,
        c_max=None if score.budget is None else score.budget * rules.C,
        r2=score.r2,
        r3=score.r3,
        rules=tuple(sorted(score.rules)),
        seconds=seconds,
    )


def _trial(case: Case, target: Target, device: torch.device) -> Trial:
    if not case.gradient:
        return Trial(case, target, device)
    from hal.conformance.gradients import GradientTrial

    return GradientTrial(case, target, device)


class Trial:
    """One judgement under way."""

    closeness = rules.FORWARD

    def __init__(self, case: Case, target: Target, device: torch.device) -> None:
        self.case, self.target, self.device = case, target, device
        self.subject: Subject = subject(case)
        self.draft: Draft = self.subject.draft
        self.score = Score(case.id)
        self.status: Status | None = None
        self.reasons: tuple[str, ...] = ()
        self.settings = {"check": True} if self.draft.raises is not None else {}

    def run(self) -> None:
        if self.draft.raises is not None:
            self._bad_input()
            return
        try:
            inputs = self.place(self.subject.family.poison(self.case))
        except (RuntimeError, TypeError, NotImplementedError) as error:  # no float64, no fp8, …
            self.status, self.reasons = "unsupported", (f"{self.device} cannot hold the inputs: {_line(error)}",)
            return
        answer = self.target.answer(Args(**vars(self.subject.op.bind((), inputs.args))), self.device)
        if isinstance(answer, Rejected):
            self._rejected(inputs, answer)
            return
        if self.target.declares.saturates and self.subject.special:
            self.status, self.reasons = (
                "unsupported",
                ("the device saturates Inf and NaN, as the implementation declares",),
            )
            return
        outcome = self.call(inputs)
        if outcome.results is None:
            return
        expected = self.subject.expected(self.target.declares)
        y = tuple(t.cpu() for t in outcome.results)
        if not self._forms(inputs, outcome.results, expected):
            return
        before = len(self.score.findings)
        self._values(expected, y, inputs)
        if len(self.score.findings) > before and self.unused:
            self._blame_poison(expected, before)
        if len(self.score.findings) > before:
            return  # what follows would only repeat it
        self.more(y, expected)

    def more(self, y: Results, expected: tuple[Expected, ...]) -> None:
        """R5: the same question asked in other ways."""
        self._again(y, expected)
        self._strided(y, expected)
        for variant in self.draft.variants:
            self._variant(variant, y, expected)
        self._replayed(y, expected)

    @property
    def unused(self) -> tuple[str, ...]:
        """Names of the tensors that hold poison."""
        return tuple(self.draft.unused)

    def ask(self, inputs: Inputs, byte: int = 0xFF) -> Outcome:
        """One call of the candidate."""
        return self.target.run(inputs.args, byte, **self.settings)

    def place(self, poison: str | None, draft: Draft | None = None, layouts: dict[str, str] | None = None) -> Inputs:
        return place(draft or self.draft, self.device, poison, self.subject.op.host_lengths, layouts)

    def call(self, inputs: Inputs, byte: int = 0xFF, what: str = "") -> Outcome:
        """A call, with R5's look at memory and R8's at exceptions."""
        return self._looked_at(self.ask(inputs, byte), inputs, what)

    def _looked_at(self, outcome: Outcome, inputs: Inputs, what: str) -> Outcome:
        if outcome.error is not None:
            name = type(outcome.error).__name__
            told = (
                "accepts the request but refuses the call"
                if isinstance(outcome.error, errors.UnsupportedError)
                else "accepts the request but fails"
            )
            self.score.find("R8", f"{self.target.name} {told}{what}: {name}: {_line(outcome.error)}")
        self.score.rules.add("R5")
        for text in (*inputs.damage(self.subject.op.mutates), *outcome.damage):
            self.score.find("R5", text + what)
        return outcome

    def contiguous(self, y: Tensor) -> bool:
        """Whether a result lies in memory as it must."""
        return y.is_contiguous()

    def _forms(self, inputs: Inputs, found: Results, expected: tuple[Expected, ...]) -> bool:
        self.score.rules.add("R8")
        if len(found) != len(expected):
            self.score.find("R8", f"{len(found)} results, but should be {len(expected)}")
            return False
        good = [rules.same_form(self.score, want, y) for want, y in zip(expected, found, strict=True)]
        if self.subject.op.mutates or not all(good):
            return all(good)
        regions = [(held.name, _region(held.buffer)) for held in inputs.guarded]
        for want, y in zip(expected, found, strict=True):
            if y.device.type != self.device.type:
                self.score.find("R8", f"{want.name} is on {y.device}, but should be on {self.device}", want.name)
            if not self.contiguous(y):
                self.score.find("R8", f"{want.name} has strides {y.stride()}, but should be contiguous", want.name)
            low, high = _region(y)
            for name, (start, end) in regions:
                if y.numel() and low < end and start < high:
                    self.score.find("R5", f"{want.name} shares memory with the input {name}", want.name)
        return True

    def _values(self, expected: tuple[Expected, ...], y: Results, inputs: Inputs) -> None:
        """R1 to R4 and R6 on each result, by the op's own rule."""
        rule = self.subject.op.accuracy.rule
        if rule in ("bitwise", "codes") or self.subject.op.mutates:
            discrete.written(self.score, expected, y, self.draft.quotients)
        elif rule == "sampling":
            discrete.sampled(self.score, self.subject, expected, y)
        else:
            self._close(expected, y)
        self.score.rules.add("R6")
        empty_claim = self.subject.vacuous()
        if empty_claim is not None:
            self.score.find("R6", f"the case proves little: {empty_claim[1]}", empty_claim[0])

    def _close(self, expected: tuple[Expected, ...], y: Results) -> None:
        """R1 to R4 on results that are approximate."""
        for i, (want, got) in enumerate(zip(expected, y, strict=True)):
            if not want.dtype.is_floating_point:
                rules.bitwise(self.score, "R4", want.name, got, want.Y.to(got.dtype), "as the oracle's", want.judged)
                continue
            rules.special_values(self.score, want, got)
            rules.element_bound(self.score, want, got, self.target.declares)
            if want.dtype in rules.SIXTEEN and want.Y.numel() >= rules.ENOUGH:
                b = self.subject.baseline(p_dtype(self.target.declares, self.case.dtype))[i]
                rules.against_baseline(self.score, want, got, b, self.closeness)
                rules.bias(self.score, want, got, b)

    def _blame_poison(self, expected: tuple[Expected, ...], before: int) -> None:
        """If the failure goes away with zeros for poison, it is the poison's: R5."""
        inputs = self.place(None)
        outcome = self.ask(inputs)
        if outcome.results is None:
            return
        trial = Score(self.case.id)
        held, self.score = self.score, trial
        try:
            if self._forms(inputs, outcome.results, expected):
                self._values(expected, tuple(t.cpu() for t in outcome.results), inputs)
        finally:
            self.score = held
        if not trial.findings:
            poison = self.subject.family.poison(self.case)
            where = ", ".join(self.unused)
            for i in range(before, len(self.score.findings)):
                found = self.score.findings[i]
                text = f"poison ({poison}) in unused parts of {where} leaks: {found.message}"
                self.score.findings[i] = Finding("R5", text, found.result)

    def _again(self, y: Results, expected: tuple[Expected, ...]) -> None:
        """The same call in memory that held something else: the same bits; with other poison in the inputs: R1."""
        poison = self.subject.family.poison(self.case)
        outcome = self.call(self.place(poison), 0x7F, " in a second call")
        self._agree(outcome, y, expected, self.target.declares.run_to_run, "run_to_run", "as in the first call")
        if self.unused:
            other = "huge" if poison != "huge" else "nan"
            what = f" with {other} for poison"
            outcome = self.call(self.place(other), 0xFF, what)
            self._agree(outcome, y, expected, False, "", "as" + what)

    def _strided(self, y: Results, expected: tuple[Expected, ...]) -> None:
        """The same values in another layout."""
        if set(self.draft.layouts.values()) - {"contiguous"}:
            layouts: dict[str, str] = {}
        else:
            layouts = self.subject.family.other_layouts(self.case, self.draft)
        if not layouts and not self.draft.layouts:
            return
        inputs = self.place(self.subject.family.poison(self.case), layouts=layouts)
        names = ", ".join(f"{name} {kind}" for name, kind in layouts.items()) or "contiguous inputs"
        what = f" with {names}"
        outcome = self.call(inputs, 0xFF, what)
        self._agree(outcome, y, expected, self.target.declares.stride_invariant, "stride_invariant", "as" + what[5:])

    def _agree(
        self, outcome: Outcome, y: Results, expected: tuple[Expected, ...], declared: bool, name: str, what: str
    ) -> None:
        if outcome.results is None:
            return
        found = tuple(t.cpu() for t in outcome.results)
        wants = expected if declared else discrete.loosened(self.subject, expected)
        told = f"{what} ({name} is declared)" if declared else what
        for want, first, second in zip(wants, y, found, strict=True):
            if rules.same_form(self.score, want, second):
                self._same(want, first, second, declared, told)

    def _same(
        self, want: Expected, first: Tensor, second: Tensor, bitwise: bool, what: str, extra: Tensor | float = 0.0
    ) -> None:
        """R5 on a result of two calls: the same bits; where they are not asked for and there is a bound, within it."""
        if bitwise or want.E is None:
            rules.bitwise(self.score, "R5", want.name, second, first, what, want.judged)
            return
        rules.special_values(self.score, want, second, "R5", f" {what}")
        rules.element_bound(self.score, want, second, self.target.declares, "R5", extra, f" {what}")

    def _replayed(self, y: Results, expected: tuple[Expected, ...]) -> None:
        """The call as a graph that was captured at other lengths, where the device has graphs."""
        declares = self.target.declares
        graph = graph_of(self.device) if declares.capturable and not declares.host_lengths else None
        if graph is None:
            return
        inputs = self.place(self.subject.family.poison(self.case))
        what = " as a graph captured at other lengths"
        outcome = self._looked_at(replayed(self.target, graph, inputs), inputs, what)
        self._agree(outcome, y, expected, False, "", what.strip())

    def _variant(self, variant: Variant, y: Results, expected: tuple[Expected, ...]) -> None:
        parts: list[Results] = []
        for arguments in variant.calls:
            # Laid out as the main call: a declared property is about what the variant changes, not about strides.
            inputs = self.place(None, Draft(dict(arguments), layouts=self.draft.layouts))
            answer = self.target.answer(Args(**vars(self.subject.op.bind((), inputs.args))), self.device)
            if isinstance(answer, Rejected):
                return  # a detour through a request of another kind, which has cases of its own
            outcome = self.call(inputs, 0xFF, f" in the variant {variant.name!r}")
            if outcome.results is None:
                return
            parts.append(tuple(t.cpu() for t in outcome.results))
        got = variant.combine(parts)
        extra = variant.extra(parts) if variant.extra is not None else (0.0,) * len(got)
        declared = variant.declared is not None and bool(getattr(self.target.declares, variant.declared))
        main, where = variant.expects(y), f"in the variant {variant.name!r}"
        wants = restrict(expected if declared else discrete.loosened(self.subject, expected), variant)
        for want, first, second, more in zip(wants, main, got, extra, strict=True):
            if tuple(second.shape) != tuple(want.Y.shape):
                self.score.find(
                    "R5",
                    f"{want.name} has shape {tuple(second.shape)} in the variant {variant.name!r}, "
                    f"but should have {tuple(want.Y.shape)}",
                    want.name,
                )
            else:
                told = f"{where} ({variant.declared} is declared)" if declared else where
                self._same(want, first, second, declared, told, more)

    def _rejected(self, inputs: Inputs, answer: Rejected) -> None:
        """R8: a request that the capabilities refuse must raise UnsupportedError when forced."""
        self.reasons = answer.reasons
        self.status = "unsupported"
        self.score.rules.add("R8")
        if not self.target.registered:
            return
        outcome = self.target.run(inputs.args, **self.settings)
        if isinstance(outcome.error, errors.UnsupportedError):
            if not str(outcome.error):
                self.status = "failed"
                self.score.find("R8", "UnsupportedError has no message")
            return
        self.status = "failed"
        got = "it ran" if outcome.error is None else f"it raised {type(outcome.error).__name__}: {_line(outcome.error)}"
        self.score.find(
            "R8",
            f"{self.target.name} rejects the request ({'; '.join(answer.reasons)}) and should raise "
            f"UnsupportedError, but {got}",
        )

    def _bad_input(self) -> None:
        """A call that the contract forbids must raise its typed error, before anything is computed."""
        self.score.rules.add("R8")
        if not self.target.registered:
            self.status, self.reasons = "skipped", ("the dispatcher refuses bad input; this call passes it by",)
            return
        inputs = self.place(None)
        outcome = self.target.run(inputs.args, **self.settings)
        wanted = getattr(errors, self.draft.raises or "HalError")
        if isinstance(outcome.error, errors.UnsupportedError) and (refused := self._refusal(inputs)):
            # Selection comes before values are looked at: what an implementation does not take it need not examine.
            self.status, self.reasons = "unsupported", refused
            return
        if outcome.error is None:
            self.score.find("R8", f"bad input was accepted, but should raise {wanted.__name__}")
        elif not isinstance(outcome.error, wanted):
            self.score.find(
                "R8",
                f"bad input raised {type(outcome.error).__name__}: {_line(outcome.error)}, but should "
                f"raise {wanted.__name__}",
            )
        elif missing := [word for word in self.draft.mentions if word not in str(outcome.error)]:
            self.score.find("R8", f"the error does not mention {', '.join(missing)}: {_line(outcome.error)}")
        if outcome.allocations:
            self.score.find("R8", f"bad input was refused only after {outcome.allocations} allocations")
        for text in inputs.damage():
            self.score.find("R5", text)

    def _refusal(self, inputs: Inputs) -> tuple[str, ...]:
        """Why the implementation does not take a request, bad values aside; empty if it does."""
        try:
            answer = self.target.answer(Args(**vars(self.subject.op.bind((), inputs.args))), self.device)
        except errors.HalError:
            return ()
        return answer.reasons if isinstance(answer, Rejected) else ()


def _region(t: Tensor) -> tuple[int, int]:
    start = t.untyped_storage().data_ptr()
    return start, start + t.untyped_storage().nbytes()


def _line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [""])[0][:300]
