"""The conformance suite, with its own judge and rules, on `portable:simdev`."""

from __future__ import annotations

import pytest

from hal import registry
from hal.conformance.case import cases
from hal.conformance.judge import judge
from hal.conformance.runner import plan, run
from hal.conformance.site import Site
from hal.op import OPS

BACKEND = "portable:simdev"
GOOD = {"passed", "unsupported"}


@pytest.mark.parametrize("op", sorted(OPS))
def test_bad_input_is_refused_on_the_second_device(devices, op):
    chosen = [case for case in cases(op, "quick") if case.bad_input]
    assert chosen
    for case in chosen:
        (implementation,) = registry.implementations("portable", op)
        verdict = judge(case, implementation, "simdev:1", backend=BACKEND)
        assert verdict.status == "passed", f"{case.id}: {verdict.findings}"


def test_a_run_is_marked_simulated_and_passes(devices):
    site = Site.of(BACKEND)
    assert site.target.simulated
    report = run(plan(site, "quick", ops=("rms_norm",)))
    assert report.target.simulated
    assert report.complete
    assert report.results
    assert {result.status for result in report.results} <= GOOD
    assert "passed" in {result.status for result in report.results}
