"""Compiles the operators over rows and the rotation as the host side launches them, for three architectures.

No launch may spill or ask for too much shared memory. Where it counts, a thread moves memory 16 bytes at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from compile_only import SHARED, Launched, compiling
from torch import Tensor

from hal.backends.cuda import plans
from hal.backends.cuda.implementations import IMPLEMENTATIONS
from hal.op import OPS

KERNELS = {found.op: found for found in IMPLEMENTATIONS if found.name == "triton"}
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
COMPILED = [(80, BF16), (80, F32), (90, BF16), (90, F32), (100, F16)]
ROW = (16_384, 4096)


@dataclass(frozen=True)
class Call:
    """A call of an operator on x of this shape, and its gradients if asked for.

    parameters: names of those that are (features,), float32 unless `alike`. grids: one for each launch. narrow: memory
    accesses of each launch that move less than 16 bytes a thread, for 16-bit dtypes; None where it does not count.
    """

    op: str
    shape: tuple[int, ...]
    grids: tuple[tuple[int, ...], ...]
    narrow: tuple[int, ...] | None = None
    parameters: tuple[str, ...] = ()
    alike: bool = False
    gradient: bool = False
    strides: tuple[int, ...] | None = None
    arguments: tuple[tuple[str, Any], ...] = ()

    def __call__(self, dtype: torch.dtype) -> None:
        x = meta(*self.shape, dtype=dtype)
        if self.strides is not None:
            x = x.as_strided(self.shape, self.strides)
        given: dict[str, Any] = dict(self.arguments)
        for name in self.parameters:
            given[name] = meta(self.shape[-1], dtype=dtype if self.alike else F32)
        more = (torch.empty_like(x),) if self.op == "add_rms_norm" else ()
        found = KERNELS[self.op]
        if not self.gradient:
            found.forward(x, *more, **given)
            return
        a = OPS[self.op].bind((x, *more), given)
        results = OPS[self.op].meta(a)[: len(OPS[self.op].results)]
        grads = tuple(meta(*result.shape, dtype=result.dtype) for result in results)
        statistics = {name: meta(*self.shape[:-1], dtype=F32) for name in OPS[self.op].stats}
        assert found.backward is not None
        found.backward(a, statistics, grads, tuple(getattr(a, name) is not None for name in OPS[self.op].grad))


def meta(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


W, WB = ("weight",), ("weight", "bias")
LIMITED = (("limit", 7.0), ("alpha", 1.702), ("up_offset", 1.0))
TANH = (("approximate", "tanh"),)
CALLS: dict[str, Call] = {
    "rms_norm: rows of 4096": Call("rms_norm", ROW, ((16_384,),), (0,), W, True),
    "rms_norm: rows of 8192": Call("rms_norm", (16_384, 8192), ((16_384,),), (0,), W, True),
    "rms_norm: rows of 1000": Call("rms_norm", (300, 1000), ((300,),), None, W),
    "rms_norm: one row": Call("rms_norm", (1, 4096), ((1,),), (0,), W),
    "rms_norm: heads of 128": Call("rms_norm", (7, 32, 128), ((7,),), (0,), arguments=(("weight_offset", 1.0),)),
    "rms_norm: rows in blocks": Call(
        "rms_norm", (300, 65_536), ((300,),), (0,), W, arguments=(("round_before_weight", True),)
    ),
    "rms_norm: rows 2³¹ elements apart": Call("rms_norm", (9, 576), ((9,),), (0,), W, strides=(2**31, 1)),
    "rms_norm: gradients of rows of 4096": Call("rms_norm", ROW, ((264,), (128,)), (None, 1), W, True, True),
    "rms_norm: gradient of x alone": Call("rms_norm", ROW, ((16_384,),), (1,), gradient=True),
    "rms_norm: gradients of heads of 128": Call("rms_norm", (7, 32, 128), ((14,), (4,)), None, W, gradient=True),
    "rms_norm: gradients of rows in blocks": Call(
        "rms_norm", (300, 65_536), ((300,), (256, 4), (2048,)), None, W, gradient=True
    ),
    "add_rms_norm: rows of 8192": Call(
        "add_rms_norm", (64, 8192), ((64,),), (0,), W, arguments=(("round_before_weight", True),)
    ),
    "add_rms_norm: gradients of rows of 8192": Call(
        "add_rms_norm", (16_384, 8192), ((132,), (256,)), (None, 1), W, True, True
    ),
    "layer_norm: rows of 4096": Call("layer_norm", ROW, ((16_384,),), (0,), WB, True),
    "layer_norm: rows of 8192": Call("layer_norm", (16_384, 8192), ((16_384,),), (0,), WB, True),
    "layer_norm: rows of 1000": Call("layer_norm", (300, 1000), ((300,),), None, WB),
    "layer_norm: gradients of rows of 8192": Call(
        "layer_norm", (16_384, 8192), ((132,), (256,)), (None, 2), WB, True, True
    ),
    "silu_and_mul": Call("silu_and_mul", (16_384, 2 * 4096), ((32_768,),), (0,)),
    "silu_and_mul: clamped": Call("silu_and_mul", (64, 2 * 2880), ((128,),), (0,), arguments=LIMITED),
    "silu_and_mul: gradient": Call("silu_and_mul", (64, 2 * 11_008), ((384,),), (0,), gradient=True, arguments=LIMITED),
    "gelu_and_mul: erf": Call("gelu_and_mul", (64, 2 * 10_240), ((320,),), (0,)),
    "gelu_and_mul: tanh": Call("gelu_and_mul", (64, 2 * 173), ((8,),), None, arguments=TANH),
    "gelu_and_mul: gradient by erf": Call("gelu_and_mul", (64, 2 * 10_240), ((320,),), (0,), gradient=True),
    "gelu_and_mul: gradient by tanh": Call(
        "gelu_and_mul", (64, 2 * 10_240), ((320,),), (0,), gradient=True, arguments=TANH
    ),
    "softmax: rows of 4096": Call("softmax", ROW, ((16_384,),), (0,)),
    "softmax: rows of 8192": Call("softmax", (16_384, 8192), ((16_384,),), (0,)),
    "softmax: rows of 32,768": Call("softmax", (64, 32_768), ((64,),), (0,)),
    "softmax: rows in pieces": Call("softmax", (64, 151_936), ((1216,), (1216,)), None),
    "softmax: an inner axis": Call("softmax", (6, 45, 7), ((6,),), None, arguments=(("dim", 1),)),
    "softmax: an inner axis in blocks": Call("softmax", (6, 5000, 640), ((60,),), (0,), arguments=(("dim", 1),)),
    "softmax: gradient of rows of 8192": Call("softmax", (16_384, 8192), ((16_384,),), (0,), gradient=True),
    "softmax: gradient of rows of 16,384": Call("softmax", (64, 16_384), ((64,),), (0,), gradient=True),
    "softmax: gradient of rows in pieces": Call("softmax", (64, 151_936), ((1216,), (1216,)), None, gradient=True),
    "softmax: gradient along an inner axis": Call(
        "softmax", (6, 5000, 640), ((60,),), (0,), gradient=True, arguments=(("dim", 1),)
    ),
}


@dataclass(frozen=True)
class Turn:
    """A call of rotary_embedding. narrow: accesses of less than 16 bytes: the position, and what depends on it."""

    tokens: int
    heads: tuple[int, int | None]
    dim: int
    rotated: int
    interleaved: bool
    narrow: int | None = None

    def __call__(self, dtype: torch.dtype) -> None:
        table = meta(4096, self.rotated // 2, dtype=F32)
        q, k = (None if heads is None else meta(self.tokens, heads, self.dim, dtype=dtype) for heads in self.heads)
        positions = meta(self.tokens, dtype=torch.int64)
        KERNELS["rotary_embedding"].forward(q, k, positions, table, table, interleaved=self.interleaved)


TURNS: dict[str, Turn] = {
    "halves": Turn(16_384, (32, 8), 128, 128, False, 3),
    "halves, some dims": Turn(5000, (2, 2), 576, 64, False),
    "halves, one token": Turn(1, (71, 1), 64, 64, False),
    "pairs": Turn(16_384, (32, 8), 128, 128, True, 3),
    "pairs, q alone": Turn(5000, (9, None), 64, 64, True),
    "pairs, some dims": Turn(5000, (3, 3), 80, 32, True),
}


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """What was prepared for one architecture serves no other, and none of it the tests after these."""
    plans.forget()
    yield
    plans.forget()


def narrow(launched: Launched) -> int:
    """Accesses of global memory that move less than 16 bytes a thread."""
    return launched.counts(r"\b(?:LDG|STG)\.") - launched.counts(r"\b(?:LDG|STG)\.E[.A-Z]*\.128")


def sound(launched: Launched) -> None:
    assert launched.spilled == 0
    assert launched.shared <= SHARED[launched.arch]


def named(value: object) -> str:
    return str(value).removeprefix("torch.")


@pytest.mark.parametrize(("arch", "dtype"), COMPILED, ids=named)
@pytest.mark.parametrize("call", CALLS)
def test_launches_neither_spill_nor_move_memory_in_small_pieces(arch: int, dtype: torch.dtype, call: str) -> None:
    with compiling(arch) as launched:
        CALLS[call](dtype)
    for made in launched:
        sound(made)
    if arch == 90 and dtype is not F32:
        assert tuple(made.grid for made in launched) == tuple((*grid, 1, 1)[:3] for grid in CALLS[call].grids)
        expected = CALLS[call].narrow or (None,) * len(launched)
        assert [None if n is None else narrow(made) for made, n in zip(launched, expected, strict=True)] == [*expected]


@pytest.mark.parametrize(("arch", "dtype"), COMPILED, ids=named)
@pytest.mark.parametrize("call", TURNS)
def test_q_and_k_are_turned_in_one_launch(arch: int, dtype: torch.dtype, call: str) -> None:
    with compiling(arch) as launched:
        TURNS[call](dtype)
    (only,) = launched
    sound(only)
    assert only.grid == (TURNS[call].tokens, 1, 1)
    if TURNS[call].narrow is not None and dtype is not F32:
        assert narrow(only) == TURNS[call].narrow


@pytest.mark.parametrize("op", ["rms_norm", "layer_norm"])
@pytest.mark.parametrize("features", [4096, 8192])
def test_a_multiprocessor_holds_rows_enough_to_hide_its_waiting(op: str, features: int) -> None:
    """At 4 TB/s, half of it read, and 1 µs of latency, 16 KB are under way on each of 132 multiprocessors."""
    with compiling(90) as launched:
        Call(op, (16_384, features), (), parameters=W, alike=True)(BF16)
    (only,) = launched
    threads = 32 * only.warps
    # Registers are given out to warps by 256.
    resident = min(2048 // threads, 65_536 // (threads * -(-only.usage["REG"] // 8) * 8))
    assert resident * features * 2 >= 2 * 16_384


def test_gradients_of_rows_are_fetched_ahead() -> None:
    with compiling(90) as launched:
        CALLS["rms_norm: gradients of rows of 4096"](BF16)
    assert launched[0].counts(r"LDGSTS\.E[.A-Z]*\.128") >= 4


def test_every_operator_over_rows_is_compiled() -> None:
    over_rows = {"rms_norm", "add_rms_norm", "layer_norm", "silu_and_mul", "gelu_and_mul", "softmax"}
    assert {(call.op, call.gradient) for call in CALLS.values()} == {(op, g) for op in over_rows for g in (False, True)}
