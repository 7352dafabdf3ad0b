"""The conformance suite as pytest tests, one per case and implementation; see hal.conformance.plugin."""

from __future__ import annotations

import pytest

from hal.conformance import runner
from hal.conformance.case import find
from hal.conformance.plugin import RESULT, plan_of, waived


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    what = plan_of(metafunc.config)
    pairs = [(piece.case, name) for piece in what.work for name in piece.implementations]
    metafunc.parametrize(("case_id", "implementation"), pairs, ids=[f"{case_id}-{name}" for case_id, name in pairs])


def test_conforms(case_id: str, implementation: str, request: pytest.FixtureRequest) -> None:
    """The implementation keeps the contract on this case."""
    result = runner.judge_case(plan_of(request.config).site, find(case_id), implementation)
    result = waived(request.config, result)
    request.node.stash[RESULT] = result
    told = "; ".join(result.why)
    if result.status in ("failed", "mistrusted"):
        pytest.fail("\n".join((result.status, *result.why, f"repeat: {result.repeat}")), pytrace=False)
    if result.status == "waived":
        pytest.xfail(told)
    if result.status != "passed":
        pytest.skip(f"{result.status}: {told}")
