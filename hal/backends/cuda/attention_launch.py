"""What both attention operators tell their kernels: lengths, strides, bounds, the way of a score, and tiles.

B batch, S queries, L keys, H query heads, K kv heads, D head dim of q and k, E head dim of v. Of ragged batches S and L
are all rows together, and the longest of them are upper bounds.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from hal.backends.cuda import launch
from hal.backends.cuda.launch import Launch
from hal.backends.cuda.rows import power_of_two
from hal.op import Args
from hal.ops._attention_args import split_window
from hal.ops._attention_core import head_scale

__all__ = [
    "Choice",
    "Problem",
    "Tile",
    "choose",
    "forward",
    "forward_tile",
    "lse_strides",
    "mask_strides",
    "precision",
    "strides",
    "vector_strides",
    "way",
    "wide",
    "width",
]

LOG2E = math.log2(math.e)
# Bytes of keys and values that programs share at a time; the caches of the chips served hold 40 MiB and more.
CACHE = 24 * 2**20
NARROWEST = 16
# Units of an exponent that neither vanish nor overflow when a score is multiplied by them.
ORDINARY = (1e-30, 1e30)


@dataclass(frozen=True)
class Problem:
    """A call by its sizes. `ragged`: by prefix sums; then queries and keys count packed rows."""

    ragged: bool
    batch: int
    queries: int
    keys: int
    longest_q: int
    longest_k: int
    heads: int
    kv_heads: int
    D: int
    E: int
    itemsize: int
    left: int | None
    right: int | None

    @classmethod
    def of(cls, a: Args) -> Problem:
        ragged = a.q.dim() == 3
        queries, keys = a.q.shape[-3], a.k.shape[-3]
        batch = a.cu_seqlens_q.shape[0] - 1 if ragged else a.q.shape[0]
        longest_q = min(a.max_seqlen_q, queries) if ragged else queries
        longest_k = min(a.max_seqlen_k, keys) if ragged else keys
        left, right = split_window(a.window)
        if a.causal:
            right = 0 if right is None else min(right, 0)
        return cls(
            ragged=ragged,
            batch=batch,
            queries=queries,
            keys=keys,
            longest_q=longest_q,
            longest_k=longest_k,
            heads=a.q.shape[-2],
            kv_heads=a.k.shape[-2],
            D=a.q.shape[-1],
            E=a.v.shape[-1],
            itemsize=a.q.dtype.itemsize,
            # A bound that hides nothing from anybody is none.
            left=None if left is None or left >= longest_k - 1 else left,
            right=None if right is None or right >= longest_q - 1 else right,
        )

    @property
    def group(self) -> int:
        """Query heads of a kv head."""
        return self.heads // self.kv_heads

    @property
    def pairs(self) -> int:
        """Sequences times kv heads."""
        return self.batch * self.kv_heads

    @property
    def o_shape(self) -> tuple[int, ...]:
        last = (self.queries, self.heads, self.E)
        return last if self.ragged else (self.batch, *last)

    @property
    def lse_shape(self) -> tuple[int, ...]:
        return (self.queries, self.heads) if self.ragged else (self.batch, self.heads, self.queries)

    @property
    def rows(self) -> int:
        """Queries of all sequences."""
        return self.queries if self.ragged else self.batch * self.queries

    @property
    def together(self) -> int:
        """Pairs whose keys and values the cache holds beside one another."""
        one = max(1, self.longest_k * (self.D + self.E) * self.itemsize)
        return max(1, min(self.pairs, CACHE // one))

    @property
    def sizes(self) -> dict[str, Any]:
        """Numbers and constants that all kernels take."""
        (D1, D2), (E1, E2) = width(self.D), width(self.E)
        return {
            "batch": self.batch,
            "kv_heads": self.kv_heads,
            "queries": self.queries,
            "keys": self.keys,
            "left": self.left,
            "right": self.right,
            "GROUP": self.group,
            "D": self.D,
            "D1": D1,
            "D2": D2,
            "E": self.E,
            "E1": E1,
            "E2": E2,
        }


def width(n: int) -> tuple[int, int]:
    """n as the sum of two powers of two or a little more, the second of which may be 0: 192 is (128, 64)."""
    whole = max(power_of_two(n), NARROWEST)
    half = whole // 2
    rest = max(power_of_two(max(n - half, 1)), NARROWEST)
    return (half, rest) if half >= NARROWEST and rest <= half // 2 else (whole, 0)


def strides(name: str, t: Tensor) -> dict[str, int]:
    """Steps of batch, length, heads and width; a packed tensor has no step of the batch."""
    steps = t.stride() if t.dim() == 4 else (0, *t.stride())
    return {f"{name}_{axis}": step for axis, step in zip("bshd", steps, strict=True)}


def lse_strides(p: Problem) -> dict[str, int]:
    """Steps of a contiguous log-sum-exp."""
    if p.ragged:
        return {"lse_b": 0, "lse_s": p.heads, "lse_h": 1}
    return {"lse_b": p.heads * p.queries, "lse_s": 1, "lse_h": p.queries}


def wide(p: Problem, *tensors: Tensor) -> bool:
    """Whether an element of one head of one sequence may lie 2³¹ elements from its first."""
    longest = max(p.longest_q, p.longest_k)
    return any(longest * t.stride(-3) + p.group * t.stride(-2) + t.shape[-1] * t.stride(-1) >= 2**31 for t in tensors)


def mask_strides(mask: Tensor | None) -> dict[str, int]:
    """Steps of a mask over (B, H, S, L), 0 where it is one for all."""
    if mask is None:
        return dict.fromkeys(("mask_b", "mask_h", "mask_s", "mask_l"), 0)
    told = [step if n > 1 else 0 for n, step in zip(mask.shape, mask.stride(), strict=True)]
    return dict(zip(("mask_b", "mask_h", "mask_s", "mask_l"), [0] * (4 - len(told)) + told, strict=True))


def vector_strides(a: Args) -> dict[str, int]:
    """Steps of prefix sums and sinks, 0 where there are none."""
    given = vars(a)
    told = {"cu_q_s": given.get("cu_seqlens_q"), "cu_k_s": given.get("cu_seqlens_k"), "sinks_s": a.sinks}
    return {name: 0 if t is None else t.stride(0) for name, t in told.items()}


def way(a: Args) -> dict[str, Any]:
    """How a product becomes a score, as hal.kernels.attention_tiles tells it; `unit` may be negative in `plain`."""
    scale = head_scale(a.scale, a.q.shape[-1])
    mask = vars(a).get("mask")
    capped, natural = a.softcap is not None, mask is not None and mask.is_floating_point()
    unit = (a.softcap if capped else scale) * LOG2E
    natural = natural or not ORDINARY[0] < abs(unit) < ORDINARY[1]
    if capped:
        before, unit = scale / a.softcap, a.softcap if natural else unit
    else:
        before, unit = (scale, 1.0) if natural else (1.0, unit)
    return {"before": float(before), "unit": float(unit), "SOFTCAP": capped, "NATURAL": natural}


def precision(dtype: torch.dtype) -> str:
    """Of products, by torch's setting at this moment: only float32 has a choice."""
    if dtype is torch.float32 and torch.get_float32_matmul_precision() != "highest":
        return "tf32"
    return "ieee"


