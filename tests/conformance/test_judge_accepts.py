"""The judge passes honest implementations, whoever wrote them, and takes capabilities at their word."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from faulty import attention

import hal
from hal import registry
from hal.capability import Declares, Implementation, Limit, Supports
from hal.conformance.case import cases
from hal.conformance.cases import families, family
from hal.conformance.judge import judge
from hal.conformance.mutants.mutant import after, before, reference
from hal.contract import OPS
from hal.errors import UnsupportedError
from hal.hookspec import hookimpl

TINY = torch.finfo(torch.float32).tiny  # what an eps of 0 counts as


def honest(op: str, name: str, forward: Any, **declares: Any) -> Implementation:
    return Implementation(op, name, forward, declares=Declares(**declares))


@functools.wraps(reference("rms_norm"))
def torch_rms_norm(*args: Any, **kwargs: Any) -> torch.Tensor:
    a = OPS["rms_norm"].bind(args, kwargs)
    weight = None if a.weight is None else a.weight.float() + a.weight_offset
    return F.rms_norm(a.x.float(), a.x.shape[-1:], weight, max(a.eps, TINY)).to(a.x.dtype)


@functools.wraps(reference("layer_norm"))
def torch_layer_norm(*args: Any, **kwargs: Any) -> torch.Tensor:
    a = OPS["layer_norm"].bind(args, kwargs)
    weight, bias = (None if t is None else t.float() for t in (a.weight, a.bias))
    return F.layer_norm(a.x.float(), a.x.shape[-1:], weight, bias, max(a.eps, TINY)).to(a.x.dtype)


@functools.wraps(reference("linear"))
def torch_linear(*args: Any, **kwargs: Any) -> torch.Tensor:
    a = OPS["linear"].bind(args, kwargs)
    return F.linear(a.x.float(), a.weight.float(), None if a.bias is None else a.bias.float()).to(a.x.dtype)


@functools.wraps(reference("softmax"))
def torch_softmax(*args: Any, **kwargs: Any) -> torch.Tensor:
    a = OPS["softmax"].bind(args, kwargs)
    dead = (a.x == float("-inf")).all(a.dim, keepdim=True)
    # In float32: on 16-bit inputs ATen rounds in between when the axis is not the last.
    return torch.softmax(a.x.float(), a.dim).masked_fill(dead, 0).to(a.x.dtype).contiguous()


WRITTEN_BY_OTHERS = {
    "rms_norm": torch_rms_norm,
    "layer_norm": torch_layer_norm,
    "linear": torch_linear,
    "softmax": torch_softmax,
    "attention": attention(),
}


@pytest.mark.parametrize("op", WRITTEN_BY_OTHERS)
def test_it_passes_kernels_that_share_nothing_with_the_reference(op: str) -> None:
    judged = 0
    for case in cases(op):
        # float64 needs float64 arithmetic throughout, which these do not have; the rounding before the weight neither.
        if case.dtype == "float64" or case.bad_input or case.params.get("round_before_weight"):
            continue
        if case.params.get("weight") == "float64" or case.params.get("L") == 0 or "captured" in case.tags:
            continue
        verdict = judge(case, honest(op, "other", WRITTEN_BY_OTHERS[op]))
        assert verdict.status == "passed", (case.id, verdict.findings)
        judged += 1
    assert judged > 20


def test_every_op_of_the_contract_has_cases() -> None:
    assert set(families()) == set(OPS)


@pytest.mark.parametrize("op", sorted(OPS))
def test_references_pass_one_case_of_each_dtype_and_tag(op: str) -> None:
    wanted: dict[tuple[str, frozenset[str]], Any] = {}
    for case in cases(op):
        if not case.bad_input:
            wanted.setdefault((case.dtype, case.tags), case)
    for case in wanted.values():
        verdict = judge(case, reference(op))
        assert verdict.status == "passed", (case.id, verdict.findings)


def test_a_verdict_says_how_much_of_the_budget_was_used() -> None:
    case = family("rms_norm").case("float32", "grid", T=7, F=576)
    verdict = judge(case, torch_rms_norm)
    assert verdict.budget is not None and 0 < verdict.budget < 0.5
    assert verdict.c_max == 4 * verdict.budget
    assert {"R1", "R4", "R5", "R6", "R8"} <= set(verdict.rules)
    half = judge(family("rms_norm").case("bfloat16", "grid", T=7, F=576), torch_rms_norm)
    assert half.r2 is not None and half.r2 < 1
    assert half.r3 is not None and half.r3 < 0.1
    assert half.to_dict()["status"] == "passed"


@pytest.fixture
def narrow() -> Iterator[Implementation]:
    """An implementation of rms_norm for at most 64 features."""
    forward = reference("rms_norm")
    implementation = Implementation(
        "rms_norm", "narrow", forward, supports=Supports(limits={"features": Limit(max=64)})
    )

    class Plugin:
        @hookimpl
        def hal_implementations(self, backend: str) -> list[Implementation]:
            return [implementation] if backend == "cpu" else []

    registry.register(Plugin(), "cpu.narrow")
    yield implementation
    registry.unregister("cpu.narrow")


def test_R8_a_refused_request_is_unsupported_with_its_reasons_and_must_raise(narrow: Implementation) -> None:
    wide = judge(family("rms_norm").case("float32", "grid", F=576), narrow, backend="cpu")
    assert wide.status == "unsupported"
    assert wide.reasons == ("features is 576, the most supported is 64",)
    assert judge(family("rms_norm").case("float32", "grid", F=64), narrow, backend="cpu").status == "passed"


def test_R8_a_refused_request_that_runs_all_the_same_fails(
    narrow: Implementation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hal.ops.norms.rms_norm", reference("rms_norm"))  # a dispatcher that ignores capabilities
    verdict = judge(family("rms_norm").case("float32", "grid", F=576), narrow, backend="cpu")
    assert verdict.status == "failed"
    assert verdict.findings[0].message.startswith(
        "narrow rejects the request (features is 576, the most supported is 64) and should raise UnsupportedError, "
        "but it ran"
    )


def test_bad_input_passes_when_the_typed_error_comes(narrow: Implementation) -> None:
    for kind in family("rms_norm").bad:
        verdict = judge(family("rms_norm").case("float32", "bad-input", bad=kind), narrow, backend="cpu")
        assert verdict.status == "passed", (kind, verdict.findings)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        (("ShapeError", (), lambda args: None), "bad input was accepted, but should raise ShapeError"),
        (("ShapeError", (), lambda args: args.update(eps=-1.0)), "bad input raised ArgumentError: "),
        (("ArgumentError", ("weight",), lambda args: args.update(eps=-1.0)), "the error does not mention weight: "),
    ],
)
def test_bad_input_fails_without_its_error_or_what_it_must_say(
    narrow: Implementation, monkeypatch: pytest.MonkeyPatch, how: Any, message: str
) -> None:
    kind = f"planted{len(message)}"  # a name of its own: what a case expects is kept by its id
    monkeypatch.setattr(type(family("rms_norm")), "bad", {kind: how})
    verdict = judge(family("rms_norm").case("float32", "bad-input", bad=kind), narrow, backend="cpu")
    assert verdict.status == "failed"
    assert verdict.findings[0].rule == "R8"
    assert verdict.findings[0].message.startswith(message)


def test_bad_input_is_skipped_where_no_dispatcher_is_in_the_way() -> None:
    verdict = judge(family("rms_norm").case("float32", "bad-input", bad="scalar"), reference("rms_norm"))
    assert verdict.status == "skipped" and verdict.reasons


def test_a_registered_implementation_is_called_through_the_public_op(narrow: Implementation) -> None:
    def served() -> int:
        return sum(row["calls"] for row in hal.report()["calls"] if row["implementation"] == "narrow")

    start = served()
    assert judge(family("rms_norm").case("float32", "grid", F=32), narrow, backend="cpu").status == "passed"
    assert served() > start


def test_a_code_next_to_a_tie_may_fall_either_way() -> None:
    case = family("write_kv_cache").case("float32", "edge", cache="int8", scale="one", x="ties")

    def nudge(a: dict[str, Any]) -> dict[str, Any]:  # as a division by multiplication with the reciprocal would
        return {"k": a["k"] * (1 + 2.0**-24)}

    assert judge(case, before("write_kv_cache", nudge)).status == "passed"
    exact = family("write_kv_cache").case("float32", "edge", cache="int8", scale="one")
    verdict = judge(exact, before("write_kv_cache", lambda a: {"k": a["k"] * 1.01}))
    assert verdict.status == "failed"


def test_R3_says_nothing_where_honest_rounding_is_biased_itself() -> None:
    few_values = family("rms_norm").case("bfloat16", "edge", F=1000, x="mean1000")
    assert judge(few_values, torch_rms_norm).r3 is None
    many_values = family("rms_norm").case("bfloat16", "edge", F=1000, weight="float32")
    assert judge(many_values, torch_rms_norm).r3 is not None


def test_a_device_that_saturates_says_so_and_is_not_asked_for_nan() -> None:
    def clipped(y: torch.Tensor, a: dict[str, Any]) -> torch.Tensor:
        return y.nan_to_num()

    saturating = honest("rms_norm", "saturating", after("rms_norm", clipped), saturates=True)
    special = judge(family("rms_norm").case("float32", "special", T=6, F=40, x="special"), saturating)
    assert special.status == "unsupported"
    assert special.reasons == ("the device saturates Inf and NaN, as the implementation declares",)
    assert judge(family("rms_norm").case("float32", "grid", T=6, F=40), saturating).status == "passed"


def test_a_device_that_cannot_hold_a_dtype_makes_its_cases_unsupported(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_float64(*args: Any, **kwargs: Any) -> Any:
        raise TypeError("Cannot convert to float64: the device has none")

    monkeypatch.setattr("hal.conformance.judge.place", no_float64)
    verdict = judge(family("rms_norm").case("float64", "grid", F=32), reference("rms_norm"))
    assert verdict.status == "unsupported"
    assert verdict.reasons == ("cpu cannot hold the inputs: Cannot convert to float64: the device has none",)


def test_a_detour_through_a_request_that_is_declared_unsupported_is_left_out() -> None:
    case = family("attention").case("float32", "edge", S=9, L=30)
    op = OPS["attention"]

    def without_bias(**a: Any) -> Any:
        if a["mask"] is not None and a["mask"].is_floating_point():
            raise UnsupportedError("a bias was asked for")
        return op.reference(**a)

    honest = Supports(features=frozenset(op.features) - {"bias"})
    assert judge(case, Implementation("attention", "honest", without_bias, supports=honest)).status == "passed"
    boastful = judge(case, Implementation("attention", "boastful", without_bias))
    assert boastful.status == "failed" and {finding.rule for finding in boastful.findings} == {"R8"}
