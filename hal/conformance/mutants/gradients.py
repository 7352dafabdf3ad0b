"""Faulty gradients of every operator but attention.

Each operator's backward pass is written once more, as a formula of the arguments with places to go wrong in.

Shape letters: T rows, F features, V vocabulary, R rotated dims.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hal.conformance.mutants.coarse import FLOAT32, bfloat16_sum, rounded, wide
from hal.conformance.mutants.mutant import (
    Candidate,
    Gradients,
    Mutant,
    asked,
    differentiated,
    each,
    one,
    weaker,
    written,
)
from hal.contract import OPS, Args
from hal.recording import recompute

__all__ = ["MUTANTS", "cross_entropy", "gelu", "layer_norm", "linear", "rms_norm", "rotary", "silu", "softmax"]

RMS = ("rms_norm", "add_rms_norm")
NORMS = (*RMS, "layer_norm")
GATED = ("silu_and_mul", "gelu_and_mul")
Step = Callable[[Tensor], Tensor]
Found = tuple[Tensor | None, ...]


def same(t: Tensor) -> Tensor:
    return t


def mean(t_TF: Tensor) -> Tensor:
    return t_TF.mean(-1, keepdim=True)


def over_rows(t_TF: Tensor) -> Tensor:
    return t_TF.flatten(0, -2).sum(0) if t_TF.dim() > 1 else t_TF


def but_the_last(t_TF: Tensor) -> Tensor:
    """The sum over all rows but the last."""
    rows = t_TF.flatten(0, -2) if t_TF.dim() > 1 else t_TF[None]
    return rows[:-1].sum(0) if len(rows) > 1 else rows[0]


def in_bfloat16(t_TF: Tensor) -> Tensor:
    return bfloat16_sum(t_TF.flatten(0, -2) if t_TF.dim() > 1 else t_TF[None], 0)


def first_axis_only(t_TF: Tensor) -> Tensor:
    """Of several leading axes the sum runs over the first."""
    return t_TF.sum(0).flatten(0, -2)[0] if t_TF.dim() > 2 else over_rows(t_TF)


# Norms.


def rms_norm(
    op: str,
    *,
    projected: Step = same,
    normed: Step = same,
    root: Step = same,
    rows: Step = over_rows,
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
        r_T1 = root((mean(x_TF.square()) + max(a.eps, torch.finfo(x_TF.dtype).tiny)).rsqrt())
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
    weighed: bool = True,
) -> Candidate:
    """dx = r(g − mean g − x̂·mean(g·x̂)), dw = Σ dy·x̂, db = Σ dy; centred: what becomes of mean g."""

    def formula(a: Args, grads: Any) -> Found:
        x_TF, dy_TF = wide(a.x), wide(grads[0])
        x_TF = x_TF - mean(x_TF)
        r_T1 = root((mean(x_TF.square()) + max(a.eps, torch.finfo(x_TF.dtype).tiny)).rsqrt())
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


def nothing(op: str, name: str) -> Candidate:
    return one(name, op, lambda d, a: None)


# Gated activations.


def silu(*, curved: bool = True, limited: bool = True, offset: bool = True, value: Step = same) -> Candidate:
    """dgate = dy·up·σ(1 + z(1 − σ)), dup = dy·gate·σ, z = alpha·gate; value: what becomes of σ."""

    def formula(a: Args, grads: Any) -> Found:
        gate, up = wide(a.x).chunk(2, -1)
        dy = wide(grads[0])
        inside = torch.ones_like(gate, dtype=torch.bool), torch.ones_like(up, dtype=torch.bool)
        if a.limit is not None:
            if limited:
                inside = gate <= a.limit, up.abs() <= a.limit
            gate, up = gate.clamp(max=a.limit), up.clamp(-a.limit, a.limit)
        z = a.alpha * gate
        share, rest = value(torch.sigmoid(z)), torch.sigmoid(-z)
        of_gate = dy * (up + (a.up_offset if offset else 0.0)) * share * ((1 + z * rest) if curved else 1.0)
        return (torch.cat((of_gate * inside[0], dy * gate * share * inside[1]), -1),)

    return written("silu_and_mul", formula)


def gelu(*, curved: bool = True, value: Step = same) -> Candidate:
    """dgate = dy·up·(Φ + gate·Φ′), dup = dy·gate·Φ; value: what becomes of Φ."""

    def formula(a: Args, grads: Any) -> Found:
        gate, up = wide(a.x).chunk(2, -1)
        dy = wide(grads[0])
        if a.approximate == "none":
            share = 0.5 * (1 + torch.erf(gate * math.sqrt(0.5)))
            slope = torch.exp(-0.5 * gate.square()) * math.sqrt(0.5 / math.pi)
        else:
            t = torch.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3))
            share = 0.5 * (1 + t)
            slope = 0.5 * (1 - t * t) * math.sqrt(2 / math.pi) * (1 + 3 * 0.044715 * gate.square())
        share = value(share)
        of_gate = dy * up * (share + gate * slope if curved else share)
        return (torch.cat((of_gate, dy * gate * share), -1),)

    return written("gelu_and_mul", formula)


def gated(op: str, **how: Any) -> Candidate:
    return silu(**how) if op == "silu_and_mul" else gelu(**how)


def halves_swapped(d: Tensor, a: Args) -> Tensor:
    of_gate, of_up = d.chunk(2, -1)
    return torch.cat((of_up, of_gate), -1)


# Softmax, rotary embedding, linear.


def softmax(*, middle: Callable[[Tensor, int], Tensor] = lambda weighed, dim: weighed.sum(dim, keepdim=True),
            kept: Step = same) -> Candidate:  # fmt: skip
    """dx = y(dy − Σ dy·y); middle: the sum. kept: what becomes of y."""

    def formula(a: Args, grads: Any) -> Found:
        dead = (a.x == -math.inf).all(a.dim, keepdim=True)
        y = kept(torch.softmax(wide(a.x).masked_fill(dead, 0.0), a.dim).masked_fill(dead, 0.0))
        dy = wide(grads[0])
        return (y * (dy - middle(dy * y, a.dim)),)

    return written("softmax", formula)


def sum_of_last_axis(weighed: Tensor, dim: int) -> Tensor:
    return weighed.sum(-1, keepdim=True)


def dead_rows_live(d: Tensor, a: Args) -> Tensor:
    """A row that is −inf throughout passes something on."""
    return torch.where((a.x == -math.inf).all(a.dim, keepdim=True), 2.0**-20, d)


def rotary(*, way: float = -1.0, value: Step = same, table: Step = same) -> Candidate:
    """The gradient turned by `way` times the angle; value, table: what becomes of products, of cos and sin."""

    def formula(a: Args, grads: Any) -> Found:
        half = a.cos.shape[1]
        pairs = slice(0, half), slice(half, 2 * half)
        if a.interleaved:
            pairs = slice(0, 2 * half, 2), slice(1, 2 * half, 2)

        def turned(grad: Tensor | None) -> Tensor | None:
            if grad is None:
                return None
            d = wide(grad)
            c, s = (table(part[a.positions].to(d.dtype)).unsqueeze(-2) for part in (a.cos, a.sin))
            first, second = (d[..., part] for part in pairs)
            found = d.clone()
            found[..., pairs[0]] = value(first * c) - way * value(second * s)
            found[..., pairs[1]] = value(second * c) + way * value(first * s)
            return found

        return turned(grads[0]), turned(grads[1])

    return written("rotary_embedding", formula)


def rest_gets_nothing(d: Tensor, a: Args) -> Tensor:
    return d.masked_fill(torch.arange(d.shape[-1]) >= 2 * a.cos.shape[1], 0.0)


def linear(*, rows: Callable[[Tensor, Tensor], Tensor] = lambda dy_TO, x_TI: dy_TO.mT @ x_TI, bias: Step = over_rows,
           columns: Callable[[Tensor, Tensor], Tensor] = lambda dy, weight: dy @ weight) -> Candidate:  # fmt: skip
    """dx = dy·w (columns), dw = dyᵀ·x (rows), db = Σ dy (bias)."""

    def formula(a: Args, grads: Any) -> Found:
        dy, x, weight = wide(grads[0]), wide(a.x), wide(a.weight)
        dw = rows(dy.reshape(-1, dy.shape[-1]), x.reshape(-1, x.shape[-1]))
        return columns(dy, weight), dw, None if a.bias is None else bias(dy)

    return written("linear", formula)


# Cross entropy.


def cross_entropy(*, smoothing: float = 1.0, others: bool = False, z: float = 1.0, ignored: bool = True,
                  count: bool = True, onehot: float = 1.0, value: Step = same) -> Candidate:  # fmt: skip
    """dx = share·[p(1 + 2z·lse) − (1 − s)·onehot − s/V].

    smoothing, z, onehot: factors of those. others: the smoothed part goes to the other classes. ignored: their rows get
    nothing. count: a mean divides by the rows that count. value: what becomes of p.
    """

    def formula(a: Args, grads: Any) -> Found:
        keep_T, classes = a.target != a.ignore_index, a.logits.shape[1]
        x_TV = wide(a.logits)
        share_T = grads[0].to(x_TV.dtype).expand(keep_T.shape)
        if ignored:
            x_TV, share_T = torch.where(keep_T[:, None], x_TV, 0.0), torch.where(keep_T, share_T, 0.0)
        if a.reduction == "mean":
            share_T = share_T / (keep_T.sum().clamp(min=1) if count else keep_T.numel())
        lse_T1 = torch.logsumexp(x_TV, -1, keepdim=True)
        s = a.label_smoothing * smoothing
        chosen_TV = torch.zeros_like(x_TV).scatter_(-1, torch.where(keep_T, a.target, 0)[:, None], 1.0)
        even_TV = (1 - chosen_TV) / max(classes - 1, 1) if others else torch.full_like(x_TV, 1 / classes)
        p_TV = value(torch.exp(x_TV - lse_T1))
        d_TV = p_TV * (1 + 2 * a.z_loss * z * lse_T1) - (1 - s) * onehot * chosen_TV - s * even_TV
        return (share_T[:, None] * d_TV,)

    return written("cross_entropy", formula)


def from_float32(op: str) -> Candidate:
    """The gradients of float64 as float32 has them."""

    def narrow(found: Gradients, a: Args, grads: Any) -> Gradients:
        return [d.float().double() if d is not None and d.dtype is torch.float64 else d for d in found]

    return differentiated(op, narrow)


def last_row_lost(op: str) -> Candidate:
    """The last row of the first gradient stays 0."""

    def lost(d: Tensor, a: Args) -> Tensor:
        at = torch.arange(d.shape[0]).reshape(-1, *[1] * (d.dim() - 1))
        return torch.where((at == d.shape[0] - 1) & (d.shape[0] > 1), 0.0, d)

    return one(OPS[op].grad[0], op, lost)


def residual_of_y_alone(found: Gradients, a: Args, grads: Any) -> Gradients:
    """The gradient that comes into residual_out reaches x and not the residual."""
    if found[1] is not None and grads[1] is not None:
        found[1] = recompute(OPS["add_rms_norm"], a, (grads[0], None), (False, True, False))[1]
    return found


DIFFERENTIABLE = (*NORMS, *GATED, "softmax", "rotary_embedding", "linear", "cross_entropy")
OF = dict.fromkeys(NORMS, "statistics") | dict.fromkeys(GATED, "gates") | {
    "softmax": "softmax", "rotary_embedding": "rotary", "linear": "product", "cross_entropy": "cross entropy"
}  # fmt: skip


def in_each(name: str, fault: Callable[[str], Candidate]) -> list[Mutant]:
    """The same fault in every operator, against what it is about."""
    return [mutant for op in DIFFERENTIABLE for mutant in each(op, name, OF[op], fault, gradient=True)]


def _(ops: Any, name: str, convention: str, fault: Callable[[str], Candidate], **more: Any) -> list[Mutant]:
    return each(ops, name, convention, fault, gradient=True, **more)


def _weaker(ops: Any, name: str, convention: str, fault: Callable[[str, float], Candidate], strength: float,
            **more: Any) -> list[Mutant]:  # fmt: skip
    return weaker(ops, name, convention, fault, strength, gradient=True, **more)


MUTANTS: list[Mutant] = [
    *in_each("nothing gets a gradient", lambda op: differentiated(op, lambda found, a, grads: [None] * len(found))),
    *in_each("the last row gets no gradient", last_row_lost),
    *_(NORMS, "nothing comes through the mean square", "statistics",
       lambda op: norm(op, projected=torch.zeros_like)),
    *_(NORMS, "the last row has the statistics of the first", "statistics", lambda op: norm(op, root=last_as_first)),
    *_("layer_norm", "nothing comes through the mean", "statistics", lambda op: layer_norm(centred=torch.zeros_like)),
    *_("add_rms_norm", "what comes into residual_out is lost", "statistics", lambda op: rms_norm(op, sum_too=False)),
    *_("add_rms_norm", "what comes into residual_out reaches x alone", "statistics",
       lambda op: differentiated(op, residual_of_y_alone)),
    *_("add_rms_norm", "the residual gets nothing", "statistics", lambda op: nothing(op, "residual")),
    *_weaker(NORMS, "a share of what comes through the mean square is lost", "statistics",
             lambda op, s: norm(op, projected=lambda t: t * (1 - s)), 2.0**-8),
    *_weaker("layer_norm", "a share of what comes through the mean is lost", "statistics",
             lambda op, s: layer_norm(centred=lambda t: t * (1 - s)), 2.0**-8),
    *_weaker(NORMS, "1 / root is a little more", "statistics",
             lambda op, s: norm(op, root=lambda t: t * (1 + s)), 2.0**-8),
    *_(NORMS, "the weight gets nothing", "weight", lambda op: nothing(op, "weight")),
    *_(NORMS, "x's gradient goes without the weight", "weight", lambda op: norm(op, weighed=False)),
    *_(NORMS, "the weight's gradient lacks the last row", "weight", lambda op: norm(op, rows=but_the_last)),
    *_(("rms_norm", "layer_norm"), "the weight's gradient is summed over one axis of two", "weight",
       lambda op: norm(op, rows=first_axis_only)),
    *_(RMS, "the offset is left out", "weight", lambda op: rms_norm(op, offset=False)),
    *_("layer_norm", "the bias gets nothing", "weight", lambda op: nothing(op, "bias")),
    *_(NORMS, "the weight's gradient is summed in bfloat16", "precision", lambda op: norm(op, rows=in_bfloat16)),
    *_weaker(NORMS, "the normed value has a rounding of its own", "precision",
             lambda op, s: norm(op, normed=lambda t: rounded(t, s)), 2.0**-8),
    *_(GATED, "the gate's curve is left out", "gates", lambda op: gated(op, curved=False)),
    *_(GATED, "gate and up are swapped", "gates", lambda op: one("x", op, halves_swapped)),
    *_("silu_and_mul", "gradients go through the limit", "gates", lambda op: silu(limited=False)),
    *_("silu_and_mul", "the limit is left out", "gates", lambda op: asked(op, limit=None)),
    *_("silu_and_mul", "alpha is left out", "gates", lambda op: asked(op, alpha=1.0)),
    *_("silu_and_mul", "the offset is left out", "gates", lambda op: silu(offset=False)),
    *_("gelu_and_mul", "tanh stands for erf", "gates", lambda op: asked(op, approximate="tanh")),
    *_("gelu_and_mul", "erf stands for tanh", "gates", lambda op: asked(op, approximate="none")),
    *_weaker(GATED, "the gate's share is a little more", "gates",
             lambda op, s: gated(op, value=lambda t: t * (1 + s)), 2.0**-8),
    *_weaker(GATED, "the gate's share has a rounding of its own", "precision",
             lambda op, s: gated(op, value=lambda t: rounded(t, s)), 2.0**-8),
    *_("softmax", "the middle is left out", "softmax", lambda op: softmax(middle=lambda t, dim: torch.zeros_like(t))),
    *_("softmax", "the middle is of the last axis", "softmax", lambda op: softmax(middle=sum_of_last_axis)),
    *_("softmax", "it runs along the last axis", "softmax", lambda op: asked(op, dim=-1)),
    *_("softmax", "a row that is −inf throughout passes something on", "softmax",
       lambda op: one("x", op, dead_rows_live)),
    *_weaker("softmax", "a share of the middle is lost", "softmax",
             lambda op, s: softmax(middle=lambda t, dim: t.sum(dim, keepdim=True) * (1 - s)), 2.0**-4),
    *_("softmax", "the middle is summed in bfloat16", "precision",
       lambda op: softmax(middle=lambda t, dim: bfloat16_sum(t, dim, keepdim=True))),
    *_weaker("softmax", "y has a rounding of its own", "precision",
             lambda op, s: softmax(kept=lambda t: rounded(t, s)), 2.0**-6),
    *_("rotary_embedding", "it turns on in place of back", "rotary", lambda op: rotary(way=1.0)),
    *_("rotary_embedding", "the key gets nothing", "rotary", lambda op: nothing(op, "k")),
    *_("rotary_embedding", "dims past rotary_dim get nothing", "rotary", lambda op: one("q", op, rest_gets_nothing)),
    *_("rotary_embedding", "pairs are never neighbours", "rotary", lambda op: asked(op, interleaved=False)),
    *_weaker("rotary_embedding", "the sine is a little more", "rotary",
             lambda op, s: rotary(way=-1.0 - s), 2.0**-8),
    *_("rotary_embedding", "tables are read as bfloat16", "precision",
       lambda op: rotary(table=lambda t: t.bfloat16().to(t.dtype))),
    *_weaker("rotary_embedding", "products have a rounding of their own", "precision",
             lambda op, s: rotary(value=lambda t: rounded(t, s)), 2.0**-8),
    *_("linear", "the bias gets nothing", "product", lambda op: nothing(op, "bias")),
    *_("linear", "the weight gets nothing", "product", lambda op: nothing(op, "weight")),
    *_("linear", "the weight's gradient lacks the last row", "product",
       lambda op: linear(rows=lambda dy, x: dy[:-1].mT @ x[:-1])),
    *_("linear", "the bias's gradient is summed over one axis of two", "product",
       lambda op: linear(bias=first_axis_only)),
    *_weaker("linear", "x's gradient is a little more", "product",
             lambda op, s: linear(columns=lambda dy, w: dy @ w * (1 + s)), 2.0**-8),
    *_("linear", "the weight's gradient is summed in bfloat16", "precision",
       lambda op: linear(rows=lambda dy, x: bfloat16_sum(dy.unsqueeze(-1) * x.unsqueeze(-2), 0))),
    *_("linear", "x's gradient is summed in bfloat16", "precision",
       lambda op: linear(columns=lambda dy, w: bfloat16_sum(dy.unsqueeze(-2) * w.mT, -1))),
    *_weaker("linear", "x's gradient has a rounding of its own", "precision",
             lambda op, s: linear(columns=lambda dy, w: rounded(dy @ w, s)), 2.0**-7),
    *_("cross_entropy", "a mean divides by all rows", "cross entropy", lambda op: cross_entropy(count=False)),
    *_("cross_entropy", "ignored rows move", "cross entropy", lambda op: cross_entropy(ignored=False)),
    *_("cross_entropy", "smoothing is left out", "cross entropy", lambda op: cross_entropy(smoothing=0.0)),
    *_("cross_entropy", "smoothing leaves the target out", "cross entropy", lambda op: cross_entropy(others=True)),
    *_("cross_entropy", "z-loss is left out", "cross entropy", lambda op: cross_entropy(z=0.0)),
    *_("cross_entropy", "z-loss is not doubled", "cross entropy", lambda op: cross_entropy(z=0.5)),
    *_weaker("cross_entropy", "smoothing is a little more", "cross entropy",
             lambda op, s: cross_entropy(smoothing=1 + s), 2.0**-8),
    *_weaker("cross_entropy", "the target counts a little more", "cross entropy",
             lambda op, s: cross_entropy(onehot=1 + s), 2.0**-8),
    *_weaker("cross_entropy", "probabilities have a rounding of their own", "precision",
             lambda op, s: cross_entropy(value=lambda t: rounded(t, s)), 2.0**-8),
    *_(DIFFERENTIABLE, "float64 is computed in float32", "precision", from_float32, invisible=FLOAT32),
]  # fmt: skip
