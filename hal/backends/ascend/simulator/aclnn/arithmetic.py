"""Arithmetic of two or three operands, element by element, with torch's broadcasting and type promotion."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hal.backends.ascend.simulator import numerics
from hal.backends.ascend.simulator.aclnn._values import real, scalar
from hal.backends.ascend.simulator.operators import operator

Number = int | float | bool
Operand = Tensor | int | float | bool


def _two(self: Operand, other: Operand, reals: bool = False) -> tuple[Operand, Operand]:
    """Both operands as they are computed with."""
    widen = real if reals else numerics.wide
    like = self if isinstance(self, Tensor) else other
    assert isinstance(like, Tensor)
    first, second = (widen(x) if isinstance(x, Tensor) else scalar(x, like) for x in (self, other))
    return first, second


def _added(self: Operand, other: Operand, alpha: Number) -> Any:
    first, second = _two(self, other)
    if not isinstance(first, Tensor):
        first = torch.tensor(first, dtype=torch.float64 if isinstance(first, float) else None)
    return torch.add(first, second, alpha=alpha)


@operator("aclnnAdd", "ttkt")
@operator("aclnnAdds", "tkkt")
@operator("aclnnAddV3", "ktkt")
def add(self: Operand, other: Operand, alpha: Number, out: Tensor) -> None:
    numerics.store(out, _added(self, other, alpha))


@operator("aclnnInplaceAdd", "ttk")
@operator("aclnnInplaceAdds", "tkk")
def add_in_place(self_ref: Tensor, other: Operand, alpha: Number) -> None:
    numerics.store(self_ref, _added(self_ref, other, alpha))


@operator("aclnnSub", "ttkt")
@operator("aclnnSubs", "tkkt")
def sub(self: Tensor, other: Operand, alpha: Number, out: Tensor) -> None:
    numerics.store(out, _added(self, other, -alpha))


@operator("aclnnInplaceSub", "ttk")
@operator("aclnnInplaceSubs", "tkk")
def sub_in_place(self_ref: Tensor, other: Operand, alpha: Number) -> None:
    numerics.store(self_ref, _added(self_ref, other, -alpha))


@operator("aclnnRsub", "ttkt")
@operator("aclnnRsubs", "tkkt")
def rsub(self: Tensor, other: Operand, alpha: Number, out: Tensor) -> None:
    """other - alpha · self."""
    numerics.store(out, _added(other, self, -alpha))


def _define(
    name: str, function: Callable[[Any, Any], Any], *kinds: str, reals: bool = False, in_place: bool = False
) -> None:
    """aclnn<name><suffix> for every kind, a suffix and two letters such as `s tk`, and its twin in place."""
    for kind in kinds:
        suffix, _, letters = kind.rpartition(" ")

        @operator(f"aclnn{name}{suffix}", f"{letters}t")
        def out_of_place(self: Operand, other: Operand, out: Tensor) -> None:
            numerics.store(out, function(*_two(self, other, reals)))

        if in_place and letters != "kt":

            @operator(f"aclnnInplace{name}{suffix}", letters)
            def twin(self_ref: Tensor, other: Operand) -> None:
                numerics.store(self_ref, function(*_two(self_ref, other, reals)))


_define("Mul", torch.mul, "tt", "s tk", in_place=True)
_define("Div", torch.true_divide, "tt", "s tk", reals=True, in_place=True)
_define("FloorDivide", torch.floor_divide, "tt", "s tk", in_place=True)
_define("Fmod", torch.fmod, "Tensor tt", "Scalar tk", in_place=True)
_define("Remainder", torch.remainder, "TensorTensor tt", "TensorScalar tk", in_place=True)
_define("Remainder", torch.remainder, "ScalarTensor kt")
_define("Pow", torch.pow, "TensorTensor tt", "TensorScalar tk", in_place=True)
_define("Pow", torch.pow, "ScalarTensor kt")
_define("Atan2", torch.atan2, "tt", reals=True, in_place=True)
_define("LogAddExp", torch.logaddexp, "tt", reals=True)
_define("LogAddExp2", torch.logaddexp2, "tt", reals=True)
_define("XLogY", torch.xlogy, "Tensor tt", "ScalarOther tk", "ScalarSelf kt", reals=True)
_define("Gcd", torch.gcd, "tt")

ROUNDING_MODES = {0: None, 1: "trunc", 2: "floor"}


def _divided(self: Tensor, other: Operand, mode: int) -> Tensor:
    rounding = ROUNDING_MODES[mode]
    first, second = _two(self, other, reals=rounding is None)
    result: Tensor = torch.div(first, second, rounding_mode=rounding)
    return result


@operator("aclnnDivMod", "ttjt")
@operator("aclnnDivMods", "tkjt")
def div_mod(self: Tensor, other: Operand, mode: int, out: Tensor) -> None:
    numerics.store(out, _divided(self, other, mode))


@operator("aclnnInplaceDivMod", "ttj")
@operator("aclnnInplaceDivMods", "tkj")
def div_mod_in_place(self_ref: Tensor, other: Operand, mode: int) -> None:
    numerics.store(self_ref, _divided(self_ref, other, mode))


@operator("aclnnLerp", "tttt")
@operator("aclnnLerps", "ttkt")
def lerp(self: Tensor, end: Tensor, weight: Operand, out: Tensor) -> None:
    numerics.store(out, _between(self, end, weight))


@operator("aclnnInplaceLerp", "ttt")
@operator("aclnnInplaceLerps", "ttk")
def lerp_in_place(self_ref: Tensor, end: Tensor, weight: Operand) -> None:
    numerics.store(self_ref, _between(self_ref, end, weight))


def _between(start: Tensor, end: Tensor, weight: Operand) -> Tensor:
    share = numerics.wide(weight) if isinstance(weight, Tensor) else scalar(weight, start)
    return torch.lerp(numerics.wide(start), numerics.wide(end), share)


def _fused(function: Callable[..., Tensor], self: Tensor, first: Tensor, second: Tensor, value: Number) -> Tensor:
    wide = [numerics.wide(t) for t in (self, first, second)]
    return function(*wide, value=scalar(value, self))


@operator("aclnnAddcmul", "tttkt")
def addcmul(self: Tensor, tensor1: Tensor, tensor2: Tensor, value: Number, out: Tensor) -> None:
    numerics.store(out, _fused(torch.addcmul, self, tensor1, tensor2, value))


@operator("aclnnInplaceAddcmul", "tttk")
def addcmul_in_place(self_ref: Tensor, tensor1: Tensor, tensor2: Tensor, value: Number) -> None:
    numerics.store(self_ref, _fused(torch.addcmul, self_ref, tensor1, tensor2, value))


@operator("aclnnAddcdiv", "tttkt")
def addcdiv(self: Tensor, tensor1: Tensor, tensor2: Tensor, value: Number, out: Tensor) -> None:
    numerics.store(out, _fused(torch.addcdiv, self, tensor1, tensor2, value))


@operator("aclnnInplaceAddcdiv", "tttk")
def addcdiv_in_place(self_ref: Tensor, tensor1: Tensor, tensor2: Tensor, value: Number) -> None:
    numerics.store(self_ref, _fused(torch.addcdiv, self_ref, tensor1, tensor2, value))
