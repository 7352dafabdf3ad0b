"""What the attention operators share: one sequence's attention, masks by sparse mode, and reading of layouts.

Shapes: N query heads, K key heads, S queries, L keys, D head dim, V value head dim, all of one sequence.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hal.backends.ascend.simulator import numerics

__all__ = [
    "COMPRESSED",
    "Attended",
    "Sparse",
    "attend",
    "backward",
    "by_sequence",
    "heads_first",
    "hidden",
    "lengths",
    "mask_of",
]

COMPRESSED = 2048  # the side of the triangle that stands for a mask of any size
# What a masked score becomes: a number, not -inf. A row that sees nothing attends to all keys alike.
_FLOOR = torch.finfo(torch.float32).min
_CEILING = torch.finfo(torch.float32).max


@dataclass(frozen=True)
class Sparse:
    """How a mask is to be read. `first` and `last`: how far before and behind its own place a query sees.

    modes: 0 mask and band from the top left, 1 mask, 2 causal from the top left, 3 causal to the bottom right, 4 band
    to the bottom right, 5 and 6 causal to the bottom right and a prefix that all see.
    """

    mode: int
    before: int
    behind: int
    prefix: Sequence[int] = ()


@dataclass(frozen=True)
class Attended:
    """A sequence's result, wide: out (N, S, V), and maximum and sum of the exponentials (N, S)."""

    out: Tensor
    maximum: Tensor
    total: Tensor

    @property
    def lse(self) -> Tensor:
        """Natural logarithm of the sum of the exponentials (N, S); +inf where a row sees nothing."""
        return torch.where(self.total == _CEILING, torch.inf, self.maximum + self.total.log())


def hidden(sparse: Sparse, mask: Tensor | None, queries: int, keys: int, sequence: int = 0) -> Tensor | None:
    """Which scores a query does not see: bool, broadcastable to (N, S, L); None = it sees all.

    mask: this sequence's, (1 or N, S, L) or more rows and columns, for modes 0, 1 and 5; a compressed triangle for the
    rest, whose content counts: above its diagonal stands what hides, below what shows.
    """
    if mask is None:
        return None
    place = torch.arange(queries).unsqueeze(1)
    key = torch.arange(keys).unsqueeze(0)
    offset = keys - queries
    if sparse.mode in (0, 1, 5):
        result = mask[..., :queries, :keys].bool()
        if sparse.mode == 0:
            result = result | (key > place + sparse.behind) | (key < place - sparse.before)
        return result
    if sparse.mode == 2:
        return _triangle(mask, key - place)
    if sparse.mode == 3:
        return _triangle(mask, key - place - offset)
    if sparse.mode == 4:
        late = _triangle(mask, key - place - offset - sparse.behind)
        early = ~_triangle(mask, key - place - offset + sparse.before + 1)
        return late | early
    if sparse.mode == 6:
        return _triangle(mask, key - place - offset) & (key >= sparse.prefix[sequence])
    raise NotImplementedError(f"sparse_mode {sparse.mode} is not simulated; 0 to 8 are")


def _triangle(mask: Tensor, distance: Tensor) -> Tensor:
    """The compressed triangle's word on a key so far behind (positive) or before (negative) a query's place."""
    square = mask.reshape(-1, mask.shape[-1])
    row = (-distance).clamp(0, COMPRESSED - 1)
    column = distance.clamp(0, COMPRESSED - 1)
    return square[row, column].bool()


def mask_of(mask: Tensor | None, sequence: int, compressed: bool) -> Tensor | None:
    """A sequence's part of a mask (S, L), (B or 1, S, L) or (B or 1, N or 1, S, L)."""
    if mask is None or compressed or mask.dim() == 2:
        return mask
    return mask[sequence if mask.shape[0] > 1 else 0]


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    unseen: Tensor | None = None,
    bias: Tensor | None = None,
    sink: Tensor | None = None,
    mend: bool = False,
) -> Attended:
    """Attention of query (N, S, D) to key (K, L, D) and value (K, L, V).

    bias is added to the scaled scores. sink (N,): a score of each head's own that takes weight and has no value.
    mend: rows that see nothing give 0 and an infinite sum instead of an average.
    """
    if key.shape[1] == 0:
        return _nothing(query, value)
    scores = _scores(query, key, scale, unseen, bias)
    maximum = scores.amax(-1)
    if sink is not None:
        maximum = torch.maximum(maximum, numerics.wide(sink).unsqueeze(-1))
    weights = (scores - maximum.unsqueeze(-1)).exp()
    total = numerics.total(weights, -1)
    if sink is not None:
        total = total + (numerics.wide(sink).unsqueeze(-1) - maximum).exp()
    out = numerics.product(numerics.rounded(weights, query.dtype), _repeated(value, query)) / total.unsqueeze(-1)
    if mend:
        blind = maximum <= _FLOOR
        out = out.masked_fill(blind.unsqueeze(-1), 0)
        total = total.masked_fill(blind, _CEILING)
    return Attended(out, maximum, total)


