"""Judges the operators over rows by hal's own quick suite, their kernels run by Triton's interpreter: simulated.

Each case is judged twice: with the tiles of the host side, and with tiles so small that most rows are walked in blocks.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from cuda_judging import conforms, interpreted, suite

from hal.backends.cuda import activations, norms_backward, plans, rows, softmax
from hal.conformance.case import Case
from hal.conformance.site import Site

SUITE = suite("rms_norm", "add_rms_norm", "layer_norm", "silu_and_mul", "gelu_and_mul", "softmax")
# What tiles can change, in a 16-bit dtype and with special values.
TILED = [
    case
    for case in SUITE
    if case.tags & {"grid", "edge", "gradient"} and (case.dtype == "bfloat16" or "special" in case.tags)
]
SMALL = (
    (rows, {"WHOLE_ROW": 64, "TILE": 256}),
    (norms_backward, {"WHOLE_ROW": 64}),
    (activations, {"TILE": 128}),
    (softmax, {"WHOLE_ROW": 64, "PIECE": 128, "PIECES": 2, "COLUMNS": 16, "TILE": 256, "LARGEST": 256}),
)


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    with interpreted() as found:
        yield found


@pytest.fixture(autouse=True)
def fresh() -> None:
    """No test finds what was prepared for another tile."""
    plans.forget()


@pytest.mark.parametrize("case", SUITE, ids=lambda case: case.id)
def test_conforms_with_its_own_tiles(site: Site, case: Case) -> None:
    conforms(site, case)


@pytest.mark.parametrize("case", TILED, ids=lambda case: case.id)
def test_conforms_with_rows_in_blocks(site: Site, case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    for module, constants in SMALL:
        for name, value in constants.items():
            monkeypatch.setattr(module, name, value)
    conforms(site, case)
