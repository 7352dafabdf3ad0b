"""Faulty gradients of the norms.

Shape letters: T rows, F features.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hal.conformance.mutants._changes import Step, same
from hal.conformance.mutants._gradient_changes import (
    Found,
    but_the_last,
    first_axis_only,
    graded,
    gradient,
    in_bfloat16,
    nothing,
    over_rows,
)
from hal.conformance.mutants.coarse import rounded, wide
from hal.conformance.mutants.mutant import Candidate, Gradients, Mutant, asked, differentiated, written
from hal.conformance.mutants.norms import NORMS, RMS, mean
from hal.contract import OPS, Args
from hal.recording import recompute

__all__ = ["MUTANTS", "norm"]


def rms_norm(
    op: str,
    *,
    projected: Step = same,
    normed: Step = same,
    root: Step = same,
    rows: Step = over_rows,
    eps: Callable[[float], float] = lambda eps: eps,
    offset: bool = True,
    sum_too: bool = True,
    weighed: bool = True,
) -> Candidate:
    """dx = r(g − x̂·mean(g·x̂)), dw = Σ dy·x̂; projected, normed, root: what becomes of the mean, x̂ and r."""

    def formula(a: Args, grads: Any) -> Found:
        dtype, x_TF = a.x.dtype, wide(a.x)
        if op == "add_rms_norm":
            x_TF = x_TF + wide(a.residual)
            x_TF = x_TF.to(dtype).to(x_TF.dtype) if a.round_residual else x_TF
        dy_TF = torch.zeros_like(x_TF) if grads[0] is None else wide(grads[0])
        r_T1 = root((mean(x_TF.square()) + max(eps(a.eps), torch.finfo(x_TF.dtype).tiny)).rsqrt())
        hat_TF = normed(x_TF * r_T1)
        g_TF = dy_TF
        early = a.round_before_weight
        if a.weight is not None and weighed:
            scale_F = a.weight.to(x_TF.dtype) + (a.weight_offset if offset else 0.0)
            g_TF = dy_TF * (scale_F.to(dtype).to(x_TF.dtype) if early else scale_F)
        dx_TF = (g_TF - hat_TF * projected(mean(g_TF * hat_TF))) * r_T1
        stored_TF = hat_TF.to(dtype).to(x_TF.dtype) if early else hat_TF
        dw_F = None if a.weight is None else rows(dy_TF * stored_TF)
        if op == "rms_norm":
            return dx_TF, dw_F
        if grads[1] is not None and sum_too:
            dx_TF = dx_TF + wide(grads[1])
        return dx_TF, dx_TF, dw_F

    return written(op, formula)


def layer_norm(
    op: str = "layer_norm",
    *,
    centred: Step = same,
    projected: Step = same,
    normed: Step = same,
    root: Step = same,
    rows: Step = over_rows,
    eps: Callable[[float], float] = lambda eps: eps,
    weighed: bool = True,
) -> Candidate:
    """dx = r(g − mean g − x̂·mean(g·x̂)), dw = Σ dy·x̂, db = Σ dy; centred: what becomes of mean g."""

    def formula(a: Args, grads: Any) -> Found:
        x_TF, dy_TF = wide(a.x), wide(grads[0])
        x_TF = x_TF - mean(x_TF)
        r_T1 = root((mean(x_TF.square()) + max(eps(a.eps), torch.finfo(x_TF.dtype).tiny)).rsqrt())
        hat_TF = normed(x_TF * r_T1)
        g_TF = dy_TF if a.weight is None or not weighed else dy_TF * a.weight.to(dy_TF.dtype)
        dx_TF = (g_TF - centred(mean(g_TF)) - hat_TF * projected(mean(g_TF * hat_TF))) * r_T1
        dw_F = None if a.weight is None else rows(dy_TF * hat_TF)
        return dx_TF, dw_F, None if a.bias is None else rows(dy_TF)

    return written(op, formula)


def norm(op: str, **how: Any) -> Candidate:
    return layer_norm(op, **how) if op == "layer_norm" else rms_norm(op, **how)


def last_as_first(r_T1: Tensor) -> Tensor:
    """The last row has the statistics of the first."""
    return torch.cat((r_T1[:-1], r_T1[:1])) if r_T1.dim() > 1 else r_T1


def residual_of_y_alone(found: Gradients, a: Args, grads: Any) -> Gradients:
    """The gradient that comes into residual_out reaches x and not the residual."""
    if found[1] is not None and grads[1] is not None:
        found[1] = recompute(OPS["add_rms_norm"], a, (grads[0], None), (False, True, False))[1]
    return found


MUTANTS: list[Mutant] = [
    *gradient(NORMS, "nothing comes through the mean square", "statistics",
              lambda op: norm(op, projected=torch.zeros_like)),
    *gradient(NORMS, "the last row has the statistics of the first", "statistics",
              lambda op: norm(op, root=last_as_first)),
    *gradient("layer_norm", "nothing comes through the mean", "statistics",
              lambda op: layer_norm(centred=torch.zeros_like)),
    *gradient("add_rms_norm", "what comes into residual_out is lost", "statistics",
              lambda op: rms_norm(op, sum_too=False)),
    *gradient("add_rms_norm", "what comes into residual_out reaches x alone", "statistics",
              lambda op: differentiated(op, residual_of_y_alone)),
    *gradient("add_rms_norm", "the residual gets nothing", "statistics", lambda op: nothing(op, "residual")),
    *graded(NORMS, "a share of what comes through the mean square is lost", "statistics",
            lambda op, s: norm(op, projected=lambda t: t * (1 - s)), 2.0**-8),
    *graded("layer_norm", "a share of what comes through the mean is lost", "statistics",
            lambda op, s: layer_norm(centred=lambda t: t * (1 - s)), 2.0**-8),
    *graded(NORMS, "1 / root is a little more", "statistics",
            lambda op, s: norm(op, root=lambda t: t * (1 + s)), 2.0**-8),
    *gradient(NORMS, "eps is left out", "eps", lambda op: asked(op, eps=1e-30)),
    *gradient(NORMS, "eps is 1e-5 at least", "eps", lambda op: norm(op, eps=lambda eps: max(eps, 1e-5))),
    *graded(NORMS, "eps is a little more", "eps",
            lambda op, s: norm(op, eps=lambda eps: eps * (1 + s)), 2.0**-8),
    *gradient(NORMS, "the weight gets nothing", "weight", lambda op: nothing(op, "weight")),
    *gradient(NORMS, "x's gradient goes without the weight", "weight", lambda op: norm(op, weighed=False)),
    *gradient(NORMS, "the weight's gradient lacks the last row", "weight", lambda op: norm(op, rows=but_the_last)),
    *gradient(("rms_norm", "layer_norm"), "the weight's gradient is summed over one axis of two", "weight",
              lambda op: norm(op, rows=first_axis_only)),
    *gradient(RMS, "the offset is left out", "weight", lambda op: rms_norm(op, offset=False)),
    *gradient("layer_norm", "the bias gets nothing", "weight", lambda op: nothing(op, "bias")),
    *gradient(NORMS, "the weight's gradient is summed in bfloat16", "precision", lambda op: norm(op, rows=in_bfloat16)),
    *graded(NORMS, "the normed value has a rounding of its own", "precision",
            lambda op, s: norm(op, normed=lambda t: rounded(t, s)), 2.0**-8),
]  # fmt: skip
