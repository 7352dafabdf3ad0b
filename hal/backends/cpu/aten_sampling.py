"""The sampling operators on the CPU without sorting the vocabulary where few tokens can be kept.

Shape letters: B rows, V vocabulary, R ranks that any row may keep.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hal.capability import Declares, Implementation
from hal.op import empty
from hal.ops.sampling import cleaned, counts, filter_ranked, gumbel

__all__ = ["IMPLEMENTATIONS"]

PIECE = 1 << 15


class _Kept(NamedTuple):
    """Scores by rank, −inf where dropped, and the token of each rank (None: ranks are tokens)."""

    score_BR: Tensor
    token_BR: Tensor | None


def _best(x_BV: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """The `most` largest of each row in descending order with their tokens, ties by the lowest token."""
    # topk finds the values, but which of several equal tokens it names is left open.
    least_B1 = torch.topk(x_BV, most, dim=-1, sorted=True).values[:, -1:]
    chosen_BV = x_BV >= least_B1
    if int(chosen_BV.sum()) != x_BV.shape[0] * most:
        above_BV = x_BV > least_B1
        tied_BV = chosen_BV & ~above_BV
        wanted_B1 = most - above_BV.sum(-1, keepdim=True)
        chosen_BV = above_BV | (tied_BV & (tied_BV.cumsum(-1) <= wanted_B1))
    token_BR = chosen_BV.nonzero()[:, 1].reshape(x_BV.shape[0], most)
    ranked_BR, order_BR = torch.sort(x_BV.gather(-1, token_BR), dim=-1, descending=True, stable=True)
    return ranked_BR, token_BR.gather(-1, order_BR)


def _filtered(
    logits: Tensor,
    temperature: float | Tensor | None,
    top_k: int | Tensor | None,
    top_p: float | Tensor | None,
    min_p: float | Tensor | None,
) -> _Kept:
    rows, vocabulary = logits.shape
    x_BV = cleaned(logits)
    most = int(counts(logits, temperature, top_k).max()) if rows else vocabulary
    token_BR: Tensor | None
    if 4 * most <= vocabulary:
        ranked_BR, token_BR = _best(x_BV, most)
    elif most == vocabulary and top_k is None and top_p is None and not _may_be_greedy(temperature):
        # Only min-p can drop a token, and it needs nothing but the best one, put first.
        return _unranked(x_BV, logits, temperature, min_p)
    else:
        ranked_BR, token_BR = torch.sort(x_BV, dim=-1, descending=True, stable=True)
    kept = filter_ranked(ranked_BR, logits, temperature, top_k, top_p, min_p)
    return _Kept(kept.score_BV.masked_fill(~kept.keep_BV, float("-inf")), token_BR)


def _may_be_greedy(temperature: float | Tensor | None) -> bool:
    if isinstance(temperature, Tensor):
        return bool((temperature == 0).any())
    return temperature == 0


def _unranked(x_BV: Tensor, logits: Tensor, temperature: float | Tensor | None, min_p: float | Tensor | None) -> _Kept:
    # Rank 0 in front, to which the filters compare; it is dropped again.
    led_BV = torch.cat((x_BV.amax(-1, keepdim=True), x_BV), dim=-1)
    kept = filter_ranked(led_BV, led_BV, temperature, None, None, min_p)
    return _Kept(kept.score_BV.masked_fill(~kept.keep_BV, float("-inf"))[:, 1:], None)


def probs(
    logits: Tensor,
    *,
    temperature: float | Tensor | None = None,
    top_k: int | Tensor | None = None,
    top_p: float | Tensor | None = None,
    min_p: float | Tensor | None = None,
) -> Tensor:
    score_BR, token_BR = _filtered(logits, temperature, top_k, top_p, min_p)
    p_BR = torch.softmax(score_BR, -1).float()
    if token_BR is None:
        return p_BR
    return torch.zeros(logits.shape, dtype=torch.float32, device=logits.device).scatter_(-1, token_BR, p_BR)


def sample(
    logits: Tensor,
    seed: int | Tensor,
    *,
    temperature: float | Tensor | None = None,
    top_k: int | Tensor | None = None,
    top_p: float | Tensor | None = None,
    min_p: float | Tensor | None = None,
) -> Tensor:
    score_BR, token_BR = _filtered(logits, temperature, top_k, top_p, min_p)
    best_B1 = score_BR.add_(_noise(seed, logits, score_BR, token_BR)).argmax(-1, keepdim=True)
    return (best_B1 if token_BR is None else token_BR.gather(-1, best_B1))[:, 0]


def _noise(seed: int | Tensor, logits: Tensor, score_BR: Tensor, token_BR: Tensor | None) -> Tensor:
    """The Gumbel noise of each rank, made in pieces: Philox passes many times over its words."""
    rows, ranks = score_BR.shape
    noise_BR = empty(score_BR.shape, dtype=score_BR.dtype, device=score_BR.device)
    step = max(1, PIECE // max(1, rows))
    for low in range(0, ranks, step):
        part = slice(low, min(low + step, ranks))
        token = torch.arange(part.start, part.stop) if token_BR is None else token_BR[:, part]
        noise_BR[:, part] = gumbel(seed, logits, score_BR.dtype, token)
    return noise_BR


# How many ranks are looked at depends on the values, and so do the shapes between.
_DECLARES = Declares(run_to_run=True, batch_invariant=False, capturable=False)

IMPLEMENTATIONS = (
    Implementation(op="top_k_top_p_probs", name="aten", forward=probs, declares=_DECLARES, priority=10),
    Implementation(op="top_k_top_p_sample", name="aten", forward=sample, declares=_DECLARES, priority=10),
)
