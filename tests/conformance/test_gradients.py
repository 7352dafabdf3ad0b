"""Gradients under the rules: honest backward passes pass, planted faults do not."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from hal import registry
from hal.capability import Declares, Implementation
from hal.conformance.case import Case, cases, find
from hal.conformance.cases import family
from hal.conformance.gradients import gradient_subject
from hal.conformance.judge import judge
from hal.conformance.mutants import gradients as mutants
from hal.conformance.mutants._plain_gradients import plain_gradients
from hal.conformance.mutants.mutant import differentiated, one, reference
from hal.conformance.verdict import Verdict
from hal.contract import OPS, Args
from hal.hookspec import hookimpl

DIFFERENTIABLE = sorted(op for op in OPS if OPS[op].grad)
EVERY = ("float64", "float32", "bfloat16", "float16")


def quick(op: str, *dtypes: str) -> list[Case]:
    return [case for case in cases(op) if case.gradient and (not dtypes or case.dtype in dtypes)]


def test_every_op_with_gradients_has_quick_cases_in_every_dtype_and_others_have_none() -> None:
    for op in OPS:
        assert {case.dtype for case in quick(op)} == (set(EVERY) if OPS[op].grad else set()), op


@pytest.mark.parametrize("backend", ["cpu", "portable:cpu"])
@pytest.mark.parametrize("op", DIFFERENTIABLE)
def test_honest_implementations_pass(op: str, backend: str) -> None:
    for case in quick(op):
        for candidate in registry.implementations(backend.partition(":")[0], op):
            verdict = judge(case, candidate, backend=backend)
            assert verdict.status in ("passed", "unsupported"), (case.id, candidate.name, verdict.findings)
            assert verdict.status == "unsupported" or {"R1", "R4", "R5", "R6", "R8"} <= set(verdict.rules)


HONEST = {
    "attention": plain_gradients()("attention"),
    "attention_varlen": plain_gradients()("attention_varlen"),
    "rms_norm": mutants.norm("rms_norm"),
    "add_rms_norm": mutants.norm("add_rms_norm"),
    "layer_norm": mutants.norm("layer_norm"),
    "silu_and_mul": mutants.gated("silu_and_mul"),
    "gelu_and_mul": mutants.gated("gelu_and_mul"),
    "softmax": mutants.softmax(),
    "rotary_embedding": mutants.rotary(),
    "linear": mutants.linear(),
    "cross_entropy": mutants.cross_entropy(),
}


@pytest.mark.parametrize("op", DIFFERENTIABLE)
def test_backward_passes_that_share_nothing_with_hal_pass(op: str) -> None:
    """What the mutants are made of, without a fault."""
    for case in quick(op):
        verdict = judge(case, HONEST[op])
        assert verdict.status == "passed", (case.id, verdict.findings)


def rejected(case: Case, candidate: Any, rule: str, message: str) -> Verdict:
    assert judge(case, reference(case.op)).status == "passed"
    verdict = judge(case, candidate)
    assert verdict.status == "failed"
    assert any(f.rule == rule and re.search(message, f.message) for f in verdict.findings), verdict.findings
    return verdict


def test_a_finding_names_the_gradient_and_the_case_alone_gives_it_back() -> None:
    case = quick("rms_norm", "float32")[0]
    assert "grad=yes" in case.id and find(case.id) == case
    message = r"^d_x\[\d+,\d+\] = \S+, but should be \S+ ± \S+ \(\d+ of \d+ elements, \S+ times the budget\)"
    rejected(case, one("x", "rms_norm", lambda d, a: d * 1.01), "R1", message)


def test_gradients_that_come_in_are_drawn_from_the_seed_bit_for_bit() -> None:
    case = quick("add_rms_norm", "bfloat16")[0]
    first, second = (type(gradient_subject(case, False))(find(case.id), False).upstream for _ in range(2))
    assert len(first) == 2
    for a, b in zip(first, second, strict=True):
        assert a is not None and b is not None and a.dtype is torch.bfloat16 and torch.equal(a, b)
    assert first[0] is not None and first[1] is not None and not torch.equal(first[0], first[1])


def test_a_gradient_that_autograd_leaves_out_is_a_finding() -> None:
    def detached(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
        return reference("linear")(x, weight, None if bias is None else bias.detach())

    rejected(quick("linear", "float32")[0], detached, "R8", r"^d_bias is None, but should have shape \(150,\)")


def test_a_call_that_is_not_differentiable_is_a_finding() -> None:
    def detached(x: Tensor, dim: int = -1) -> Tensor:
        return reference("softmax")(x.detach(), dim)

    rejected(quick("softmax", "float32")[0], detached, "R8", "accepts the request but fails: RuntimeError")


def test_R5_gradients_that_come_in_stay_as_they_were() -> None:
    def in_place(found: list[Tensor | None], a: Args, grads: Any) -> list[Tensor | None]:
        grads[0].mul_(2)
        return found

    rejected(quick("linear", "float32")[0], differentiated("linear", in_place), "R5", "^the gradient of y was modified")


def test_R5_a_gradient_asked_for_alone_is_the_one_asked_for_with_others() -> None:
    def backward(a: Args, outs: dict[str, Tensor], grads: Any, needs: tuple[bool, ...]) -> tuple[Tensor | None, ...]:
        from hal.recording import recompute

        dx, dw, db = recompute(OPS["linear"], a, grads, needs)
        return dx, dw if dw is None or needs[0] else dw + 1, db

    message = "when asked for the gradients of weight alone"
    candidate = Implementation("linear", "planted", reference("linear"), backward=backward)
    rejected(quick("linear", "float32")[0], candidate, "R5", message)


def test_R5_equal_calls_give_equal_gradients() -> None:
    calls = iter(range(10**6))

    def noisy(d: Tensor, a: Args) -> Tensor:
        return torch.nextafter(d, torch.full_like(d, torch.inf)) if next(calls) % 2 else d

    case = quick("linear", "float64")[0]
    rejected(case, one("x", "linear", noisy), "R5", "as in the first call")


def test_R5_other_layouts_agree_under_the_bound() -> None:
    def by_stride(d: Tensor, a: Args) -> Tensor:
        return d if a.x.is_contiguous() else d * 1.01

    rejected(quick("layer_norm", "float32")[0], one("x", "layer_norm", by_stride), "R5", "times the budget")


@pytest.fixture
def registered() -> Iterator[Any]:
    """Registers implementations of attention with the cpu backend."""
    made: list[Implementation] = []

    class Plugin:
        @hookimpl
        def hal_implementations(self, backend: str) -> list[Implementation]:
            return made if backend == "cpu" else []

    def register(candidate: Implementation) -> Implementation:
        made.append(candidate)
        registry.register(Plugin(), "cpu.planted")
        return candidate

    yield register
    registry.unregister("cpu.planted")


def test_R8_a_gradient_into_lse_raises_unless_it_is_declared(registered: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    candidate = registered(replace(HONEST["attention"], declares=Declares()))
    case = family("attention").case("float32", "gradient", S=5, L=7, H=2, K=1, lse=True, grad=True)
    assert judge(case, candidate, backend="cpu").status == "passed"
    from hal import selection

    def lenient(self: Any, a: Args, outs: Any, grads: Any, needs: Any) -> Any:
        return self.implementation.backward(a, outs, grads, needs)

    monkeypatch.setattr(selection.Plan, "backward", lenient)
    verdict = judge(case, candidate, backend="cpu")
    assert verdict.status == "failed"
    assert verdict.findings[0].rule == "R8"
    assert "a gradient into lse should raise TransformError, but nothing was raised" in verdict.findings[0].message


def test_R8_what_is_declared_of_lse_must_be_true(registered: Any) -> None:
    honest = HONEST["attention"]

    def forgets(a: Args, outs: Any, grads: Any, needs: Any) -> Any:
        return honest.backward(a, outs, grads[:1], needs)

    candidate = registered(replace(honest, backward=forgets))
    case = family("attention").case("float32", "gradient", S=5, L=7, H=2, K=1, lse=True, grad=True)
    verdict = judge(case, candidate, backend="cpu")
    assert {finding.rule for finding in verdict.findings} == {"R1"}
