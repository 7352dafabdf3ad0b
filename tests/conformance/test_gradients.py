"""Gradients under the rules: honest backward passes pass, planted faults do not."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from faulty import reference
from torch import Tensor
from wrong_gradients import (
    after,
    asked,
    attention_formula,
    cross_entropy_formula,
    implementation,
    in_bfloat16,
    layer_norm_formula,
    one,
    rms_weight,
    wide,
    written,
)

from hal import registry
from hal.capability import Implementation
from hal.conformance.case import Case, cases, find
from hal.conformance.cases import family
from hal.conformance.gradients import gradient_subject
from hal.conformance.judge import judge
from hal.conformance.verdict import Verdict
from hal.contract import OPS, Args
from hal.hookspec import hookimpl

DIFFERENTIABLE = sorted(op for op in OPS if OPS[op].grad)
EVERY = ("float64", "float32", "bfloat16", "float16")
NARROW = ("float32", "bfloat16", "float16")


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


@pytest.mark.parametrize(
    "candidate",
    [
        written("attention", attention_formula(), lse_grad=True),
        written("layer_norm", layer_norm_formula()),
        written("cross_entropy", cross_entropy_formula()),
    ],
    ids=lambda candidate: candidate.op,
)
def test_backward_passes_that_share_nothing_with_hal_pass(candidate: Implementation) -> None:
    for case in quick(candidate.op):
        verdict = judge(case, candidate)
        assert verdict.status == "passed", (case.id, verdict.findings)


def scaled(d: Tensor, a: Args) -> Tensor:
    return d * (1 + 2.0**-8 if d.dtype.itemsize > 2 else 1 + 2.0**-5)


def leak_into_rows(d: Tensor, a: Args) -> Tensor:
    """Something small where a query sees nothing, as an unmasked product leaves it."""
    return torch.where(d == 0, torch.full_like(d, 2.0**-20), d)


def forgets_the_sum(found: list[Tensor | None], a: Args, grads: Any) -> list[Tensor | None]:
    found[0] = found[1] = None if grads[0] is None else asked_alone(a, grads)
    return found


def asked_alone(a: Args, grads: Any) -> Tensor | None:
    from hal.recording import recompute

    return recompute(OPS["add_rms_norm"], a, (grads[0], None), (True, True, True))[0]


def first_lead_only(found: list[Tensor | None], a: Args, grads: Any) -> list[Tensor | None]:
    if found[1] is not None and a.x.dim() > 2 and not a.round_before_weight:
        found[1] = rms_weight(a, grads[0], lambda rows: rows.sum(0)[0])
    elif found[1] is not None and a.x.dim() > 2:
        found[1] = found[1] - rms_weight(a, grads[0], lambda rows: rows[0].sum(0)).to(found[1].dtype)
    return found


def bfloat16_sum(found: list[Tensor | None], a: Args, grads: Any) -> list[Tensor | None]:
    if found[1] is not None and not a.round_before_weight:
        found[1] = rms_weight(a, grads[0], lambda rows: in_bfloat16(rows.flatten(0, -2)))
    return found


def linear_bfloat16_sum(found: list[Tensor | None], a: Args, grads: Any) -> list[Tensor | None]:
    dy, x = wide(grads[0]).flatten(0, -2), wide(a.x).flatten(0, -2)
    found[1] = in_bfloat16(dy[:, :, None] * x[:, None, :])
    return found


def other_rotation(a: Args, grads: Any) -> tuple[Tensor | None, ...]:
    outs = reference("rotary_embedding")(
        grads[0], grads[1], a.positions, a.cos, a.sin, interleaved=a.interleaved, rotary_dim=a.rotary_dim
    )
    return outs[0], outs[1]


def silu_without_its_curve(a: Args, grads: Any) -> tuple[Tensor | None, ...]:
    gate, up = wide(a.x).chunk(2, -1)
    share, dy = torch.sigmoid(a.alpha * gate), wide(grads[0])
    return (torch.cat((dy * (up + a.up_offset) * share, dy * gate * share), -1),)


def silu_through_the_limit(a: Args, grads: Any) -> tuple[Tensor | None, ...]:
    with torch.enable_grad():
        x = wide(a.x).detach().requires_grad_()
        gate, up = x.chunk(2, -1)
        if a.limit is not None:  # straight through the clamp
            gate = gate + (gate.clamp(max=a.limit) - gate).detach()
            up = up + (up.clamp(-a.limit, a.limit) - up).detach()
        y = gate * torch.sigmoid(a.alpha * gate) * (up + a.up_offset)
        return torch.autograd.grad(y, x, wide(grads[0]))


def softmax_without_its_mean(a: Args, grads: Any) -> tuple[Tensor | None, ...]:
    return (wide(grads[0]) * wide(reference("softmax")(a.x, a.dim)),)


def dropped(found: list[Tensor | None], a: Args, grads: Any) -> list[Tensor | None]:
    return [None for _ in found]


def nan_times_zero(found: list[Tensor | None], a: Args, grads: Any) -> list[Tensor | None]:
    """A row's own gradient multiplied by its weight of 0, rather than left out."""
    if found[0] is not None:
        found[0] = found[0] + 0.0 * grads[0].float().sum().to(found[0].dtype)
    return found


