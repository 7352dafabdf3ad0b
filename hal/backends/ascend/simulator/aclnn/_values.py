"""What several families of operators need to read their arguments."""

from __future__ import annotations

import torch
from torch import Tensor

from hal.backends.ascend.simulator import numerics

__all__ = ["all_dims", "real", "scalar"]


def real(t: Tensor) -> Tensor:
    """`t` for a function of real numbers: integers and booleans become floats first, as the chip casts them."""
    return numerics.wide(t if t.is_floating_point() else t.double())


def scalar(value: float, like: Tensor) -> float:
    """A scalar as it meets a tensor: narrow floats compute with a float32 scalar."""
    if isinstance(value, float) and like.is_floating_point() and like.dtype is not torch.float64:
        return torch.tensor(value, dtype=torch.float32).item()
    return value


def all_dims(t: Tensor, dims: list[int] | None) -> list[int]:
    """The dims to reduce: none named means all."""
    return dims or list(range(t.ndim))
