"""Cases of attention_varlen and merge_attention.

Shape letters: T packed queries, U packed keys, H query heads, K kv heads, D head dim of q and k, E head dim of v.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from hal.conformance.case import Case, Param
from hal.conformance.cases._family import DTYPES, HALVES, Family, P, alike, change, elsewhere
from hal.conformance.cases._heads import OPTIONS, expanded, heads, options, visible
from hal.conformance.cases._values import special
from hal.conformance.cases.attention import optional
from hal.conformance.inputs import Draft, Draw, Results, Variant

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy


def prefix_sums(lengths: list[int]) -> Tensor:
    """int32 prefix sums, the first 0."""
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)


def paths(p: P, args: dict[str, Any], q_lens: list[int], lengths: tuple[str, ...]) -> Iterator[Variant]:
    """Other ways to one result of packed queries: decoding, host copies of `lengths` or none, an unbounded window."""
    untold = {f"{name}_cpu": None for name in lengths}
    if max(q_lens, default=0) > 1 and p.q_tail == 0:
        last = [end - 1 for n, end in zip(q_lens, itertools.accumulate(q_lens), strict=True) if n]
        counts = [1 if n else 0 for n in q_lens]
        decode = args | untold | {"q": args["q"][last], "cu_seqlens_q": prefix_sums(counts), "max_seqlen_q": 1}

        def rows_of(results: Results) -> Results:
            o, lse = results
            return o[last], lse[last] if p.lse else lse

        yield Variant("the last query of each sequence", (decode,), rows_of)
    if args[f"{lengths[0]}_cpu"] is None:
        yield Variant("lengths told to the host", (args | {f"{name}_cpu": args[name] for name in lengths},))
    else:
        yield Variant("lengths not told to the host", (args | untold,))
    if p.window is None:
        yield Variant("an unbounded window", (args | {"window": (None, None)},))


def unseen_keys(q_lens: list[int], k_lens: list[int], causal: bool, window: Any) -> list[Tensor]:
    """Per sequence (L,): keys that none of its queries may see."""
    return [~visible(s, n, causal, window).any(0) for s, n in zip(q_lens, k_lens, strict=True)]


class AttentionVarlen(Family):
    """attention_varlen."""

    op = "attention_varlen"
    defaults: ClassVar[dict[str, Any]] = {
        "q": [5, 1, 8],
        "k": None,
        "q_tail": 0,
        "k_tail": 0,
        **OPTIONS,
        "cpu": False,
        "slack": 0,
        "special": False,
        "broadcast": False,
    }
    arranged = ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "sinks")
    bad: ClassVar[dict[str, Any]] = {
        "device": elsewhere("cu_seqlens_q"),
        "q_rank": ("ShapeError", ("q",), change("q", lambda q: q[None])),
        "cu_dtype": ("DtypeError", ("cu_seqlens_q", "int64"), change("cu_seqlens_q", lambda c: c.long())),
        "cu_count": ("ShapeError", ("cu_seqlens",), change("cu_seqlens_k", lambda c: c[:-1])),
        "cu_empty": ("ShapeError", ("cu_seqlens_q",), change("cu_seqlens_q", lambda c: c[:0])),
        "cu_start": ("ArgumentError", ("cu_seqlens_q", "0"), change("cu_seqlens_q", lambda c: c.clamp(min=1))),
        "cu_down": (
            "ArgumentError",
            ("cu_seqlens_k",),
            change("cu_seqlens_k", lambda c: torch.cat((c[:1], c[1:].flip(0)))),
        ),
        "cu_past": ("ArgumentError", ("cu_seqlens_k",), change("k", lambda k: k[:-1])),
        "max_short": ("ArgumentError", ("max_seqlen_q",), change("max_seqlen_q", lambda m: m - 1)),
        "max_negative": ("ArgumentError", ("max_seqlen_k",), change("max_seqlen_k", lambda _: -1)),
        "cpu_differs": (
            "ArgumentError",
            ("cu_seqlens_q_cpu",),
            change("cu_seqlens_q_cpu", lambda _: torch.tensor([0, 1, 2, 3], dtype=torch.int32)),
        ),
        "head_ratio": ("ShapeError", ("head",), change("q", lambda q: q[:, :1].expand(-1, 3, -1))),
        "v_dtype": ("DtypeError", ("v",), change("v", lambda v: v.double())),
        "softcap": ("ArgumentError", ("softcap",), change("softcap", lambda _: 0.0)),
        "sinks_shape": ("ShapeError", ("sinks",), change("sinks", lambda _: torch.zeros(3))),
    }

    def drafted(self, case: Case) -> Draft:
        draft = super().drafted(case)
        if case.params.get("bad") == "cu_past":  # both, or the rows of k and v already differ
            draft.args["v"] = draft.args["v"][:-1]
        return draft

    def draft(self, p: P, draw: Draw, dtype: torch.dtype) -> Draft:
        q_lens, k_lens = list(p.q), list(p.q if p.k is None else p.k)
        E = p.D if p.E is None else p.E
        T, U = int(sum(q_lens)) + p.q_tail, int(sum(k_lens)) + p.k_tail
        cu_q, cu_k = prefix_sums(q_lens), prefix_sums(k_lens)
        args: dict[str, Any] = {
            "q": heads(draw, "q", (T,), p.H, p.D, dtype, p.spread),
            "k": heads(draw, "k", (U,), p.K, p.D, dtype, 1.0),
            "v": heads(draw, "v", (U,), p.K, E, dtype, 1.0),
            "cu_seqlens_q": cu_q,
            "cu_seqlens_k": cu_k,
            "max_seqlen_q": max(q_lens, default=0) + p.slack,
            "max_seqlen_k": max(k_lens, default=0) + p.slack,
            **options(p, draw, dtype),
            "cu_seqlens_q_cpu": cu_q.clone() if p.cpu else None,
            "cu_seqlens_k_cpu": cu_k.clone() if p.cpu else None,
        }
        if p.broadcast:  # one kv head, told as several
            args |= {name: alike(args[name], 1) for name in ("k", "v")}
        draft = Draft(args)
        unseen_U = torch.cat([*unseen_keys(q_lens, k_lens, p.causal, p.window), torch.ones(p.k_tail, dtype=torch.bool)])
        spare_T = torch.arange(T) >= sum(q_lens)
        for name, unused in (("q", spare_T), ("k", unseen_U), ("v", unseen_U)):
            if unused.any():
                draft.unused[name] = unused[:, None, None]
                args[name] = args[name].masked_fill(unused[:, None, None], 0.0)
        if p.special:  # one query's alone, in one head
            args["q"][0, 0, 0] = math.nan
        else:
            draft.variants += self._variants(p, args, q_lens, k_lens)
        return draft

    def _variants(self, p: P, args: dict[str, Any], q_lens: list[int], k_lens: list[int]) -> Iterator[Variant]:
        cu_q, cu_k = args["cu_seqlens_q"].tolist(), args["cu_seqlens_k"].tolist()
        no_cpu = {"cu_seqlens_q_cpu": None, "cu_seqlens_k_cpu": None}
        if len(q_lens) > 1 and any(q_lens):
            b = max(range(len(q_lens)), key=lambda i: q_lens[i])
            alone = (
                args
                | no_cpu
                | {
                    "q": args["q"][cu_q[b] : cu_q[b + 1]],
                    "k": args["k"][cu_k[b] : cu_k[b + 1]],
                    "v": args["v"][cu_k[b] : cu_k[b + 1]],
                    "cu_seqlens_q": prefix_sums([q_lens[b]]),
                    "cu_seqlens_k": prefix_sums([k_lens[b]]),
                }
            )

            def expects(results: Results) -> Results:
                return tuple(t[cu_q[b] : cu_q[b + 1]] for t in results)

            yield Variant(f"sequence {b} alone", (alone,), expects, declared="batch_invariant")
        if p.H > p.K:
            yield expanded(args, ("k", "v"), 1, p.H // p.K)
        yield from paths(p, args, q_lens, ("cu_seqlens_q", "cu_seqlens_k"))

    def grid(self) -> Iterator[Case]:
        for dtype in DTYPES:
            yield self.case(dtype, "grid", q=[5, 1, 13], H=3, K=1, causal=True, lse=True)
            yield self.case(dtype, "grid", q=[4, 9, 1], k=[7, 20, 33], H=4, K=2, D=72, causal=True, lse=True)
            yield self.case(dtype, "edge", "empty", "poison", q=[3, 0, 6], k=[5, 4, 6], H=2, K=1, causal=True, lse=True)
            yield self.case(dtype, "edge", "poison", q=[3, 7], q_tail=2, k_tail=2, H=4, K=4, causal=True, lse=True)
            yield self.case(dtype, "edge", q=[9, 2], k=[4, 6], H=2, K=1, causal=True, lse=True)
            yield self.case(
                dtype, "edge", "poison", q=[2, 3], k=[30, 19], H=2, K=1, window=[3, 0], causal=True, lse=True
            )
            yield self.case(
                dtype,
                "edge",
                q=[3, 6],
                k=[9, 4],
                H=6,
                K=2,
                D=40,
                E=24,
                sinks="float32",
                softcap=2.0,
                causal=True,
                lse=True,
            )
            yield self.case(
                dtype,
                "edge",
                q=[3, 4],
                k=[9, 12],
                H=6,
                K=2,
                sinks="same",
                loud=True,
                scale=0.4,
                window=[3, 0],
                lse=True,
            )
            yield self.case(dtype, "edge", q=[3, 4], k=[9, 12], H=2, K=1, window=[0, 4], lse=True)
            spread = 600.0 if dtype == "float64" else 60.0
            yield self.case(dtype, "edge", q=[3, 4], k=[20, 30], H=2, K=1, D=32, spread=spread, lse=True)
            yield self.case(dtype, "edge", q=[7, 9], H=2, K=1, D=32, causal=True, spread=4 * spread, lse=True)
            # One key in 8,193: near equal scores leave no room for it in lse.
            yield self.case(dtype, "edge", q=[1, 1], k=[3, 8193], H=2, K=1, D=16, spread=0.1, lse=True)
            yield self.case(dtype, "grid", q=[3, 4], k=[9, 12], H=4, K=2, D=33, E=41, causal=True, slack=3, lse=True)
            yield self.case(dtype, "edge", "special", q=[3, 4], k=[9, 12], H=2, K=1, special=True, lse=True)
            yield self.case(dtype, "edge", "strided", q=[3, 4], k=[9, 12], H=4, K=2, broadcast=True)
        for dtype in HALVES:
            yield self.case(dtype, "grid", q=[5, 1, 13], H=16, K=16, D=72, spread=2.0)
            yield self.case(dtype, "grid", q=[3, 4], k=[9, 12], H=7, K=1, D=80, softcap=2.0, causal=True)
            yield self.case(dtype, "grid", q=[3, 4], k=[9, 12], H=6, K=2, sinks="same", causal=True, lse=True, cpu=True)
            yield self.case(dtype, "grid", q=[3, 4], k=[9, 12], H=2, K=1, D=192, E=128, causal=True)
            yield self.case(dtype, "grid", q=[1] * 5, k=[3, 17, 40, 1, 9], H=9, K=3, causal=True)
        yield self.case("float32", "grid", q=[3, 4], k=[9, 12], H=6, K=2, sinks="float32", window=[5, 2], lse=True)
        yield self.case("float32", "grid", q=[3, 4], k=[9, 12], H=2, K=1, scale=0.4, softcap=1.5, cpu=True)
        yield self.case("bfloat16", "edge", q=[3, 4], k=[9, 12], H=71, K=1, slack=9)
        yield self.case("float32", "edge", "empty", "poison", q=[4], k=[0], lse=True)
        yield self.case("float32", "edge", "empty", "poison", q=[3, 2], k=[0, 5], lse=True, sinks="same")
        yield self.case("float32", "edge", "empty", "poison", q=[0, 0], k=[5, 3], lse=True)
        for dtype in DTYPES:
            yield self.case(dtype, "edge", "empty", "poison", q=[], k=[], q_tail=4, k_tail=3, lse=True)
        for dtype in DTYPES:
            yield self.case(dtype, "edge", "empty", q=[0], k=[0], lse=True)
        for i, layout in enumerate(("offset", "sliced", "stepped", "transposed", "gapped", "reversed")):
            yield self.case(
                ("float32", "bfloat16", "float16")[i % 3],
                "edge",
                "strided",
                q=[5, 7],
                H=4,
                K=2,
                D=40,
                causal=True,
                lse=True,
                layout=layout,
            )
        for dtype in DTYPES:
            yield self.case(dtype, "grid", q=[65, 1, 130, 7], H=9, K=3, causal=True, lse=True, suite="full")
            yield self.case(dtype, "grid", q=[1, 30, 1], k=[900, 400, 77], H=4, K=1, D=128, causal=True, suite="full")
            for D in (16, 20, 96, 256, 576):
                yield self.case(dtype, "grid", q=[3, 9], k=[11, 30], H=3, K=1, D=D, causal=True, suite="full")
        yield from self.bad_cases(H=4, K=2, cpu=True)

    def strategy(self) -> SearchStrategy[dict[str, Param]]:
        from hypothesis import strategies as st

        @st.composite
        def recipe(draw: Any) -> dict[str, Param]:
            K, n = draw(st.integers(1, 3)), draw(st.integers(1, 4))
            made: dict[str, Param] = {
                "q": draw(st.lists(st.integers(0, 12), min_size=n, max_size=n)),
                "k": draw(st.lists(st.integers(0, 30), min_size=n, max_size=n)),
                "q_tail": draw(st.integers(0, 2)),
                "k_tail": draw(st.integers(0, 2)),
                "H": K * draw(st.integers(1, 4)),
                "K": K,
                "D": draw(st.integers(4, 130)),
            }
            optional(
                draw,
                made,
                E=st.integers(2, 100),
                causal=st.just(True),
                softcap=st.sampled_from([1.0, 20.0]),
                sinks=st.sampled_from(["same", "float32"]),
                lse=st.just(True),
                cpu=st.just(True),
                window=st.lists(st.one_of(st.none(), st.integers(0, 20)), min_size=2, max_size=2),
                layout=st.sampled_from(["sliced", "stepped", "transposed", "gapped", "reversed"]),
            )
            return made

        return recipe()


class MergeAttention(Family):
    """merge_attention."""

    op = "merge_attention"
    defaults: ClassVar[dict[str, Any]] = {
        "lead": [6],
        "H": 3,
        "E": 64,
        "apart": 2.0,
        "equal": False,
        "gaps": True,
        "alone": False,
        "size": 3.0,
        "special": False,
        "broadcast": False,
    }
    arranged = ("out_a", "lse_a", "out_b", "lse_b")
    bad: ClassVar[dict[str, Any]] = {
        "device": elsewhere("lse_b"),
        "rank": ("ShapeError", ("out_a",), change("out_a", lambda t: t[0, 0])),
        "out_shape": ("ShapeError", ("out_b",), change("out_b", lambda t: t[1:])),
        "lse_shape": ("ShapeError", ("lse_b",), change("lse_b", lambda t: t[1:])),
        "lse_dtype": ("DtypeError", ("lse_a", "float64"), change("lse_a", lambda t: t.double())),
        "out_dtype": ("DtypeError", ("out_b",), change("out_b", lambda t: t.double())),
        "int": ("DtypeError", ("out_a", "int64"), change("out_a", lambda t: t.long())),
    }

    def drafted(self, case: Case) -> Draft:
        draft = super().drafted(case)
        if case.params.get("bad") == "rank":
            draft.args["out_b"] = draft.args["out_b"][0, 0]
        return draft

    def draft(self, p: P, draw: Draw, dtype: torch.dtype) -> Draft:
        lead = tuple(p.lead)
        lse_shape = (*lead, p.H) if len(lead) == 1 else (lead[0], p.H, lead[1])
        wide = torch.float64 if dtype is torch.float64 else torch.float32
        args: dict[str, Any] = {}
        draft = Draft(args)
        dead = draw.integers("dead", lse_shape, 0, 6)
        for i, side in enumerate("ab"):
            out = heads(draw, f"out_{side}", lead, p.H, p.E, dtype, 1.0)
            lse = (draw.normal("lse_a" if p.equal else f"lse_{side}", lse_shape) * p.apart + p.size).to(wide)
            if p.special and side == "a":  # rows of out with NaN, Inf and −Inf, and a last one whose lse is NaN
                out = special(draw, "out", out)
                lse[-1:] = math.nan
            if p.broadcast:
                out, lse = alike(out, 0), alike(lse, 0)
            if p.gaps:
                gone = (dead == i) | (dead == 2) | (p.alone and side == "b")
                lse = lse.masked_fill(gone, -math.inf)
                beside = (gone if len(lead) == 1 else gone.transpose(1, 2))[..., None]
                draft.unused[f"out_{side}"] = beside
                out = out.masked_fill(beside, 0.0)
            args |= {f"out_{side}": out, f"lse_{side}": lse}
        swapped = {"out_a": args["out_b"], "lse_a": args["lse_b"], "out_b": args["out_a"], "lse_b": args["lse_a"]}
        draft.variants.append(Variant("the pieces swapped", (swapped,)))
        if lead[0] > 1:
            part = {name: t[-1:] for name, t in args.items()}
            draft.variants.append(
                Variant("the last rows alone", (part,), lambda r: tuple(t[-1:] for t in r), declared="batch_invariant")
            )
        return draft

    def grid(self) -> Iterator[Case]:
        for dtype in DTYPES:
            yield self.case(dtype, "grid", lead=[9], H=3, E=64)
            yield self.case(dtype, "grid", lead=[2, 7], H=4, E=40)
            yield self.case(dtype, "edge", lead=[9], H=3, E=80, apart=60.0)
            yield self.case(dtype, "edge", lead=[9], H=3, E=40, alone=True)  # a copy of a, never a itself
            yield self.case(dtype, "edge", lead=[9], H=3, E=80, equal=True, gaps=False)
            yield self.case(dtype, "edge", lead=[9], H=3, E=33, size=2000.0)  # exponentials overflow
            yield self.case(dtype, "edge", "special", lead=[6], H=3, E=24, gaps=False, special=True)
            yield self.case(dtype, "edge", "strided", lead=[6], H=3, E=40, gaps=False, broadcast=True)
        yield self.case("bfloat16", "edge", lead=[1], H=71, E=1)
        yield self.case("bfloat16", "edge", lead=[5], H=2, E=576)
        for dtype in DTYPES:
            yield self.case(dtype, "edge", "empty", lead=[0], H=2)
        yield self.case("float32", "edge", "empty", lead=[2, 0], H=2)
        for i, layout in enumerate(("offset", "sliced", "stepped", "transposed", "gapped", "reversed")):
            yield self.case(
                ("float32", "bfloat16", "float16")[i % 3], "edge", "strided", lead=[6], H=4, E=40, layout=layout
            )
        for dtype in DTYPES:
            yield self.case(dtype, "grid", lead=[3, 129], H=9, E=128, suite="full")
        yield from self.bad_cases()

    def strategy(self) -> SearchStrategy[dict[str, Param]]:
        from hypothesis import strategies as st

        return st.fixed_dictionaries(
            {
                "lead": st.lists(st.integers(1, 12), min_size=1, max_size=2),
                "H": st.integers(1, 9),
                "E": st.integers(1, 140),
            },
            optional={
                "apart": st.sampled_from([0.5, 30.0]),
                "gaps": st.just(False),
                "layout": st.sampled_from(["sliced", "stepped", "gapped", "reversed"]),
            },
        )


FAMILIES = (AttentionVarlen(), MergeAttention())
