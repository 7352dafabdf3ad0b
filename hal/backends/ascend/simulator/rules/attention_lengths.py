"""Rules of attention for inference: lengths of sequences, and paged caches."""

from __future__ import annotations

import itertools
from functools import partial

import torch
from torch import Tensor

from hal.backends.ascend.simulator.constraints import Constraint
from hal.backends.ascend.simulator.rules._calls import FUSED, PAGE, STEP, key_rows, one, packed, query_dims, single

_fused = partial(Constraint, FUSED, page=PAGE, enforced_by="document")


def _both_sums(
    input_layout: str, actual_seq_lengths: list[int] | None, actual_seq_lengths_kv: list[int] | None
) -> str | None:
    if not packed(input_layout) or (actual_seq_lengths and actual_seq_lengths_kv):
        return None
    return f"{actual_seq_lengths} and {actual_seq_lengths_kv}"


def _rising(sums: list[int] | None) -> bool:
    return all(a <= b for a, b in itertools.pairwise((0, *(sums or ()))))


def _sums(
    input_layout: str,
    actual_seq_lengths: list[int] | None,
    actual_seq_lengths_kv: list[int] | None,
    block_table: Tensor | None,
) -> str | None:
    if not packed(input_layout):
        return None
    for sums in (actual_seq_lengths, None if block_table is not None else actual_seq_lengths_kv):
        if not _rising(sums):
            return f"{sums}"
    return None


def _tokens(
    query: Tensor,
    key: list[Tensor],
    input_layout: str,
    actual_seq_lengths: list[int] | None,
    actual_seq_lengths_kv: list[int] | None,
    block_table: Tensor | None,
) -> str | None:
    if not packed(input_layout):
        return None
    axis = 0 if input_layout.startswith("TND") else 1
    pairs = [(actual_seq_lengths, query)]
    if block_table is None:
        pairs.append((actual_seq_lengths_kv, one(key)))
    for sums, t in pairs:
        if sums and sums[-1] != t.shape[axis]:
            return f"{sums[-1]} of {t.shape[axis]} tokens"
    return None


def _as_many(
    input_layout: str, actual_seq_lengths: list[int] | None, actual_seq_lengths_kv: list[int] | None
) -> str | None:
    if not packed(input_layout) or not actual_seq_lengths or not actual_seq_lengths_kv:
        return None
    counts = len(actual_seq_lengths), len(actual_seq_lengths_kv)
    return None if counts[0] == counts[1] <= 4096 else f"{counts[0]} and {counts[1]}"


def _short_enough(
    query: Tensor,
    key: list[Tensor],
    input_layout: str,
    num_heads: int,
    num_key_value_heads: int,
    actual_seq_lengths: list[int] | None,
    actual_seq_lengths_kv: list[int] | None,
    block_table: Tensor | None,
    block_size: int,
) -> str | None:
    checked: list[tuple[list[int] | None, int]] = []
    if not packed(input_layout):
        queries = query_dims(query, input_layout, num_heads)[2]
        checked.append((actual_seq_lengths if queries > 1 else None, queries))
        if block_table is None:
            keys = key_rows(key, input_layout, num_heads, num_key_value_heads)
            checked.append((actual_seq_lengths_kv, keys))
    if block_table is not None:
        checked.append((actual_seq_lengths_kv, block_table.shape[-1] * block_size))
    for sizes, most in checked:
        if sizes and (max(sizes) > most or min(sizes) < 0):
            return f"{sizes} of {most}"
    return None


def _count(
    query: Tensor,
    input_layout: str,
    num_heads: int,
    actual_seq_lengths: list[int] | None,
    actual_seq_lengths_kv: list[int] | None,
) -> str | None:
    if packed(input_layout):
        return None
    for sizes in (None if single(query, input_layout, num_heads) else actual_seq_lengths, actual_seq_lengths_kv):
        if sizes and len(sizes) != 1 and len(sizes) < query.shape[0]:
            return f"{len(sizes)} for {query.shape[0]} sequences"
    return None


def _paged_lengths(block_table: Tensor | None, actual_seq_lengths_kv: list[int] | None) -> str | None:
    return "none" if block_table is not None and not actual_seq_lengths_kv else None


def _table(block_table: Tensor | None) -> str | None:
    if block_table is None or (block_table.dtype is torch.int32 and block_table.dim() == 2):
        return None
    return f"{tuple(block_table.shape)} of {block_table.dtype}"


