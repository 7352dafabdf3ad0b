"""Compiles every kernel, as the host side would launch it, for 910B3 and 950PR: down to planned HIVM, not to code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import triton_bad_kernels as bad
from torch import Tensor
from triton_dryrun import GRID_LIMIT, TARGETS, Launch, compiled, narrowings, problems, recorded, unified_buffer

from hal.backends.ascend.triton import IMPLEMENTATIONS, launch

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
FORWARD = {found.op: found.forward for found in IMPLEMENTATIONS}
Make = Callable[..., Tensor]


def norm(op: str, shape: tuple[int, ...], strides: tuple[int, ...] | None = None, **arguments: Any) -> Callable:
    """A call of a norm, with a float32 weight unless told otherwise."""

    def call(dtype: torch.dtype) -> None:
        x = torch.empty(shape, dtype=dtype, device="meta")
        if strides is not None:
            x = x.as_strided(shape, strides)
        named = {"weight": torch.empty(shape[-1], device="meta")} | arguments
        more = (torch.empty_like(x),) if op == "add_rms_norm" else ()
        if named.get("bias") == "same":
            named["bias"] = torch.empty(shape[-1], dtype=dtype, device="meta")
        FORWARD[op](x, *more, **named)

    return call


def pointwise(op: str, shape: tuple[int, ...], **arguments: Any) -> Callable:
    def call(dtype: torch.dtype) -> None:
        FORWARD[op](torch.empty(shape, dtype=dtype, device="meta"), **arguments)

    return call


def rotary(tokens: int, H: int, K: int | None, D: int, R: int, interleaved: bool) -> Callable:
    def call(dtype: torch.dtype) -> None:
        q = torch.empty(tokens, H, D, dtype=dtype, device="meta")
        k = None if K is None else torch.empty(tokens, K, D, dtype=dtype, device="meta")
        table = torch.empty(4096, R // 2, device="meta")
        positions = torch.empty(tokens, dtype=torch.int64, device="meta")
        FORWARD["rotary_embedding"](q, k, positions, table, table, interleaved=interleaved)

    return call


CALLS: dict[str, Callable[[torch.dtype], None]] = {
    "rms_norm: rows of 4096": norm("rms_norm", (100_000, 4096)),
    "rms_norm: heads of 128": norm("rms_norm", (7, 32, 128), weight=None, weight_offset=1.0),
    "rms_norm: rows in blocks": norm("rms_norm", (300, 16_384), round_before_weight=True),
    "rms_norm: one row": norm("rms_norm", (1, 4096)),
    "rms_norm: rows 2³¹ elements apart": norm("rms_norm", (9, 576), strides=(2**31, 1)),
    "add_rms_norm: rows of 8192": norm("add_rms_norm", (64, 8192), round_before_weight=True),
    "add_rms_norm: rows of 576": norm("add_rms_norm", (64, 576), round_residual=False),
    "add_rms_norm: rows in blocks": norm("add_rms_norm", (64, 12_288)),
    "layer_norm: rows of 8192": norm("layer_norm", (64, 8192), bias="same"),
    "layer_norm: rows of 1000": norm("layer_norm", (64, 1000), bias="same"),
    "layer_norm: rows in blocks": norm("layer_norm", (64, 12_288), bias="same"),
    "layer_norm: no parameters": norm("layer_norm", (9, 2), weight=None),
    "layer_norm: one column": norm("layer_norm", (9, 1), bias="same"),
    "silu_and_mul": pointwise("silu_and_mul", (100_000, 2 * 11_008)),
    "silu_and_mul: clamped": pointwise("silu_and_mul", (64, 2 * 2880), limit=7, alpha=1.702, up_offset=1.0),
    "silu_and_mul: one column": pointwise("silu_and_mul", (64, 2), limit=2.5),
    "gelu_and_mul: erf": pointwise("gelu_and_mul", (64, 2 * 10_240)),
    "gelu_and_mul: tanh": pointwise("gelu_and_mul", (64, 2 * 173), approximate="tanh"),
    "softmax: rows of 1000": pointwise("softmax", (100_000, 1000)),
    "softmax: rows of 8192": pointwise("softmax", (64, 8192)),
    "softmax: rows in blocks": pointwise("softmax", (64, 151_936)),
    "softmax: an inner axis": pointwise("softmax", (6, 45, 7), dim=1),
    "softmax: an inner axis in blocks": pointwise("softmax", (6, 5000, 640), dim=1),
    "rotary_embedding: halves": rotary(5000, 32, 8, 128, 128, False),
    "rotary_embedding: halves, some dims": rotary(5000, 2, 2, 576, 64, False),
    "rotary_embedding: halves, one token": rotary(1, 71, 1, 64, 64, False),
    "rotary_embedding: pairs": rotary(5000, 32, 8, 128, 128, True),
    "rotary_embedding: pairs, 64 dims": rotary(5000, 9, None, 64, 64, True),
    "rotary_embedding: pairs, some dims": rotary(5000, 3, 3, 80, 32, True),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("target", TARGETS)
def test_a_launch_compiles_into_the_unified_buffer_without_scalar_loops(
    target: str, call: str, dtype: torch.dtype
) -> None:
    cores = TARGETS[target][1]
    with recorded(cores) as launches:
        CALLS[call](dtype)
    assert len(launches) == 1
    made = compiled(launches[0], target)
    assert problems(launches[0], made) == []
    assert 1 <= launches[0].grid[0] <= cores
    asked, kept = narrowings(made)
    if dtype is torch.float32:
        assert asked == 0
    else:
        # The 950 repeats a cast for the rest of a tile; 910B has one for each that is asked for.
        assert 0 < asked <= kept and (target != "Ascend910B3" or asked == kept)


def test_every_implementation_is_compiled() -> None:
    assert {name.partition(":")[0] for name in CALLS} == {found.op for found in IMPLEMENTATIONS}


@pytest.mark.parametrize("target", TARGETS)
def test_no_rounding_of_add_rms_norm_is_folded_away(target: str) -> None:
    with recorded(1) as launches:
        norm("add_rms_norm", (64, 8192), round_before_weight=True)(torch.bfloat16)
    asked, kept = narrowings(compiled(launches[0], target))
    # The sum, the normed value, the weight, the result: the stored sum and the one that is normed are the same cast.
    assert asked == 4 and kept >= 4


def ask(kernel: Any, grid: int = 1, **arguments: Any) -> Launch:
    tensors = {
        name: torch.empty(1, dtype=value, device="meta") if isinstance(value, torch.dtype) else value
        for name, value in arguments.items()
    }
    return Launch(kernel, (grid,), tensors)


F32, F16, I32 = torch.float32, torch.float16, torch.int32
BAD = {
    "ub overflow": lambda: ask(bad.greedy, x=F32, y=F32, n=5, BLOCK=32_768),
    "cc overflow": lambda: ask(bad.product, x=F16, y=F16, z=F32, n=512, BLOCK=512, DEPTH=32),
    "scalar: loads or stores": lambda: ask(bad.gather, x=F32, places=I32, y=F32, n=5, BLOCK=1024),
    "scalar: a loop over elements": lambda: ask(bad.gather, x=F32, places=I32, y=F32, n=5, BLOCK=1024),
    "scalar: integer comparison": lambda: ask(bad.chosen, x=F32, y=F32, n=5, BLOCK=1024),
    "grid: 70000 programs": lambda: ask(bad.copy, grid=70_000, x=F32, y=F32, n=5, BLOCK=64),
}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("fault", BAD)
def test_a_faulty_launch_is_found_out(target: str, fault: str) -> None:
    asked = BAD[fault]()
    found = problems(asked, compiled(asked, target))
    assert any(fault in problem for problem in found), found


@pytest.mark.parametrize("target", TARGETS)
def test_a_sound_launch_has_no_problem_and_a_known_use_of_the_buffer(target: str) -> None:
    asked = ask(bad.copy, x=F32, y=F32, n=5, BLOCK=4096)
    made = compiled(asked, target)
    assert problems(asked, made) == []
    assert made.hivm is not None and unified_buffer(made.hivm) == 4096 * 4


def test_a_tile_that_must_give_up_double_buffering_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "TILE", 2 * launch.TILE)
    with recorded(1) as launches:
        norm("add_rms_norm", (64, 12_288))(torch.float32)
    found = problems(launches[0], compiled(launches[0], "Ascend910B3"))
    assert found and all(problem.startswith("retried: ") for problem in found)


def test_no_number_of_tiles_makes_too_large_a_grid() -> None:
    with recorded(10**6) as launches:
        norm("rms_norm", (10**7, 4096))(torch.float32)
    assert launches[0].grid == (GRID_LIMIT,)
