"""Faults of writing into a paged KV cache: slots and blocks that get what is not theirs.

N blocks, P slots per block, K kv heads, U packed rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hal.conformance.mutants._cache_changes import CACHES, finite, given, raw
from hal.conformance.mutants.mutant import Arguments, Candidate, Mutant, after, each, reference
from hal.contract import OPS

__all__ = ["MUTANTS"]

# Tokens: write_kv_cache


def slots_of_8_bits(a: Arguments) -> Arguments:
    slots = a["slot_mapping"]
    return {"slot_mapping": torch.where(slots < 0, slots, slots % 256)}


def skipped_into_the_last_slot(a: Arguments) -> Arguments:
    return {"slot_mapping": a["slot_mapping"] % (a["k_cache"].shape[0] * a["k_cache"].shape[1])}


def last_token_skipped(a: Arguments) -> Arguments:
    slots = a["slot_mapping"].clone()
    slots[-1:] = -1
    return {"slot_mapping": slots}


def next_slot(a: Arguments) -> Arguments:
    """The last token that is not skipped lands one slot further on."""
    slots = a["slot_mapping"].clone()
    kept = (slots >= 0).nonzero()[:, 0]
    if len(kept):
        slots[kept[-1]] = (slots[kept[-1]] + 1) % (a["k_cache"].shape[0] * a["k_cache"].shape[1])
    return {"slot_mapping": slots}


def skipping_shifts(a: Arguments) -> Arguments:
    """Tokens that are kept are counted without those that are skipped."""
    kept = int((a["slot_mapping"] >= 0).sum())
    order = (a["slot_mapping"] < 0).to(torch.int8).sort(stable=True).indices
    slots = torch.full_like(a["slot_mapping"], -1)
    slots[:kept] = a["slot_mapping"][order[:kept]]
    return {"slot_mapping": slots}


def write(spoil: Callable[[Arguments, dict[str, Tensor]], None]) -> Callable[[str], Candidate]:
    """The reference, after which `spoil` writes into the caches; it gets what they held before."""

    def fault(op: str) -> Candidate:
        def call(*args: Any, **kwargs: Any) -> None:
            a = dict(vars(OPS[op].bind(args, kwargs)))
            held = {name: a[name].clone() for name in CACHES}
            reference(op)(**a)
            spoil(a, held)

        return call

    return fault


def last_head_stays(a: Arguments, held: dict[str, Tensor]) -> None:
    raw(a["v_cache"])[:, :, -1] = raw(held["v_cache"])[:, :, -1]


def last_feature_stays(a: Arguments, held: dict[str, Tensor]) -> None:
    raw(a["k_cache"])[..., -1] = raw(held["k_cache"])[..., -1]


def nothing_is_written(a: Arguments, held: dict[str, Tensor]) -> None:
    for name in CACHES:
        raw(a[name]).copy_(raw(held[name]))


def rest_of_the_page_cleared(a: Arguments, held: dict[str, Tensor]) -> None:
    """What follows the last written token in its page is zeroed."""
    slots, P = a["slot_mapping"], a["k_cache"].shape[1]
    kept = slots[slots >= 0]
    if len(kept):
        block, offset = divmod(int(kept[-1]), P)
        for name in CACHES:
            raw(a[name])[block, offset + 1 :] = 0


def slot_0_cleared(a: Arguments, held: dict[str, Tensor]) -> None:
    """Skipped tokens write zeros to slot 0, if no other token does."""
    slots = a["slot_mapping"]
    if bool((slots < 0).any()) and not bool((slots == 0).any()):
        for name in CACHES:
            raw(a[name])[0, 0] = 0


def unnamed_token_written(a: Arguments, held: dict[str, Tensor]) -> None:
    """The first token past the end of a short slot mapping goes to a slot that is free."""
    n, P = a["slot_mapping"].shape[0], a["k_cache"].shape[1]
    taken = set(a["slot_mapping"].tolist())
    free = next((s for s in range(a["k_cache"].shape[0] * P) if s not in taken), None)
    if n < a["k"].shape[0] and free is not None:
        reference("write_kv_cache")(**(a | {name: a[name][n : n + 1] for name in ("k", "v")}
                                       | {"slot_mapping": torch.tensor([free])}))  # fmt: skip


# Blocks: copy_kv_blocks


def copying(
    pairs: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] = lambda src, dst: (src, dst),
    which: Callable[[list[Tensor]], list[Tensor]] = lambda caches: caches,
    part: Callable[[Tensor], Tensor] = lambda cache: cache,
) -> Callable[[str], Candidate]:
    """The copy, of other pairs, fewer caches or parts of blocks."""

    def fault(op: str) -> Candidate:
        def call(k_caches: list[Tensor], v_caches: list[Tensor], src: Tensor, dst: Tensor) -> None:
            read, written = pairs(src, dst)
            for cache in which([*k_caches, *v_caches]):
                places = raw(part(cache))
                places[written] = places[read]

        return call

    return fault


def one_by_one(backwards: bool) -> Callable[[str], Candidate]:
    def call(k_caches: list[Tensor], v_caches: list[Tensor], src: Tensor, dst: Tensor) -> None:
        pairs = list(zip(src.tolist(), dst.tolist(), strict=True))
        for cache in map(raw, (*k_caches, *v_caches)):
            for s, d in reversed(pairs) if backwards else pairs:
                cache[d] = cache[s].clone()

    return lambda op: call


def copied_floats(change: Callable[[Tensor], Tensor]) -> Callable[[str], Candidate]:
    """What was copied of floats, changed."""

    def changed(_: None, a: Arguments) -> None:
        for cache in (*a["k_caches"], *a["v_caches"]):
            if cache.element_size() > 1:
                cache[a["dst"]] = change(cache[a["dst"]])

    return lambda op: after(op, changed)


def sources_cleared(op: str) -> Candidate:
    """Blocks are moved: a source that is no destination ends up zero."""

    def change(_: None, a: Arguments) -> None:
        gone = [s for s in a["src"].tolist() if s not in a["dst"].tolist()]
        for cache in map(raw, (*a["k_caches"], *a["v_caches"])):
            cache[gone] = 0

    return after(op, change)


MUTANTS: list[Mutant] = [
    # KV cache, writing
    *each("write_kv_cache", "nothing is written", "KV cache", write(nothing_is_written)),
    *each("write_kv_cache", "slots have 8 bits", "KV cache", given(slots_of_8_bits)),
    *each("write_kv_cache", "a skipped token lands in the last slot", "KV cache", given(skipped_into_the_last_slot)),
    *each("write_kv_cache", "the last token is skipped", "KV cache", given(last_token_skipped)),
    *each("write_kv_cache", "one token lands in the next slot", "KV cache", given(next_slot)),
    *each("write_kv_cache", "skipped tokens are not counted", "KV cache", given(skipping_shifts)),
    *each("write_kv_cache", "the last head of v is not written", "KV cache", write(last_head_stays)),
    *each("write_kv_cache", "the last element of each head of k is not written", "KV cache", write(last_feature_stays)),
    *each("write_kv_cache", "the rest of the last page is cleared", "KV cache", write(rest_of_the_page_cleared)),
    *each("write_kv_cache", "skipped tokens clear slot 0", "KV cache", write(slot_0_cleared)),
    *each("write_kv_cache", "a token without a slot is written", "KV cache", write(unnamed_token_written)),
    # KV cache, copying
    *each("copy_kv_blocks", "nothing is copied", "KV cache", copying(lambda src, dst: (src[:0], dst[:0]))),
    *each("copy_kv_blocks", "the last pair is not copied", "KV cache", copying(lambda src, dst: (src[:-1], dst[:-1]))),
    *each("copy_kv_blocks", "sources and destinations are swapped", "KV cache", copying(lambda src, dst: (dst, src))),
    *each("copy_kv_blocks", "the last layer's v is not copied", "KV cache", copying(which=lambda caches: caches[:-1])),
    *each("copy_kv_blocks", "the last slot of a block stays", "KV cache", copying(part=lambda cache: cache[:, :-1])),
    *each("copy_kv_blocks", "the last head stays", "KV cache", copying(part=lambda cache: cache[:, :, :-1])),
    *each("copy_kv_blocks", "pairs are copied one by one", "KV cache", one_by_one(False)),
    *each("copy_kv_blocks", "pairs are copied one by one, the last first", "KV cache", one_by_one(True)),
    *each("copy_kv_blocks", "sources are cleared", "KV cache", sources_cleared),
    # special values
    *each("copy_kv_blocks", "NaN becomes 0", "special values", copied_floats(lambda t: t.masked_fill(t.isnan(), 0.0))),
    *each("copy_kv_blocks", "infinity becomes the largest number", "special values", copied_floats(finite)),
]  # fmt: skip
