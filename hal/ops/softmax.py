"""Softmax over one axis, in which a row that is −inf throughout is zero.

Shape letters: n the length of the axis.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hal.accuracy import Accumulator, Accuracy, growth, smallest_normal, unit_roundoff
from hal.arithmetic import result, widen
from hal.errors import ArgumentError, ShapeError
from hal.op import Args, Cost, Meta, Traits, dtype_name, op
from hal.ops._checks import check_floating

__all__ = ["softmax"]


def _pack(x: Tensor, dim: int = -1) -> tuple[Any, ...]:
    return x, dim


def _validate(a: Args) -> None:
    check_floating("softmax", "x", a.x)
    rank = a.x.dim()
    if rank == 0:
        raise ShapeError("softmax: x has no axis; it needs at least one: call x.reshape(1)")
    if not isinstance(a.dim, int) or not -rank <= a.dim < rank:
        raise ArgumentError(
            f"softmax: dim is {a.dim!r}; x has {rank} axes, so dim is an integer in {-rank} … {rank - 1}"
        )


def _meta(a: Args) -> tuple[Meta, ...]:
    return (Meta(tuple(a.x.shape), a.x.dtype),)


def _traits(a: Args) -> Traits:
    last = a.dim in (-1, a.x.dim() - 1)
    return Traits(
        dtype=dtype_name(a.x.dtype),
        features=frozenset(() if last else {"inner_dim"}),
        dims={"length": a.x.shape[a.dim]},
    )


def _cost(a: Args) -> Cost:
    # Per element: compare, subtract, exponential, add, divide.
    return Cost(flops=5 * a.x.numel(), bytes=2 * a.x.numel() * a.x.element_size())


def _dead(x: Tensor, dim: int) -> Tensor:
    """Which rows are −inf throughout (and so have no maximum to subtract)."""
    return (x == float("-inf")).all(dim, keepdim=True)


def _bound(a: Args, expected: tuple[Tensor, ...], acc: Accumulator) -> tuple[Tensor, ...]:
    n = a.x.shape[a.dim]
    if n == 0:
        return (torch.zeros_like(a.x),)
    distance = (a.x - a.x.amax(a.dim, keepdim=True)).abs()
    error = expected[0].abs() * (growth(n, acc) + 2 * acc.eps * (1 + distance))
    # −inf weighs exactly nothing; rows of NaN or +inf have no error: they are judged as special values.
    return (torch.where(error.isfinite(), error, 0.0),)


def _gradient_bound(
    a: Args, expected: tuple[Tensor, ...], grads: tuple[Tensor | None, ...], acc: Accumulator
) -> tuple[Tensor | None, ...]:
    (dy,), (y,) = grads, expected
    n = a.x.shape[a.dim]
    assert dy is not None
    if n == 0:
        return (torch.zeros_like(a.x),)
    relative = growth(n, acc) + 2 * acc.eps * (1 + (a.x - a.x.amax(a.dim, keepdim=True)).abs())
    saved, least = 0.0, smallest_normal(acc)
    if acc.dtype is not None and acc.dtype.itemsize == 2:
        saved = unit_roundoff(acc.dtype)
        least += torch.finfo(acc.dtype).tiny * saved
    weighed = dy * y
    mean = weighed.sum(a.dim, keepdim=True)
    live = torch.where(relative.isfinite(), relative, 0.0)
    moved = (weighed.abs() * (live + growth(n, acc))).sum(a.dim, keepdim=True)
    moved = moved + (saved * weighed).square().sum(a.dim, keepdim=True).sqrt()
    moved = moved + least * dy.square().sum(a.dim, keepdim=True).sqrt()
    error = y * ((live + saved) * (dy - mean).abs() + moved + 2 * acc.eps * (dy.abs() + mean.abs()))
    error = error + torch.where(y > 0, least, 0.0) * (dy - mean).abs()
    return (torch.where(error.isfinite(), error, 0.0),)


def _exact(a: Args, expected: tuple[Tensor, ...]) -> tuple[Tensor | None, ...]:
    alive = ~expected[0].isnan()
    return ((a.x == float("-inf")) & alive,)


ACCURACY = Accuracy(
    bound=_bound,
    exact=_exact,
    gradient_bound=_gradient_bound,
    notes="x − max rounds once, ε|x − max| absolute, hence relative in the exponential, which itself errs "
    "by 1 to 2 ε; the denominator is a sum of n positive terms with the same errors, averaged, and g(n) "
    "of its own; one division. What underflows is below 2⁻¹²⁶, which omega holds. −inf weighs exactly 0, "
    "in a row of nothing else too. Gradient: dx = y(dy − m), m = Σdy·y. With ρ the relative error of y, m moves by "
    "Σ|dy·y|(ρ + g(n)); difference and product 2ε(|dy| + |m|); where y was kept in 16 bits, its rounding u moves m by "
    "u√Σ(dy·y)² and dx by u|dx|, or by half of what is least there where y underflows.",
)


@op(
    schema="Tensor x, int dim",
    results=("y",),
    pack=_pack,
    validate=_validate,
    meta=_meta,
    traits=_traits,
    dims=("length",),
    cost=_cost,
    accuracy=ACCURACY,
    features=("inner_dim",),
    grad=("x",),
    saves=("y",),
)
def softmax(x: Tensor, dim: int = -1) -> Tensor:
    """y = exp(x − max x) / Σ exp(x − max x) over ``dim``, computed in float32 (float64 for float64) and
    rounded once.

    x: any rank of at least 1, any float, any strides. Result: like x, contiguous. A row that is −inf
    throughout gives 0 with gradient 0, where ``torch.softmax`` gives NaN; a row with a NaN or +inf is NaN.

    Raises ShapeError, ArgumentError (dim out of range) and DtypeError.
    """
    dead = _dead(x, dim)
    y = torch.softmax(widen(x).masked_fill(dead, 0.0), dim).masked_fill(dead, 0.0)
    return result(y, x.dtype).contiguous()
