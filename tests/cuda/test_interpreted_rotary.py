"""Judges rotary_embedding by hal's own quick suite, its kernel run by Triton's interpreter: simulated."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from cuda_judging import conforms, interpreted, suite

from hal.backends.cuda import plans, rotary
from hal.conformance.case import Case
from hal.conformance.site import Site

SUITE = suite("rotary_embedding")


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    with interpreted() as found:
        yield found


@pytest.fixture(autouse=True)
def fresh() -> None:
    """No test finds what was prepared for another tile."""
    plans.forget()


@pytest.mark.parametrize("case", SUITE, ids=lambda case: case.id)
def test_conforms(site: Site, case: Case) -> None:
    conforms(site, case)


@pytest.mark.parametrize("case", [case for case in SUITE if case.dtype == "bfloat16"], ids=lambda case: case.id)
def test_conforms_with_few_heads_at_a_time(site: Site, case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rotary, "PAIRS", 128)
    conforms(site, case)
