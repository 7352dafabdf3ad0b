"""Attention of one sequence after another, written once more and plainly, with places to go wrong in.

Shape letters: B batch, S queries, L keys, H query heads, K kv heads, D head dim of q and k, E head dim of v.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hal.conformance.mutants.mutant import Arguments, Candidate, Fault, reference
from hal.contract import OPS

__all__ = ["Plain", "changed", "dense", "keys_of", "plain", "referenced", "sequences", "spoilt", "wide"]

Results = tuple[Tensor, Tensor]
SHARED = ("causal", "window", "softcap", "scale", "sinks")


def wide(t: Tensor) -> Tensor:
    """In the compute dtype."""
    return t if t.dtype is torch.float64 else t.float()


def sequences(op: str, a: Arguments) -> Iterator[Arguments]:
    """The dense arguments of each sequence: q (B, S, H, D), k, v, mask and the options.

    `at` is its number, `whole` the call's own arguments; `rows` are its rows of a packed batch.
    """
    shared = {name: a[name] for name in SHARED}
    if op == "attention":
        tensors = {name: a[name] for name in ("q", "k", "v", "mask")}
        yield shared | tensors | {"at": 0, "whole": a, "rows": slice(None)}
        return
    cu = a["cu_seqlens_q"].tolist()
    for b in range(len(cu) - 1):
        rows = slice(cu[b], cu[b + 1])
        k, v = keys_of(op, a, b)
        yield shared | {"q": a["q"][rows][None], "k": k, "v": v, "mask": None, "at": b, "whole": a, "rows": rows}


def keys_of(op: str, a: Arguments, b: int) -> tuple[Tensor, Tensor]:
    """(1, L, K, D) keys and (1, L, K, E) values of one sequence."""
    if op == "attention_varlen":
        start, stop = a["cu_seqlens_k"][b : b + 2].tolist()
        return a["k"][None, start:stop], a["v"][None, start:stop]
    length, page = int(a["seq_lens"][b]), a["k_cache"].shape[1]
    blocks = a["block_table"][b, : -(-length // page)].long()
    return _stored(a["k_cache"], a["k_scale"], blocks, length, a["q"]), _stored(
        a["v_cache"], a["v_scale"], blocks, length, a["q"]
    )


def _stored(cache: Tensor, scale: Tensor | None, blocks: Tensor, length: int, q: Tensor) -> Tensor:
    # One block after another: fp8 tensors know no indexing by a tensor.
    pages = [cache[int(block)] for block in blocks]
    held = torch.cat(pages)[:length] if pages else cache.flatten(0, 1)[:0]
    if cache.dtype.itemsize > 1:
        return held[None]
    held = held.to(wide(q).dtype)
    return (held if scale is None else held * scale.to(held.dtype).reshape(-1, 1))[None]


def dense(op: str, call: Callable[[Arguments], Results]) -> Candidate:
    """An implementation of `op` from one of dense attention: (o_BSHE, lse_BHS) of the arguments of `sequences`."""

    @functools.wraps(reference(op))
    def run(*args: Any, **kwargs: Any) -> Any:
        a = dict(vars(OPS[op].bind(args, kwargs)))
        if op == "attention":
            (o, lse) = call(next(sequences(op, a)))
        else:
            v = a["v"] if op == "attention_varlen" else a["v_cache"]
            o = a["q"].new_zeros(*a["q"].shape[:2], v.shape[-1])
            lse = torch.zeros(a["q"].shape[:2], dtype=wide(a["q"]).dtype)
            for s in sequences(op, a):
                if s["q"].shape[1]:
                    part, logs = call(s)
                    o[s["rows"]], lse[s["rows"]] = part[0], logs[0].T
        return (o.contiguous(), lse.contiguous()) if a["return_lse"] else o.contiguous()

    return run


def referenced(s: Arguments) -> Results:
    """What the reference gives for one sequence."""
    told = {name: s[name] for name in (*SHARED, "q", "k", "v", "mask")}
    found: Results = reference("attention")(**told, return_lse=True)
    return found


def changed(change: Callable[[Arguments], Arguments]) -> Fault:
    """Each sequence's arguments are taken for others: `change` gives the new values of some."""
    return lambda op: dense(op, lambda s: referenced(s | change(s)))


def spoilt(change: Callable[[Tensor, Tensor, Arguments], Results]) -> Fault:
    """Each sequence's results, spoilt."""
    return lambda op: dense(op, lambda s: change(*referenced(s), s))


def plain(**places: Any) -> Fault:
    """Plain attention that goes wrong in these places."""
    return lambda op: dense(op, Plain(**places))


def _bottom_right(s: Arguments) -> int:
    return int(s["k"].shape[1] - s["q"].shape[1])


def _group(h: int, H: int, K: int) -> int:
    return h // (H // K)


