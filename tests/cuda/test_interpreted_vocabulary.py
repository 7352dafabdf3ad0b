"""Judges the operators over a vocabulary by hal's own quick suite, their kernels interpreted by Triton: simulated.

Each case of cross_entropy is judged with the tiles of the host side, and those that chunks can change again with tiles
so small that rows are read in many. Sampling finds a level in few passes here, as the interpreter takes a pass over a
few tokens as slowly as one over many; what passes can change is judged again as the device runs it, and with too little
room for copies, so that levels are searched for in the rows themselves.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from cuda_judging import conforms, interpreted, suite

from hal.backends.cuda import cross_entropy, sampling
from hal.conformance.case import Case
from hal.conformance.site import Site

LOSSES = suite("cross_entropy")
# The statistics of 400 draws take the interpreter minutes: they are left to devices.
SAMPLING = [case for case in suite("top_k_top_p_probs", "top_k_top_p_sample") if case.params.get("B") != 400]
# What chunks can change, in a 16-bit dtype and with special values.
CHUNKED = [case for case in LOSSES if case.dtype == "bfloat16" or "special" in case.tags]
# What passes can change: top-k, top-p, both, ties and odd values, in the dtypes of the shortest and longest search.
PASSED = [
    case
    for case in SAMPLING
    if case.op == "top_k_top_p_probs" and case.dtype in ("float32", "bfloat16") and {"k", "p"} & case.params.keys()
    if "m" not in case.params and not case.tags & {"strided", "empty", "bad"}
]


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    with interpreted() as found:
        yield found


@pytest.mark.parametrize("case", LOSSES, ids=lambda case: case.id)
def test_cross_entropy_conforms_with_its_own_tiles(site: Site, case: Case) -> None:
    conforms(site, case)


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Rows in chunks of 64 and tiles of 32 logits, of which one program combines few: three kernels are launched."""

    def forget() -> None:
        cross_entropy._losses.cache_clear()
        cross_entropy._gradient.cache_clear()

    monkeypatch.setattr(cross_entropy, "tile_of", lambda *_: ({"BLOCK_R": 2, "BLOCK_V": 32}, {"num_warps": 1}))
    monkeypatch.setattr(cross_entropy, "chunk_of", lambda *_: {"CHUNK": 64, "STAGES": 1})
    monkeypatch.setattr(cross_entropy, "COMBINED", 8)
    monkeypatch.setattr(cross_entropy, "COUNTED", 2)
    forget()
    yield
    forget()


@pytest.mark.parametrize("case", CHUNKED, ids=lambda case: case.id)
def test_cross_entropy_conforms_with_rows_in_chunks(site: Site, case: Case, small_tiles: None) -> None:
    conforms(site, case)


@pytest.mark.parametrize("case", SAMPLING, ids=lambda case: case.id)
def test_sampling_conforms(site: Site, case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "PASS_BITS", 6)
    conforms(site, case)


@pytest.mark.parametrize("case", PASSED, ids=lambda case: case.id)
def test_sampling_conforms_in_the_passes_of_a_device_over_rows(
    site: Site, case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampling, "CAPACITY", 4)
    monkeypatch.setattr(sampling, "ROW_TILES", {kernel: {80: (32, 16)} for kernel in sampling.ROW_TILES})
    conforms(site, case)