Tile = tuple[dict[str, int], dict[str, int]]


@dataclass(frozen=True)
class Choice:
    """A tile and how it is compiled, for heads no wider than `widest`."""

    widest: int
    rows: int
    keys: int
    edge: int  # of what is walked in blocks, where not all of it is seen
    warps: int
    stages: int

    def over_keys(self) -> Tile:
        """Constants and options of a kernel that walks keys."""
        return self._tile(EDGE_N=min(self.edge, self.keys))

    def over_queries(self) -> Tile:
        """Constants and options of a kernel that walks queries."""
        return self._tile(EDGE_M=min(self.edge, self.rows))

    def _tile(self, **edge: int) -> Tile:
        blocks = {"BLOCK_M": self.rows, "BLOCK_N": self.keys} | edge
        return blocks, {"num_warps": self.warps, "num_stages": self.stages}


# By bytes of an element and the oldest capability that has the shared memory and the instructions for it.
FORWARD: dict[tuple[int, int], tuple[Choice, ...]] = {
    (2, 100): (
        Choice(64, 128, 64, 32, 8, 3),
        Choice(128, 128, 128, 64, 8, 2),
        Choice(192, 128, 64, 64, 8, 2),
        Choice(256, 128, 32, 32, 8, 2),
        Choice(640, 64, 32, 32, 8, 2),
    ),
    (2, 90): (
        Choice(64, 128, 64, 32, 8, 3),
        Choice(128, 128, 128, 64, 8, 2),
        Choice(192, 128, 64, 64, 8, 2),
        Choice(256, 128, 64, 16, 8, 2),
        Choice(640, 64, 32, 32, 8, 2),
    ),
    (2, 80): (
        Choice(64, 128, 64, 64, 4, 3),
        Choice(128, 128, 64, 32, 8, 3),
        Choice(256, 64, 32, 32, 8, 2),
        Choice(640, 32, 32, 32, 8, 1),
    ),
    (4, 80): (
        Choice(64, 64, 32, 32, 8, 2),
        Choice(128, 32, 32, 32, 8, 2),
        Choice(256, 16, 32, 32, 8, 2),
        Choice(640, 16, 16, 16, 8, 1),
    ),
}


def choose(table: dict[tuple[int, int], tuple[Choice, ...]], p: Problem, capability: int) -> Choice:
    """The first row of the newest table for this chip that is wide enough."""
    fitting = max(key for key in table if key[0] == p.itemsize and key[1] <= capability)
    widest = max(sum(width(p.D)), sum(width(p.E)))
    return next(choice for choice in table[fitting] if widest <= choice.widest)


def forward_tile(p: Problem, capability: int) -> Tile:
    """Tile and options of the forward kernel; by widths, dtype and chip alone, so that a row is what it is alone."""
    return choose(FORWARD, p, capability).over_keys()


def forward(a: Args, p: Problem) -> Callable[[bool], Launch]:
    """The launch with or without a log-sum-exp, by torch's precision at the moment; made when first asked for."""
    device, dtype = a.q.device, a.q.dtype
    blocks, options = forward_tile(p, launch.capability(device))
    tiles = max(1, -(-p.longest_q * p.group // blocks["BLOCK_M"]))
    score = way(a)
    values = {
        **p.sizes,
        **strides("q", a.q),
        **strides("k", a.k),
        **strides("v", a.v),
        **lse_strides(p),
        **mask_strides(vars(a).get("mask")),
        **vector_strides(a),
        **score,
        "unit": abs(score["unit"]),
        "NEGATIVE": score["unit"] < 0,
        "tiles": tiles,
        "together": p.together,
        "WIDE": wide(p, a.q, a.k, a.v),
        **blocks,
    }
    grid = (max(1, tiles * p.pairs),)

    @cache
    def launched(with_lse: bool, how: str) -> Launch:
        # One for each: what a launch is specialised to differs with and without a log-sum-exp.
        return Launch("attention.attention_kernel", grid, device, options, PRECISION=how, **values)

    return lambda with_lse: launched(with_lse, precision(dtype))
