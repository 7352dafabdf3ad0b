"""Faults of reading a paged KV cache: pages and slots, block tables, ragged ends.

N blocks, P slots per block, K kv heads, D head dim, M entries per sequence of a block table.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hal.conformance.mutants._cache_changes import CACHES, READERS, Change, finite, given, raw
from hal.conformance.mutants.mutant import Arguments, Mutant, after, each

__all__ = ["MUTANTS"]

# Pages and tables


def lengths(a: Arguments) -> list[int]:
    """Keys of each sequence."""
    if "seq_lens" in a:
        return [int(n) for n in a["seq_lens"]]
    return [int(n) for n in a["cu_seqlens_k"].diff()]


def pages_read(a: Arguments, b: int) -> int:
    """Blocks that sequence b reads."""
    return -(-lengths(a)[b] // int(a["k_cache"].shape[1]))


def longest(a: Arguments) -> int | None:
    """The sequence with the most keys, if any has some."""
    found = lengths(a)
    return max(range(len(found)), key=found.__getitem__) if any(found) else None


def last_page_repeats(a: Arguments) -> Arguments:
    """The last page of the longest sequence is taken for the one before it."""
    b = longest(a)
    if b is None or pages_read(a, b) < 2:
        return {}
    table = a["block_table"].clone()
    table[b, pages_read(a, b) - 1] = table[b, pages_read(a, b) - 2]
    return {"block_table": table}


def neighbours_page(a: Arguments) -> Arguments:
    """The first page of a sequence is that of the sequence before it."""
    with_keys = [b for b, n in enumerate(lengths(a)) if n]
    if len(with_keys) < 2:
        return {}
    table = a["block_table"].clone()
    table[with_keys[1], 0] = table[with_keys[0], 0]
    return {"block_table": table}


def pages_in_order(a: Arguments) -> Arguments:
    """Pages lie one behind the other, as if there were no table."""
    table, N = a["block_table"], a["k_cache"].shape[0]
    if not N:
        return {}
    return {"block_table": (torch.arange(table.numel(), dtype=torch.int32) % N).reshape(table.shape)}


def every_id_is_checked(a: Arguments) -> Arguments:
    """Entries past a sequence's end must be valid too."""
    table, N = a["block_table"], a["k_cache"].shape[0]
    if bool(((table < 0) | (table >= max(N, 1))).any()):
        raise IndexError(f"index {int(table.max())} is out of bounds for dimension 0 with size {N}")
    return {}


def copied(t: Tensor) -> Tensor:
    """A copy that may be changed; codes as their bytes."""
    return raw(t).clone(memory_format=torch.contiguous_format)


def slot_repeats(name: str, slot: int) -> Change:
    """One slot of the longest sequence's first page holds what the slot before it holds."""

    def change(a: Arguments) -> Arguments:
        b = longest(a)
        at = slot % int(a[name].shape[1])
        if b is None or lengths(a)[b] <= at or at == 0:
            return {}
        places, block = copied(a[name]), int(a["block_table"][b, 0])
        places[block, at] = places[block, at - 1]
        return {name: places.view(a[name].dtype)}

    return change


def pages_of_16(a: Arguments) -> Arguments:
    """However many slots a page has, 16 of them are used: key j lies in block j // 16."""
    P = int(a["k_cache"].shape[1])
    if P <= 16:
        return {}
    repeated = {name: copied(a[name]) for name in CACHES}
    for places in repeated.values():
        places[:, 16:] = places[:, :16].repeat(1, -(-P // 16), *[1] * (places.ndim - 2))[:, : P - 16]
    return {name: places.view(a[name].dtype) for name, places in repeated.items()}


def heads_before_slots(a: Arguments) -> Arguments:
    """A page is taken to hold heads before slots."""
    found = {}
    for name in CACHES:
        places = copied(a[name])
        N, P, K, D = places.shape
        found[name] = places.view(N, K, P, D).transpose(1, 2).contiguous().view(a[name].dtype)
    return found


# Ragged ends and unused slots of gather_kv_cache


def row(at: int, becomes: Callable[[Tensor], Tensor], r: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The results with one row changed; `becomes` gets the whole result."""
    found = tuple(t.clone() for t in r)
    for new, t in zip(found, r, strict=True):
        new[at] = becomes(t)
    return found


def last_row_lost(r: Any, a: Arguments) -> Any:
    used = sum(lengths(a))
    return row(used - 1, lambda t: torch.zeros_like(t[0]), r) if used else r


def padding_kept(r: Any, a: Arguments) -> Any:
    """The first row past the last sequence holds the last key once more."""
    used = sum(lengths(a))
    return row(used, lambda t: t[used - 1], r) if 0 < used < r[0].shape[0] else r


def first_row_of_a_sequence(r: Any, a: Arguments) -> Any:
    """The first key of a sequence is the last one of the sequence before."""
    ends = [int(n) for n in a["cu_seqlens_k"][1:-1] if 0 < n < a["cu_seqlens_k"][-1]]
    return row(ends[0], lambda t: t[ends[0] - 1], r) if ends else r


def whole_pages_added(r: Any, a: Arguments) -> Any:
    """A page is loaded whole, and what is not used of it is multiplied by 0."""
    found = [t.clone() for t in r]
    P, at = int(a["k_cache"].shape[1]), 0
    for b, n in enumerate(lengths(a)):
        for t, name in zip(found, CACHES, strict=True):
            for j in range(0, n, P):
                page = a[name][int(a["block_table"][b, j // P])].to(torch.float32)
                t[at + j : at + min(j + P, n)] += (0 * page.sum(0)).to(t.dtype)
        at += n
    return tuple(found)


MUTANTS: list[Mutant] = [
    # ragged ends, hidden NaN
    *each("gather_kv_cache", "the last row of the last sequence is lost", "ragged ends",
          lambda op: after(op, last_row_lost)),
    *each("gather_kv_cache", "the row past the last sequence repeats its last key", "ragged ends",
          lambda op: after(op, padding_kept)),
    *each("gather_kv_cache", "a sequence starts with the last key of the one before", "ragged ends",
          lambda op: after(op, first_row_of_a_sequence)),
    *each("gather_kv_cache", "unused slots are multiplied by 0", "hidden NaN", lambda op: after(op, whole_pages_added)),
    # special values
    *each("gather_kv_cache", "NaN becomes 0", "special values",
          lambda op: after(op, lambda r, a: tuple(t.masked_fill(t.isnan(), 0.0) for t in r))),
    *each("gather_kv_cache", "infinity becomes the largest number", "special values",
          lambda op: after(op, lambda r, a: tuple(finite(t) for t in r))),
    # KV cache and block table, reading
    *each(READERS, "one slot of k repeats the one before", "KV cache", given(slot_repeats("k_cache", 1))),
    *each(READERS, "the last slot of one page of v repeats the one before", "KV cache",
          given(slot_repeats("v_cache", -1))),
    *each(READERS, "pages have 16 slots whatever they have", "KV cache", given(pages_of_16)),
    *each(READERS, "a page holds heads before slots", "KV cache", given(heads_before_slots)),
    *each(READERS, "the last page of one sequence is the one before it", "block table", given(last_page_repeats)),
    *each(READERS, "one page is that of another sequence", "block table", given(neighbours_page)),
    *each(READERS, "there is no table", "block table", given(pages_in_order)),
    *each(READERS, "ids past the end must be valid", "block table", given(every_id_is_checked), form=True),
]  # fmt: skip
