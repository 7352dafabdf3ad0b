"""Rules of the paged caches."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from hal.backends.ascend.simulator.constraints import A2, A3, P310, Constraint
from hal.backends.ascend.simulator.rules._common import absent, contiguous, dtypes, each, one_dtype

_SCATTER, _GATHER = "torch_npu-npu_scatter_pa_kv_cache", "aclnnGatherPaKvCache"
_WRITE, _READ = "aclnnScatterPaKvCache", "aclnnGatherPaKvCache"
_ALIGNED = 32  # bytes of the innermost dimension of an NZ cache
_write = partial(Constraint, _WRITE, page=_SCATTER, enforced_by="document")
_read = partial(Constraint, _READ, page=_GATHER, enforced_by="document")


def _slots(cache: Tensor, cache_mode: str | None) -> int:
    return cache.shape[0] * cache.shape[2 if cache_mode == "PA_NZ" else 1]


def _negative(slot_mapping: Tensor) -> str | None:
    least = int(slot_mapping.min()) if slot_mapping.numel() else 0
    return None if least >= 0 else f"{least}"


def _outside(key_cache: Tensor, slot_mapping: Tensor, cache_mode: str | None) -> str | None:
    greatest = int(slot_mapping.max()) if slot_mapping.numel() else 0
    slots = _slots(key_cache, cache_mode)
    return None if greatest < slots else f"{greatest} of {slots}"


def _unique(slot_mapping: Tensor) -> str | None:
    values, counts = slot_mapping.flatten().unique(return_counts=True)
    twice = values[counts > 1]
    return None if not twice.numel() else f"{int(twice[0])} more than once"


def _norm_layout(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, cache_mode: str) -> str | None:
    if cache_mode == "PA_NZ" or key.dim() != 3:
        return None
    for tokens, cache in ((key, key_cache), (value, value_cache)):
        if cache.shape[2:] != tokens.shape[1:]:
            return f"a cache {tuple(cache.shape)} for tokens {tuple(tokens.shape)}"
    return None


def _nz_layout(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, cache_mode: str) -> str | None:
    if cache_mode != "PA_NZ" or key.dim() != 3:
        return None
    for tokens, cache in ((key, key_cache), (value, value_cache)):
        inner = cache.shape[3]
        if inner * cache.element_size() != _ALIGNED or cache.shape[1] * inner != tokens.shape[1] * tokens.shape[2]:
            return f"a cache {tuple(cache.shape)} for tokens {tuple(tokens.shape)}"
    return None


def _one_each(key: Tensor, slot_mapping: Tensor) -> str | None:
    if key.dim() != 3 or slot_mapping.numel() == key.shape[0]:
        return None
    return f"{slot_mapping.numel()} slots for {key.shape[0]} tokens"


def _rows(key: Tensor, seq_lens: Tensor, is_seq_lens_cumsum: bool) -> str | None:
    rows = int(seq_lens[-1] if is_seq_lens_cumsum else seq_lens.sum()) if seq_lens.numel() else 0
    return None if rows == key.shape[0] else f"{rows} rows for a result of {key.shape[0]}"


def _batch(block_tables: Tensor, seq_lens: Tensor, is_seq_lens_cumsum: bool) -> str | None:
    wanted = block_tables.shape[0] + is_seq_lens_cumsum
    return None if seq_lens.shape[0] == wanted else f"{seq_lens.shape[0]} for {block_tables.shape[0]} sequences"


def _first(seq_lens: Tensor, is_seq_lens_cumsum: bool) -> str | None:
    return None if not is_seq_lens_cumsum or int(seq_lens[0]) == 0 else f"{int(seq_lens[0])}"


def _blocks(key_cache: Tensor, block_tables: Tensor) -> str | None:
    least, greatest = (int(x) for x in block_tables.aminmax()) if block_tables.numel() else (0, 0)
    return None if least >= 0 and greatest < key_cache.shape[0] else f"{least} to {greatest} of {key_cache.shape[0]}"


ROWS = (
    absent(_WRITE, _SCATTER),
    _write(
        rule="keys, values and caches have one dtype",
        check=one_dtype("key", "value", "key_cache", "value_cache"),
    ),
    _write(
        rule="keys, values, caches and slots are contiguous",
        check=contiguous("key", "value", "key_cache", "value_cache", "slot_mapping"),
    ),
    _write(
        rule="slots are int32 or int64",
        check=dtypes("slot_mapping", allowed=(torch.int32, torch.int64)),
    ),
    _write(rule="no slot is negative", check=_negative, values=True),
    _write(rule="each slot lies within the cache", check=_outside, values=True),
    _write(rule="no slot is given twice", check=_unique, values=True),
    _write(rule="there is a slot for each token", check=_one_each),
    _write(
        rule="caches have 4 dimensions",
        check=each("key_cache", "value_cache", test=lambda t: None if t.dim() == 4 else f"of {t.dim()}"),
    ),
    _write(rule="with cache_mode Norm a cache is (blocks, block size, heads, head dim)", check=_norm_layout),
    _write(
        rule="with cache_mode PA_NZ, the default, a cache is (blocks, heads · head dim / c, block size, c), c 32 bytes",
        check=_nz_layout,
    ),
    Constraint(
        operator=_WRITE,
        rule="a cache is not fp8, which comes with the 950",
        page=_SCATTER,
        enforced_by="field",
        check=each("key_cache", test=lambda t: f"of {t.dtype}" if "float8" in str(t.dtype) else None),
        socs=A2 | A3,
    ),
    _read(
        rule="block_tables and seq_lens are int32",
        check=dtypes("block_tables", "seq_lens", "seq_offset", allowed=(torch.int32,)),
    ),
    _read(
        rule="caches to gather from are int8, float16 or bfloat16",
        check=dtypes("key_cache", "value_cache", allowed=(torch.int8, torch.float16, torch.bfloat16)),
        socs=A2 | A3 | P310,
    ),
    _read(
        rule="what is gathered, and where to, is contiguous",
        check=contiguous("key_cache", "value_cache", "block_tables", "seq_lens", "key", "value"),
    ),
    _read(rule="seq_lens has one entry a sequence, running sums one more", check=_batch),
    _read(rule="running sums of lengths begin with 0", check=_first, values=True),
    _read(rule="the results have as many rows as the lengths add up to", check=_rows, values=True),
    _read(rule="each block of block_tables is one of the cache's", check=_blocks, values=True),
)
