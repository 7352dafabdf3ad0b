"""Matrix products on the cube core."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hal.backends.ascend.simulator import numerics
from hal.backends.ascend.simulator.aclnn._values import scalar
from hal.backends.ascend.simulator.operators import operator

# cubeMathType: what a float32 product may round its inputs to.
ALLOW_FP32_DOWN_PRECISION, USE_HF32 = 1, 3

# The cube core has no other formats among those of torch.
DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def _product(a: Tensor, b: Tensor, cube_math_type: int) -> Tensor:
    if a.dtype not in DTYPES or b.dtype not in DTYPES:
        raise NotImplementedError(f"a product of {a.dtype} and {b.dtype}: the cube core takes {DTYPES}")
    if a.dtype is not b.dtype:
        dtype = torch.promote_types(a.dtype, b.dtype)
        a, b = a.to(dtype), b.to(dtype)
    return numerics.product(a, b, hf32=cube_math_type in (ALLOW_FP32_DOWN_PRECISION, USE_HF32))


@operator("aclnnMatmul", "ttty")
@operator("aclnnMm", "ttty")
@operator("aclnnBatchMatMul", "ttty")
def matmul(self: Tensor, mat2: Tensor, out: Tensor, cube_math_type: int) -> None:
    numerics.store(out, _product(self, mat2, cube_math_type))


@operator("aclnnMv", "ttty")
def matrix_vector(self: Tensor, vec: Tensor, out: Tensor, cube_math_type: int) -> None:
    numerics.store(out, _product(self, vec[:, None], cube_math_type)[:, 0])


@operator("aclnnDot", "ttt")
def dot(self: Tensor, tensor: Tensor, out: Tensor) -> None:
    numerics.store(out, _product(self[None], tensor[:, None], 0).reshape(()))


def _added(self: Tensor, beta: Any, alpha: Any, product: Tensor) -> Tensor:
    """beta·self + alpha·product; with a beta of 0 self is not read, so that what is not finite there is no matter."""
    scaled = product * scalar(alpha, self)
    return scaled if beta == 0 else numerics.wide(self) * scalar(beta, self) + scaled


@operator("aclnnAddmm", "tttkkty")
def addmm(self: Tensor, mat1: Tensor, mat2: Tensor, beta: Any, alpha: Any, out: Tensor, cube_math_type: int) -> None:
    numerics.store(out, _added(self, beta, alpha, _product(mat1, mat2, cube_math_type)))


@operator("aclnnInplaceAddmm", "tttkky")
def addmm_in_place(self_ref: Tensor, mat1: Tensor, mat2: Tensor, beta: Any, alpha: Any, cube_math_type: int) -> None:
    numerics.store(self_ref, _added(self_ref, beta, alpha, _product(mat1, mat2, cube_math_type)))


@operator("aclnnBaddbmm", "tttkkty")
def baddbmm(
    self: Tensor, batch1: Tensor, batch2: Tensor, beta: Any, alpha: Any, out: Tensor, cube_math_type: int
) -> None:
    numerics.store(out, _added(self, beta, alpha, _product(batch1, batch2, cube_math_type)))


@operator("aclnnAddbmm", "tttkkty")
def addbmm(
    self: Tensor, batch1: Tensor, batch2: Tensor, beta: Any, alpha: Any, out: Tensor, cube_math_type: int
) -> None:
    product = numerics.total(_product(batch1, batch2, cube_math_type), [0])
    numerics.store(out, _added(self, beta, alpha, product))


@operator("aclnnAddmv", "tttkkty")
def addmv(self: Tensor, mat: Tensor, vec: Tensor, alpha: Any, beta: Any, out: Tensor, cube_math_type: int) -> None:
    numerics.store(out, _added(self, beta, alpha, _product(mat, vec[:, None], cube_math_type)[:, 0]))


@operator("aclnnAddr", "tttkkt")
def addr(self: Tensor, vec1: Tensor, vec2: Tensor, beta: Any, alpha: Any, out: Tensor) -> None:
    numerics.store(out, _added(self, beta, alpha, torch.outer(numerics.wide(vec1), numerics.wide(vec2))))
