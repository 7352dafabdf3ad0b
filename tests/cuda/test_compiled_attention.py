"""Compiles attention and its gradients, as the host side launches them, for three architectures."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from compile_only import SHARED, Launched, compiling

from hal.backends.cuda.implementations import IMPLEMENTATIONS
from hal.op import OPS

KERNELS = {found.op: found for found in IMPLEMENTATIONS if found.name == "triton"}
# The matrix instruction of each architecture.
PRODUCT = {80: r"\bHMMA", 90: r"\bHGMMA", 100: r"\bUTCHMMA"}
HALF, SINGLE = torch.bfloat16, torch.float32
Call = Callable[[], None]


def meta(*shape: int, dtype: torch.dtype = HALF) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def dense(S: int, L: int, H: int, K: int, D: int, E: int | None = None, dtype: torch.dtype = HALF, **kw: Any) -> Call:
    """A call on two sequences."""

    def call() -> None:
        q, k, v = (meta(2, n, h, w, dtype=dtype) for n, h, w in ((S, H, D), (L, K, D), (L, K, E or D)))
        KERNELS["attention"].forward(q, k, v, **kw)

    return call


def ragged(T: int, H: int, K: int, D: int, **kw: Any) -> Call:
    """A call on three sequences of T rows together."""

    def call() -> None:
        cu = meta(4, dtype=torch.int32)
        KERNELS["attention_varlen"].forward(meta(T, H, D), meta(T, K, D), meta(T, K, D), cu, cu, 512, 512, **kw)

    return call


def backward(S: int, H: int, K: int, D: int, **kw: Any) -> Call:
    """Gradients of q, k and v of two sequences."""

    def call() -> None:
        q, k, v, do = meta(2, S, H, D), meta(2, S, K, D), meta(2, S, K, D), meta(2, S, H, D)
        outs = {"o": meta(2, S, H, D), "lse": meta(2, H, S, dtype=SINGLE)}
        implementation = KERNELS["attention"]
        assert implementation.backward is not None
        a = OPS["attention"].bind((q, k, v), kw)
        found = implementation.backward(a, outs, (do, None), (True, True, True, False, False))
        assert [None if t is None else t.shape for t in found] == [q.shape, k.shape, v.shape, None, None]

    return call


# By name: a call whose products are of 16-bit matrices, and the programs that its kernels have.
FAST: dict[str, tuple[Call, Callable[[int], list[int]]]] = {
    "causal, heads of 64": (dense(2048, 2048, 32, 8, 64, causal=True), lambda arch: [1024]),
    "causal, heads of 128": (dense(2048, 2048, 32, 8, 128, causal=True), lambda arch: [1024]),
    "all keys, heads of 128": (dense(2048, 2048, 32, 8, 128), lambda arch: [1024]),
    "causal, heads of 256": (dense(2048, 2048, 32, 8, 256, causal=True), lambda arch: [2048 if arch == 80 else 1024]),
    "one query": (dense(1, 32_768, 32, 8, 128), lambda arch: [16]),
    "ragged, causal": (ragged(4096, 32, 8, 128, causal=True, return_lse=True), lambda arch: [3 * 8 * 16]),
    "backward, heads of 128": (
        backward(2048, 32, 8, 128, causal=True),
        lambda arch: [4096, 512 if arch == 80 else 256, 2048 if arch == 80 else 1024],
    ),
}
# Calls that only have to be right, and to fit.
GENERAL: dict[str, Call] = {
    "window, cap, sinks": ragged(999, 14, 2, 64, window=(128, 0), softcap=30.0, sinks=meta(14), return_lse=True),
    "a bias": dense(200, 300, 8, 8, 80, mask=meta(8, 1, 300, dtype=SINGLE)),
    "a mask, a negative scale": dense(200, 300, 8, 8, 72, mask=meta(200, 300, dtype=torch.bool), scale=-0.1),
    "another width of v": dense(200, 300, 8, 4, 192, 128, causal=True),
    "the widest heads": dense(200, 300, 8, 4, 576, 512, causal=True),
    "float32": dense(200, 300, 8, 4, 128, dtype=SINGLE, causal=True),
}


def launches(arch: int, call: Call) -> list[Launched]:
    with compiling(arch) as launched:
        call()
        return list(launched)


@pytest.mark.parametrize("call", FAST)
@pytest.mark.parametrize("arch", SHARED, ids=lambda arch: f"sm_{arch}")
def test_a_fast_path_compiles_to_matrix_instructions_without_spills(arch: int, call: str) -> None:
    run, programs = FAST[call]
    launched = launches(arch, run)
    assert [one.grid[0] for one in launched] == programs(arch)
    for one in launched:
        assert one.spilled == 0, one.name
        assert one.shared <= SHARED[arch]
        if one.name != "attention_delta_kernel":
            assert one.counts(PRODUCT[arch]) > 0, one.name


@pytest.mark.parametrize("call", GENERAL)
@pytest.mark.parametrize("arch", SHARED, ids=lambda arch: f"sm_{arch}")
def test_any_other_call_compiles_and_fits(arch: int, call: str) -> None:
    (only,) = launches(arch, GENERAL[call])
    assert only.shared <= SHARED[arch]
