"""What the example claims holds, and a claim that does not hold is found. Run: pip install . && pytest tests"""

from __future__ import annotations

import boastful
import pytest

from hal import registry
from hal.conformance.report import Report
from hal.conformance.runner import plan, run
from hal.conformance.site import Site


def judged(backend: str, op: str, implementation: str) -> Report:
    return run(plan(Site.of(backend), ops=(op,), implementations=(implementation,)))


@pytest.mark.parametrize(("backend", "op"), [("example", "rms_norm"), ("cpu", "softmax")])
def test_what_it_claims_holds(backend: str, op: str) -> None:
    report = judged(backend, op, "example")
    assert report.exit_status() == 0, [result.why for result in report.bad]
    assert report.counts["passed"] > 10


def test_a_false_claim_is_caught() -> None:
    registry.register(boastful, "example.boastful")
    try:
        report = judged("example", "rms_norm", "boastful")
    finally:
        registry.unregister("example.boastful")
    assert report.exit_status() == 1
    assert report.bad
    # only what was claimed falsely fails; what is claimed rightly passes beside it
    assert all("weight_offset" in result.case for result in report.bad)
    assert report.counts["passed"] > 10
