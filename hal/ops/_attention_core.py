"""The one body of all attention operators: dense, padded, differentiable, in the compute dtype.

B batch, S queries, R queries of one chunk, L keys, H query heads, K kv heads, G = H // K, D width of q and k,
E width of v.
"""

from __future__ import annotations

import contextvars
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from hal.arithmetic import lossy

__all__ = ["Logits", "Sight", "attend", "chunks", "grouped", "head_scale", "logits"]

CHUNK_ELEMENTS = 1 << 24
"""Scores held at once (without autograd): queries are taken in chunks so that B·H·R·L stays below."""


@dataclass(frozen=True)
class Sight:
    """Which keys each query may see.

    Query i of a sequence of s queries and l keys stands at position i + (l - s). `queries_B` and `keys_B` (int64)
    are the true lengths of padded sequences. `mask` is bool (True = attend) or an additive bias, broadcastable to
    (B, H, S, L). `left` and `right` are the inclusive window around the position.
    """

    causal: bool = False
    left: int | None = None
    right: int | None = None
    mask: Tensor | None = None
    queries_B: Tensor | None = None
    keys_B: Tensor | None = None

    @property
    def unlimited(self) -> bool:
        """Every key is seen by some query, whatever the shapes (given one query at least)."""
        return self.mask is None and self.keys_B is None and self.left is None

    def visible(self, start: int, stop: int, n_queries: int, n_keys: int, device: torch.device) -> Tensor:
        """Bool, rank 4, broadcastable to (B, H, stop - start, L)."""
        i_R1 = torch.arange(start, stop, device=device)[:, None]
        j_L = torch.arange(n_keys, device=device)
        queries = n_queries if self.queries_B is None else self.queries_B[:, None, None, None]
        keys = n_keys if self.keys_B is None else self.keys_B[:, None, None, None]
        position = i_R1 + (keys - queries)
        seen = (i_R1 < queries) & (j_L < keys)
        if self.causal:
            seen = seen & (j_L <= position)
        everything = n_queries + n_keys  # an unbounded side may be written as the largest integer: no overflow
        if self.left is not None:
            seen = seen & (j_L >= position - min(self.left, everything))
        if self.right is not None:
            seen = seen & (j_L <= position + min(self.right, everything))
        mask = self._mask_rows(start, stop, n_queries)
        if mask is not None:
            seen = seen & (mask if mask.dtype is torch.bool else mask != -math.inf)
        return seen[(None,) * (4 - seen.ndim)]

    def bias(self, start: int, stop: int, n_queries: int, dtype: torch.dtype) -> Tensor | None:
        """The finite part of an additive mask in `dtype`, or None."""
        mask = self._mask_rows(start, stop, n_queries)
        if mask is None or mask.dtype is torch.bool:
            return None
        finite = mask.masked_fill(mask == -math.inf, 0.0)
        if mask.dtype is torch.float64 and dtype is not torch.float64:
            # The lowest float64 is an ordinary number: it must not become -inf on its way to a narrower dtype, nor
            # lose its gradient.
            value = finite.detach()
            finite = value.clamp(min=torch.finfo(dtype).min) + (finite - value)
        return finite.to(dtype)

    def _mask_rows(self, start: int, stop: int, n_queries: int) -> Tensor | None:
        if self.mask is None or self.mask.ndim < 2 or self.mask.shape[-2] == 1 != n_queries:
            return self.mask
        return self.mask[..., start:stop, :]


@dataclass(frozen=True)
class Logits:
    """One chunk of scores: scaled, capped, biased, -inf where not visible; `sees` says which rows see a key."""

    scores_BHRL: Tensor
    visible: Tensor
    sees: Tensor
    top_BHR1: Tensor


def head_scale(scale: float | None, head_dim: int) -> float:
    """The factor on q·k: 1/sqrt(D) of the true D unless given."""
    return head_dim**-0.5 if scale is None else scale


