"""Gradients of rms_norm, add_rms_norm and layer_norm by the kernels of hal.kernels.norms_backward.

Kept from the forward pass are the statistics, and the inputs themselves: nothing is stored for the backward pass alone
but 4 bytes a row (8 of layer_norm). Where the weight's gradient is wanted, programs stay on their multiprocessors and
walk rows; each hands in a row of partial sums, which a second launch adds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hal.backends.cuda import launch, rows
from hal.backends.cuda.plans import remembered, signature
from hal.backends.cuda.tactics import Tactic, tuned
from hal.op import Args, empty

__all__ = ["add_rms_norm", "layer_norm", "rms_norm"]

Gradients = tuple[Tensor | None, ...]

# Rows that a program keeps in registers together with their gradients and the sums for the parameters.
WHOLE_ROW = 8192
WARP = 512
# Warps that a multiprocessor holds at once of programs that stay: what their registers allow (up to 128 a thread).
RESIDENT_WARPS = 16
# Programs of norm_columns_kernel, of which a multiprocessor holds several, for each multiprocessor.
COLUMN_PROGRAMS = 8
COLUMNS = Tactic({"BLOCK_R": 16, "BLOCK_F": 256}, {"num_warps": 8})
SUMS = Tactic({"BLOCK_R": 128, "BLOCK_F": 32}, {"num_warps": 8})


@tuned()
def backward_tactic(features: int, stays: bool, capability: int) -> Tactic:
    """The tile of norm_backward_kernel, whose programs stay for their sums or not."""
    if features > WHOLE_ROW:
        constants = {"BLOCK_R": 1, "BLOCK_F": min(rows.TILE, WHOLE_ROW), "WHOLE": False, "STAGES": 1}
        return Tactic(constants, {"num_warps": 4})
    taken = rows.tile(features, WARP)
    return Tactic({**taken.constants, "STAGES": 2 if stays else 1}, taken.options)


@tuned()
def columns_tactic(features: int, capability: int) -> Tactic:
    """The tile of norm_columns_kernel."""
    return COLUMNS


@tuned()
def sums_tactic(features: int, capability: int) -> Tactic:
    """The tile of sum_rows_kernel."""
    return SUMS


def _launches(a: Args, laid: dict[str, rows.Rows], needs: tuple[bool, bool, bool]) -> tuple[Any, ...]:
    """The launches of norm_backward_kernel, norm_columns_kernel, sum_rows_kernel, or None; rows of partial sums."""
    x, device, chip = laid["x"], a.x.device, launch.capability(a.x.device)
    for_x, for_parameters = needs[0], needs[1] or needs[2]
    tactic = backward_tactic(x.features, for_parameters, chip)
    whole = bool(tactic.constants["WHOLE"])
    numbers: dict[str, Any] = {"rows": x.rows, "features": x.features}
    strides = {f"{name}_stride": laid[name].stride if name in laid else 0 for name in ("x", "residual", "dy")}
    rounds = {
        "ROUND_BEFORE_WEIGHT": vars(a).get("round_before_weight", False),
        "ROUND_RESIDUAL": vars(a).get("round_residual", False),
    }
    tiles, sums, main, columns, added = rows.tiles(x.rows, tactic), 0, None, None, None
    if for_parameters and whole:
        sums = min(tiles, launch.multiprocessors(device) * max(1, RESIDENT_WARPS // tactic.options["num_warps"]))
    if for_x or (for_parameters and whole):
        main = launch.Launch(
            "norms_backward.norm_backward_kernel",
            (sums or tiles,),
            device,
            tactic.options,
            **numbers,
            **strides,
            d_total_stride=laid["d_total"].stride if "d_total" in laid else 0,
            weight_offset=float(vars(a).get("weight_offset", 0.0)),
            **rounds,
            **tactic.constants,
        )
    if for_parameters and not whole:
        tactic = columns_tactic(x.features, chip)
        across = -(-x.features // tactic.constants["BLOCK_F"])
        sums = max(1, min(rows.tiles(x.rows, tactic), COLUMN_PROGRAMS * launch.multiprocessors(device) // across))
        columns = launch.Launch(
            "norms_backward.norm_columns_kernel",
            (across, sums),
            device,
            tactic.options,
            **numbers,
            **strides,
            **rounds,
            **tactic.constants,
        )
    if for_parameters:
        tactic = sums_tactic(x.features, chip)
        added = launch.Launch(
            "norms_backward.sum_rows_kernel",
            (-(-x.features // tactic.constants["BLOCK_F"]),),
            device,
            tactic.options,
            rows=sums,
            features=x.features,
            **tactic.constants,
        )
    return main, columns, added, sums


def _prepare(a: Args, dy: Tensor, d_total: Tensor | None, needs: tuple[bool, bool, bool]) -> Callable[..., Gradients]:
    """A function of (x, residual, weight, mean, rstd, dy, d_total) that gives dx, dw, db, None where not needed."""
    tensors = {"x": a.x, "residual": vars(a).get("residual"), "dy": dy, "d_total": d_total}
    laid = {name: rows.Rows.of(t) for name, t in tensors.items() if t is not None}
    main, columns, added, sums = _launches(a, laid, needs)
    shape, dtype, device, features = a.x.shape, a.x.dtype, a.x.device, a.x.shape[-1]
    lay_x, lay_dy = laid["x"].lay, laid["dy"].lay
    lay_residual: Callable[[Any], Any] = laid["residual"].lay if "residual" in laid else _nothing
    lay_total: Callable[[Any], Any] = laid["d_total"].lay if "d_total" in laid else _nothing
    parameter = rows.parameter(a.weight)
    kinds = [
        None if p is None or not need else torch.float32 if p.dtype is torch.float64 else p.dtype
        for p, need in ((a.weight, needs[1]), (vars(a).get("bias"), needs[2]))
    ]

    def call(
        x: Tensor,
        residual: Tensor | None,
        weight: Tensor | None,
        mean: Tensor | None,
        rstd: Tensor,
        dy: Tensor,
        d_total: Tensor | None,
    ) -> Gradients:
        x, residual, dy, d_total = lay_x(x), lay_residual(residual), lay_dy(dy), lay_total(d_total)
        dx = empty(shape, dtype=dtype, device=device) if needs[0] else None
        dw, db = (None if kind is None else empty((features,), dtype=kind, device=device) for kind in kinds)
        dw_sums, db_sums = (
            None if d is None else empty((sums, features), dtype=torch.float32, device=device) for d in (dw, db)
        )
        if main is not None:
            own = (dw_sums, db_sums) if columns is None else (None, None)
            main(x, residual, parameter(weight), mean, rstd, dy, d_total, dx, *own)
        if columns is not None:
            columns(x, residual, mean, rstd, dy, dw_sums, db_sums)
        if added is not None:
            added(dw_sums, db_sums, dw, db)
        return dx, dw, db

    return call


def _nothing(t: Any) -> Any:
    return t


def _gradients(
    op: str, a: Args, mean: Tensor | None, rstd: Tensor, dy: Tensor, d_total: Tensor | None, needs: tuple[bool, ...]
) -> Gradients:
    """dx, dw, db."""
    for_x, for_weight, for_bias = needs
    wanted = for_x, for_weight and a.weight is not None, for_bias and vars(a).get("bias") is not None
    if not any(wanted):
        return None, None, None
    key = (op, wanted, signature(dy), signature(d_total), *map(signature, vars(a).values()))
    call: Callable[..., Gradients] = remembered(key, lambda: _prepare(a, dy, d_total, wanted))
    return call(a.x, vars(a).get("residual"), a.weight, mean, rstd, dy, d_total)


def rms_norm(a: Args, outs: dict[str, Tensor], grads: Gradients, needs: tuple[bool, ...]) -> Gradients:
    (dy,) = grads
    if dy is None or not a.x.numel():
        return None, None
    return _gradients("rms_norm", a, None, outs["rstd"], dy, None, (*needs, False))[:2]


def add_rms_norm(a: Args, outs: dict[str, Tensor], grads: Gradients, needs: tuple[bool, ...]) -> Gradients:
    dy, d_total = grads
    if dy is None or not a.x.numel():
        return d_total, d_total, None
    for_x = needs[0] or needs[1]
    dx, dw, _ = _gradients("add_rms_norm", a, None, outs["rstd"], dy, d_total, (for_x, needs[2], False))
    return dx, dx, dw


def layer_norm(a: Args, outs: dict[str, Tensor], grads: Gradients, needs: tuple[bool, ...]) -> Gradients:
    (dy,) = grads
    if dy is None or not a.x.numel():
        return None, None, None
    return _gradients("layer_norm", a, outs["mean"], outs["rstd"], dy, None, needs)
