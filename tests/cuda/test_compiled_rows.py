"""Compiles the operators over rows, as the host side launches them, for three architectures: no spills, no surprises."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from compile_only import SHARED, compiling

from hal.backends.cuda.implementations import IMPLEMENTATIONS

KERNELS = {found.op: found for found in IMPLEMENTATIONS if found.name == "triton"}
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
Call = Callable[[torch.dtype], None]


def norm(op: str, shape: tuple[int, ...], strides: tuple[int, ...] | None = None, **arguments: Any) -> Call:
    """A call of a norm, with a float32 weight unless told otherwise."""

    def call(dtype: torch.dtype) -> None:
        x = torch.empty(shape, dtype=dtype, device="meta")
        if strides is not None:
            x = x.as_strided(shape, strides)
        named = {"weight": torch.empty(shape[-1], device="meta")} | arguments
        more = (torch.empty_like(x),) if op == "add_rms_norm" else ()
        KERNELS[op].forward(x, *more, **named)

    return call


CALLS: dict[str, Call] = {
    "rms_norm: rows of 4096": norm("rms_norm", (16_384, 4096)),
    "rms_norm: rows of 8192": norm("rms_norm", (16_384, 8192)),
    "rms_norm: heads of 128": norm("rms_norm", (7, 32, 128), weight=None, weight_offset=1.0),
    "rms_norm: rows in blocks": norm("rms_norm", (300, 65_536), round_before_weight=True),
    "rms_norm: rows 2³¹ elements apart": norm("rms_norm", (9, 576), strides=(2**31, 1)),
    "add_rms_norm: rows of 8192": norm("add_rms_norm", (64, 8192), round_before_weight=True),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("arch", SHARED, ids=lambda arch: f"sm_{arch}")
def test_a_launch_compiles_without_spills(arch: int, call: str, dtype: torch.dtype) -> None:
    with compiling(arch) as launched:
        CALLS[call](dtype)
    (only,) = launched
    assert only.spilled == 0
    assert only.shared <= SHARED[arch]
