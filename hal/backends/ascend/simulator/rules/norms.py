"""Rules of the normalisations."""

from __future__ import annotations

from torch import Tensor

from hal.backends.ascend.simulator.constraints import Constraint
from hal.backends.ascend.simulator.rules._common import (
    FLOATS,
    absent,
    contiguous,
    dtypes,
    each,
    no_bfloat16,
    one_dtype,
    taking,
)

_RMS, _ADD, _GEMMA = "torch_npu-npu_rms_norm", "torch_npu-npu_add_rms_norm", "torch_npu-npu_gemma_rms_norm"
_LAYER = "aclnnLayerNorm"
_SUMS = ("aclnnAddRmsNorm", "aclnnInplaceAddRmsNorm")


def _gamma_fits(x: Tensor, gamma: Tensor) -> str | None:
    if gamma.dim() <= x.dim() and x.shape[x.dim() - gamma.dim() :] == gamma.shape:
        return None
    return f"gamma {tuple(gamma.shape)} for an input {tuple(x.shape)}"


def _same_shape(x1: Tensor, x2: Tensor) -> str | None:
    return None if x1.shape == x2.shape else f"{tuple(x1.shape)} and {tuple(x2.shape)}"


ROWS = (
    Constraint(
        operator="aclnnRmsNorm",
        rule="gamma's shape is that of the input's last dimensions",
        page=_RMS,
        enforced_by="document",
        check=_gamma_fits,
    ),
    Constraint(
        operator="aclnnRmsNorm",
        rule="input and gamma have one dtype",
        page=_RMS,
        enforced_by="document",
        check=one_dtype("x", "gamma"),
    ),
    Constraint(
        operator="aclnnRmsNorm",
        rule="the input is float16, bfloat16 or float32",
        page=_RMS,
        enforced_by="document",
        check=dtypes("x", allowed=FLOATS),
    ),
    Constraint(
        operator="aclnnRmsNorm",
        rule="the input has 2 to 8 dimensions",
        page=_RMS,
        enforced_by="document",
        check=each("x", test=lambda t: None if 2 <= t.dim() <= 8 else f"of {t.dim()} dimensions"),
    ),
    Constraint(
        operator=_SUMS,
        rule="x1 and x2 have one shape",
        page=_ADD,
        enforced_by="document",
        check=_same_shape,
    ),
    Constraint(
        operator=_SUMS,
        rule="x1, x2 and gamma have one dtype",
        page=_ADD,
        enforced_by="document",
        check=one_dtype("x1", "x2", "gamma"),
    ),
    Constraint(
        operator=_SUMS,
        rule="gamma's shape is that of the last dimensions of x1",
        page=_ADD,
        enforced_by="document",
        check=taking(("x1", "gamma"), _gamma_fits),
    ),
    Constraint(
        operator=_SUMS,
        rule="x1 is float16, bfloat16 or float32",
        page=_ADD,
        enforced_by="document",
        check=dtypes("x1", allowed=FLOATS),
    ),
    Constraint(
        operator="aclnnGemmaRmsNorm",
        rule="the operands of the Gemma form are contiguous",
        page=_GEMMA,
        enforced_by="document",
        check=contiguous("x", "gamma"),
    ),
    Constraint(
        operator="aclnnGemmaRmsNorm",
        rule="the input of the Gemma form is not empty",
        page=_GEMMA,
        enforced_by="document",
        check=each("x", test=lambda t: None if t.numel() else f"of shape {tuple(t.shape)}"),
    ),
    Constraint(
        operator="aclnnGemmaRmsNorm",
        rule="input and gamma of the Gemma form have one dtype",
        page=_GEMMA,
        enforced_by="document",
        check=one_dtype("x", "gamma"),
    ),
    Constraint(
        operator="aclnnGemmaRmsNorm",
        rule="gamma's shape is that of the last dimensions of the Gemma form's input",
        page=_GEMMA,
        enforced_by="document",
        check=_gamma_fits,
    ),
    Constraint(
        operator="aclnnLayerNorm",
        rule="the input of a layer norm is float16, bfloat16 or float32",
        page=_LAYER,
        enforced_by="document",
        check=dtypes("input", allowed=FLOATS),
    ),
    absent("aclnnGemmaRmsNorm", _GEMMA),
    no_bfloat16("aclnnRmsNorm", _RMS, "x"),
    no_bfloat16(_SUMS, _ADD, "x1"),
    no_bfloat16("aclnnLayerNorm", _LAYER, "input"),
)
