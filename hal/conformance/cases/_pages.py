"""What cases of paged caches share: contents, scales, block tables, and which slots are read.

Shape letters: N blocks, P slots per block, K kv heads, B sequences, M entries per sequence of a block table.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from hal.conformance.inputs import Draw, Variant

__all__ = ["CODES", "FP8", "cache", "paged_variants", "pages", "read_slots", "scale", "spare_entries"]

FP8 = torch.float8_e4m3fn
CODES = ("int8", "float8_e4m3fn")


def cache(draw: Draw, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A cache full of something: any codes at all, or floats."""
    if dtype.itemsize == 1:
        bits = draw.integers(name, shape, 0, 256).to(torch.uint8)
        if dtype is FP8:
            bits = torch.where(bits & 0x7F == 0x7F, bits & 0x80, bits)  # no NaN
        return bits.view(dtype)
    return draw.normal(name, shape).to(dtype)


def scale(draw: Draw, name: str, kind: str | None, kv_heads: int, size: float) -> Tensor | None:
    """float32 () or (K,), around `size`; `power` is a power of two, so that ties are exact."""
    if kind is None:
        return None
    if kind == "power":
        return torch.tensor(0.25)
    return draw.uniform(name, () if kind == "one" else (kv_heads,), 0.7 * size, 1.4 * size).float()


def pages(draw: Draw, lengths: list[int], page: int, spare: int) -> tuple[Tensor, int]:
    """A block table (B, M) of blocks in random order, some never named, and the number of blocks."""
    used = [-(-n // page) for n in lengths]
    blocks = sum(used) + spare
    order = draw.permutation("blocks", blocks).int()
    table = torch.zeros(len(lengths), max(used, default=0) + 1, dtype=torch.int32)
    at = 0
    for b, n in enumerate(used):
        table[b, :n] = order[at : at + n]
        at += n
    return table, blocks


def spare_entries(lengths: list[int], page: int, table: Tensor) -> Tensor:
    """Entries of the block table past each sequence's end."""
    used = torch.tensor([-(-n // page) for n in lengths]).reshape(-1, 1)
    return torch.arange(table.shape[1]) >= used


def read_slots(lengths: list[int], page: int, table: Tensor, blocks: int) -> Tensor:
    """(N, P): slots that hold a key of some sequence."""
    read = torch.zeros(blocks, page, dtype=torch.bool)
    for b, n in enumerate(lengths):
        j = torch.arange(n)
        read[table[b, j // page].long(), j % page] = True
    return read


def paged_variants(args: dict[str, Any], blocks: int, draw: Draw) -> Iterator[Variant]:
    """The same pages in other places of the cache."""
    if blocks < 2:
        return
    order = draw.permutation("moved", blocks)  # block i moves to order[i]
    moved = dict(args)
    for name in ("k_cache", "v_cache"):
        store = args[name].view(torch.uint8) if args[name].dtype.itemsize == 1 else args[name]
        there = torch.empty_like(store)
        there[order] = store
        moved[name] = there.view(args[name].dtype)
    moved["block_table"] = order[args["block_table"].long()].int()
    yield Variant("blocks in other places", (moved,), declared="block_permutation")
