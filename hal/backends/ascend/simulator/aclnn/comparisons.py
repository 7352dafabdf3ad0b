"""Comparisons, logic, bits and choices: results are exact, so tensors keep their dtypes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hal.backends.ascend.simulator import numerics
from hal.backends.ascend.simulator.operators import operator

Number = int | float | bool
Operand = Tensor | int | float | bool


def _define(name: str, function: Callable[[Any, Any], Tensor], letters: str, in_place: bool) -> None:
    @operator(f"aclnn{name}", f"{letters}t")
    def out_of_place(self: Tensor, other: Operand, out: Tensor) -> None:
        numerics.store(out, function(self, other))

    if in_place:

        @operator(f"aclnnInplace{name}", letters)
        def twin(self_ref: Tensor, other: Operand) -> None:
            numerics.store(self_ref, function(self_ref, other))


for _name, _function in {
    "Eq": torch.eq,
    "Ne": torch.ne,
    "Lt": torch.lt,
    "Le": torch.le,
    "Gt": torch.gt,
    "Ge": torch.ge,
    "BitwiseAnd": torch.bitwise_and,
    "BitwiseOr": torch.bitwise_or,
    "BitwiseXor": torch.bitwise_xor,
}.items():
    # CANN has every in-place twin but that of "or".
    _define(f"{_name}Tensor", _function, "tt", in_place=_name != "BitwiseOr")
    _define(f"{_name}Scalar", _function, "tk", in_place=_name != "BitwiseOr")

_define("LessScalar", torch.lt, "tk", in_place=False)
_define("LogicalAnd", torch.logical_and, "tt", in_place=True)
_define("LogicalOr", torch.logical_or, "tt", in_place=True)
_define("LogicalXor", torch.logical_xor, "tt", in_place=False)
_define("LeftShift", torch.bitwise_left_shift, "tt", in_place=False)
_define("LeftShifts", torch.bitwise_left_shift, "tk", in_place=False)
_define("RightShift", torch.bitwise_right_shift, "tt", in_place=False)
_define("Maximum", torch.maximum, "tt", in_place=False)
_define("Minimum", torch.minimum, "tt", in_place=False)
_define("ClampMin", lambda x, bound: torch.clamp(x, min=bound), "tk", in_place=False)
_define("ClampMax", lambda x, bound: torch.clamp(x, max=bound), "tk", in_place=True)
_define("ClampMinTensor", lambda x, bound: torch.clamp(x, min=bound), "tt", in_place=True)
_define("ClampMaxTensor", lambda x, bound: torch.clamp(x, max=bound), "tt", in_place=True)


@operator("aclnnClamp", "tkkt")
@operator("aclnnClampTensor", "tttt")
def clamp(self: Tensor, clip_value_min: Any, clip_value_max: Any, out: Tensor) -> None:
    numerics.store(out, torch.clamp(self, clip_value_min, clip_value_max))


@operator("aclnnEqual", "ttt")
def equal(self: Tensor, other: Tensor, out: Tensor) -> None:
    out.fill_(torch.equal(self, other))


@operator("aclnnIsClose", "ttddbt")
def is_close(self: Tensor, other: Tensor, rtol: float, atol: float, equal_nan: bool, out: Tensor) -> None:
    out.copy_(torch.isclose(numerics.wide(self), numerics.wide(other), rtol, atol, equal_nan))


@operator("aclnnSWhere", "tttt")
def where(condition: Tensor, self: Tensor, other: Tensor, out: Tensor) -> None:
    out.copy_(torch.where(condition.bool(), self, other))


@operator("aclnnInplaceMaskedFillScalar", "ttk")
@operator("aclnnInplaceMaskedFillTensor", "ttt")
def masked_fill(self_ref: Tensor, mask: Tensor, value: Any) -> None:
    self_ref.masked_fill_(mask.bool(), value)


@operator("aclnnIsInTensorScalar", "tkbbt")
def is_in_scalar(element: Tensor, test_element: Number, assume_unique: bool, invert: bool, out: Tensor) -> None:
    out.copy_(torch.isin(element, test_element, assume_unique=assume_unique, invert=invert))


@operator("aclnnIsInScalarTensor", "ktbbt")
def is_in_tensor(element: Number, test_elements: Tensor, assume_unique: bool, invert: bool, out: Tensor) -> None:
    out.copy_(torch.isin(element, test_elements, assume_unique=assume_unique, invert=invert))
