"""Cases of paged_attention: decode, chunked prefill and mixed batches over a paged cache.

Shape letters: T packed queries, H query heads, K kv heads, D head dim of q and k, E head dim of v, P slots per block.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from hal.conformance.case import Case, Param
from hal.conformance.cases._family import DTYPES, HALVES, Family, P, alike, change, elsewhere
from hal.conformance.cases._heads import OPTIONS, expanded, heads, options
from hal.conformance.cases._pages import CODES, FP8, cache, paged_variants, pages, scale, spare_entries
from hal.conformance.cases.attention import optional
from hal.conformance.cases.ragged import paths, prefix_sums, unseen_keys
from hal.conformance.inputs import Draft, Draw, Results, Variant

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy


def _codes(args: dict[str, Any], **scales: Any) -> None:
    args.update({name: args[name].to(torch.int8) for name in ("k_cache", "v_cache")} | scales)


class PagedAttention(Family):
    """paged_attention."""

    op = "paged_attention"
    defaults: ClassVar[dict[str, Any]] = {
        "q": [1, 1, 1],
        "k": [5, 20, 33],
        "q_tail": 0,
        "P": 16,
        **OPTIONS,
        "causal": True,
        "cache": "same",
        "kv_scale": None,
        "cpu": False,
        "spare": 2,
        "slack": 0,
        "special": False,
        "broadcast": False,
    }
    arranged = ("q", "k_cache", "v_cache", "block_table", "seq_lens", "cu_seqlens_q", "sinks", "k_scale", "v_scale")
    dense_last = ("k_cache", "v_cache")
    bad: ClassVar[dict[str, Any]] = {
        "device": elsewhere("block_table"),
        "q_rank": ("ShapeError", ("q",), change("q", lambda q: q[None])),
        "q_dtype": ("DtypeError", ("q",), change("q", lambda q: q.double())),
        "table_dtype": ("DtypeError", ("block_table", "int64"), change("block_table", lambda t: t.long())),
        "lens_dtype": ("DtypeError", ("seq_lens", "int64"), change("seq_lens", lambda t: t.long())),
        "table_rows": ("ShapeError", ("block_table",), change("block_table", lambda t: t[1:])),
        "cu_count": ("ShapeError", ("cu_seqlens_q",), change("cu_seqlens_q", lambda c: c[:-1])),
        "cu_start": ("ArgumentError", ("cu_seqlens_q", "0"), change("cu_seqlens_q", lambda c: c.clamp(min=1))),
        "block_high": ("ArgumentError", ("block_table", "99"), change("block_table", lambda t: torch.full_like(t, 99))),
        "block_low": ("ArgumentError", ("block_table", "-1"), change("block_table", lambda t: torch.full_like(t, -1))),
        "lens_negative": ("ArgumentError", ("-1",), change("seq_lens", lambda t: torch.full_like(t, -1))),
        "lens_long": ("ArgumentError", ("block",), change("seq_lens", lambda t: torch.full_like(t, 999))),
        "max_short": ("ArgumentError", ("max_seqlen_q",), change("max_seqlen_q", lambda m: m - 1)),
        "head_ratio": ("ShapeError", ("head",), change("q", lambda q: q[:, :1].expand(-1, 3, -1))),
        "int8_no_scale": ("ArgumentError", ("k_scale",), _codes),
        "nan_scale": (
            "ArgumentError",
            ("k_scale", "nan"),
            lambda args: _codes(args, k_scale=torch.tensor(math.nan), v_scale=torch.tensor(1.0)),
        ),
        "float_scale": ("ArgumentError", ("k_scale",), change("k_scale", lambda _: torch.tensor(1.0))),
        "cpu_differs": ("ArgumentError", ("seq_lens_cpu",), change("seq_lens_cpu", lambda t: t + 1)),
        "softcap": ("ArgumentError", ("softcap",), change("softcap", lambda _: -1.0)),
    }

    def draft(self, p: P, draw: Draw, dtype: torch.dtype) -> Draft:
        q_lens, k_lens, E = list(p.q), list(p.k), p.D if p.E is None else p.E
        table, blocks = pages(draw, k_lens, p.P, p.spare)
        held = dtype if p.cache == "same" else getattr(torch, p.cache)
        T = sum(q_lens) + p.q_tail
        cu, lens = prefix_sums(q_lens), torch.tensor(k_lens, dtype=torch.int32)
        # Codes times their scale have about the size of the float values.
        size = 0.012 if held is torch.int8 else 0.006
        args: dict[str, Any] = {
            "q": heads(draw, "q", (T,), p.H, p.D, dtype, p.spread),
            "k_cache": cache(draw, "k_cache", (blocks, p.P, p.K, p.D), held),
            "v_cache": cache(draw, "v_cache", (blocks, p.P, p.K, E), held),
            "block_table": table,
            "seq_lens": lens,
            "cu_seqlens_q": cu,
            "max_seqlen_q": max(q_lens, default=0) + p.slack,
            **options(p, draw, dtype),
            "k_scale": scale(draw, "k_scale", p.kv_scale, p.K, size),
            "v_scale": scale(draw, "v_scale", p.kv_scale, p.K, 0.4 * size),
            "seq_lens_cpu": lens.clone() if p.cpu else None,
            "cu_seqlens_q_cpu": cu.clone() if p.cpu else None,
        }
        if held is FP8 and p.kv_scale is None:
            for name in ("k_cache", "v_cache"):  # scale 1: codes of ordinary size
                args[name] = draw.normal(name, tuple(args[name].shape)).float().to(FP8)
        if p.broadcast:  # caches may not overlap with themselves
            args["q"] = alike(args["q"], 1)
        draft = Draft(args)
        unread = torch.ones(blocks, p.P, dtype=torch.bool)
        for b, unseen in enumerate(unseen_keys(q_lens, k_lens, p.causal, p.window)):
            j = (~unseen).nonzero()[:, 0]
            unread[table[b, j // p.P].long(), j % p.P] = False
        spare_T = torch.arange(T) >= sum(q_lens)
        draft.unused |= {"block_table": spare_entries(k_lens, p.P, table), "q": spare_T[:, None, None]}
        draft.unused |= dict.fromkeys(("k_cache", "v_cache"), unread[:, :, None, None])
        for name in ("k_cache", "v_cache", "q"):
            if (held.itemsize > 1 or name == "q") and draft.unused[name].any():
                args[name] = args[name].masked_fill(draft.unused[name], 0.0)
        if p.special:  # one query's alone, in one head
            args["q"][0, 0, 0] = math.nan
        else:
            draft.variants += self._variants(p, args, q_lens, k_lens)
            draft.variants += paged_variants(args, blocks, draw)
        return draft

    def _variants(self, p: P, args: dict[str, Any], q_lens: list[int], k_lens: list[int]) -> Iterator[Variant]:
        cu = args["cu_seqlens_q"].tolist()
        no_cpu = {"seq_lens_cpu": None, "cu_seqlens_q_cpu": None}
        if len(q_lens) > 1 and any(q_lens):
            b = max(range(len(q_lens)), key=lambda i: (q_lens[i], k_lens[i]))
            alone = (
                args
                | no_cpu
                | {
                    "q": args["q"][cu[b] : cu[b + 1]],
                    "block_table": args["block_table"][b : b + 1],
                    "seq_lens": args["seq_lens"][b : b + 1],
                    "cu_seqlens_q": prefix_sums([q_lens[b]]),
                }
            )

            def expects(results: Results) -> Results:
                return tuple(t[cu[b] : cu[b + 1]] for t in results)

            yield Variant(f"sequence {b} alone", (alone,), expects, declared="batch_invariant")
        if p.H > p.K:
            part = expanded(args, ("k_cache", "v_cache"), 2, p.H // p.K) if args["k_cache"].dtype.itemsize > 1 else None
            if part is not None:
                yield part
        yield from paths(p, args, q_lens, ("seq_lens", "cu_seqlens_q"))

    def grid(self) -> Iterator[Case]:
        mixed: dict[str, Any] = {"q": [1, 7, 0, 4], "k": [33, 7, 5, 20]}
        for dtype in DTYPES:
            yield self.case(dtype, "grid", "poison", H=3, K=1, lse=True)
            yield self.case(dtype, "grid", "poison", **mixed, H=4, K=2, D=72, lse=True)
            yield self.case(dtype, "grid", "poison", q=[9], k=[40], P=64, H=2, K=1, lse=True)
            yield self.case(dtype, "edge", "poison", q=[4, 1], k=[50, 34], H=2, K=1, window=[9, 0], lse=True)
            yield self.case(
                dtype,
                "edge",
                "poison",
                q=[3, 6],
                k=[9, 4],
                q_tail=2,
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
                "poison",
                q=[3, 4],
                k=[9, 20],
                H=6,
                K=2,
                sinks="same",
                loud=True,
                scale=0.4,
                window=[3, 0],
                causal=False,
                lse=True,
            )
            yield self.case(
                dtype, "edge", "poison", q=[3, 4], k=[9, 20], H=2, K=1, window=[0, 4], causal=False, lse=True
            )
            yield self.case(dtype, "edge", "poison", q=[6, 2], k=[3, 2], H=2, K=1, lse=True)  # more queries than keys
            spread = 600.0 if dtype == "float64" else 60.0
            yield self.case(dtype, "edge", "poison", q=[3, 4], k=[20, 30], H=2, K=1, D=32, spread=spread, lse=True)
            yield self.case(dtype, "edge", "poison", q=[7, 9], k=[7, 9], H=2, K=1, D=32, spread=4 * spread, lse=True)
            # One key in 8,193: near equal scores leave no room for it in lse.
            yield self.case(dtype, "edge", q=[1, 1], k=[3, 8193], P=64, H=2, K=1, D=16, spread=0.1, lse=True)
            yield self.case(dtype, "grid", "poison", q=[3, 4], k=[9, 20], H=4, K=2, D=33, E=41, slack=3, lse=True)
            yield self.case(dtype, "edge", "special", q=[3, 4], k=[9, 20], H=2, K=1, special=True, lse=True)
            yield self.case(dtype, "edge", "strided", q=[1, 3], k=[16, 32], spare=0, H=4, K=2, broadcast=True)
        for dtype in DTYPES:
            for held in CODES:
                yield self.case(dtype, "grid", "poison", **mixed, H=4, K=2, cache=held, kv_scale="one", lse=True)
                yield self.case(dtype, "grid", "poison", H=6, K=3, D=40, cache=held, kv_scale="head")
            yield self.case(dtype, "grid", "poison", H=4, K=2, cache="float8_e4m3fn")
        for dtype in HALVES:
            yield self.case(dtype, "grid", "poison", H=7, K=1, D=128, k=[33, 1, 64], P=32)
            yield self.case(dtype, "grid", "poison", **mixed, H=6, K=2, softcap=2.0, sinks="same", lse=True, cpu=True)
            yield self.case(dtype, "grid", "poison", H=2, K=1, D=192, E=128, q=[3, 1, 2])
            yield self.case(dtype, "edge", "poison", H=71, K=1, D=64, k=[17, 3, 8])
            yield self.case(dtype, "edge", "poison", H=2, K=1, D=576, E=512, k=[17, 3, 8])
        yield self.case(
            "float32", "grid", "poison", **mixed, H=2, K=1, causal=False, scale=0.3, sinks="float32", lse=True
        )
        yield self.case("float32", "edge", "empty", "poison", q=[1, 2], k=[0, 5], lse=True)
        yield self.case("float32", "edge", "empty", "poison", q=[1, 2], k=[0, 5], sinks="same", lse=True)
        yield self.case("float32", "edge", "empty", "poison", q=[0, 0], k=[4, 20], lse=True)
        for dtype in DTYPES:
            yield self.case(dtype, "edge", "empty", "poison", q=[], k=[], q_tail=3, lse=True)
        yield self.case("bfloat16", "edge", "poison", q=[2, 1], k=[9, 20], q_tail=3, slack=7, lse=True, cpu=True)
        # As many rows as sequences, one query at most: still not row b for sequence b.
        for dtype in HALVES:
            for q in ([1, 0], [0, 1]):
                for cpu in (False, True):
                    made: dict[str, Any] = {"q": q, "k": [20, 33], "q_tail": 1, "H": 4, "K": 2, "D": 64, "cpu": cpu}
                    yield self.case(dtype, "edge", "poison", **made, lse=dtype == "bfloat16")
        for page in (1, 4, 128):
            yield self.case("bfloat16", "edge", "poison", P=page, H=2, K=1, k=[5, 20, 9])
        for i, layout in enumerate(("offset", "sliced", "gapped", "swapped", "stepped", "transposed")):
            yield self.case(
                ("float32", "bfloat16", "float16")[i % 3],
                "edge",
                "strided",
                "poison",
                q=[1, 3],
                k=[20, 17],
                H=4,
                K=2,
                D=40,
                layout=layout,
            )
        yield self.case(
            "bfloat16", "edge", "strided", "poison", H=4, K=2, cache="int8", kv_scale="one", layout="gapped"
        )
        for poison in ("nan", "inf", "huge"):
            yield self.case("float32", "edge", "poison", q=[1, 2], k=[33, 18], H=2, K=1, poison=poison)
            yield self.case("bfloat16", "edge", "poison", q=[1, 2], k=[33, 18], H=2, K=1, poison=poison)
        for dtype in DTYPES:
            for page in (16, 64):
                yield self.case(
                    dtype, "grid", "poison", q=[1, 1, 1, 1], k=[1000, 77, 1, 400], P=page, H=8, K=2, D=128, suite="full"
                )
                yield self.case(
                    dtype, "grid", "poison", q=[60, 1, 33], k=[200, 90, 33], P=page, H=9, K=3, lse=True, suite="full"
                )
            for D in (16, 20, 80, 96, 256):
                yield self.case(dtype, "grid", "poison", H=3, K=1, D=D, q=[1, 3, 1], suite="full")
        yield from self.bad_cases(H=4, K=2, cpu=True)

    def strategy(self) -> SearchStrategy[dict[str, Param]]:
        from hypothesis import strategies as st

        @st.composite
        def recipe(draw: Any) -> dict[str, Param]:
            K, n = draw(st.integers(1, 3)), draw(st.integers(1, 4))
            made: dict[str, Param] = {
                "q": draw(st.lists(st.integers(0, 8), min_size=n, max_size=n)),
                "k": draw(st.lists(st.integers(0, 60), min_size=n, max_size=n)),
                "q_tail": draw(st.integers(0, 2)),
                "P": draw(st.sampled_from([1, 5, 16, 64])),
                "H": K * draw(st.integers(1, 4)),
                "K": K,
                "D": draw(st.integers(4, 130)),
            }
            optional(
                draw,
                made,
                E=st.integers(2, 100),
                causal=st.just(False),
                softcap=st.sampled_from([1.0, 20.0]),
                sinks=st.sampled_from(["same", "float32"]),
                lse=st.just(True),
                cpu=st.just(True),
                window=st.lists(st.one_of(st.none(), st.integers(0, 20)), min_size=2, max_size=2),
                layout=st.sampled_from(["sliced", "gapped", "swapped"]),
            )
            if draw(st.booleans()):
                made |= {"cache": draw(st.sampled_from(CODES)), "kv_scale": draw(st.sampled_from(["one", "head"]))}
            return made

        return recipe()


FAMILIES = (PagedAttention(),)
