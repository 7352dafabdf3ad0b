"""Values that bring faults to light: big means, rows at eps, overflow in half precision, exact integers.

Shape letters: T rows, F features.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hal.conformance.inputs import Draw
from hal.errors import ArgumentError

__all__ = ["KINDS", "large", "special", "values"]

KINDS = (
    "normal",
    "mean50",
    "mean1000",
    "tiny",
    "large",
    "ints",
    "mixed",
    "outlier",
    "zero_row",
    "constant_row",
    "special",
    "subnormal",
)


def large(dtype: torch.dtype) -> float:
    """A size whose square overflows half precision, not float32, and that `dtype` holds."""
    return 2.0e4 if dtype is torch.float16 else 1.0e15


def values(draw: Draw, name: str, kind: str, shape: tuple[int, ...], dtype: torch.dtype, eps: float = 1e-6) -> Tensor:
    """A tensor of `kind`, rounded to `dtype` once; rows are along the last axis."""
    x = draw.normal(name, shape)
    if not x.numel():
        return x.to(dtype)
    if kind in ("mean50", "mean1000"):
        # Rows of different size, so that a result in the wrong row shows.
        sizes = torch.tensor([1.0, 4.0, 0.25, 16.0, 0.0625], dtype=torch.float64)
        x = (x + float(kind[4:])) * sizes[torch.arange(x[..., 0].numel()) % 5].reshape(*shape[:-1], 1)
    elif kind == "tiny":
        x = x * math.sqrt(eps)
    elif kind == "large":
        x = x.clamp(-3, 3) * large(dtype)
    elif kind == "ints":
        x = draw.integers(name, shape, -4, 5).double()
    elif kind == "mixed":
        # From a table: pow may differ in the last bit between machines.
        sizes = torch.tensor([2.0**k for k in range(-6, 7)], dtype=torch.float64)
        x = x * sizes[draw.integers(f"{name}.power", (*shape[:-1], 1), 0, 13)]
    elif kind == "outlier":
        x = x.clamp(-2, 2) * 320
        if x.numel():
            x[..., shape[-1] // 2] = 16000
    elif kind == "zero_row":
        x[:1] = 0
    elif kind == "constant_row":
        x[:1] = 1.7
    elif kind == "special":
        x = special(draw, name, x)
    elif kind == "subnormal":
        x = x * torch.finfo(dtype).smallest_normal
    elif kind != "normal":
        raise ArgumentError(f"no values of the kind {kind!r}; there are {', '.join(KINDS)}")
    return x.to(dtype)


def special(draw: Draw, name: str, x: Tensor) -> Tensor:
    """NaN, Inf and −Inf, one in each of the first three rows, the rest as it is."""
    if x.numel() == 0:
        return x
    flat = x.reshape(-1, x.shape[-1])
    for row, figure in enumerate((math.nan, math.inf, -math.inf)[: flat.shape[0]]):
        flat[row, int(draw.integers(f"{name}.special{row}", (1,), 0, x.shape[-1]))] = figure
    return flat.reshape(x.shape)