def _product(q: Tensor, k: Tensor, scale: float) -> Tensor:
    return torch.einsum("bshd,blhd->bhsl", q, k) * scale


def _cap(scores: Tensor, cap: float) -> Tensor:
    return cap * torch.tanh(scores / cap)


def _hide(scores: Tensor, seen: Tensor, s: Arguments) -> Tensor:
    return scores.masked_fill(~seen, -math.inf)


def _weigh(p: Tensor, v: Tensor) -> Tensor:
    return torch.einsum("bhsl,blhe->bshe", p, v)


@dataclass(frozen=True)
class Plain:
    """Dense attention, each step of it to be replaced.

    shift: position of query 0 among the keys. head: the kv head of h of H query heads on K. product: logits of q, k
    and the scale. cap, hide: logits capped, and hidden where not seen. look: what is seen, changed. clean: which of k
    and v lose what nobody sees. top: what is taken out of the exponentials. total: the sum of those. log: lse of
    both. weigh: P·v. dead: what a row without keys gives. to: the result in its dtype.
    """

    shift: Callable[[Arguments], int] = _bottom_right
    head: Callable[[int, int, int], int] = _group
    product: Callable[[Tensor, Tensor, float], Tensor] = _product
    cap: Callable[[Tensor, float], Tensor] = _cap
    hide: Callable[[Tensor, Tensor, Arguments], Tensor] = _hide
    look: Callable[[Tensor, Arguments], Tensor] = lambda seen, s: seen
    clean: tuple[str, ...] = ("k", "v")
    bias_first: bool = False
    top: Callable[[Tensor, Tensor], Tensor] = lambda hidden, s: hidden.amax(-1, keepdim=True)
    total: Callable[[Tensor], Tensor] = lambda p: p.sum(-1, keepdim=True)
    log: Callable[[Tensor, Tensor], Tensor] = lambda top, total: top + torch.log(total)
    weigh: Callable[[Tensor, Tensor], Tensor] = _weigh
    dead: float | None = 0.0
    to: Callable[[Tensor, torch.dtype], Tensor] = lambda t, dtype: t.to(dtype)

    def __call__(self, s: Arguments) -> Results:
        q, k, v = (wide(s[name]) for name in ("q", "k", "v"))
        (H, D), (L, K) = q.shape[2:], k.shape[1:3]
        if L == 0:  # nothing to go wrong with
            return referenced(s)
        pick = [self.head(h, H, K) for h in range(H)]
        seen = self.look(self.seen(s), s)
        k, v = k[:, :, pick], v[:, :, pick]
        unused = ~seen.any(2).transpose(1, 2)[..., None]
        k, v = (t.masked_fill(unused, 0.0) if name in self.clean else t for name, t in (("k", k), ("v", v)))
        scale = D**-0.5 if s["scale"] is None else s["scale"]
        scores = self.product(q, k, scale)
        bias = _bias(s, scores)
        scores = scores + bias if self.bias_first else scores
        scores = scores if s["softcap"] is None else self.cap(scores, s["softcap"])
        scores = scores if self.bias_first else scores + bias
        hidden = self.hide(scores, seen, s)
        top = self.top(hidden, scores)
        sinks = None if s["sinks"] is None else s["sinks"].to(q.dtype)[None, :, None, None]
        top = top if sinks is None else torch.maximum(top, sinks)
        top = top.masked_fill(top == -math.inf, 0.0)
        p = torch.exp(hidden - top)
        total = self.total(p)
        total = total if sinks is None else total + torch.exp(sinks - top)
        lse = self.log(top, total)[..., 0]
        o = self.weigh(p / total.masked_fill(total == 0, 1.0), v)
        if self.dead is not None:
            o = torch.where(seen.any(-1).transpose(1, 2)[..., None], o, self.dead)
        return self.to(o, s["q"].dtype), lse

    def seen(self, s: Arguments) -> Tensor:
        """(B, H, S, L)"""
        (B, S, H), L = s["q"].shape[:3], s["k"].shape[1]
        at, j = torch.arange(S)[:, None] + self.shift(s), torch.arange(L)
        seen: Tensor = torch.ones(S, L, dtype=torch.bool)
        seen = seen & (j <= at) if s["causal"] else seen
        left, right = (None, None) if s["window"] is None else s["window"]
        seen = seen if left is None else seen & (j >= at - left)
        seen = seen if right is None else seen & (j <= at + right)
        if s["mask"] is not None:
            seen = seen & (s["mask"] if s["mask"].dtype is torch.bool else s["mask"] != -math.inf)
        return seen.expand(B, H, S, L)


def _bias(s: Arguments, like: Tensor) -> Tensor:
    mask = s["mask"]
    if mask is None or mask.dtype is torch.bool:
        return like.new_zeros(())
    finite: Tensor = mask.masked_fill(mask == -math.inf, 0.0)
    return finite.to(like.dtype)