def key_times_zero(found: list[Tensor | None], a: Args, grads: Any) -> list[Tensor | None]:
    if found[0] is not None:
        found[0] = found[0] + 0.0 * a.k.sum()
    return found


FAULTS: dict[str, tuple[Implementation, tuple[str, ...], str]] = {
    "attention forgets the scale": (written("attention", attention_formula(scaled=False), lse_grad=True), EVERY, "R1"),
    "attention scales a little more": (one("q", "attention", scaled), NARROW, "R1"),
    "attention forgets the cap's slope": (
        written("attention", attention_formula(slope=False), lse_grad=True),
        EVERY,
        "R1",
    ),
    "attention sums dk into the wrong kv head": (
        written("attention", attention_formula(group=False), lse_grad=True),
        EVERY,
        "R1",
    ),
    "attention has no delta term": (written("attention", attention_formula(delta=False), lse_grad=True), EVERY, "R1"),
    "attention is not causal backward": (asked("attention", causal=False), EVERY, "R1"),
    "attention ignores the window backward": (asked("attention", window=None), EVERY, "R4"),
    "attention leaks into rows that see nothing": (one("q", "attention", leak_into_rows), EVERY, "R4"),
    "attention leaks into keys that nobody sees": (one("k", "attention", leak_into_rows), EVERY, "R4"),
    "attention lets NaN into rows that see nothing through": (after("attention", nan_times_zero), EVERY, "R5"),
    "attention lets the NaN of a hidden key through": (after("attention", key_times_zero), EVERY, "R5"),
    "attention gives v nothing": (one("v", "attention", lambda d, a: None), EVERY, "R1"),
    "attention gives the sinks nothing": (one("sinks", "attention", lambda d, a: None), EVERY, "R1"),
    "attention counts the sink's logit twice": (one("sinks", "attention", lambda d, a: d * 2), EVERY, "R1"),
    "attention spreads the bias's gradient": (one("mask", "attention", lambda d, a: d / 2), EVERY, "R1"),
    "attention_varlen leaks into padding": (one("q", "attention_varlen", leak_into_rows), EVERY, "R4"),
    "attention_varlen is not causal backward": (asked("attention_varlen", causal=False), EVERY, "R1"),
    "attention_varlen forgets the cap": (asked("attention_varlen", softcap=None), EVERY, "R1"),
    "rms_norm sums dw over one axis of two": (after("rms_norm", first_lead_only), EVERY, "R1"),
    "rms_norm sums dw in bfloat16": (after("rms_norm", bfloat16_sum), NARROW, "R1"),
    "rms_norm forgets the offset": (asked("rms_norm", weight_offset=0.0), EVERY, "R1"),
    "rms_norm is off by 2^-8": (one("x", "rms_norm", scaled), EVERY, "R1"),
    "rms_norm gives the weight nothing": (one("weight", "rms_norm", lambda d, a: None), EVERY, "R1"),
    "add_rms_norm drops the sum's own gradient": (after("add_rms_norm", forgets_the_sum), EVERY, "R1"),
    "add_rms_norm gives the residual nothing": (one("residual", "add_rms_norm", lambda d, a: None), EVERY, "R1"),
    "layer_norm drops the mean": (written("layer_norm", layer_norm_formula(mean=False)), EVERY, "R1"),
    "layer_norm drops the projection": (written("layer_norm", layer_norm_formula(projection=False)), EVERY, "R1"),
    "cross_entropy forgets z-loss": (written("cross_entropy", cross_entropy_formula(z=False)), EVERY, "R1"),
    "cross_entropy forgets the smoothing": (
        written("cross_entropy", cross_entropy_formula(smoothing=False)),
        EVERY,
        "R1",
    ),
    "cross_entropy moves ignored rows": (written("cross_entropy", cross_entropy_formula(ignored=False)), EVERY, "R5"),
    "cross_entropy divides by all rows": (written("cross_entropy", cross_entropy_formula(count=False)), EVERY, "R1"),
    "softmax forgets the mean": (written("softmax", softmax_without_its_mean), EVERY, "R1"),
    "softmax differentiates along the last axis": (asked("softmax", dim=-1), EVERY, "R1"),
    "rotary turns on": (written("rotary_embedding", other_rotation), EVERY, "R1"),
    "rotary gives the key nothing": (one("k", "rotary_embedding", lambda d, a: None), EVERY, "R1"),
    "silu forgets its curve": (written("silu_and_mul", silu_without_its_curve), EVERY, "R1"),
    "silu differentiates through its limit": (written("silu_and_mul", silu_through_the_limit), EVERY, "R4"),
    "gelu is the other gelu": (asked("gelu_and_mul", approximate="tanh"), ("float64", "float32"), "R1"),
    "linear sums dw in bfloat16": (after("linear", linear_bfloat16_sum), ("float32", "float16"), "R1"),
    "linear gives the bias nothing": (one("bias", "linear", lambda d, a: None), EVERY, "R1"),
    "linear gives nothing at all": (after("linear", dropped), EVERY, "R1"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_rejected_by_a_quick_case_of_every_dtype_where_they_show(fault: str) -> None:
    candidate, dtypes, rule = FAULTS[fault]
    for dtype in dtypes:
        verdicts = (judge(case, candidate) for case in quick(candidate.op, dtype))
        seen = []
        for verdict in verdicts:
            seen += [(finding.rule, finding.result) for finding in verdict.findings]
            if any(finding.rule == rule and finding.result.startswith("d_") for finding in verdict.findings):
                break
        else:
            raise AssertionError(f"no quick case of {dtype} rejects it by {rule}; found {seen}")


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

    rejected(quick("linear", "float32")[0], after("linear", in_place), "R5", "^the gradient of y was modified")


def test_R5_a_gradient_asked_for_alone_is_the_one_asked_for_with_others() -> None:
    def backward(a: Args, outs: dict[str, Tensor], grads: Any, needs: tuple[bool, ...]) -> tuple[Tensor | None, ...]:
        from hal.recording import recompute

        dx, dw, db = recompute(OPS["linear"], a, grads, needs)
        return dx, dw if dw is None or needs[0] else dw + 1, db

    message = "as with all the others, when asked for the gradients of weight alone"
    rejected(quick("linear", "float32")[0], implementation("linear", backward), "R5", message)


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
    candidate = registered(written("attention", attention_formula()))
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
    def forgets(a: Args, grads: Any) -> Any:
        return attention_formula()(a, grads[:1])

    candidate = registered(written("attention", forgets, lse_grad=True))
    case = family("attention").case("float32", "gradient", S=5, L=7, H=2, K=1, lse=True, grad=True)
    verdict = judge(case, candidate, backend="cpu")
    assert {finding.rule for finding in verdict.findings} == {"R1"}
