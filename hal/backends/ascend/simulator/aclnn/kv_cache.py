"""Paged key and value caches: write tokens into slots, gather sequences out of blocks.

Layouts: `Norm` is (blocks, block size, heads, head dim). `PA_NZ` is (blocks, heads · head dim / c, block size, c),
where c elements are 32 bytes. A slot is block · block size + row.
"""

from __future__ import annotations

from torch import Tensor

from hal.backends.ascend.simulator.operators import operator

__all__: list[str] = []


def _nz(cache_mode: str | None) -> bool:
    return cache_mode == "PA_NZ"


def _write(tokens: Tensor, cache: Tensor, slots: Tensor, nz: bool) -> None:
    if nz:
        size, wide = cache.shape[2], cache.shape[3]
        rows = tokens.reshape(tokens.shape[0], -1, wide)
        cache[slots // size, :, slots % size] = rows
    else:
        cache.view(-1, *cache.shape[2:])[slots] = tokens


@operator("aclnnScatterPaKvCache", "ttttttttssaa")
def scatter_pa_kv_cache(
    key: Tensor,
    key_cache: Tensor,
    slot_mapping: Tensor,
    value: Tensor,
    value_cache: Tensor,
    compress_lens: Tensor | None,
    compress_seq_offsets: Tensor | None,
    seq_lens: Tensor | None,
    cache_mode: str | None,
    scatter_mode: str | None,
    strides: list[int] | None,
    offsets: list[int] | None,
) -> None:
    if key.dim() != 3:
        raise NotImplementedError(
            "the compressed form (4-D keys) is not simulated; pass keys (tokens, heads, head dim)"
        )
    slots = slot_mapping.long()
    for tokens, cache in ((key, key_cache), (value, value_cache)):
        _write(tokens, cache, slots, _nz(cache_mode))


def _read(cache: Tensor, blocks: Tensor, nz: bool) -> Tensor:
    """The rows of some blocks, in order: (rows, …)."""
    found = cache[blocks]
    if nz:
        found = found.transpose(1, 2).flatten(2)
    return found.flatten(0, 1)


@operator("aclnnGatherPaKvCache", "tttttttsb")
def gather_pa_kv_cache(
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    key: Tensor,
    value: Tensor,
    seq_offset: Tensor | None,
    cache_mode: str | None,
    is_seq_lens_cumsum: bool,
) -> None:
    nz = _nz(cache_mode)
    size = key_cache.shape[2] if nz else key_cache.shape[1]
    lengths = (seq_lens.diff() if is_seq_lens_cumsum else seq_lens).tolist()
    starts = [0] * len(lengths) if seq_offset is None else (seq_offset // size).tolist()
    row = 0
    for table, length, start in zip(block_tables.long(), lengths, starts, strict=True):
        blocks = table[start : start - (-length // size)]
        for cache, out in ((key_cache, key), (value_cache, value)):
            part = out[row : row + length]
            part.copy_(_read(cache, blocks, nz)[:length].reshape(part.shape))
        row += length