def _table_rows(
    query: Tensor, input_layout: str, actual_seq_lengths: list[int] | None, block_table: Tensor | None
) -> str | None:
    if block_table is None or block_table.dim() != 2:
        return None
    batch = len(actual_seq_lengths or ()) if packed(input_layout) else query.shape[0]
    return None if block_table.shape[0] == batch else f"{block_table.shape[0]} for {batch} sequences"


def _prefill_block(
    query: Tensor, input_layout: str, num_heads: int, block_table: Tensor | None, block_size: int
) -> str | None:
    if block_table is None or packed(input_layout) or single(query, input_layout, num_heads):
        return None
    return None if 128 <= block_size <= 512 and block_size % 128 == 0 else f"{block_size}"


def _decode_block(
    query: Tensor, input_layout: str, num_heads: int, block_table: Tensor | None, block_size: int
) -> str | None:
    if block_table is None or not single(query, input_layout, num_heads):
        return None
    return None if 0 < block_size <= 512 and block_size % 16 == 0 else f"{block_size}"


def _packed_block(input_layout: str, block_table: Tensor | None, block_size: int) -> str | None:
    if block_table is None or not packed(input_layout):
        return None
    return None if 0 < block_size <= 1024 and block_size % 16 == 0 else f"{block_size}"


def _cache_layout(key: list[Tensor], input_layout: str, block_table: Tensor | None) -> str | None:
    dims = one(key).dim()
    if block_table is None:
        return None
    allowed = (3,) if input_layout in ("BSH", "BSND") else (3, 4, 5)
    return None if dims in allowed else f"{tuple(one(key).shape)} with {input_layout}"


def _cache_block(key: list[Tensor], block_table: Tensor | None, block_size: int) -> str | None:
    if block_table is None:
        return None
    cache = one(key)
    rows = cache.shape[{3: 1, 4: 2, 5: 3}.get(cache.dim(), 1)]
    return None if rows == block_size else f"{block_size} for a cache {tuple(cache.shape)}"


def _cache_width(key: list[Tensor], block_table: Tensor | None) -> str | None:
    cache = one(key)
    return f"{cache.shape[2]}" if block_table is not None and cache.dim() == 3 and cache.shape[2] > 65535 else None


def _used_blocks(
    key: list[Tensor], block_table: Tensor | None, block_size: int, actual_seq_lengths_kv: list[int] | None
) -> str | None:
    if block_table is None or block_table.dim() != 2 or not actual_seq_lengths_kv or block_size <= 0:
        return None
    blocks = one(key).shape[0]
    sizes = actual_seq_lengths_kv * block_table.shape[0] if len(actual_seq_lengths_kv) == 1 else actual_seq_lengths_kv
    for row, length in zip(block_table.tolist(), sizes, strict=False):
        for block in row[: -(-length // block_size)]:
            if not 0 <= block < blocks:
                return f"{block} of {blocks}"
    return None


ROWS = (
    _fused(rule="packed, both lists of lengths are given", check=_both_sums),
    _fused(rule="packed, lengths are running sums that never fall", check=_sums),
    _fused(rule="packed, the last running sum is the number of tokens", check=_tokens),
    _fused(rule="packed, both lists of lengths have one entry a sequence, 4096 at most", check=_as_many),
    _fused(rule="no length is greater than what is there, or negative", check=_short_enough),
    _fused(rule="there is one length, or one a sequence", check=_count),
    _fused(rule="with a block_table actual_seq_lengths_kv is given", check=_paged_lengths),
    Constraint(
        operator=(*FUSED, STEP),
        rule="block_table is int32 with 2 dimensions",
        page=PAGE,
        enforced_by="document",
        check=_table,
    ),
    _fused(rule="block_table has a row for each sequence", check=_table_rows),
    _fused(rule="for more than one query block_size is a multiple of 128, from 128 to 512", check=_prefill_block),
    _fused(rule="for a single query block_size is a multiple of 16, at most 512", check=_decode_block),
    _fused(rule="packed, block_size is a multiple of 16, at most 1024", check=_packed_block),
    _fused(
        rule="a paged cache is (blocks, block size, heads · head dim); BNSD and TND take (blocks, heads, block size, "
        "head dim) too",
        check=_cache_layout,
    ),
    _fused(rule="block_size is that of the cache", check=_cache_block),
    _fused(
        rule="heads · head dim of a cache (blocks, block size, heads · head dim) is at most 65535", check=_cache_width
    ),
    _fused(
        rule="each block that a length reaches is one of the cache's, which no device checks",
        check=_used_blocks,
        values=True,
    ),
)
