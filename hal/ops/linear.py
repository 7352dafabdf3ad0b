"""The matrix product of every projection: x @ weight.T + bias.

Shape letters: I features in, O features out; x is (…, I).
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from hal.accuracy import Accumulator, Accuracy, growth
from hal.arithmetic import result, widen
from hal.errors import ShapeError
from hal.op import Args, Cost, Meta, Traits, dtype_name, op
from hal.ops._checks import check_floating, check_rank, check_same_device, check_same_dtype

__all__ = ["linear"]


def _pack(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> tuple[Any, ...]:
    return x, weight, bias


def _validate(a: Args) -> None:
    check_floating("linear", "x", a.x)
    check_rank("linear", "weight", a.weight, 2, "(out, in)")
    check_same_dtype("linear", x=a.x, weight=a.weight)
    check_same_device("linear", x=a.x, weight=a.weight, bias=a.bias)
    if a.x.dim() == 0 or a.x.shape[-1] != a.weight.shape[1]:
        raise ShapeError(
            f"linear: x has shape {tuple(a.x.shape)} and weight {tuple(a.weight.shape)}; x is (…, in) and "
            "weight (out, in), so the last axis of x must equal the last axis of weight: pass "
            "weight.T.contiguous() if yours is (in, out)"
        )
    if a.bias is not None:
        check_floating("linear", "bias", a.bias)
        if tuple(a.bias.shape) != (a.weight.shape[0],):
            raise ShapeError(
                f"linear: bias has shape {tuple(a.bias.shape)}; with weight {tuple(a.weight.shape)} it must "
                f"be ({a.weight.shape[0]},), one value for each feature out"
            )


def _meta(a: Args) -> tuple[Meta, ...]:
    return (Meta((*a.x.shape[:-1], a.weight.shape[0]), a.x.dtype),)


def _rows(a: Args) -> int:
    rows = 1
    for n in a.x.shape[:-1]:
        rows *= n
    return rows


def _traits(a: Args) -> Traits:
    return Traits(
        dtype=dtype_name(a.x.dtype),
        features=frozenset({"bias"} if a.bias is not None else ()),
        dims={"rows": _rows(a), "in": a.weight.shape[1], "out": a.weight.shape[0]},
    )


def _cost(a: Args) -> Cost:
    rows, (n_out, n_in) = _rows(a), a.weight.shape
    flops = 2 * rows * n_out * n_in
    moved = (rows * n_in + n_out * n_in + rows * n_out) * a.x.element_size()
    if a.bias is not None:
        flops += rows * n_out
        moved += n_out * a.bias.element_size()
    return Cost(flops=flops, bytes=moved)


def _bound(a: Args, expected: tuple[Tensor, ...], acc: Accumulator) -> tuple[Tensor, ...]:
    error = growth(a.x.shape[-1], acc) * (a.x.abs() @ a.weight.abs().T)
    if acc.u_p:
        error = error + acc.u_p * (a.x.square() @ a.weight.square().T).sqrt()
    if a.bias is not None:
        error = error + acc.eps * a.bias.abs()
    return (error,)


def _gradient_bound(
    a: Args, expected: tuple[Tensor, ...], grads: tuple[Tensor | None, ...], acc: Accumulator
) -> tuple[Tensor | None, ...]:
    (dy,) = grads
    assert dy is not None
    dy_TO, x_TI = dy.flatten(0, -2) if dy.dim() > 1 else dy[None], a.x.reshape(_rows(a), a.x.shape[-1])

    def product(left: Tensor, right: Tensor) -> Tensor:
        error = growth(left.shape[1], acc) * (left.abs() @ right.abs())
        return error + acc.u_p * (left.square() @ right.square()).sqrt() if acc.u_p else error

    db_O = None if a.bias is None else growth(_rows(a), acc) * dy_TO.abs().sum(0)
    return product(dy_TO, a.weight).reshape(a.x.shape), product(dy_TO.T, x_TI), db_O


ACCURACY = Accuracy(
    bound=_bound,
    gradient_bound=_gradient_bound,
    notes="A sum of n products in any order errs by g(n)·Σ|x||w|; adding the bias rounds once more, ε(|b| "
    "+ |Σxw|), whose second part the first bound holds. Factors rounded to u_p (tf32) each change their "
    "product by at most u_p relative, independently: u_p·√(Σ(xw)²) is 1.2 standard deviations of the sum "
    "of two such errors. Gradients are such products too, dx over the features out, dw over the rows; that of the bias "
    "is a sum over the rows, g(T)Σ|dy|.",
)


@op(
    schema="Tensor x, Tensor weight, Tensor? bias",
    results=("y",),
    pack=_pack,
    validate=_validate,
    meta=_meta,
    traits=_traits,
    dims=("rows", "in", "out"),
    cost=_cost,
    accuracy=ACCURACY,
    features=("bias",),
    grad=("x", "weight", "bias"),
)
def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """y = x @ weight.T + bias, accumulated in float32 (float64 for float64) and rounded once.

    x: (…, in), any float. weight: (out, in), same dtype as x. bias: (out,), any float, or None. Result: (…,
    out), dtype of x. float32 products are strict float32 unless ``torch.get_float32_matmul_precision()``
    allows tf32.

    Raises ShapeError, DtypeError and DeviceError. The formula is that of ``torch.nn.functional.linear``.
    """
    y = widen(x) @ widen(weight).T
    if bias is not None:
        y = y + widen(bias)
    return result(y, x.dtype).contiguous()
