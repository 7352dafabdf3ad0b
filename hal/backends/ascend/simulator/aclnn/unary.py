"""Functions of one tensor, element by element."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from hal.backends.ascend.simulator import numerics
from hal.backends.ascend.simulator.aclnn._values import real
from hal.backends.ascend.simulator.operators import operator

Function = Callable[[Tensor], Tensor]

# Functions of real numbers, each result rounded once.
REAL: dict[str, Function] = {
    "Acos": torch.acos,
    "Acosh": torch.acosh,
    "AngleV2": torch.angle,
    "Asin": torch.asin,
    "Asinh": torch.asinh,
    "Atan": torch.atan,
    "Atanh": torch.atanh,
    "Cos": torch.cos,
    "Cosh": torch.cosh,
    "Erf": torch.erf,
    "Erfc": torch.erfc,
    "Erfinv": torch.erfinv,
    "Exp": torch.exp,
    "Exp2": torch.exp2,
    "Expm1": torch.expm1,
    "Log": torch.log,
    "Log10": torch.log10,
    "Log1p": torch.log1p,
    "Log2": torch.log2,
    "Reciprocal": torch.reciprocal,
    "Rsqrt": torch.rsqrt,
    "Sigmoid": torch.sigmoid,
    "Sin": torch.sin,
    "Sinc": torch.sinc,
    "Sinh": torch.sinh,
    "Sqrt": torch.sqrt,
    "Tan": torch.tan,
    "Tanh": torch.tanh,
    "Silu": torch.nn.functional.silu,
    "Mish": torch.nn.functional.mish,
    "Hardswish": torch.nn.functional.hardswish,
    "Hardsigmoid": torch.nn.functional.hardsigmoid,
    "LogSigmoid": torch.nn.functional.logsigmoid,
}

# Functions whose result is exact in the dtype of the argument, or a truth value.
EXACT: dict[str, Function] = {
    "Abs": torch.abs,
    "BitwiseNot": torch.bitwise_not,
    "Ceil": torch.ceil,
    "Floor": torch.floor,
    "Frac": torch.frac,
    "IsFinite": torch.isfinite,
    "IsNegInf": torch.isneginf,
    "IsPosInf": torch.isposinf,
    "LogicalNot": torch.logical_not,
    "Neg": torch.neg,
    "Relu": torch.relu,
    "Round": torch.round,
    "Sign": torch.sign,
    "Signbit": torch.signbit,
    "Trunc": torch.trunc,
}

# Those that CANN also writes in place.
IN_PLACE = (
    "Acos",
    "Acosh",
    "Asin",
    "Asinh",
    "Atan",
    "Atanh",
    "Ceil",
    "Cos",
    "Cosh",
    "Erf",
    "Erfc",
    "Erfinv",
    "Exp",
    "Exp2",
    "Expm1",
    "Floor",
    "Frac",
    "Hardsigmoid",
    "Hardswish",
    "Log",
    "Log10",
    "Log1p",
    "Log2",
    "LogicalNot",
    "Mish",
    "Reciprocal",
    "Relu",
    "Rsqrt",
    "Sigmoid",
    "Sin",
    "Sinc",
    "Sinh",
    "Sqrt",
    "Tan",
    "Tanh",
)


def _rounded_once(function: Function) -> Function:
    return lambda t: function(real(t))


def _define(name: str, function: Function) -> None:
    @operator(f"aclnn{name}", "tt")
    def out_of_place(self: Tensor, out: Tensor) -> None:
        numerics.store(out, function(self))

    if name in IN_PLACE:

        @operator(f"aclnnInplace{name}", "t")
        def in_place(self_ref: Tensor) -> None:
            numerics.store(self_ref, function(self_ref))


for _name, _function in REAL.items():
    _define(_name, _rounded_once(_function))
for _name, _function in EXACT.items():
    _define(_name, _function)


@operator("aclnnGelu", "tt")
def gelu_tanh(self: Tensor, out: Tensor) -> None:
    """The tanh form, as its document says; torch_npu calls it for either form of torch's gelu."""
    gelu(self, 1, out)


