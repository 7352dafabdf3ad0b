"""Judges attention by hal's own quick suite, its kernels run by Triton's interpreter: simulated.

Each case is judged with the tiles of the host side; what tiles can change, also with tiles so small that sequences are
walked in several blocks, masked at the edges and not between them.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from cuda_judging import conforms, interpreted, suite

from hal.backends.cuda import attention_gradients, attention_launch
from hal.conformance.case import Case
from hal.conformance.site import Site

SUITE = suite("attention", "attention_varlen")
TILED = [
    case
    for case in SUITE
    if case.tags & {"grid", "edge", "gradient"} and case.dtype == "float32" and not case.tags & {"bad-input", "strided"}
]
SMALL = {"BLOCK_M": 16, "BLOCK_N": 16}


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    with interpreted() as found:
        yield found


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    edge_keys, edge_queries = SMALL | {"EDGE_N": 16}, SMALL | {"EDGE_M": 16}
    monkeypatch.setattr(attention_launch, "forward_tile", lambda p, arch: (edge_keys, {}))
    monkeypatch.setattr(attention_gradients, "dq_tile", lambda p, arch: (edge_keys, {}))
    monkeypatch.setattr(attention_gradients, "dkv_tile", lambda p, arch: (edge_queries, {}))
    monkeypatch.setattr(attention_gradients, "mask_tile", lambda p, arch: (SMALL, {}))
    attention_gradients.launches.cache_clear()
    yield
    attention_gradients.launches.cache_clear()


@pytest.mark.parametrize("case", SUITE, ids=lambda case: case.id)
def test_conforms_with_its_own_tiles(site: Site, case: Case) -> None:
    conforms(site, case)


@pytest.mark.parametrize("case", TILED, ids=lambda case: case.id)
def test_conforms_with_small_tiles(site: Site, case: Case, small_tiles: None) -> None:
    conforms(site, case)
