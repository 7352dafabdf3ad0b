"""rms_norm, add_rms_norm and layer_norm by the kernels of hal.kernels.norms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hal.arithmetic import smallest_number
from hal.backends.cuda import rows
from hal.backends.cuda.launch import Launch
from hal.backends.cuda.offers import offer
from hal.capability import Declares, Implementation, Limit
from hal.op import Args, empty

__all__ = ["IMPLEMENTATIONS"]


def _least(eps: float) -> float:
    """eps as the contract counts it: at least the smallest normal number of the statistics."""
    return max(float(eps), smallest_number(torch.float32))


def parameter(p: Tensor | None) -> Tensor | None:
    """Contiguous; the kernels have no float64, and their statistics none of its digits."""
    if p is None:
        return None
    return (p.float() if p.dtype is torch.float64 else p).contiguous()


def _rms(a: Args) -> tuple[rows.Rows, rows.Rows, Launch]:
    """The launch of rms_norm_kernel: y, and total with a residual."""
    x, residual = rows.Rows.of(a.x), rows.Rows.of(vars(a).get("residual", a.x))
    blocks = rows.tile(x.features)
    launch = Launch(
        "norms.rms_norm_kernel",
        (rows.tiles(x.rows, blocks),),
        a.x.device,
        rows.options(blocks),
        rows=x.rows,
        features=x.features,
        x_stride=x.stride,
        residual_stride=residual.stride,
        eps=_least(a.eps),
        weight_offset=float(a.weight_offset),
        ROUND_BEFORE_WEIGHT=a.round_before_weight,
        ROUND_RESIDUAL=vars(a).get("round_residual", False),
        **blocks,
    )
    return x, residual, launch


def rms_norm(a: Args) -> Callable[..., Tensor]:
    shape, dtype, device = a.x.shape, a.x.dtype, a.x.device
    if not a.x.numel():
        return lambda x, *_, **__: empty(shape, dtype=dtype, device=device)
    x_rows, _, launch = _rms(a)

    def call(x: Tensor, weight: Tensor | None = None, *_: Any, **__: Any) -> Tensor:
        y = empty(shape, dtype=dtype, device=device)
        launch(x_rows.lay(x), None, parameter(weight), y, None)
        return y

    return call


def add_rms_norm(a: Args) -> Callable[..., tuple[Tensor, Tensor]]:
    shape, dtype, device = a.x.shape, a.x.dtype, a.x.device

    def results() -> tuple[Tensor, Tensor]:
        return empty(shape, dtype=dtype, device=device), empty(shape, dtype=dtype, device=device)

    if not a.x.numel():
        return lambda x, residual, *_, **__: results()
    x_rows, residual_rows, launch = _rms(a)

    def call(x: Tensor, residual: Tensor, weight: Tensor | None = None, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        y, total = results()
        launch(x_rows.lay(x), residual_rows.lay(residual), parameter(weight), y, total)
        return y, total

    return call


_COLUMNS = {"features": Limit(max=2**24 - 1)}
_DECLARES = Declares(batch_invariant=True, stride_invariant=True, copies=frozenset({"x"}))

IMPLEMENTATIONS: tuple[Implementation, ...] = (
    offer("rms_norm", rms_norm, limits=_COLUMNS, declares=_DECLARES),
    offer(
        "add_rms_norm",
        add_rms_norm,
        limits=_COLUMNS,
        declares=Declares(batch_invariant=True, stride_invariant=True, copies=frozenset({"x", "residual"})),
    ),
)
