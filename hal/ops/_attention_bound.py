"""Derived error bounds of attention: output, log-sum-exp and gradients, on padded sequences in float64.

Errors of a dot product of n terms grow like g(n) = sqrt(n)·eps. A logit s_j = scale·q·k_j carries
e_j = scale·sqrt(D)·eps·Σ|q||k_j| + 4·eps (exponential, maximum) + eps·|bias|; the cap adds 2·eps·cap and damps
what comes before it by no more than 1. A bias too large for its logit to be told beside it has a bound of its own
(`_beside_bias`). To first order a change of the logits moves o by Σp e|v| + (Σp e)|o|;
rounding P to its declared dtype adds u_p·sqrt(Σp²v²), errors of independent sign; summation adds g(n)·Σp|v| over
the n visible keys. The log-sum-exp moves by Σp e + g(n) + eps·|max|.

Shape letters as in `_attention_core`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from hal.accuracy import Accumulator
from hal.ops._attention_core import Logits, Sight, chunks, grouped, logits

__all__ = ["GradientBounds", "forward_bound", "gradient_bound", "rows_without_keys"]


@dataclass(frozen=True)
class _Chunk:
    """One chunk of probabilities with the error of each logit."""

    p_BHRL: Tensor
    e_BHRL: Tensor
    grow_BHR1: Tensor
    top_BHR1: Tensor
    slope_BHRL: Tensor | None
    sink_BHR1: Tensor | None


class GradientBounds(NamedTuple):
    """E of the gradients of q, k and v, of an additive mask and of the sinks, where there are such."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None
    sinks: Tensor | None