@operator("aclnnGeluV2", "tit")
def gelu(x: Tensor, approximate: int, y: Tensor) -> None:
    numerics.store(y, torch.nn.functional.gelu(real(x), approximate="tanh" if approximate else "none"))


@operator("aclnnRoundDecimals", "tit")
def round_decimals(self: Tensor, decimals: int, out: Tensor) -> None:
    numerics.store(out, torch.round(self, decimals=decimals))


@operator("aclnnInplaceRoundDecimals", "ti")
def round_decimals_in_place(self_ref: Tensor, decimals: int) -> None:
    numerics.store(self_ref, torch.round(self_ref, decimals=decimals))


@operator("aclnnNanToNum", "tffft")
def nan_to_num(self: Tensor, nan: float, posinf: float, neginf: float, out: Tensor) -> None:
    numerics.store(out, torch.nan_to_num(self, nan, posinf, neginf))


@operator("aclnnInplaceNanToNum", "tfff")
def nan_to_num_in_place(self_ref: Tensor, nan: float, posinf: float, neginf: float) -> None:
    numerics.store(self_ref, torch.nan_to_num(self_ref, nan, posinf, neginf))


@operator("aclnnSoftplus", "tkkt")
def softplus(self: Tensor, beta: float, threshold: float, out: Tensor) -> None:
    numerics.store(out, torch.nn.functional.softplus(real(self), beta, threshold))


@operator("aclnnElu", "tkkkt")
def elu(self: Tensor, alpha: float, scale: float, input_scale: float, out: Tensor) -> None:
    x = real(self)
    numerics.store(out, torch.where(x > 0, x * scale, torch.expm1(x * input_scale) * (alpha * scale)))


@operator("aclnnInplaceElu", "tkkk")
def elu_in_place(self_ref: Tensor, alpha: float, scale: float, input_scale: float) -> None:
    elu(self_ref, alpha, scale, input_scale, self_ref)


@operator("aclnnCelu", "tkt")
def celu(self: Tensor, alpha: float, out: Tensor) -> None:
    numerics.store(out, torch.nn.functional.celu(real(self), alpha))


@operator("aclnnInplaceCelu", "tk")
def celu_in_place(self_ref: Tensor, alpha: float) -> None:
    numerics.store(self_ref, torch.nn.functional.celu(real(self_ref), alpha))


@operator("aclnnGlu", "tit")
def glu(self: Tensor, dim: int, out: Tensor) -> None:
    numerics.store(out, torch.nn.functional.glu(real(self), dim))


@operator("aclnnLogit", "tdt")
def logit(self: Tensor, eps: float, out: Tensor) -> None:
    numerics.store(out, torch.logit(real(self), eps if eps >= 0 else None))


@operator("aclnnSoftshrink", "tkt")
def softshrink(self: Tensor, lambd: float, out: Tensor) -> None:
    numerics.store(out, torch.nn.functional.softshrink(real(self), lambd))


@operator("aclnnHardshrink", "tkt")
def hardshrink(self: Tensor, lambd: float, out: Tensor) -> None:
    numerics.store(out, torch.nn.functional.hardshrink(self, lambd))


@operator("aclnnLeakyRelu", "tkt")
def leaky_relu(self: Tensor, negative_slope: float, out: Tensor) -> None:
    numerics.store(out, torch.nn.functional.leaky_relu(real(self), negative_slope))


@operator("aclnnInplaceLeakyRelu", "tk")
def leaky_relu_in_place(self_ref: Tensor, negative_slope: float) -> None:
    numerics.store(self_ref, torch.nn.functional.leaky_relu(real(self_ref), negative_slope))


@operator("aclnnHardtanh", "tkkt")
def hardtanh(self: Tensor, clip_min: float, clip_max: float, out: Tensor) -> None:
    numerics.store(out, torch.clamp(self, clip_min, clip_max))


@operator("aclnnThreshold", "tkkt")
def threshold(self: Tensor, threshold: float, value: float, out: Tensor) -> None:
    numerics.store(out, torch.threshold(self, threshold, value))


@operator("aclnnInplaceThreshold", "tkk")
def threshold_in_place(self_ref: Tensor, threshold: float, value: float) -> None:
    numerics.store(self_ref, torch.threshold(self_ref, threshold, value))