def chunks(batch: int, heads: int, queries: int, keys: int) -> Iterator[tuple[int, int]]:
    """Ranges of queries whose scores stay below CHUNK_ELEMENTS; at least one, which may be empty."""
    rows = max(1, CHUNK_ELEMENTS // max(1, batch * heads * keys))
    for start in range(0, max(queries, 1), rows):
        yield start, min(start + rows, queries)


def grouped(x_BRHD: Tensor, kv_heads: int) -> Tensor:
    """(B, R, H, D) to (B, K, G·R, D): the query heads of one kv head become rows of one product."""
    B, R, H, D = x_BRHD.shape
    return (
        x_BRHD.reshape(B, R, kv_heads, H // kv_heads, D)
        .permute(0, 2, 3, 1, 4)
        .reshape(B, kv_heads, -1 if B * R * H * D else H // kv_heads * R, D)
    )


def logits(
    q_BRHD: Tensor,
    k_BLKD: Tensor,
    sight: Sight,
    rows: tuple[int, int],
    n_queries: int,
    *,
    softcap: float | None,
    scale: float,
    sinks_H: Tensor | None,
) -> Logits:
    """Scores of the queries `rows` against all keys."""
    B, R, H, _ = q_BRHD.shape
    L, K = k_BLKD.shape[1:3]
    visible = sight.visible(*rows, n_queries, L, q_BRHD.device)
    sees = visible.any(-1, keepdim=True)
    # A query that sees nothing must not reach the gradient of k, even when it is NaN.
    q_BRHD = torch.where(sees.transpose(1, 2), q_BRHD, 0.0)
    s_BHRL = (grouped(q_BRHD, K) @ k_BLKD.permute(0, 2, 3, 1)).reshape(B, H, R, L) * scale
    if softcap is not None:
        s_BHRL = softcap * torch.tanh(s_BHRL / softcap)
    bias = sight.bias(*rows, n_queries, s_BHRL.dtype)
    if bias is not None:
        s_BHRL = s_BHRL + bias
    s_BHRL = s_BHRL.masked_fill(~visible, -math.inf)
    top_BHR1 = s_BHRL.detach().amax(-1, keepdim=True)
    if sinks_H is not None:
        top_BHR1 = torch.maximum(top_BHR1, sinks_H.detach()[:, None, None])
    return Logits(s_BHRL, visible, sees, top_BHR1.masked_fill(top_BHR1 == -math.inf, 0.0))


def attend(
    q_BSHD: Tensor,
    k_BLKD: Tensor,
    v_BLKE: Tensor,
    sight: Sight,
    *,
    softcap: float | None,
    scale: float,
    sinks_H: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """(o_BSHE, lse_BHS) in the dtype of q, k, v and sinks, which is the compute dtype."""
    B, S, H, _ = q_BSHD.shape
    if k_BLKD.shape[1] == 0:  # one key that nobody sees spares every reduction the empty case
        no_key = torch.zeros(B, dtype=torch.int64, device=q_BSHD.device)
        queries_B = torch.full_like(no_key, S) if sight.queries_B is None else sight.queries_B
        sight = Sight(queries_B=queries_B, keys_B=no_key)
        k_BLKD = torch.cat((k_BLKD, k_BLKD.new_zeros(B, 1, *k_BLKD.shape[2:])), 1)
        v_BLKE = torch.cat((v_BLKE, v_BLKE.new_zeros(B, 1, *v_BLKE.shape[2:])), 1)
    ranges = list(chunks(B, H, S, k_BLKD.shape[1]))
    if not sight.unlimited:
        seen_BLK1 = _seen(sight, ranges, S, k_BLKD, H // k_BLKD.shape[2])
        k_BLKD = torch.where(seen_BLK1, k_BLKD, 0.0)
        v_BLKE = torch.where(seen_BLK1, v_BLKE, 0.0)
    parts = []
    for start, stop in ranges:
        chunk = logits(
            q_BSHD[:, start:stop], k_BLKD, sight, (start, stop), S, softcap=softcap, scale=scale, sinks_H=sinks_H
        )
        parts.append(_weigh(chunk, v_BLKE, sinks_H))
    if len(parts) == 1:
        return parts[0]
    return torch.cat([o for o, _ in parts], 1), torch.cat([lse for _, lse in parts], 2)


def _weigh(chunk: Logits, v_BLKE: Tensor, sinks_H: Tensor | None) -> tuple[Tensor, Tensor]:
    s_BHRL, top_BHR1 = chunk.scores_BHRL, chunk.top_BHR1
    B, H, R, L = s_BHRL.shape
    K, E = v_BLKE.shape[2:]
    p_BHRL = torch.exp(s_BHRL - top_BHR1)
    total_BHR1 = p_BHRL.sum(-1, keepdim=True)
    if sinks_H is not None:
        total_BHR1 = total_BHR1 + torch.exp(sinks_H[:, None, None] - top_BHR1)
    o_BKME = _rounded(p_BHRL, s_BHRL).reshape(B, K, H // K * R, L) @ v_BLKE.permute(0, 2, 1, 3)
    empty_BHR1 = total_BHR1 == 0
    total_BHR1 = total_BHR1.masked_fill(empty_BHR1, 1.0)
    o_BHRE = o_BKME.reshape(B, H, R, E) / total_BHR1
    lse_BHR = (top_BHR1 + torch.log(total_BHR1)).masked_fill(empty_BHR1, -math.inf).squeeze(-1)
    # Zero before autograd sees it: a row without keys passes no gradient on, even a NaN one.
    o_BHRE = torch.where(chunk.sees, o_BHRE, 0.0)
    return o_BHRE.transpose(1, 2).contiguous(), lse_BHR


def _rounded(p_BHRL: Tensor, s_BHRL: Tensor) -> Tensor:
    """P, and in the backward pass dS, with the rounding that the baseline of an implementation declares."""
    rounded = lossy(p_BHRL)
    if rounded is p_BHRL:
        return p_BHRL
    if s_BHRL.requires_grad:
        # The backward pass runs after the mode is left; the hook takes it along.
        context = contextvars.copy_context()
        s_BHRL.register_hook(lambda dS_BHRL: context.run(lossy, dS_BHRL))
    return p_BHRL + (rounded - p_BHRL).detach()


def _seen(sight: Sight, ranges: list[tuple[int, int]], n_queries: int, k_BLKD: Tensor, group: int) -> Tensor:
    """Bool, broadcastable to (B, L, K, 1): keys that some query of the sequence and kv head sees."""
    found = None
    for start, stop in ranges:
        visible = sight.visible(start, stop, n_queries, k_BLKD.shape[1], k_BLKD.device).any(2)
        found = visible if found is None else found | visible
    assert found is not None
    if found.shape[1] != 1:
        found = found.unflatten(1, (found.shape[1] // group, group)).any(2)
    return found.transpose(1, 2)[..., None]
