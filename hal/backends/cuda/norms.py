"""rms_norm, add_rms_norm and layer_norm by the kernels of hal.kernels.norms.

Their gradients: hal.backends.cuda.norms_backward. For them the statistics are kept, 4 bytes a row (8 of layer_norm).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hal.arithmetic import smallest_number
from hal.backends.cuda import launch, norms_backward, rows
from hal.backends.cuda.offers import offer
from hal.backends.cuda.plans import planned
from hal.backends.cuda.tactics import Tactic, tuned
from hal.capability import Declares, Implementation, Limit
from hal.op import Args, empty

__all__ = ["IMPLEMENTATIONS"]


@tuned()
def norm_tactic(features: int, capability: int) -> Tactic:
    """The tile of rms_norm_kernel and layer_norm_kernel."""
    return rows.tile(features)


def _least(eps: float) -> float:
    """eps as the contract counts it: at least the smallest normal number of the statistics."""
    return max(float(eps), smallest_number(torch.float32))


def _like(x: Tensor) -> Callable[[], Tensor]:
    """Makes results of x's shape and dtype."""
    shape, dtype, device = x.shape, x.dtype, x.device
    return lambda: empty(shape, dtype=dtype, device=device)


def _statistic(x: Tensor) -> Callable[[], Tensor]:
    """Makes statistics: a float32 number for each row of x."""
    shape, device = x.shape[:-1], x.device
    return lambda: empty(shape, dtype=torch.float32, device=device)


def _rms(a: Args) -> tuple[rows.Rows, rows.Rows, launch.Launch]:
    """The launch of rms_norm_kernel: y, and total with a residual."""
    x, residual = rows.Rows.of(a.x), rows.Rows.of(vars(a).get("residual", a.x))
    tactic = norm_tactic(x.features, launch.capability(a.x.device))
    run = launch.Launch(
        "norms.rms_norm_kernel",
        (rows.tiles(x.rows, tactic),),
        a.x.device,
        tactic.options,
        rows=x.rows,
        features=x.features,
        x_stride=x.stride,
        residual_stride=residual.stride,
        eps=_least(a.eps),
        weight_offset=float(a.weight_offset),
        ROUND_BEFORE_WEIGHT=a.round_before_weight,
        ROUND_RESIDUAL=vars(a).get("round_residual", False),
        **tactic.constants,
    )
    return x, residual, run


def _prepare_rms(a: Args, train: bool) -> Callable[..., Any]:
    y_of, rstd_of = _like(a.x), _statistic(a.x)
    if not a.x.numel():
        return lambda x, *_, **__: (y_of(), rstd_of()) if train else y_of()
    x_rows, _, run = _rms(a)
    lay, parameter = x_rows.lay, rows.parameter(a.weight)

    def call(x: Tensor, weight: Tensor | None = None, *_: Any, **__: Any) -> Tensor:
        y = y_of()
        run(lay(x), None, parameter(weight), y, None, None)
        return y

    def recorded(x: Tensor, weight: Tensor | None = None, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        y, rstd = y_of(), rstd_of()
        run(lay(x), None, parameter(weight), y, None, rstd)
        return y, rstd

    return recorded if train else call


def _prepare_add_rms(a: Args, train: bool) -> Callable[..., tuple[Tensor, ...]]:
    y_of, rstd_of = _like(a.x), _statistic(a.x)
    if not a.x.numel():
        return lambda x, *_, **__: (y_of(), y_of(), rstd_of()) if train else (y_of(), y_of())
    x_rows, residual_rows, run = _rms(a)
    lay, lay_residual, parameter = x_rows.lay, residual_rows.lay, rows.parameter(a.weight)

    def call(x: Tensor, residual: Tensor, weight: Tensor | None = None, *_: Any, **__: Any) -> tuple[Tensor, ...]:
        y, total = y_of(), y_of()
        run(lay(x), lay_residual(residual), parameter(weight), y, total, None)
        return y, total

    def recorded(x: Tensor, residual: Tensor, weight: Tensor | None = None, *_: Any, **__: Any) -> tuple[Tensor, ...]:
        y, total, rstd = y_of(), y_of(), rstd_of()
        run(lay(x), lay_residual(residual), parameter(weight), y, total, rstd)
        return y, total, rstd

    return recorded if train else call


def _prepare_layer(a: Args, train: bool) -> Callable[..., Any]:
    y_of, statistic_of = _like(a.x), _statistic(a.x)
    if not a.x.numel():
        return lambda x, *_, **__: (y_of(), statistic_of(), statistic_of()) if train else y_of()
    x = rows.Rows.of(a.x)
    tactic = norm_tactic(x.features, launch.capability(a.x.device))
    run = launch.Launch(
        "norms.layer_norm_kernel",
        (rows.tiles(x.rows, tactic),),
        a.x.device,
        tactic.options,
        rows=x.rows,
        features=x.features,
        x_stride=x.stride,
        eps=_least(a.eps),
        EXACT=x.features == tactic.constants["BLOCK_F"],
        **tactic.constants,
    )
    lay, weight_of, bias_of = x.lay, rows.parameter(a.weight), rows.parameter(a.bias)

    def call(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, *_: Any, **__: Any) -> Tensor:
        y = y_of()
        run(lay(x), weight_of(weight), bias_of(bias), y, None, None)
        return y

    def recorded(
        x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, *_: Any, **__: Any
    ) -> tuple[Tensor, ...]:
        y, mean, rstd = y_of(), statistic_of(), statistic_of()
        run(lay(x), weight_of(weight), bias_of(bias), y, mean, rstd)
        return y, mean, rstd

    return recorded if train else call


def _offer(
    op: str,
    prepare: Callable[[Args, bool], Callable[..., Any]],
    backward: Callable[..., Any],
    copies: frozenset[str],
) -> Implementation:
    return offer(
        op,
        lambda a: prepare(a, False),
        limits={"features": Limit(max=2**24 - 1)},
        declares=Declares(batch_invariant=True, copies=copies),
        train=planned(op, lambda a: prepare(a, True)),
        backward=backward,
    )


IMPLEMENTATIONS: tuple[Implementation, ...] = (
    _offer("rms_norm", _prepare_rms, norms_backward.rms_norm, frozenset({"x"})),
    _offer("add_rms_norm", _prepare_add_rms, norms_backward.add_rms_norm, frozenset({"x", "residual"})),
    _offer("layer_norm", _prepare_layer, norms_backward.layer_norm, frozenset({"x"})),
)
