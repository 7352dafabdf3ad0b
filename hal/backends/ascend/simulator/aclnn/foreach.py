"""Lists of tensors at once, as torch.optim uses them: each item as its operator on one tensor would be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hal.backends.ascend.simulator import numerics
from hal.backends.ascend.simulator.aclnn._values import real, scalar
from hal.backends.ascend.simulator.operators import operator

Number = int | float | bool
Tensors = list[Tensor]

ONE: dict[str, Callable[[Tensor], Tensor]] = {
    "Abs": torch.abs,
    "Acos": torch.acos,
    "Asin": torch.asin,
    "Atan": torch.atan,
    "Cos": torch.cos,
    "Cosh": torch.cosh,
    "Erf": torch.erf,
    "Erfc": torch.erfc,
    "Exp": torch.exp,
    "Expm1": torch.expm1,
    "Log": torch.log,
    "Log10": torch.log10,
    "Log1p": torch.log1p,
    "Log2": torch.log2,
    "Neg": torch.neg,
    "Reciprocal": torch.reciprocal,
    "Sigmoid": torch.sigmoid,
    "Sign": torch.sign,
    "Sin": torch.sin,
    "Sinh": torch.sinh,
    "Sqrt": torch.sqrt,
    "Tan": torch.tan,
    "Tanh": torch.tanh,
}

TWO: dict[str, Callable[[Any, Any], Tensor]] = {
    "Add": torch.add,
    "Sub": torch.sub,
    "Mul": torch.mul,
    "Div": torch.true_divide,
    "Maximum": lambda x, y: torch.maximum(x, torch.as_tensor(y, dtype=x.dtype)),
    "Minimum": lambda x, y: torch.minimum(x, torch.as_tensor(y, dtype=x.dtype)),
    "Pow": torch.pow,
}


def _number(value: Tensor | Number, like: Tensor) -> Number:
    """A scalar, which the first versions of these operators take as a tensor of one element."""
    plain: Number = value.item() if isinstance(value, Tensor) else value
    return scalar(plain, like)


def _define_one(name: str, function: Callable[[Tensor], Tensor]) -> None:
    @operator(f"aclnnForeach{name}", "ll")
    def each(x: Tensors, out: Tensors) -> None:
        for item, target in zip(x, out, strict=True):
            numerics.store(target, function(numerics.wide(item)))


def _define_two(name: str, function: Callable[[Any, Any], Tensor]) -> None:
    widen = real if name == "Div" else numerics.wide

    @operator(f"aclnnForeach{name}ScalarList", "lKl")
    def by_numbers(x: Tensors, scalars: list[Number], out: Tensors) -> None:
        for item, number, target in zip(x, scalars, out, strict=True):
            numerics.store(target, function(widen(item), scalar(number, item)))

    @operator(f"aclnnForeach{name}Scalar", "ltl")
    @operator(f"aclnnForeach{name}ScalarV2", "lkl")
    def by_number(x: Tensors, scalar: Tensor | Number, out: Tensors) -> None:
        for item, target in zip(x, out, strict=True):
            numerics.store(target, function(widen(item), _number(scalar, item)))

    if name in ("Add", "Sub"):
        return  # with alpha, below

    @operator(f"aclnnForeach{name}List", "lll")
    def by_list(x1: Tensors, x2: Tensors, out: Tensors) -> None:
        for first, second, target in zip(x1, x2, out, strict=True):
            numerics.store(target, function(widen(first), widen(second)))


def _define_scaled(name: str, function: Callable[..., Tensor]) -> None:
    @operator(f"aclnnForeach{name}List", "lltl")
    @operator(f"aclnnForeach{name}ListV2", "llkl")
    def scaled(x1: Tensors, x2: Tensors, alpha: Tensor | Number, out: Tensors) -> None:
        for first, second, target in zip(x1, x2, out, strict=True):
            numerics.store(target, function(numerics.wide(first), numerics.wide(second), alpha=_number(alpha, first)))


def _define_fused(name: str, function: Callable[..., Tensor]) -> None:
    def one(item: Tensor, first: Tensor, second: Tensor, value: Number, target: Tensor) -> None:
        numerics.store(target, function(*map(numerics.wide, (item, first, second)), value=value))

    @operator(f"aclnnForeach{name}Scalar", "llltl")
    @operator(f"aclnnForeach{name}ScalarV2", "lllkl")
    def by_number(x1: Tensors, x2: Tensors, x3: Tensors, scalar: Tensor | Number, out: Tensors) -> None:
        for item, first, second, target in zip(x1, x2, x3, out, strict=True):
            one(item, first, second, _number(scalar, item), target)

    @operator(f"aclnnForeach{name}ScalarList", "lllKl")
    def by_numbers(x1: Tensors, x2: Tensors, x3: Tensors, scalars: list[Number], out: Tensors) -> None:
        for item, first, second, number, target in zip(x1, x2, x3, scalars, out, strict=True):
            one(item, first, second, scalar(number, item), target)


for _name, _one in ONE.items():
    _define_one(_name, _one)
for _name, _two in TWO.items():
    _define_two(_name, _two)
_define_scaled("Add", torch.add)
_define_scaled("Sub", torch.sub)
_define_fused("Addcmul", torch.addcmul)
_define_fused("Addcdiv", torch.addcdiv)


@operator("aclnnForeachPowScalarAndTensor", "kll")
def pow_of(scalar: Number, exponents: Tensors, out: Tensors) -> None:
    for exponent, target in zip(exponents, out, strict=True):
        numerics.store(target, torch.pow(scalar, numerics.wide(exponent)))


@operator("aclnnForeachLerpScalar", "llkl")
def lerp(x1: Tensors, x2: Tensors, weight: Number, out: Tensors) -> None:
    for start, end, target in zip(x1, x2, out, strict=True):
        numerics.store(target, torch.lerp(numerics.wide(start), numerics.wide(end), scalar(weight, start)))


@operator("aclnnForeachLerpList", "llll")
def lerp_list(x1: Tensors, x2: Tensors, weights: Tensors, out: Tensors) -> None:
    for start, end, weight, target in zip(x1, x2, weights, out, strict=True):
        numerics.store(target, torch.lerp(*map(numerics.wide, (start, end, weight))))


@operator("aclnnForeachCopy", "ll")
def copy(x: Tensors, out: Tensors) -> None:
    for item, target in zip(x, out, strict=True):
        target.copy_(item)


@operator("aclnnForeachZeroInplace", "l")
def zero(x: Tensors) -> None:
    for item in x:
        item.zero_()


@operator("aclnnForeachNorm", "lkl")
def norm(x: Tensors, scalar: Number, out: Tensors) -> None:
    for item, target in zip(x, out, strict=True):
        numerics.store(target, torch.linalg.vector_norm(numerics.wide(item), scalar).reshape(target.shape))


@operator("aclnnForeachNonFiniteCheckAndUnscale", "ltt")
def check_and_unscale(scaled_grads: Tensors, found_inf: Tensor, inv_scale: Tensor) -> None:
    for grad in scaled_grads:
        if not grad.isfinite().all():
            found_inf.fill_(1)
        numerics.store(grad, numerics.wide(grad) * inv_scale)
