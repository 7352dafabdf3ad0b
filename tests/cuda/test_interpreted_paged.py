"""Judges the operators on paged caches, and merge_attention, by hal's own quick suite; the kernels are interpreted:
simulated.

Attention is judged with its own tiles, and with tiles so small that sequences have several and their keys are divided.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from cuda_judging import KERNELS, conforms, interpreted, suite

from hal.backends.cuda import kv_cache, launch, paged_attention
from hal.conformance import runner
from hal.conformance.case import Case
from hal.conformance.site import Site

SUITE = suite("write_kv_cache", "gather_kv_cache", "merge_attention", "paged_attention")
COPIES = suite("copy_kv_blocks")
ATTENTION = [case for case in SUITE if case.op == "paged_attention" and "bad" not in case.params]
# What tiles can change, in a 16-bit dtype; long sequences and large heads take long, and have parts in their own tiles.
LONG = {"k": [3, 8193], "H": 71, "D": 576}
TILED = [
    case
    for case in ATTENTION
    if case.dtype == "bfloat16" and not any(case.params.get(name) == value for name, value in LONG.items())
]
FP8 = [case for case in SUITE + COPIES if case.params.get("cache") == "float8_e4m3fn" and case.dtype != "float64"]


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    with interpreted() as found:
        yield found


def small(shape: paged_attention.Shape, capability: int) -> tuple[dict[str, int], dict[str, int]]:
    """The host side's tile, with 16 rows and 16 keys."""
    blocks, options = tile(shape, capability)
    return blocks | {"BLOCK_M": 16, "BLOCK_N": 16}, options


tile = paged_attention.tile


@pytest.mark.parametrize("case", SUITE, ids=lambda case: case.id)
def test_conforms(site: Site, case: Case) -> None:
    conforms(site, case)


@pytest.mark.parametrize("case", COPIES, ids=lambda case: case.id)
def test_copies_in_every_dtype(site: Site, case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_cache, "IDS", 2)
    result = runner.judge_case(site, case, "triton")
    assert result.status == "passed", "\n".join(result.why)


@pytest.mark.parametrize("case", TILED, ids=lambda case: case.id)
def test_conforms_in_parts_and_in_several_tiles(site: Site, case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paged_attention, "tile", small)
    monkeypatch.setattr(paged_attention, "LEAST", 16)
    conforms(site, case)


@pytest.mark.parametrize("case", TILED, ids=lambda case: case.id)
def test_conforms_where_whole_tiles_have_no_masks(site: Site, case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paged_attention, "tile", small)
    monkeypatch.setattr(paged_attention, "LARGE", 1)
    conforms(site, case)


@pytest.mark.parametrize("case", FP8, ids=lambda case: case.id)
def test_conforms_where_the_architecture_has_no_fp8(site: Site, case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "capability", lambda device: 80)
    conforms(site, case)


def test_every_code_of_fp8_is_made_and_read_as_torch_does(site: Site) -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    values = codes.float()
    finite = values[values.isfinite()].sort().values
    # Each value, the ties between neighbours, and the numbers beside these, of both signs; what saturates, and NaN.
    ties = (finite[1:] + finite[:-1]) / 2
    beside = [torch.nextafter(ties, torch.tensor(side)) for side in (-torch.inf, torch.inf)]
    x = torch.cat((values, ties, *beside, torch.tensor([464.0, 465.0, 1e30, torch.inf, -torch.inf, 2.0**-10, 1e-40])))
    wide = x[:, None, None].repeat(1, 1, 2)
    cache = torch.zeros(1, x.numel(), 1, 2).to(torch.float8_e4m3fn)
    v_cache = cache.clone()
    arguments: dict[str, Any] = {"slot_mapping": torch.arange(x.numel())}
    KERNELS["write_kv_cache"].forward(wide, wide, cache, v_cache, **arguments)
    expected = torch.where(x.isnan(), x, x.clamp(-448, 448)).to(torch.float8_e4m3fn)
    for made in (cache, v_cache):
        assert torch.equal(made[0, :, 0, 0].view(torch.uint8) & 0x7F, expected.view(torch.uint8) & 0x7F)
        assert torch.equal(made[0, :, 0, 1].float().nan_to_num(7.0), expected.float().nan_to_num(7.0))
    table, cu = torch.zeros(1, 1, dtype=torch.int32), torch.tensor([0, x.numel()], dtype=torch.int32)
    k, _ = KERNELS["gather_kv_cache"].forward(cache, v_cache, table, cu, x.numel(), out_dtype=torch.float32)
    assert torch.equal(k[:, 0, 0].nan_to_num(7.0), expected.float().nan_to_num(7.0))
