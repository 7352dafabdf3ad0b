"""Compiles the operators over a vocabulary, as the host side launches them, for three architectures: no spills, no
surprises, whole loads, and the launches that are meant."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from compile_only import SHARED, Launched, compiling

from hal.backends.cuda import cross_entropy, sampling
from hal.capability import Implementation
from hal.op import OPS

# Every architecture, and the other width of logits on one of them: a search takes seconds to compile.
TARGETS = [(arch, torch.bfloat16) for arch in SHARED] + [(90, torch.float32)]
ON_TARGETS = pytest.mark.parametrize(
    ("arch", "dtype"), TARGETS, ids=lambda given: f"sm_{given}" if isinstance(given, int) else _dtype(given)
)
Call = Callable[[torch.dtype], Any]
(LOSS,) = cross_entropy.IMPLEMENTATIONS
PROBS, SAMPLE = sampling.IMPLEMENTATIONS


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _logits(shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def trained(shape: tuple[int, int], **arguments: Any) -> Call:
    """A recorded call of cross_entropy and its gradient."""

    def call(dtype: torch.dtype) -> None:
        assert LOSS.train is not None and LOSS.backward is not None
        logits, target = _logits(shape, dtype), torch.empty(shape[0], dtype=torch.int64, device="meta")
        loss, lse = LOSS.train(logits, target, **arguments)
        a = OPS["cross_entropy"].bind((logits, target), arguments)
        LOSS.backward(a, {"lse": lse}, (loss,), (True,))

    return call


def sampled(implementation: Implementation, shape: tuple[int, int], each: bool = False, **arguments: Any) -> Call:
    """A call of a sampling operator, its seed a tensor; `each`: parameters as tensors, one a row."""

    def call(dtype: torch.dtype) -> None:
        told = dict(arguments)
        if each:
            for name in arguments:
                of = torch.int64 if name == "top_k" else torch.float32
                told[name] = torch.empty(shape[:1], dtype=of, device="meta")
        seed = (torch.empty((), dtype=torch.int64, device="meta"),) if implementation is SAMPLE else ()
        implementation.forward(_logits(shape, dtype), *seed, **told)

    return call


LOSSES: dict[str, tuple[Call, list[str]]] = {
    "mean of 4096 × 131072": (
        trained((4096, 131_072)),
        ["statistics_kernel", "losses_kernel", "total_kernel", "share_kernel", "gradient_kernel"],
    ),
    "one row of 128256, smoothed, with z-loss": (
        trained((1, 128_256), label_smoothing=0.1, z_loss=1e-4),
        ["statistics_kernel", "losses_kernel", "share_kernel", "gradient_kernel"],
    ),
    "each of 8192 × 32000": (
        trained((8192, 32_000), reduction="none"),
        ["statistics_kernel", "losses_kernel", "gradient_kernel"],
    ),
}
FILTERED = {"temperature": 0.7, "top_k": 50, "top_p": 0.9, "min_p": 0.01}
DRAWS: dict[str, tuple[Call, list[str]]] = {
    "probabilities of 8 × 131072, all filters": (
        sampled(PROBS, (8, 131_072), **FILTERED),
        ["gather_kernel", "search_kernel", "probs_kernel"],
    ),
    "draws from 256 × 151936, all filters, a tensor each": (
        sampled(SAMPLE, (256, 151_936), each=True, **FILTERED),
        ["gather_kernel", "search_kernel", "draw_kernel", "pick_kernel"],
    ),
    "draws from 4 × 262144, a temperature alone": (
        sampled(SAMPLE, (4, 262_144), temperature=0.7),
        ["gather_kernel", "draw_kernel", "pick_kernel"],
    ),
}


def _judged(launched: list[Launched], expected: list[str]) -> None:
    assert [one.name for one in launched] == expected
    for one in launched:
        assert (one.name, one.spilled) == (one.name, 0)
        assert one.shared <= SHARED[one.arch]


@pytest.mark.parametrize("call", LOSSES)
@ON_TARGETS
def test_losses_compile_without_spills_and_with_whole_loads(arch: int, call: str, dtype: torch.dtype) -> None:
    made, expected = LOSSES[call]
    with compiling(arch) as launched:
        made(dtype)
    _judged(launched, expected)
    # All of a thread's loads of a tile are 16 bytes wide, and none waits for the arithmetic of another.
    by_name = {one.name: one for one in launched}
    for name in ("statistics_kernel", "gradient_kernel"):
        assert by_name[name].counts(r"LDG\S*\.128 ") >= 4
        assert by_name[name].counts(r"LDG\S*\.U16 ") == 0
    assert by_name["gradient_kernel"].counts(r"STG\S*\.128 ") == 4


@pytest.mark.parametrize("arch", SHARED)
def test_a_loss_fills_the_device_with_one_pass_over_the_logits(arch: int) -> None:
    with compiling(arch) as launched:
        trained((4096, 131_072))(torch.bfloat16)
    statistics, losses, total, share, gradient = launched
    assert statistics.grid == (4096 * 131_072 * 2 // cross_entropy.CHUNK_BYTES, 1, 1)
    assert losses.grid == (32, 1, 1)
    assert total.grid == share.grid == (1, 1, 1)
    assert gradient.grid == (4096 * 131_072 * 2 // cross_entropy.TILE_BYTES, 1, 1)
    # The programs that a multiprocessor's registers hold have 64 KiB under way.
    programs = 65_536 // (statistics.usage["REG"] * 32 * statistics.warps)
    assert programs * cross_entropy.TILE_BYTES >= 65_536


@pytest.mark.parametrize("call", DRAWS)
@ON_TARGETS
def test_sampling_compiles_without_spills(arch: int, call: str, dtype: torch.dtype) -> None:
    made, expected = DRAWS[call]
    with compiling(arch) as launched:
        made(dtype)
    _judged(launched, expected)
    # Passes over a row run ahead of themselves, by asynchronous copies.
    assert launched[0].counts(r"LDGSTS\S*\.128 ") >= 3


def test_a_seed_that_is_a_number_is_written_for_the_launch() -> None:
    with compiling(90) as launched:
        SAMPLE.forward(_logits((2, 100), torch.float32), 5, top_k=3)
    assert [one.name for one in launched][-2:] == ["draw_kernel", "pick_kernel"]
