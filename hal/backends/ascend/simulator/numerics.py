"""How operators compute: exactly, or as a device may.

`exact`: float64 inside, each result rounded once. `perturbed`: float32 inside, sums by blocks in another order,
intermediates left unrounded, hf32 products where they are allowed, Inf and NaN lost on a chip that saturates. An
implementation that passes on one and not on the other leans on something that no device promises.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hal.backends.ascend.simulator import runtime
from hal.backends.ascend.simulator.settings import SimulatorSettings

__all__ = ["mean", "product", "rounded", "store", "total", "wide"]

_SUM_BLOCK = 32
_PRODUCT_BLOCK = 64
_HF32_DROPPED = 12  # of float32's 23 bits of mantissa, hf32 keeps 11


def _settings() -> SimulatorSettings:
    bridge = runtime.attached()
    return SimulatorSettings() if bridge is None else bridge.settings


def _perturbed() -> bool:
    return _settings().numerics == "perturbed"


def wide(t: Tensor) -> Tensor:
    """`t` in the dtype to compute in: float64, or float32 perturbed. Integers and booleans stay as they are."""
    if not t.is_floating_point():
        return t
    return t.float() if _perturbed() and t.dtype != torch.float64 else t.double()


def total(t: Tensor, dims: Sequence[int] | int | None = None, keepdim: bool = False) -> Tensor:
    """The sum of `wide(t)` over `dims` (none given: over all)."""
    values = wide(t)
    axes = sorted(_axes(t, dims))
    if not axes:
        return values
    if not _perturbed() or not values.is_floating_point():
        return values.sum(axes, keepdim=keepdim)
    rows = values.movedim(axes, tuple(range(-len(axes), 0))).flatten(values.dim() - len(axes))
    result = rows.new_zeros(rows.shape[:-1])
    for block in reversed(rows.split(_SUM_BLOCK, -1)):
        result = result + block.sum(-1)
    if keepdim:
        for axis in axes:
            result = result.unsqueeze(axis)
    return result


def mean(t: Tensor, dims: Sequence[int] | int | None = None, keepdim: bool = False) -> Tensor:
    """The mean of `wide(t)` over `dims` (none given: over all)."""
    count = 1
    for axis in _axes(t, dims):
        count *= t.shape[axis]
    return total(t, dims, keepdim) / count


def _axes(t: Tensor, dims: Sequence[int] | int | None) -> list[int]:
    if dims is None or (not isinstance(dims, int) and not dims):
        return list(range(t.dim()))
    given = [dims] if isinstance(dims, int) else list(dims)
    return [axis % t.dim() if t.dim() else 0 for axis in given] if t.dim() else []


def product(a: Tensor, b: Tensor, hf32: bool = False) -> Tensor:
    """The matrix product `a @ b`, wide. hf32: the call allows float32 inputs to lose mantissa."""
    if not _perturbed() or a.dtype == torch.float64 or not a.is_floating_point():
        return torch.matmul(wide(a), wide(b))
    left, right = a.float(), b.float()
    if hf32 and a.dtype == torch.float32:
        left, right = _hf32(left), _hf32(right)
    inner = 0 if right.dim() == 1 else -2
    parts = zip(left.split(_PRODUCT_BLOCK, -1), right.split(_PRODUCT_BLOCK, inner), strict=True)
    result: Tensor | None = None
    for x, y in parts:
        part = torch.matmul(x, y)
        result = part if result is None else result + part
    return torch.matmul(left, right) if result is None else result


def _hf32(t: Tensor) -> Tensor:
    """float32 rounded to hf32, to nearest, ties away from zero; Inf and NaN stay."""
    bits = t.contiguous().view(torch.int32)
    half = 1 << (_HF32_DROPPED - 1)
    rounded_bits = (bits + half) & ~((1 << _HF32_DROPPED) - 1)
    return torch.where(torch.isfinite(t), rounded_bits.view(torch.float32), t)


def rounded(value: Tensor, dtype: torch.dtype) -> Tensor:
    """An intermediate that is stored in `dtype`; perturbed: one that stays in registers, unrounded."""
    return value if _perturbed() else value.to(dtype).to(value.dtype)


def store(out: Tensor, value: Tensor) -> None:
    """Write a result, rounded once; on a chip that saturates, perturbed: without Inf and NaN."""
    if _settings().saturate and out.is_floating_point():
        most = torch.finfo(out.dtype).max
        value = torch.nan_to_num(value, nan=0.0, posinf=most, neginf=-most).clamp(-most, most)
    out.copy_(value)
