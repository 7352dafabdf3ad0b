"""Faults that any operator can have: in memory, strides, empty calls, repeatability, and every value off a little."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from hal import arithmetic, memory
from hal.capability import Declares, Implementation
from hal.conformance.mutants.conventions import CONVENTIONS
from hal.conformance.mutants.mutant import HALVES, Arguments, Candidate, Mutant, after, before, each, reference, weaker
from hal.contract import OPS, Args

__all__ = ["MUTANTS", "as_dense", "last_bit_of_the_last_element", "tensors"]

Outs = tuple[Tensor, ...]
_RAW = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_CACHES = ("k_cache", "v_cache", "k_caches", "v_caches")


def _results(op: str, change: Callable[[Outs, Arguments], Outs]) -> Candidate:
    """The reference with its results changed, as one tuple, those that were not asked for among them."""

    def changed(public: object, a: Arguments) -> object:
        outs = OPS[op].outs(Args(**a), public)
        return OPS[op].public(change(outs, a), OPS[op].pack(**a))

    return after(op, changed)


def _each_result(op: str, change: Callable[[Tensor], Tensor]) -> Candidate:
    return _results(op, lambda outs, a: tuple(change(y) if y.numel() else y for y in outs))


def tensors(a: Arguments) -> Iterator[Tensor]:
    for value in a.values():
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list):
            yield from value


def _parameters(op: str) -> tuple[str, ...]:
    """The public parameters of an operator that may be tensors on the device, in order."""
    told = (part.split() for part in OPS[op].schema.split(","))
    return tuple(word[-1] for word in told if word[0].startswith("Tensor") and not word[-1].endswith("_cpu"))


# Empty inputs


def _no_launch_of_nothing(op: str) -> Candidate:
    def check(a: Arguments) -> Arguments:
        if any(t.numel() == 0 for t in tensors(a)):
            raise RuntimeError("invalid configuration argument: a grid of 0 blocks")
        return {}

    return before(op, check)


# Strides


def as_dense(t: Tensor) -> Tensor:
    if any(n > 1 and stride == 0 for n, stride in zip(t.shape, t.stride(), strict=True)):
        return t  # a dense walk would leave the memory that an expanded tensor has
    dense = t.as_strided(t.shape, torch.empty(t.shape, device="meta").stride(), t.storage_offset())
    return _in_range(dense, t)


def _last_stride_1(t: Tensor) -> Tensor:
    if t.ndim == 0 or t.shape[-1] < 2 or t.stride(-1) == 0:
        return t
    return _in_range(t.as_strided(t.shape, (*t.stride()[:-1], 1), t.storage_offset()), t)


def _first_alone(t: Tensor) -> Tensor:
    """Along an axis with a stride of 0 a dense walk meets something else; here it is zeros."""
    for axis, (n, stride) in enumerate(zip(t.shape, t.stride(), strict=True)):
        if n > 1 and stride == 0:
            t = t.contiguous()
            t.narrow(axis, 1, n - 1).zero_()
    return t


def _expanded_as_dense(op: str) -> Candidate:
    def change(a: Arguments) -> Arguments:
        return {name: _first_alone(t) for name, t in a.items() if isinstance(t, Tensor) and name not in OPS[op].mutates}

    return before(op, change)


def _in_range(read: Tensor, t: Tensor) -> Tensor:
    """Ids and lengths that were read from the wrong places lead to wrong results, not to a crash."""
    if t.dtype in (torch.int32, torch.int64) and t.numel():
        return read.clamp(int(t.min()), int(t.max()))
    return read


def _reread(op: str, name: str, read: Callable[[Tensor], Tensor]) -> Candidate:
    def change(a: Arguments) -> Arguments:
        value = a[name]
        if isinstance(value, list):
            return {name: [read(t) for t in value]}
        return {name: read(value)} if isinstance(value, Tensor) else {}

    return before(op, change)


# Inputs stay


def _scribbled(op: str, name: str, scribble: Callable[[Tensor], object]) -> Candidate:
    """An input is written into once the results are there."""

    def change(public: object, a: Arguments) -> object:
        if isinstance(a[name], Tensor) and a[name].numel():
            scribble(a[name])
        return public

    return after(op, change)


def last_bit_of_the_last_element(t: Tensor) -> None:
    last = t[tuple(slice(n - 1, n) for n in t.shape)].reshape(-1) if t.ndim else t.view(1)
    last.view(torch.uint8).bitwise_xor_(1)


# Results are new


def _in_place_of(op: str, name: str) -> Candidate:
    """Results take the memory of an input, where they fit into it."""

    def moved(outs: Outs, a: Arguments) -> Outs:
        t, y = a[name], outs[0]
        size = y.numel() * y.element_size()
        if not t.is_contiguous() or size == 0 or size > t.numel() * t.element_size():
            return outs
        there = t.view(-1).view(torch.uint8)[:size].view(y.dtype).view(y.shape)
        return (there.copy_(y), *outs[1:])

    return _results(op, moved)


def _strided(y: Tensor) -> Tensor:
    """The same values with a gap after each."""
    return y.new_zeros((*y.shape, 2))[..., 0].copy_(y)


# Memory


def _into_own_memory(op: str, fill: Callable[[Tensor, Tensor], object]) -> Candidate:
    def allocated(y: Tensor) -> Tensor:
        new = memory.empty(y.shape, dtype=y.dtype, device=y.device)
        fill(new, y)
        return new

    return _each_result(op, allocated)


def _all_but_the_last(new: Tensor, y: Tensor) -> None:
    new.view(-1)[:-1] = y.reshape(-1)[:-1]


def _one_more(new: Tensor, y: Tensor) -> None:
    new.copy_(y)
    new.as_strided((1,), (1,), new.storage_offset() + new.numel()).fill_(1)


def _one_before(new: Tensor, y: Tensor) -> None:
    new.copy_(y)
    new.as_strided((1,), (1,), new.storage_offset() - 1).fill_(1)


def _from_a_dirty_workspace(new: Tensor, y: Tensor) -> None:
    sums = memory.empty((1,), dtype=torch.float32, device=y.device)
    new.copy_(y + sums.clamp(-1, 1).to(y.dtype) if y.is_floating_point() else y + sums.view(torch.int32))


def _past_the_cache(op: str) -> Candidate:
    """An operator that writes caches writes one element behind each."""

    def change(_: None, a: Arguments) -> None:
        for t in _written(op, a):
            end = t.storage_offset() + sum((n - 1) * stride for n, stride in zip(t.shape, t.stride(), strict=True))
            t.as_strided((1,), (1,), end + 1).fill_(1)

    return after(op, change)


def _written(op: str, a: Arguments) -> list[Tensor]:
    found = [t for t in tensors({name: a[name] for name in OPS[op].mutates}) if t.numel()]
    return [t.view(torch.uint8) if t.element_size() == 1 else t for t in found]


# Run to run, and the other bitwise promises


def _one_bit(y: Tensor) -> Tensor:
    """The largest finite value with its last bit flipped; of ids, the first."""
    if not y.numel():
        return y
    size = torch.where(y.isfinite(), y.abs(), -1) if y.is_floating_point() else torch.ones_like(y)
    found = y.clone()
    found.view(-1).view(_RAW[y.element_size()])[size.reshape(-1).argmax()] ^= 1
    return found


def _promising(op: str, nudge: Callable[[Arguments], bool], declares: Declares) -> Candidate:
    def change(outs: Outs, a: Arguments) -> Outs:
        return tuple(_one_bit(y) for y in outs) if nudge(a) else outs

    call = _results(op, change)
    assert not isinstance(call, Implementation)
    return Implementation(op, "mutant", call, declares=declares)


def _other_in_every_second_call(op: str) -> Candidate:
    calls = itertools.count()
    return _promising(op, lambda a: next(calls) % 2 == 1, Declares(run_to_run=True))


def _other_when_strided(op: str) -> Candidate:
    return _promising(op, lambda a: any(not t.is_contiguous() for t in tensors(a)), Declares(stride_invariant=True))


def _written_otherwise_in_every_second_call(op: str) -> Candidate:
    calls = itertools.count()

    def change(_: None, a: Arguments) -> None:
        if next(calls) % 2 == 1:
            for t in _written(op, a):
                last_bit_of_the_last_element(t)

    return after(op, change)


_FEW = {"silu_and_mul": 4, "gelu_and_mul": 4}  # their cases ask for the last half of the rows, the others for one


def _other_when_alone(op: str) -> Candidate:
    def alone(a: Arguments) -> bool:
        lengths = a.get("cu_seqlens_q")
        rows = a[_parameters(op)[0]].shape[0] if lengths is None else lengths.shape[0] - 1
        return bool(rows <= _FEW.get(op, 1))

    return _promising(op, alone, Declares(batch_invariant=True))


def _other_in_odd_blocks(op: str) -> Candidate:
    def odd(a: Arguments) -> bool:
        table = a["block_table"]
        return bool(table.numel()) and int(table[0, 0]) % 2 == 1

    return _promising(op, odd, Declares(block_permutation=True))


# Precision


def _off(op: str, strength: float) -> Candidate:
    """Every value of the exact result is off by a share, and then rounded."""

    @functools.wraps(reference(op))
    def call(*args: object, **kwargs: object) -> object:
        a = vars(OPS[op].bind(args, kwargs))
        outs = OPS[op].outs(Args(**a), arithmetic.oracle(OPS[op].reference, **a))
        told = zip(outs, OPS[op].meta(Args(**a)), strict=False)
        scaled = (y * (1 + strength) if y.is_floating_point() else y for y in outs)
        rounded = tuple(y.to(meta.dtype).contiguous() for y, (_, meta) in zip(scaled, told, strict=True))
        return OPS[op].public(rounded, OPS[op].pack(**a))

    return call


def _of_each_input(convention: str, name: str, fault: Callable[[str, str], Candidate]) -> Iterator[Mutant]:
    """A mutant for each tensor that an operator of that convention takes; `name` says which by {}."""
    for op in CONVENTIONS[convention]:
        for parameter in _parameters(op):
            if convention == "strides" or parameter not in OPS[op].mutates:
                yield from each(op, name.format(parameter), convention, functools.partial(_of, fault, parameter))


def _of(fault: Callable[[str, str], Candidate], parameter: str, op: str) -> Candidate:
    return fault(op, parameter)


_RESULTS = CONVENTIONS["results are new"]
_NO_ROOM = {"top_k_top_p_probs": dict.fromkeys(HALVES, "float32 probabilities do not fit into 16-bit logits")}
_BLOCKS = ("paged_attention", "gather_kv_cache")
_WRITERS = tuple(op for op in CONVENTIONS["memory"] if op not in _RESULTS)
_BATCHED = tuple(op for op in _RESULTS if op != "gather_kv_cache")

MUTANTS: list[Mutant] = [
    *each(CONVENTIONS["empty inputs"], "nothing cannot be launched", "empty inputs", _no_launch_of_nothing, form=True),
    *_of_each_input("strides", "{} is taken to be dense", lambda op, name: _reread(op, name, as_dense)),
    *each(CONVENTIONS["strides"], "a stride of 0 is taken to be dense", "strides", _expanded_as_dense),
    *(mutant for op in CONVENTIONS["strides"] if _parameters(op)[0] not in _CACHES
      for mutant in each(op, "the last stride is taken to be 1", "strides",
                         lambda op: _reread(op, _parameters(op)[0], _last_stride_1))),
    *_of_each_input("inputs stay", "{} is used as scratch", lambda op, name: _scribbled(op, name, Tensor.zero_)),
    *_of_each_input("inputs stay", "one bit of {} changes",
                    lambda op, name: _scribbled(op, name, last_bit_of_the_last_element)),
    *(mutant for op in _RESULTS
      for mutant in each(op, "the result takes the memory of an input", "results are new",
                         lambda op: _in_place_of(op, _parameters(op)[0]), invisible=_NO_ROOM.get(op))),
    *each(_RESULTS, "results have gaps", "results are new", lambda op: _each_result(op, _strided), form=True),
    *each(_RESULTS, "the last element is not written", "memory",
          lambda op: _into_own_memory(op, _all_but_the_last)),
    *each(_RESULTS, "one element past the end is written", "memory",
          lambda op: _into_own_memory(op, _one_more)),
    *each(_RESULTS, "one element before the start is written", "memory",
          lambda op: _into_own_memory(op, _one_before)),
    *each(_RESULTS, "a workspace is taken to hold zeros", "memory",
          lambda op: _into_own_memory(op, _from_a_dirty_workspace)),
    *each(_WRITERS, "one element past a cache is written", "memory", _past_the_cache),
    *each(_RESULTS, "every second call gives other bits", "run to run", _other_in_every_second_call),
    *each(_WRITERS, "every second call writes other bits", "run to run", _written_otherwise_in_every_second_call),
    *each(_RESULTS, "strides give other bits, declared not to", "run to run", _other_when_strided),
    *each(_BATCHED, "a row alone gives other bits, declared not to", "run to run", _other_when_alone),
    *each(_BLOCKS, "blocks elsewhere give other bits, declared not to", "run to run", _other_in_odd_blocks),
    *weaker([op for op in CONVENTIONS["precision"] if op in OPS], "every value is off", "precision", _off, 2.0**-8),
]  # fmt: skip