def forward_bound(
    q_BSHD: Tensor,
    k_BLKD: Tensor,
    v_BLKE: Tensor,
    o_BSHE: Tensor,
    sight: Sight,
    acc: Accumulator,
    *,
    softcap: float | None,
    scale: float,
    sinks_H: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """(E of o_BSHE, E of lse_BHS); all tensors float64, `o_BSHE` the oracle's output."""
    B, S, H, _ = q_BSHD.shape
    if k_BLKD.shape[1] == 0:
        return torch.zeros_like(o_BSHE), q_BSHD.new_zeros(B, H, S)
    k_BLKD, v_BLKE = _cleaned(sight, S, k_BLKD, v_BLKE, H)
    v_BKLE = v_BLKE.transpose(1, 2)
    o_parts, lse_parts = [], []
    for start, stop in chunks(B, H, S, k_BLKD.shape[1]):
        c = _probabilities(q_BSHD[:, start:stop], k_BLKD, sight, (start, stop), S, acc, softcap, scale, sinks_H)
        moved_BHR1 = (c.p_BHRL * c.e_BHRL).sum(-1, keepdim=True)
        weights = c.p_BHRL * (c.grow_BHR1 + c.e_BHRL)
        E_BHRE = _times(weights, v_BKLE.abs()) + moved_BHR1 * o_BSHE[:, start:stop].transpose(1, 2).abs()
        E_BHRE = E_BHRE + acc.u_p * _times(c.p_BHRL.square(), v_BKLE.square()).sqrt()
        o_parts.append(E_BHRE.transpose(1, 2))
        lse_parts.append((moved_BHR1 + c.grow_BHR1 + acc.eps * c.top_BHR1.abs()).squeeze(-1))
    return torch.cat(o_parts, 1), torch.cat(lse_parts, 2)


def gradient_bound(
    q_BSHD: Tensor,
    k_BLKD: Tensor,
    v_BLKE: Tensor,
    o_BSHE: Tensor,
    do_BSHE: Tensor,
    sight: Sight,
    acc: Accumulator,
    u_o: float,
    *,
    softcap: float | None,
    scale: float,
    sinks_H: Tensor | None,
    dlse_BHS: Tensor | None = None,
    mask: Tensor | None = None,
) -> GradientBounds:
    """E of each gradient; `u_o` is the unit roundoff of the dtype in which o was saved, `mask` an additive one.

    δ_i = u_o·sqrt(Σdo²o²) + u_p·sqrt(Σ_d do²·Σ_j p²v²) is the error of the row's Σ do·o and of dP. To first order
    a logit's error e moves p_j by p_j(e_j − Σp e), which is the float32 term of each gradient. A gradient into the
    log-sum-exp joins dS as p·dlse. dS before the cap's slope is the gradient of the bias, summed over the axes that
    the mask broadcasts, with g(terms); −p_sink(Σ do·o − dlse), summed over the rows, is that of a sink;
    the δ of its rows are independent and add up as sqrt(Σ(p_sink·δ)²), as they do in dk.
    """
    B, S, H, _ = q_BSHD.shape
    L, K = k_BLKD.shape[1:3]
    zeros = torch.zeros_like(q_BSHD), torch.zeros_like(k_BLKD), torch.zeros_like(v_BLKE)
    sinks_E = None if sinks_H is None else torch.zeros_like(sinks_H)
    bias_E = None if mask is None else torch.zeros_like(mask)
    if L == 0:  # every row is its sink alone, whose gradient is the sum of dlse
        if sinks_E is not None and dlse_BHS is not None:
            sinks_E += (4 + (B * S) ** 0.5) * acc.eps * dlse_BHS.abs().sum((0, 2))
        return GradientBounds(*zeros, bias_E, sinks_E)
    k_BLKD, v_BLKE = _cleaned(sight, S, k_BLKD, v_BLKE, H)
    k_BKLD, v_BKLE = k_BLKD.transpose(1, 2), v_BLKE.transpose(1, 2)
    n = max(S * (H // K), 1)
    grow_L, grow_n = L**0.5 * acc.eps, n**0.5 * acc.eps
    factor = abs(scale)
    dq_parts = []
    squares_k, squares_v = zeros[1].transpose(1, 2).clone(), zeros[2].transpose(1, 2).clone()
    delta_k, linear_k, linear_v = squares_k.clone(), squares_k.clone(), squares_v.clone()
    squares_sinks = q_BSHD.new_zeros(H)
    merged = 1.0 if mask is None else B * H * S * L / max(mask.numel(), 1)
    for start, stop in chunks(B, H, S, L):
        q_BRHD, do_BRHE, o_BRHE = (t[:, start:stop] for t in (q_BSHD, do_BSHE, o_BSHE))
        c = _probabilities(q_BRHD, k_BLKD, sight, (start, stop), S, acc, softcap, scale, sinks_H)
        p = c.p_BHRL
        q_BKMD, do_BKME = grouped(q_BRHD, K), grouped(do_BRHE, K)
        dp_BHRL = (do_BKME @ v_BKLE.mT).reshape(p.shape)
        row_BHR1 = (do_BRHE * o_BRHE).sum(-1).transpose(1, 2)[..., None]
        from_lse = 0.0 if dlse_BHS is None else dlse_BHS[:, :, start:stop, None]
        ds = p * (dp_BHRL - row_BHR1 + from_lse)
        seen_v = _times(p.square(), v_BKLE.square()).transpose(1, 2)
        delta_BHR1 = (
            u_o * (do_BRHE * o_BRHE).square().sum(-1).sqrt() + acc.u_p * (do_BRHE.square() * seen_v).sum(-1).sqrt()
        )
        delta_BHR1 = delta_BHR1.transpose(1, 2)[..., None]
        # |Δds| from the logits' own errors, from the sums behind dP and from the cap's slope.
        e_bar = (p * c.e_BHRL).sum(-1, keepdim=True)
        absolute_dp = (do_BKME.abs() @ v_BKLE.abs().mT).reshape(p.shape)
        absolute_row = (do_BRHE * o_BRHE).abs().sum(-1).transpose(1, 2)[..., None]
        row_moves = (p * c.e_BHRL * dp_BHRL.abs()).sum(-1, keepdim=True) + e_bar * row_BHR1.abs()
        summed = do_BRHE.shape[-1] ** 0.5 * acc.eps
        own = ds.abs() * (c.e_BHRL + e_bar) + p * row_moves
        own = own + p * summed * (absolute_dp + absolute_row)
        if bias_E is not None:
            error = own + p * delta_BHR1 + (acc.u_p + merged**0.5 * acc.eps + grow_L) * ds.abs()
            _reduce_into(bias_E, error, (start, stop), S)
        if sinks_E is not None and sinks_H is not None and c.sink_BHR1 is not None:
            into = (from_lse - row_BHR1).abs()
            relative = e_bar + 4 * acc.eps + grow_L + (B * S) ** 0.5 * acc.eps
            error = c.sink_BHR1 * (into * relative + row_moves + summed * absolute_row)
            sinks_E += error.sum((0, 2, 3))
            squares_sinks = squares_sinks + (c.sink_BHR1 * delta_BHR1).square().sum((0, 2, 3))
        if c.slope_BHRL is not None:
            ds, own = ds * c.slope_BHRL, own * c.slope_BHRL.abs() + 4 * acc.eps * ds.abs()
            p_slope = p * c.slope_BHRL.abs()
        else:
            p_slope = p
        linear = _times(own + grow_L * ds.abs(), k_BKLD.abs())
        dq = acc.u_p * _times(ds.square(), k_BKLD.square()).sqrt() + delta_BHR1 * _times(p_slope, k_BKLD).abs()
        dq_parts.append(factor * (dq + linear).transpose(1, 2))
        squares_k += _back(ds.square(), q_BKMD.square(), K)
        delta_k += _back((p_slope * delta_BHR1).square(), q_BKMD.square(), K)
        linear_k += _back(own + grow_n * ds.abs(), q_BKMD.abs(), K)
        squares_v += _back(p.square(), do_BKME.square(), K)
        linear_v += _back(p * (grow_n + c.e_BHRL + e_bar), do_BKME.abs(), K)
    dk = factor * (acc.u_p * squares_k.sqrt() + delta_k.sqrt() + linear_k)
    dv = acc.u_p * squares_v.sqrt() + linear_v
    sinks_E = None if sinks_E is None else sinks_E + squares_sinks.sqrt()
    return GradientBounds(torch.cat(dq_parts, 1), dk.transpose(1, 2), dv.transpose(1, 2), bias_E, sinks_E)


def _reduce_into(bias_E: Tensor, error_BHRL: Tensor, rows: tuple[int, int], queries: int) -> None:
    """Add what the rows of one chunk contribute to the bound of an additive mask's gradient."""
    into = bias_E[(None,) * (4 - bias_E.ndim)]
    if into.shape[2] == queries > 1:
        into = into[:, :, rows[0] : rows[1]]
    into += error_BHRL.sum_to_size(into.shape)


def rows_without_keys(sight: Sight, queries: int, keys: int, like: Tensor) -> Tensor:
    """Bool, broadcastable to (B, H, S): rows whose output the contract fixes at zero."""
    return ~sight.visible(0, queries, queries, keys, like.device).any(-1)


def _cleaned(sight: Sight, queries: int, k_BLKD: Tensor, v_BLKE: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """k and v with zeros where no query of any head looks; a bound needs no finer distinction."""
    visible = sight.visible(0, queries, queries, k_BLKD.shape[1], k_BLKD.device)
    seen_BL11 = visible.any(2).any(1)[..., None, None]
    return torch.where(seen_BL11, k_BLKD, 0.0), torch.where(seen_BL11, v_BLKE, 0.0)


def _probabilities(
    q_BRHD: Tensor,
    k_BLKD: Tensor,
    sight: Sight,
    rows: tuple[int, int],
    n_queries: int,
    acc: Accumulator,
    softcap: float | None,
    scale: float,
    sinks_H: Tensor | None,
) -> _Chunk:
    B, R, H, D = q_BRHD.shape
    L, K = k_BLKD.shape[1:3]
    chunk: Logits = logits(q_BRHD, k_BLKD, sight, rows, n_queries, softcap=softcap, scale=scale, sinks_H=sinks_H)
    weight = torch.exp(chunk.scores_BHRL - chunk.top_BHR1)
    total = weight.sum(-1, keepdim=True)
    if sinks_H is not None:
        total = total + torch.exp(sinks_H[:, None, None] - chunk.top_BHR1)
    total = total.masked_fill(total == 0, 1.0)
    p_BHRL = weight / total
    sink_BHR1 = None if sinks_H is None else torch.exp(sinks_H[:, None, None] - chunk.top_BHR1) / total
    raw_BHRL = (grouped(q_BRHD, K) @ k_BLKD.permute(0, 2, 3, 1)).reshape(B, H, R, L) * scale
    products = (grouped(q_BRHD.abs(), K) @ k_BLKD.abs().permute(0, 2, 3, 1)).reshape(B, H, R, L)
    e_BHRL = abs(scale) * D**0.5 * acc.eps * products + 4 * acc.eps
    slope = None
    if softcap is not None:
        e_BHRL = e_BHRL + 2 * acc.eps * softcap
        tanh = torch.tanh(raw_BHRL / softcap)
        slope, raw_BHRL = 1 - tanh.square(), softcap * tanh
    bias = sight.bias(*rows, n_queries, q_BRHD.dtype)
    if bias is not None:
        if sinks_H is None:
            e_BHRL = e_BHRL + _beside_bias(acc.eps, bias, raw_BHRL, chunk.visible)
        else:
            e_BHRL = e_BHRL + acc.eps * bias.abs()
    # Where nothing is visible p is 0: keep an error that is Inf or NaN there out of the sums.
    e_BHRL = e_BHRL.masked_fill(~chunk.visible, 0.0)
    seen_BHR1 = chunk.visible.expand(*chunk.visible.shape[:3], L).sum(-1, keepdim=True).clamp(min=1)
    return _Chunk(p_BHRL, e_BHRL, seen_BHR1.to(p_BHRL.dtype).sqrt() * acc.eps, chunk.top_BHR1, slope, sink_BHR1)


def _beside_bias(eps: float, bias: Tensor, s_BHRL: Tensor, visible: Tensor) -> Tensor:
    """What a bias b adds to the error of its logit s: eps·|b|, or 2|s| where that is less and says something.

    A sum s + b is rounded by at most |s|, since b itself is a number that it may be rounded to: two roundings of it,
    the candidate's and the oracle's, are at most 2|s| apart, however large b. What b itself errs by, in another
    dtype or times log2(e), is the same for equal biases and cancels in the quotient, if no sink stands beside. So
    2|s| holds where b is the largest of its row, whose own error goes to the others. With e = 2|s| ≤ 1/2 throughout a
    row, p moves by a factor of at most exp(2e), which the first order's 1 + 2e falls short of by no more than 1.72;
    in other rows eps·|b| is left.
    """
    error = eps * bias.abs()
    top = torch.where(visible, bias, -math.inf).amax(-1, keepdim=True)
    slight = s_BHRL.abs().masked_fill(~visible, 0.0).amax(-1, keepdim=True) <= 0.25
    told = torch.where(bias == top, torch.minimum(error, 2 * s_BHRL.abs()), error + eps * top.abs())
    return torch.where(slight, told, error)


def _times(weights_BHRL: Tensor, x_BKLE: Tensor) -> Tensor:
    """Σ_j weights·x with each kv head serving its group: (B, H, R, E)."""
    B, H, R, L = weights_BHRL.shape
    K, E = x_BKLE.shape[1], x_BKLE.shape[3]
    return (weights_BHRL.reshape(B, K, H // K * R, L) @ x_BKLE).reshape(B, H, R, E)


def _back(weights_BHRL: Tensor, x_BKMD: Tensor, kv_heads: int) -> Tensor:
    """Σ over queries and the group's heads of weights·x: (B, K, L, D)."""
    B, H, R, L = weights_BHRL.shape
    return weights_BHRL.reshape(B, kv_heads, H // kv_heads * R, L).mT @ x_BKMD
