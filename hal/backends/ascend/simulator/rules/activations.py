"""Rules of the gated activations and softmax."""

from __future__ import annotations

import math

from torch import Tensor

from hal.backends.ascend.simulator.constraints import Constraint
from hal.backends.ascend.simulator.rules._common import FLOATS, absent, dtypes, no_bfloat16

_SWIGLU, _GEGLU, _GELU_MUL = "torch_npu-npu_swiglu", "torch_npu-npu_geglu", "torch_npu-npu_gelu_mul"


def _even(x: Tensor, dim: int) -> str | None:
    return None if x.shape[dim] % 2 == 0 else f"{x.shape[dim]}"


def _narrow(input: Tensor) -> str | None:
    last = input.shape[-1]
    return None if last % 2 == 0 and last <= 1024 else f"{last}"


def _rows(input: Tensor) -> str | None:
    rows = math.prod(input.shape[:-1])
    return None if rows <= 200_000 else f"{rows}"


ROWS = (
    Constraint(
        operator="aclnnSwiGlu",
        rule="the dimension that is split in two has an even size",
        page=_SWIGLU,
        enforced_by="document",
        check=_even,
    ),
    Constraint(
        operator="aclnnSwiGlu",
        rule="the input of swiglu is float16, bfloat16 or float32",
        page=_SWIGLU,
        enforced_by="document",
        check=dtypes("x", allowed=FLOATS),
    ),
    Constraint(
        operator="aclnnGeGluV3",
        rule="the dimension that geglu splits in two has an even size",
        page=_GEGLU,
        enforced_by="document",
        check=_even,
    ),
    Constraint(
        operator="aclnnGeGluV3",
        rule="the input of geglu is float16, bfloat16 or float32",
        page=_GEGLU,
        enforced_by="document",
        check=dtypes("x", allowed=FLOATS),
    ),
    Constraint(
        operator="aclnnGeluMul",
        rule="the last dimension of gelu_mul's input is even and at most 1024",
        page=_GELU_MUL,
        enforced_by="document",
        check=_narrow,
    ),
    Constraint(
        operator="aclnnGeluMul",
        rule="gelu_mul's input has at most 200,000 rows",
        page=_GELU_MUL,
        enforced_by="document",
        check=_rows,
    ),
    absent("aclnnGeluMul", _GELU_MUL),
    no_bfloat16(("aclnnSwiGlu", "aclnnGeGluV3"), _GEGLU, "x"),
    no_bfloat16("aclnnSoftmax", "aclnnSoftmax", "self"),
)
