"""Calls captured as graphs: honest ones pass, ones that keep a number from the capture are found."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from hal.capability import Declares, Implementation
from hal.conformance import judge as judging
from hal.conformance.case import Case
from hal.conformance.cases import family
from hal.conformance.inputs import Results
from hal.conformance.judge import judge
from hal.contract import OPS


class Tape:
    """A graph of one launch: what is captured is the call; a replay runs it again into the memory of the first."""

    phase = "eager"

    def capture(self, call: Callable[[], Results]) -> Results:
        call()
        Tape.phase = "capture"
        self.call, self.found = call, call()
        Tape.phase = "eager"
        return self.found

    def replay(self) -> None:
        Tape.phase = "replay"
        for old, new in zip(self.found, self.call(), strict=True):
            old.copy_(new)
        Tape.phase = "eager"


@pytest.fixture(autouse=True)
def _graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judging, "graph_of", lambda device: Tape())


def implementation(op: str, forward: Callable[..., Any], **declares: Any) -> Implementation:
    return Implementation(op, "candidate", forward, declares=Declares(**declares))


def keeps(op: str, name: str) -> Callable[..., Any]:
    """The reference, which replays with the argument `name` as it was in the capture."""
    kept: list[Any] = []

    def call(**arguments: Any) -> Any:
        if Tape.phase == "capture":
            kept[:] = [arguments[name].clone()]
        elif Tape.phase == "replay":
            arguments = arguments | {name: kept[0]}
        return OPS[op].reference(**arguments)

    return call


CASES = {
    "seq_lens": family("paged_attention").case("float32", "edge", q=[1, 1], k=[32, 21]),
    "cu_seqlens_k": family("attention_varlen").case("float32", "edge", q=[3, 4], k=[9, 12]),
    "x": family("rms_norm").case("float32", "edge", T=7, F=33),
    "slot_mapping": family("write_kv_cache").case("float32", "edge"),
    "seed": family("top_k_top_p_sample").case("float32", "edge", B=9, seed="rows"),
}


@pytest.mark.parametrize("name", CASES)
def test_a_call_that_keeps_what_it_saw_in_the_capture_fails(name: str) -> None:
    case: Case = CASES[name]
    honest = judge(case, implementation(case.op, OPS[case.op].reference))
    assert honest.status == "passed", honest.findings
    verdict = judge(case, implementation(case.op, keeps(case.op, name)))
    assert verdict.status == "failed"
    assert all(finding.rule == "R5" for finding in verdict.findings)
    assert any("as a graph captured at other lengths" in finding.message for finding in verdict.findings)


def test_one_that_is_declared_not_capturable_or_wants_host_lengths_is_not_captured() -> None:
    case = CASES["seq_lens"]
    for declares in ({"capturable": False}, {"host_lengths": True}):
        assert judge(case, implementation(case.op, keeps(case.op, "seq_lens"), **declares)).status == "passed"


def test_a_capture_that_fails_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    class Strict(Tape):
        def capture(self, call: Callable[[], Results]) -> Results:
            raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(judging, "graph_of", lambda device: Strict())
    verdict = judge(CASES["x"], implementation("rms_norm", OPS["rms_norm"].reference))
    assert [finding.rule for finding in verdict.findings] == ["R8"]
    assert "fails as a graph captured at other lengths: RuntimeError: operation not permitted" in (
        verdict.findings[0].message
    )
