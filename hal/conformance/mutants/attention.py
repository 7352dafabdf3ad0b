"""Mutants of the attention operators: what a query sees. Those of what it makes of it stand in their own modules."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hal.conformance.mutants import _attention_arithmetic, _attention_sides, _merging
from hal.conformance.mutants._attention_sides import right, shift
from hal.conformance.mutants._plain_attention import changed, plain, spoilt
from hal.conformance.mutants.mutant import Arguments, Candidate, Fault, Mutant, after, before, each

__all__ = ["MUTANTS"]

ALL = ("attention", "attention_varlen", "paged_attention")
RAGGED = ("attention_varlen", "paged_attention")


def _given(change: Callable[[Arguments], Arguments]) -> Fault:
    return lambda op: before(op, change)


SIDES = [
    *(m for name, change in _attention_sides.CAUSAL.items() for m in each(ALL, name, "causal", changed(change))),
    *each(ALL, "one row of one head sees one key ahead", "causal", plain(look=_attention_sides.looks_ahead)),
    *(m for name, change in _attention_sides.WINDOW.items() for m in each(ALL, name, "window", changed(change))),
    *each(ALL, "one row of one head sees one key past the window", "window", plain(look=_attention_sides.looks_back)),
]


# Masks.


def _bias(change: Callable[[Tensor, Arguments], Tensor]) -> Fault:
    def told(a: Arguments) -> Arguments:
        mask = a["mask"]
        return {} if mask is None or mask.dtype is torch.bool else {"mask": change(mask, a)}

    return _given(told)


def _flags(change: Callable[[Tensor], Tensor]) -> Fault:
    def told(a: Arguments) -> Arguments:
        mask = a["mask"]
        return {} if mask is None or mask.dtype is not torch.bool else {"mask": change(mask)}

    return _given(told)


def _last_flag_flipped(mask: Tensor) -> Tensor:
    found = mask.clone(memory_format=torch.contiguous_format)
    found.view(-1)[-1].logical_not_()
    return found


def _first_of(axis: int) -> Fault:
    def told(a: Arguments) -> Arguments:
        mask = a["mask"]
        if mask is None or mask.ndim < 4:
            return {}
        return {"mask": mask.narrow(axis, 0, min(1, mask.shape[axis])).expand(mask.shape)}

    return _given(told)


def _lowest_masks(mask: Tensor, a: Arguments) -> Tensor:
    return mask.masked_fill(mask == torch.finfo(mask.dtype).min, -math.inf)


def _scaled_bias(mask: Tensor, a: Arguments) -> Tensor:
    scale: float = a["q"].shape[-1] ** -0.5 if a["scale"] is None else a["scale"]
    return mask * scale


MASK = [
    *each("attention", "the mask is ignored", "mask", _given(lambda a: {"mask": None})),
    *each("attention", "True masks", "mask", _flags(torch.logical_not)),
    *each("attention", "a bool mask is added as 0 and 1", "mask", _flags(Tensor.float)),
    *each("attention", "the last flag of a mask is read wrongly", "mask", _flags(_last_flag_flipped)),
    *each("attention", "-inf in a bias is a low number", "mask", _bias(lambda m, a: m.clamp(min=-1e4))),
    *each("attention", "a low bias masks", "mask", _bias(lambda m, a: m.masked_fill(m < -1e4, -math.inf))),
    *each("attention", "the lowest number in a bias masks", "mask", _bias(_lowest_masks)),
    *each("attention", "a bias is scaled", "mask", _bias(_scaled_bias)),
    *each("attention", "a bias is capped", "mask", plain(bias_first=True)),
    *each("attention", "a bias has bfloat16's digits", "mask", _bias(lambda m, a: m.bfloat16())),
    *each("attention", "all batches have the first one's mask", "mask", _first_of(0)),
    *each("attention", "all heads have the first one's mask", "mask", _first_of(1)),
    *each("attention", "a mask ends causality", "mask",
          _given(lambda a: {"causal": a["causal"] and a["mask"] is None})),
    *each("attention", "a mask ends the window", "mask",
          _given(lambda a: {} if a["mask"] is None else {"window": None})),
]  # fmt: skip


# Rows without keys, and keys that nobody sees.


def _rows_without_keys(o: Tensor) -> Tensor:
    """(B, H, S): a row of zeros is one (values are drawn at random)."""
    return (o == 0).all(-1).transpose(1, 2)


def _last_of_them(o: Tensor, lse: Tensor, s: Arguments) -> tuple[Tensor, Tensor]:
    dead = _rows_without_keys(o).transpose(1, 2).nonzero()
    if dead.numel():
        o = o.clone()
        o[tuple(dead[-1])] = 2.0**-20
    return o, lse


def _floor(scores: Tensor, seen: Tensor, s: Arguments) -> Tensor:
    return scores.masked_fill(~seen, -1e30)


def _added(scores: Tensor, seen: Tensor, s: Arguments) -> Tensor:
    return scores + torch.zeros_like(scores).masked_fill(~seen, -math.inf)


DEAD = "row without keys"
ROWS = [
    *each(ALL, "a row without keys is NaN", DEAD, plain(dead=math.nan)),
    *each(ALL, "a row without keys is next to 0", DEAD, plain(dead=2.0**-20)),
    *each(ALL, "a row without keys is a mean", DEAD, plain(hide=_floor, dead=None)),
    *each(ALL, "one row without keys of many is next to 0", DEAD, spoilt(_last_of_them)),
    *each(ALL, "lse has a finite floor", DEAD, spoilt(lambda o, lse, s: (o, lse.clamp(min=-1e30)))),
    *each(ALL, "lse of a row without keys is 0", DEAD, spoilt(
        lambda o, lse, s: (o, lse.masked_fill(lse == -math.inf, 0.0))
    )),
    *each(ALL, "a row without keys loses its sink", DEAD, spoilt(
        lambda o, lse, s: (o, lse.masked_fill(_rows_without_keys(o), -math.inf))
    )),
]  # fmt: skip

HIDDEN = "hidden NaN"
NAN = [
    *each(ALL, "a hidden value is multiplied by 0", HIDDEN, plain(clean=("k",))),
    *each(ALL, "a hidden key is hidden by adding -inf", HIDDEN, plain(clean=("v",), hide=_added)),
    *each(ALL, "a hidden key takes part in the largest score", HIDDEN, plain(
        clean=("v",), top=lambda hidden, scores: scores.amax(-1, keepdim=True)
    )),
]  # fmt: skip


# Lengths.


def _tail(change: Callable[[Any, int], None]) -> Fault:
    """Rows past the last sequence are written; `change` gets a tensor and the first such row."""

    def write(found: Any, a: Arguments) -> Any:
        end = int(a["cu_seqlens_q"][-1])
        for t in found if isinstance(found, tuple) else (found,):
            if t.shape[0] > end:
                change(t, end)
        return found

    return lambda op: after(op, write)


def _fill_all(t: Tensor, end: int) -> None:
    t[end:] = math.nan


def _fill_last(t: Tensor, end: int) -> None:
    t[-1, -1] = 2.0**-20


def _lse_of_nothing(t: Tensor, end: int) -> None:
    if t.ndim == 2:
        t[end:] = -math.inf


def _to_the_end(op: str) -> Candidate:
    """The last sequence takes what follows it."""

    def told(a: Arguments) -> Arguments:
        changes: Arguments = {}
        for side in ("q", "k"):
            name = f"cu_seqlens_{side}"
            if name in a and len(a[name]) > 1:
                cu, n = a[name].clone(), a[side].shape[0]
                cu[-1] = n
                changes |= {name: cu, f"max_seqlen_{side}": n, f"{name}_cpu": None}
        return {name: value for name, value in changes.items() if name in a}

    return before(op, told)


def _without_its_last_key(number: int) -> Fault:
    def told(s: Arguments) -> Arguments:
        return {"k": s["k"][:, :-1], "v": s["v"][:, :-1]} if s["at"] == number else {}

    return changed(told)


def _without_a_key_of_thousands(s: Arguments) -> Arguments:
    return {"k": s["k"][:, :-1], "v": s["v"][:, :-1]} if s["k"].shape[1] > 4096 else {}


def _keys_of_the_next(op: str) -> Candidate:
    """A sequence of the packed batch sees the first key behind its own."""

    def told(s: Arguments) -> Arguments:
        end = int(s["whole"]["cu_seqlens_k"][s["at"] + 1])
        return {name: torch.cat((s[name], s["whole"][name][None, end : end + 1]), 1) for name in ("k", "v")}

    return changed(told)(op)


ENDS = [
    *each(RAGGED, "rows past the last sequence are never written", "ragged ends", _tail(_fill_all)),
    *each(RAGGED, "the last row past the last sequence is next to 0", "ragged ends", _tail(_fill_last)),
    *each(RAGGED, "lse past the last sequence is -inf", "ragged ends", _tail(_lse_of_nothing)),
    *each(RAGGED, "the last sequence takes what follows it", "ragged ends", _to_the_end),
    *each(RAGGED, "the second sequence loses its last key", "ragged ends", _without_its_last_key(1)),
    *each("attention_varlen", "a sequence sees the next one's first key", "ragged ends", _keys_of_the_next),
]

LOST = each(ALL, "one key of 8,193 is lost", "precision", changed(_without_a_key_of_thousands))


# Upper bounds.


def _query_bound(s: Arguments) -> int:
    return int(s["k"].shape[1] - s["whole"]["max_seqlen_q"])


def _query_bound_of_the_longest(s: Arguments) -> int:
    longest = int(s["whole"]["cu_seqlens_q"].diff().max())
    return _query_bound(s) if s["q"].shape[1] == longest else shift(s)


def _keys_to_the_bound(s: Arguments) -> Arguments:
    """Each sequence has keys of zeros up to max_seqlen_k, or to the end of its last page."""
    whole, n = s["whole"], s["k"].shape[1]
    bound = whole["max_seqlen_k"] if "max_seqlen_k" in whole else n + -n % whole["k_cache"].shape[1]
    return {name: torch.cat((s[name], s[name].new_zeros(1, bound - n, *s[name].shape[2:])), 1) for name in ("k", "v")}


def _off_by_what_is_spare(s: Arguments) -> Arguments:
    whole = s["whole"]
    spare = whole["max_seqlen_q"] - int(whole["cu_seqlens_q"].diff().max())
    return right(s, -spare) if spare and s["at"] == len(whole["cu_seqlens_q"]) - 2 else {}


BOUNDS = [
    *each(RAGGED, "every sequence has as many queries as the bound", "lengths are bounds", plain(shift=_query_bound)),
    *each(RAGGED, "the longest sequence has as many queries as the bound", "lengths are bounds",
          plain(shift=_query_bound_of_the_longest)),
    *each(RAGGED, "the last sequence is causal by what the bound has to spare", "lengths are bounds",
          changed(_off_by_what_is_spare)),
    *each(RAGGED, "a sequence has as many keys as the bound", "lengths are bounds", changed(_keys_to_the_bound)),
]  # fmt: skip

MUTANTS: list[Mutant] = [
    *SIDES, *MASK, *ROWS, *NAN, *ENDS, *LOST, *BOUNDS, *_attention_arithmetic.MUTANTS, *_merging.MUTANTS
]  # fmt: skip
