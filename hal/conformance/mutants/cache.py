"""Faults of the operators on a paged KV cache: pages and slots, block tables, quantised codes.

N blocks, P slots per block, K kv heads, U packed rows, M entries per sequence of a block table.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hal.conformance.mutants.mutant import Arguments, Candidate, Mutant, after, before, each, reference, weaker
from hal.contract import OPS

__all__ = ["MUTANTS"]

FP8 = torch.float8_e4m3fn
READERS = ("paged_attention", "gather_kv_cache")
QUANTISED = (*READERS, "write_kv_cache")
CACHES = ("k_cache", "v_cache")
Change = Callable[[Arguments], Arguments]


def given(change: Change) -> Callable[[str], Candidate]:
    """Arguments that are taken for others."""
    return lambda op: before(op, change)


# Reading: pages and tables


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
    return (t.view(torch.uint8) if t.element_size() == 1 else t).clone(memory_format=torch.contiguous_format)


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


# Reading: ragged ends and unused slots of gather_kv_cache


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


# Writing


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


def raw(t: Tensor) -> Tensor:
    """Codes as bytes, which every operation takes."""
    return t.view(torch.uint8) if t.element_size() == 1 else t


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


# Copying


def copying(
    pairs: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] = lambda src, dst: (src, dst),
    which: Callable[[list[Tensor]], list[Tensor]] = lambda caches: caches,
    part: Callable[[Tensor], Tensor] = lambda cache: cache,
) -> Callable[[str], Candidate]:
    """The copy, of other pairs, fewer caches or parts of blocks."""

    def fault(op: str) -> Candidate:
        def call(k_caches: list[Tensor], v_caches: list[Tensor], src: Tensor, dst: Tensor) -> None:
            there = [part(cache) for cache in which([*k_caches, *v_caches])]
            reference(op)(there, there, *pairs(src, dst))

        return call

    return fault


def one_by_one(backwards: bool) -> Callable[[str], Candidate]:
    def call(k_caches: list[Tensor], v_caches: list[Tensor], src: Tensor, dst: Tensor) -> None:
        pairs = list(zip(src.tolist(), dst.tolist(), strict=True))
        for cache in map(raw, (*k_caches, *v_caches)):
            for s, d in reversed(pairs) if backwards else pairs:
                cache[d] = cache[s].clone()

    return lambda op: call


def sources_cleared(op: str) -> Candidate:
    """Blocks are moved: a source that is no destination ends up zero."""

    def change(_: None, a: Arguments) -> None:
        gone = [s for s in a["src"].tolist() if s not in a["dst"].tolist()]
        for cache in map(raw, (*a["k_caches"], *a["v_caches"])):
            cache[gone] = 0

    return after(op, change)


# Quantised codes


def scale_of_first_head(a: Arguments) -> Arguments:
    return {name: a[name][0] for name in ("k_scale", "v_scale") if a[name] is not None and a[name].ndim}


def scales_swapped(a: Arguments) -> Arguments:
    return {"k_scale": a["v_scale"], "v_scale": a["k_scale"]}


def v_has_the_scale_of_k(a: Arguments) -> Arguments:
    return {"v_scale": a["k_scale"]}


def no_scale(a: Arguments) -> Arguments:
    return {name: torch.ones_like(a[name]) for name in ("k_scale", "v_scale") if a[name] is not None}


def scale_in_16_bits(a: Arguments) -> Arguments:
    return {name: a[name].bfloat16().float() for name in ("k_scale", "v_scale") if a[name] is not None}


def scale_off(op: str, strength: float) -> Candidate:
    def change(a: Arguments) -> Arguments:
        names = ("k_scale", "v_scale")
        return {name: a[name].double() * (1 + strength) for name in names if a[name] is not None}

    return before(op, change)


def codes_as(read: Callable[[Tensor], Tensor], dtype: torch.dtype) -> Change:
    """Codes of one dtype, decoded as something else (float32), times their scale."""

    def change(a: Arguments) -> Arguments:
        if a["k_cache"].dtype is not dtype:
            return {}
        out = a["q"].dtype if "q" in a else a["out_dtype"]
        wide = torch.float64 if out is torch.float64 else torch.float32
        found: Arguments = {}
        for name in ("k", "v"):
            by, values = a[f"{name}_scale"], read(a[f"{name}_cache"].contiguous()).to(wide)
            found[f"{name}_cache"] = values if by is None else values * (by if by.ndim == 0 else by[:, None]).to(wide)
            found[f"{name}_scale"] = None
        return found

    return change


def subnormals_flushed(codes: Tensor) -> Tensor:
    values = codes.float()
    return values.masked_fill(values.abs() < 2.0**-6, 0.0)


def quantising(ratio: Callable[[Tensor, torch.dtype], Tensor]) -> Callable[[str], Candidate]:
    """value / scale, changed before it becomes a code."""

    def change(a: Arguments) -> Arguments:
        to = a["k_cache"].dtype
        if to.itemsize > 1:
            return {}
        found: Arguments = {}
        for name in ("k", "v"):
            by = a[f"{name}_scale"]
            x = a[name].double() if a[name].dtype is torch.float64 else a[name].float()
            by = torch.ones((), dtype=x.dtype) if by is None else by.to(x.dtype)
            found[name] = ratio(x / (by if by.ndim == 0 else by[:, None]), to)
            found[f"{name}_scale"] = torch.ones(())
        return found

    return given(change)


def for_int8(change: Callable[[Tensor], Tensor]) -> Callable[[str], Candidate]:
    return quantising(lambda ratio, to: change(ratio) if to is torch.int8 else ratio)


def for_fp8(change: Callable[[Tensor], Tensor]) -> Callable[[str], Candidate]:
    return quantising(lambda ratio, to: change(ratio) if to is FP8 else ratio)


def truncated_fp8(ratio: Tensor) -> Tensor:
    """Toward zero, to 3 bits behind the leading one."""
    exponent = torch.frexp(ratio).exponent
    ulp = exponent.clamp(min=-5) - 4
    found = torch.ldexp(torch.ldexp(ratio, -ulp).trunc(), ulp)
    return torch.where(ratio.isfinite(), found, ratio)


def floats_only(change: Callable[[Tensor], Tensor]) -> Callable[[str], Candidate]:
    """k and v changed on their way into a cache of floats."""
    return given(lambda a: {n: change(a[n]) for n in ("k", "v")} if a["k_cache"].element_size() > 1 else {})


MUTANTS: list[Mutant] = [
    # ragged ends, hidden NaN
    *each("gather_kv_cache", "the last row of the last sequence is lost", "ragged ends",
          lambda op: after(op, last_row_lost)),
    *each("gather_kv_cache", "the row past the last sequence repeats its last key", "ragged ends",
          lambda op: after(op, padding_kept)),
    *each("gather_kv_cache", "a sequence starts with the last key of the one before", "ragged ends",
          lambda op: after(op, first_row_of_a_sequence)),
    *each("gather_kv_cache", "unused slots are multiplied by 0", "hidden NaN", lambda op: after(op, whole_pages_added)),
    # KV cache and block table, reading
    *each(READERS, "one slot of k repeats the one before", "KV cache", given(slot_repeats("k_cache", 1))),
    *each(READERS, "the last slot of one page of v repeats the one before", "KV cache",
          given(slot_repeats("v_cache", -1))),
    *each(READERS, "pages have 16 slots whatever they have", "KV cache", given(pages_of_16)),
    *each(READERS, "a page holds heads before slots", "KV cache", given(heads_before_slots)),
    *each(READERS, "the last page of one sequence is the one before it", "block table", given(last_page_repeats)),
    *each(READERS, "one page is that of another sequence", "block table", given(neighbours_page)),
    *each(READERS, "there is no table", "block table", given(pages_in_order)),
    *each(READERS, "ids past the end must be valid", "block table", given(every_id_is_checked)),
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
    # quantisation
    *each(QUANTISED, "all heads have the first one's scale", "quantisation", given(scale_of_first_head)),
    *each(QUANTISED, "k and v swap their scales", "quantisation", given(scales_swapped)),
    *each(QUANTISED, "v has the scale of k", "quantisation", given(v_has_the_scale_of_k)),
    *each(QUANTISED, "there is no scale", "quantisation", given(no_scale)),
    *each(QUANTISED, "the scale is rounded to bfloat16", "quantisation", given(scale_in_16_bits)),
    *weaker(QUANTISED, "scales are off", "quantisation", scale_off, 2.0**-8),
    *each(READERS, "int8 codes are read as unsigned", "quantisation",
          given(codes_as(lambda t: t.view(torch.uint8).float(), torch.int8))),
    *each(READERS, "fp8 codes are read as e5m2", "quantisation",
          given(codes_as(lambda t: t.view(torch.float8_e5m2).float(), FP8))),
    *each(READERS, "small fp8 codes are flushed to 0", "quantisation", given(codes_as(subnormals_flushed, FP8))),
    *each("write_kv_cache", "int8 codes are truncated", "quantisation", for_int8(torch.trunc)),
    *each("write_kv_cache", "int8 ties go away from zero", "quantisation",
          for_int8(lambda r: r.sign() * (r.abs() + 0.5).floor())),
    *each("write_kv_cache", "int8 ties go up", "quantisation", for_int8(lambda r: (r + 0.5).floor())),
    *each("write_kv_cache", "the lowest int8 code is -127", "quantisation", for_int8(lambda r: r.clamp(min=-127))),
    *each("write_kv_cache", "int8 codes wrap around", "quantisation",
          for_int8(lambda r: torch.where(r.isfinite(), (r.round() + 128) % 256 - 128, r))),
    *each("write_kv_cache", "int8 codes are rounded to bfloat16 first", "quantisation",
          for_int8(lambda r: r.bfloat16().to(r.dtype))),
    *each("write_kv_cache", "fp8 codes are truncated", "quantisation", for_fp8(truncated_fp8)),
    *each("write_kv_cache", "fp8 codes are rounded to bfloat16 first", "quantisation",
          for_fp8(lambda r: r.bfloat16().to(r.dtype))),
    *each("write_kv_cache", "fp8 overflows to NaN", "quantisation",
          for_fp8(lambda r: r.masked_fill((r.abs() >= 464) & r.isfinite(), math.nan))),
    *each("write_kv_cache", "the largest fp8 code is 240", "quantisation", for_fp8(lambda r: r.clamp(-240, 240))),
    *each("write_kv_cache", "small fp8 codes are flushed to 0", "quantisation",
          for_fp8(lambda r: r.masked_fill(r.abs() < 2.0**-6, 0.0))),
    # special values
    *each("write_kv_cache", "NaN becomes 0 in a cache of floats", "special values",
          floats_only(lambda x: x.masked_fill(x.isnan(), 0.0))),
    *each("write_kv_cache", "infinity becomes the largest float", "special values",
          floats_only(lambda x: x.clamp(-torch.finfo(x.dtype).max, torch.finfo(x.dtype).max))),
    *each("write_kv_cache", "NaN becomes the lowest int8 code", "special values",
          for_int8(lambda r: r.masked_fill(r.isnan(), -math.inf))),
    *each("write_kv_cache", "infinity becomes 0 in int8", "special values",
          for_int8(lambda r: r.masked_fill(r.isinf(), 0.0))),
    *each("write_kv_cache", "NaN becomes 0 in fp8", "special values", for_fp8(lambda r: r.masked_fill(r.isnan(), 0.0))),
    *each("write_kv_cache", "infinity becomes NaN in fp8", "special values",
          for_fp8(lambda r: r.masked_fill(r.isinf(), math.nan))),
]  # fmt: skip
