"""linear by cuBLAS, through torch's addmm and mm.

A bias of x's dtype is added before the one rounding, in cuBLAS's epilogue or as the product's first summand; `F.linear`
adds it to the rounded product of some layouts, and so does cuBLAS for one row of 16 bits, whose product is therefore
taken in float32. A bias of another dtype is added to a float32 product (float64 for float64) of widened inputs, which
copies them.

float32 is strict unless torch's own precision setting allows tf32: cuBLAS follows the same setting. Two further
settings would break the bound, and are off during a call: partial sums of a split product in 16 bits (a rounding of
2⁻⁹ of a partial sum, where c·g(n) allows 2⁻¹⁶ of Σ|x||w| for 4,096 terms), which torch allows unless told otherwise,
and accumulation in float16.

Gradients are products too, and the bias's a float32 sum; nothing is kept for them but the inputs.

Shape suffixes: T rows, I features in, O features out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from hal.backends.cuda.offers import forward_of
from hal.capability import Declares, Implementation, Supports
from hal.locks import LOCK
from hal.op import Args, empty

__all__ = ["IMPLEMENTATIONS"]

Gradients = tuple[Tensor | None, ...]

# By dtype, torch's settings that let cuBLAS compute in fewer bits than float32.
COARSE = {
    torch.float16: ("allow_fp16_reduced_precision_reduction", "allow_fp16_accumulation"),
    torch.bfloat16: ("allow_bf16_reduced_precision_reduction",),
}


@contextmanager
def _without(dtype: torch.dtype) -> Iterator[None]:
    """Those of this dtype's settings that are on, off; they are the process's, so one thread at a time changes them."""
    with LOCK:
        names = _on(dtype)
        for name in names:
            setattr(torch.backends.cuda.matmul, name, False)
        try:
            yield
        finally:
            for name in names:
                setattr(torch.backends.cuda.matmul, name, True)


def _on(dtype: torch.dtype) -> tuple[str, ...]:
    return tuple(name for name in COARSE.get(dtype, ()) if getattr(torch.backends.cuda.matmul, name))


def _fine(dtype: torch.dtype) -> Any:
    """A context in which products of this dtype are accumulated in float32 throughout."""
    return _without(dtype) if _on(dtype) else nullcontext()


def _prepare(a: Args) -> Callable[..., Tensor]:
    n_out, n_in = a.weight.shape
    shape, dtype, device = (*a.x.shape[:-1], n_out), a.x.dtype, a.x.device
    rows, flat = math.prod(a.x.shape[:-1]), a.x.dim() == 2
    wide = torch.float64 if a.bias is not None and torch.float64 in (dtype, a.bias.dtype) else torch.float32

    def nothing_to_multiply(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        y = empty(shape, dtype=dtype, device=device)
        return y.zero_() if bias is None else y.copy_(bias)

    def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        x_TI = x if flat else x.reshape(rows, n_in)
        with _fine(dtype):
            y_TO = torch.mm(x_TI, weight.t()) if bias is None else torch.addmm(bias, x_TI, weight.t())
        return y_TO if flat else y_TO.view(shape)

    def one_row(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        assert bias is not None
        y_TO = torch.mm(x.reshape(rows, n_in), weight.t(), out_dtype=torch.float32)
        return y_TO.add_(bias).to(dtype).view(shape)

    def widened(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        assert bias is not None
        y_TO = torch.addmm(bias.to(wide), x.reshape(rows, n_in).to(wide), weight.t().to(wide))
        return y_TO.to(dtype).view(shape)

    if not rows * n_in * n_out:
        return nothing_to_multiply
    if a.bias is not None and a.bias.dtype is not dtype:
        return widened
    return one_row if a.bias is not None and rows == 1 and dtype in COARSE and device.type == "cuda" else product


def _backward(a: Args, outs: dict[str, Tensor], grads: Gradients, needs: tuple[bool, ...]) -> Gradients:
    (dy,), (for_x, for_weight, for_bias) = grads, needs
    if dy is None:
        return None, None, None
    n_out, n_in = a.weight.shape
    dy_TO = dy.reshape(math.prod(dy.shape[:-1]), n_out)
    wide = torch.float64 if dy.dtype is torch.float64 else torch.float32
    db = dy_TO.sum(0, dtype=wide) if for_bias and a.bias is not None else None
    if not dy.numel() or not n_in:
        return None, None, db
    with _fine(dy.dtype):
        dx = torch.mm(dy_TO, a.weight).view(a.x.shape) if for_x else None
        dw = torch.mm(dy_TO.t(), a.x.reshape(-1, n_in)) if for_weight else None
    return dx, dw, db


IMPLEMENTATIONS: tuple[Implementation, ...] = (
    Implementation(
        "linear",
        "cublas",
        forward_of("linear", _prepare),
        supports=Supports(device_types=frozenset({"cuda"})),
        # Which of cuBLAS's kernels runs depends on every size and stride. Operands that are neither a matrix nor its
        # transpose are copied.
        declares=Declares(copies=frozenset({"x", "weight", "bias"})),
        priority=10,
        prepare=_prepare,
        backward=_backward,
    ),
)