def _nothing(query: Tensor, value: Tensor) -> Attended:
    wide = numerics.wide(query)
    rows = wide.new_full(query.shape[:-1], _FLOOR)
    return Attended(wide.new_zeros(*query.shape[:-1], value.shape[-1]), rows, torch.full_like(rows, _CEILING))


def _repeated(t: Tensor, query: Tensor) -> Tensor:
    return numerics.wide(t).repeat_interleave(query.shape[0] // t.shape[0], 0)


def _scores(query: Tensor, key: Tensor, scale: float, unseen: Tensor | None, bias: Tensor | None) -> Tensor:
    scores = numerics.product(numerics.wide(query), _repeated(key, query).transpose(-1, -2)) * scale
    if bias is not None:
        scores = scores + numerics.wide(bias)
    return scores if unseen is None else scores.masked_fill(unseen, _FLOOR)


def backward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    upstream: Tensor,
    out: Tensor,
    maximum: Tensor,
    total: Tensor,
    scale: float,
    unseen: Tensor | None = None,
    bias: Tensor | None = None,
    sink: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of query, key, value, bias (N, S, L) and sink, from the stored maximum and sum (N, S)."""
    group = query.shape[0] // key.shape[0]
    weights = (_scores(query, key, scale, unseen, bias) - maximum.unsqueeze(-1)).exp() / total.unsqueeze(-1)
    wide_upstream = numerics.wide(upstream)
    drift = numerics.total(wide_upstream * numerics.wide(out), -1, keepdim=True)
    reached = numerics.product(wide_upstream, _repeated(value, query).transpose(-1, -2))
    slope = weights * (reached - drift)
    stored = numerics.rounded(slope, query.dtype)
    to_query = numerics.product(stored, _repeated(key, query)) * scale
    to_key = numerics.product(stored.transpose(-1, -2), numerics.wide(query)) * scale
    to_value = numerics.product(numerics.rounded(weights, query.dtype).transpose(-1, -2), wide_upstream)
    to_sink = None
    if sink is not None:
        share = (numerics.wide(sink).unsqueeze(-1) - maximum).exp() / total
        to_sink = -numerics.total(share * drift.squeeze(-1), -1)
    return to_query, _grouped(to_key, group), _grouped(to_value, group), slope, to_sink


def _grouped(t: Tensor, group: int) -> Tensor:
    return numerics.total(t.unflatten(0, (-1, group)), 1) if group > 1 else t


def heads_first(t: Tensor, layout: str, heads: int) -> Tensor:
    """A batch in BSH, SBH, BSND, BNSD, NSD order as (B, N, S, D): a view that can be written to."""
    if layout == "SBH":
        t, layout = t.transpose(0, 1), "BSH"
    if layout == "BSH":
        t, layout = t.view(*t.shape[:-1], heads, -1), "BSND"
    if layout == "BSND":
        return t.transpose(1, 2)
    if layout == "NBSD":
        return t.transpose(0, 1)
    if layout == "BNSD":
        return t
    raise NotImplementedError(f"layout {layout} is not simulated")


def lengths(running: Sequence[int]) -> list[int]:
    """What running sums are the sums of; sequences left out at the end are given as 0."""
    return [max(0, end - start) for start, end in itertools.pairwise((0, *running))]


def by_sequence(t: Tensor, running: Sequence[int], layout: str = "TND") -> list[Tensor]:
    """Packed tokens (T, N, D), or (N, T, D), as sequences (N, S, D): views that can be written to."""
    packed = t if layout == "NTD" else t.transpose(0, 1)
    counts = lengths(running)
    starts = [0, *itertools.accumulate(counts)]
    return [packed[:, start : start + count] for start, count in zip(starts, counts, strict=False)]
