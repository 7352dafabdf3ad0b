"""Cases of gather_kv_cache.

Shape letters: N blocks, P slots per block, K kv heads, D head dim of k, E head dim of v, B sequences.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from hal.conformance.case import Case, Param
from hal.conformance.cases._family import DTYPES, HALVES, Family, P, alike, change, elsewhere
from hal.conformance.cases._pages import CODES, FP8, cache, paged_variants, pages, read_slots, scale, spare_entries
from hal.conformance.cases._values import special
from hal.conformance.cases.attention import optional
from hal.conformance.cases.ragged import prefix_sums
from hal.conformance.inputs import Draft, Draw

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy


class GatherKvCache(Family):
    """gather_kv_cache."""

    op = "gather_kv_cache"
    defaults: ClassVar[dict[str, Any]] = {
        "k": [5, 20, 33],
        "tail": 0,
        "P": 16,
        "K": 2,
        "D": 64,
        "E": None,
        "cache": "same",
        "out": None,
        "scale": None,
        "cpu": False,
        "spare": 2,
        "special": False,
        "broadcast": False,
    }
    arranged = ("k_cache", "v_cache", "block_table", "cu_seqlens_k", "k_scale", "v_scale")
    dense_last = ("k_cache", "v_cache")
    bad: ClassVar[dict[str, Any]] = {
        "device": elsewhere("block_table"),
        "table_dtype": ("DtypeError", ("block_table", "int64"), change("block_table", lambda t: t.long())),
        "table_rows": ("ShapeError", ("block_table",), change("block_table", lambda t: t[1:])),
        "block_high": ("ArgumentError", ("block_table", "99"), change("block_table", lambda t: torch.full_like(t, 99))),
        "block_low": ("ArgumentError", ("block_table", "-1"), change("block_table", lambda t: torch.full_like(t, -1))),
        "table_short": ("ArgumentError", ("block",), change("block_table", lambda t: t[:, :1])),
        "total_short": ("ArgumentError", ("total_k",), change("total_k", lambda n: n - 1)),
        "total_negative": ("ArgumentError", ("total_k",), change("total_k", lambda n: -1)),
        "cu_down": (
            "ArgumentError",
            ("cu_seqlens_k",),
            change("cu_seqlens_k", lambda c: torch.cat((c[:1], c[1:].flip(0)))),
        ),
        "codes_no_dtype": (
            "ArgumentError",
            ("out_dtype",),
            lambda args: args.update({name: args[name].to(FP8) for name in ("k_cache", "v_cache")}),
        ),
        "out_int": ("DtypeError", ("out_dtype",), change("out_dtype", lambda _: torch.int64)),
    }

    def draft(self, p: P, draw: Draw, dtype: torch.dtype) -> Draft:
        lengths, E = list(p.k), p.D if p.E is None else p.E
        table, blocks = pages(draw, lengths, p.P, p.spare)
        held = dtype if p.cache == "same" else getattr(torch, p.cache)
        cu = prefix_sums(lengths)
        args: dict[str, Any] = {
            "k_cache": cache(draw, "k_cache", (blocks, p.P, p.K, p.D), held),
            "v_cache": cache(draw, "v_cache", (blocks, p.P, p.K, E), held),
            "block_table": table,
            "cu_seqlens_k": cu,
            "total_k": sum(lengths) + p.tail,
            "k_scale": scale(draw, "k_scale", p.scale, p.K, 0.02),
            "v_scale": scale(draw, "v_scale", p.scale, p.K, 0.004),
            "out_dtype": None if held is dtype and p.out is None else dtype,
            "cu_seqlens_k_cpu": cu.clone() if p.cpu else None,
        }
        if p.special and held.itemsize > 1:
            args |= {name: special(draw, name, args[name]) for name in ("k_cache", "v_cache")}
        if p.broadcast and p.scale == "head":  # caches may not overlap with themselves
            args |= {name: alike(args[name], 0) for name in ("k_scale", "v_scale")}
        draft = Draft(args)
        unread = ~read_slots(lengths, p.P, table, blocks)[:, :, None, None]
        draft.unused |= {"block_table": spare_entries(lengths, p.P, table), "k_cache": unread, "v_cache": unread}
        draft.variants += paged_variants(args, blocks, draw)
        return draft

    def grid(self) -> Iterator[Case]:
        for dtype in DTYPES:
            yield self.case(dtype, "grid", "poison", k=[5, 20, 33])
            yield self.case(dtype, "grid", "poison", k=[7, 1, 16], P=4, K=3, D=40, E=24, tail=5, cpu=True)
            for held in CODES:
                yield self.case(dtype, "grid", "poison", k=[5, 20], cache=held, scale="one")
                yield self.case(dtype, "grid", "poison", k=[5, 70], P=64, K=3, D=40, cache=held, scale="head")
            yield self.case(dtype, "edge", "empty", k=[], tail=3)
            yield self.case(dtype, "edge", "special", k=[16, 32], spare=0, D=24, special=True)
            yield self.case(dtype, "edge", "strided", k=[5, 20], K=3, cache="int8", scale="head", broadcast=True)
        for dtype in HALVES:
            yield self.case(dtype, "grid", "poison", k=[5, 9], cache="float8_e4m3fn")
            yield self.case(dtype, "grid", "poison", k=[5, 9], cache="float32")
        yield self.case("float32", "grid", "poison", k=[5, 9], cache="bfloat16")
        yield self.case("float32", "edge", "empty", "poison", k=[0, 6, 0], tail=2)
        yield self.case("float32", "edge", "empty", "poison", k=[0], tail=3)
        yield self.case("float32", "edge", "empty", k=[], spare=0)
        for i, layout in enumerate(("offset", "sliced", "gapped", "swapped", "stepped")):
            yield self.case(
                ("float32", "bfloat16", "float16")[i % 3], "edge", "strided", "poison", k=[5, 20], D=24, layout=layout
            )
        for dtype in DTYPES:
            for P_ in (1, 16, 64, 128):
                yield self.case(dtype, "grid", "poison", k=[300, 17, 1, 129], P=P_, K=3, D=96, suite="full")
        yield from self.bad_cases()

    def strategy(self) -> SearchStrategy[dict[str, Param]]:
        from hypothesis import strategies as st

        @st.composite
        def recipe(draw: Any) -> dict[str, Param]:
            made: dict[str, Param] = {
                "k": draw(st.lists(st.integers(0, 40), min_size=1, max_size=4)),
                "tail": draw(st.integers(0, 3)),
                "P": draw(st.integers(1, 32)),
                "K": draw(st.integers(1, 4)),
                "D": draw(st.integers(1, 80)),
            }
            optional(draw, made, E=st.integers(1, 60), layout=st.sampled_from(["sliced", "gapped", "swapped"]))
            if draw(st.booleans()):
                made |= {"cache": draw(st.sampled_from(CODES)), "scale": draw(st.sampled_from(["one", "head"]))}
            return made

        return recipe()


FAMILIES = (GatherKvCache(),)
