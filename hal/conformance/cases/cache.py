"""Cases of write_kv_cache, gather_kv_cache and copy_kv_blocks.

Shape letters: T tokens, N blocks, P slots per block, K kv heads, D head dim of k, E head dim of v, B sequences.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from hal.conformance.case import Case, Param
from hal.conformance.cases._family import DTYPES, HALVES, Family, P, change, elsewhere
from hal.conformance.cases._pages import CODES, FP8, cache, paged_variants, pages, read_slots, scale, spare_entries
from hal.conformance.cases.attention import optional
from hal.conformance.cases.ragged import prefix_sums
from hal.conformance.inputs import Draft, Draw

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy


class WriteKvCache(Family):
    """write_kv_cache."""

    op = "write_kv_cache"
    defaults: ClassVar[dict[str, Any]] = {
        "T": 9,
        "n": None,
        "N": 4,
        "P": 16,
        "K": 2,
        "D": 64,
        "E": None,
        "cache": "same",
        "scale": None,
        "skip": "some",
        "x": "normal",
    }
    arranged = ("k", "v", "k_cache", "v_cache", "slot_mapping", "k_scale", "v_scale")
    dense_last = ("k_cache", "v_cache")
    bad: ClassVar[dict[str, Any]] = {
        "device": elsewhere("slot_mapping"),
        "k_rank": ("ShapeError", ("k",), change("k", lambda k: k[0])),
        "heads": ("ShapeError", ("k",), change("k", lambda k: k[:, :1])),
        "slot_dtype": ("DtypeError", ("slot_mapping", "int32"), change("slot_mapping", lambda s: s.int())),
        "slot_long": ("ShapeError", ("slot_mapping",), change("slot_mapping", lambda s: torch.cat((s, s)))),
        "slot_high": (
            "ArgumentError",
            ("slot_mapping", "64"),
            change("slot_mapping", lambda s: torch.full_like(s, 64)),
        ),
        "slot_low": ("ArgumentError", ("slot_mapping", "-2"), change("slot_mapping", lambda s: torch.full_like(s, -2))),
        "cache_dtype": ("DtypeError", ("k_cache",), change("k_cache", lambda c: c.double())),
        "int8_no_scale": (
            "ArgumentError",
            ("k_scale",),
            lambda args: args.update({name: args[name].to(torch.int8) for name in ("k_cache", "v_cache")}),
        ),
        "float_scale": ("ArgumentError", ("k_scale",), change("k_scale", lambda _: torch.tensor(1.0))),
        "nan_scale": (
            "ArgumentError",
            ("k_scale", "nan"),
            lambda args: args.update(
                {name: args[name].to(torch.int8) for name in ("k_cache", "v_cache")}
                | {"k_scale": torch.tensor(math.nan), "v_scale": torch.tensor(1.0)}
            ),
        ),
        "zero_scale": (
            "ArgumentError",
            ("v_scale",),
            lambda args: args.update(
                {name: args[name].to(torch.int8) for name in ("k_cache", "v_cache")}
                | {"k_scale": torch.tensor(1.0), "v_scale": torch.tensor(0.0)}
            ),
        ),
        "scale_shape": (
            "ShapeError",
            ("k_scale",),
            lambda args: args.update(
                {name: args[name].to(torch.int8) for name in ("k_cache", "v_cache")}
                | {"k_scale": torch.ones(3), "v_scale": torch.ones(3)}
            ),
        ),
        "overlap": ("ArgumentError", ("overlap",), change("k_cache", lambda c: c[:1].expand(c.shape))),
    }

    def draft(self, p: P, draw: Draw, dtype: torch.dtype) -> Draft:
        E = p.D if p.E is None else p.E
        n = min(p.T if p.n is None else p.n, p.N * p.P)
        to = dtype if p.cache == "same" else getattr(torch, p.cache)
        slots = draw.permutation("slots", p.N * p.P)[:n]
        if p.skip == "some":
            slots = torch.where(draw.integers("skip", (n,), 0, 4) == 0, -1, slots)
        elif p.skip == "all":
            slots = torch.full((n,), -1)
        scales = {name: scale(draw, name, p.scale, p.K, size) for name, size in (("k_scale", 0.02), ("v_scale", 0.004))}
        args: dict[str, Any] = {
            "k": self.values(p, draw, "k", p.D, dtype, to, scales["k_scale"]),
            "v": self.values(p, draw, "v", E, dtype, to, scales["v_scale"]),
            "k_cache": cache(draw, "k_cache", (p.N, p.P, p.K, p.D), to),
            "v_cache": cache(draw, "v_cache", (p.N, p.P, p.K, E), to),
            "slot_mapping": slots,
            **scales,
        }
        draft = Draft(args)
        skipped_T = torch.ones(p.T, dtype=torch.bool)
        skipped_T[:n] = slots < 0
        if skipped_T.any():
            draft.unused |= dict.fromkeys(("k", "v"), skipped_T[:, None, None])
        if to.itemsize == 1:
            for name in ("k", "v"):
                draft.quotients[f"{name}_cache"] = _quotients(args, name, slots)
        return draft

    def values(
        self, p: P, draw: Draw, name: str, width: int, dtype: torch.dtype, to: torch.dtype, by: Tensor | None
    ) -> Tensor:
        x = draw.normal(name, (p.T, p.K, width))
        if to.itemsize == 1:
            # Most values within the codes' range, some beyond it.
            top = 127.0 if to is torch.int8 else 448.0
            each = 1.0 if by is None else by.double() if by.dim() == 0 else by.double()[:, None]
            x = x * 0.45 * top * each
            if p.x == "ties":
                x = (draw.integers(name, (p.T, p.K, width), -140, 140).double() + 0.5) * each
            elif p.x == "small":
                x = draw.normal(name, (p.T, p.K, width)) * 2.0**-7 * each  # fp8's subnormal codes
        x = x.to(dtype)
        if p.x == "special" and p.T:
            flat = x.view(-1)
            for i, figure in enumerate((math.nan, math.inf, -math.inf)):
                flat[i * (flat.numel() // 3)] = figure
        return x

    def grid(self) -> Iterator[Case]:
        for dtype in DTYPES:
            yield self.case(dtype, "grid", T=9, K=2, D=64)
            yield self.case(dtype, "grid", T=7, K=3, D=40, E=24, P=4)
            yield self.case(dtype, "edge", "special", T=6, K=2, D=20, x="special", skip="never")
            yield self.case(dtype, "edge", T=5, N=300, P=16, K=1, D=8)  # slots past 255
            yield self.case(dtype, "edge", "empty", T=0)
            for to in CODES:
                yield self.case(dtype, "grid", T=9, K=2, D=64, cache=to, scale="one")
                yield self.case(dtype, "grid", T=9, K=3, D=40, cache=to, scale="head")
                yield self.case(dtype, "edge", T=9, K=2, D=64, cache=to, scale="power", x="ties")
                yield self.case(
                    dtype, "edge", "special", T=6, K=2, D=20, cache=to, scale="one", x="special", skip="never"
                )
            yield self.case(dtype, "edge", T=5, K=1, D=24, cache="float8_e4m3fn", scale="one", x="small")
            yield self.case(dtype, "edge", T=20, n=13, N=2, P=16, K=1, D=80)
        yield self.case("float32", "edge", T=6, K=2, D=20, cache="float8_e4m3fn")
        yield self.case("float32", "edge", "special", T=6, K=2, D=20, cache="float8_e4m3fn", x="special", skip="never")
        yield self.case("float32", "edge", "empty", T=6, skip="all")
        yield self.case("float32", "edge", T=6, skip="never")
        yield self.case("float32", "edge", "empty", T=5, n=0)
        yield self.case("bfloat16", "edge", T=1, N=1, P=1, K=1, D=1, skip="never")
        for i, layout in enumerate(("offset", "sliced", "gapped", "swapped", "transposed", "stepped")):
            yield self.case(("float32", "bfloat16", "float16")[i % 3], "edge", "strided", T=9, K=2, D=24, layout=layout)
        yield self.case("bfloat16", "edge", "strided", T=9, K=2, D=24, cache="int8", scale="head", layout="gapped")
        yield self.case(
            "bfloat16", "edge", "strided", T=9, K=2, D=24, cache="float8_e4m3fn", scale="one", layout="swapped"
        )
        for dtype in DTYPES:
            for P_ in (1, 16, 64, 128):
                yield self.case(dtype, "grid", T=70, N=40, P=P_, K=3, D=128, suite="full")
        yield from self.bad_cases()

    def strategy(self) -> SearchStrategy[dict[str, Param]]:
        from hypothesis import strategies as st

        @st.composite
        def recipe(draw: Any) -> dict[str, Param]:
            made: dict[str, Param] = {
                "T": draw(st.integers(1, 12)),
                "N": draw(st.integers(1, 6)),
                "P": draw(st.integers(2, 32)),
                "K": draw(st.integers(1, 4)),
                "D": draw(st.integers(1, 80)),
            }
            optional(
                draw,
                made,
                E=st.integers(1, 60),
                skip=st.just("never"),
                layout=st.sampled_from(["sliced", "gapped", "swapped", "stepped"]),
            )
            if draw(st.booleans()):
                made |= {
                    "cache": draw(st.sampled_from(CODES)),
                    "scale": draw(st.sampled_from(["one", "head", "power"])),
                }
            made["n"] = min(draw(st.integers(1, 12)), int(str(made["T"])), int(str(made["N"])) * int(str(made["P"])))
            return made

        return recipe()


def _quotients(args: dict[str, Any], name: str, slots: Tensor) -> Tensor:
    """value / scale where something is written, NaN elsewhere."""
    store, x, by = args[f"{name}_cache"], args[name].double(), args[f"{name}_scale"]
    if by is not None:
        x = x / (by.double() if by.dim() == 0 else by.double()[:, None])
    found = torch.full(store.shape, math.nan, dtype=torch.float64)
    kept = slots >= 0
    page = store.shape[1]
    found[slots[kept] // page, slots[kept] % page] = x[: slots.shape[0]][kept]
    return found


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


class CopyKvBlocks(Family):
    """copy_kv_blocks."""

    op = "copy_kv_blocks"
    defaults: ClassVar[dict[str, Any]] = {
        "layers": 2,
        "N": 7,
        "P": 16,
        "K": 2,
        "D": 16,
        "E": None,
        "cache": "same",
        "pairs": "plain",
    }
    arranged = ("k_caches", "v_caches", "src", "dst")
    dense_last = ("k_caches", "v_caches")
    PAIRS: ClassVar[dict[str, tuple[list[int], list[int]]]] = {
        "plain": ([0, 3], [5, 1]),
        "chain": ([0, 1, 2], [1, 2, 3]),
        "swap": ([4, 6], [6, 4]),
        "ring": ([0, 1, 2, 3], [3, 0, 1, 2]),
        "fan": ([2, 2, 2], [0, 4, 6]),
        "self": ([3, 1], [3, 2]),
        "nothing": ([], []),
    }
    bad: ClassVar[dict[str, Any]] = {
        "device": elsewhere("src"),
        "pairs": ("ShapeError", ("pairs",), change("src", lambda s: s[1:])),
        "dtype": ("DtypeError", ("src", "int32"), change("src", lambda s: s.int())),
        "high": ("ArgumentError", ("dst", "7"), change("dst", lambda d: d * 0 + torch.tensor([7, 1]))),
        "low": ("ArgumentError", ("src", "-1"), change("src", lambda s: s * 0 - 1)),
        "twice": ("ArgumentError", ("dst",), change("dst", lambda d: d * 0)),
        "layers": ("ArgumentError", ("v_caches",), change("v_caches", lambda c: c[1:])),
        "blocks": ("ShapeError", ("blocks",), change("v_caches", lambda c: [c[0], c[1][1:]])),
    }

    def draft(self, p: P, draw: Draw, dtype: torch.dtype) -> Draft:
        E = p.D if p.E is None else p.E
        to = dtype if p.cache == "same" else getattr(torch, p.cache)
        src, dst = self.PAIRS[p.pairs]
        return Draft(
            {
                "k_caches": [cache(draw, f"k{i}", (p.N, p.P, p.K, p.D), to) for i in range(p.layers)],
                "v_caches": [cache(draw, f"v{i}", (p.N, p.P, p.K, E), to) for i in range(p.layers)],
                "src": torch.tensor(src, dtype=torch.int64),
                "dst": torch.tensor(dst, dtype=torch.int64),
            }
        )

    def grid(self) -> Iterator[Case]:
        for dtype in DTYPES:
            yield self.case(dtype, "grid")
            yield self.case(dtype, "edge", pairs="chain", layers=1)
            yield self.case(dtype, "edge", pairs="ring")
            yield self.case(dtype, "edge", "empty", pairs="nothing")
        for pairs in ("swap", "fan", "self"):
            yield self.case("bfloat16", "edge", pairs=pairs)
        for to in CODES:
            yield self.case("bfloat16", "grid", cache=to, pairs="ring", layers=3)
        yield self.case("float32", "edge", E=24, P=1, K=1)
        for i, layout in enumerate(("offset", "sliced", "gapped", "swapped")):
            yield self.case(("float32", "bfloat16", "float16")[i % 3], "edge", "strided", pairs="chain", layout=layout)
        yield self.case("bfloat16", "grid", layers=6, N=7, P=64, K=3, D=128, pairs="ring", suite="full")
        yield from self.bad_cases()

    def strategy(self) -> SearchStrategy[dict[str, Param]]:
        from hypothesis import strategies as st

        return st.fixed_dictionaries(
            {
                "layers": st.integers(1, 3),
                "N": st.integers(7, 12),
                "P": st.integers(1, 20),
                "K": st.integers(1, 3),
                "D": st.integers(1, 40),
                "pairs": st.sampled_from(["plain", "chain", "swap", "ring", "fan", "self"]),
            },
            optional={"cache": st.sampled_from(CODES), "layout": st.sampled_from(["sliced", "gapped", "swapped"])},
        )


FAMILIES = (WriteKvCache(), GatherKvCache(), CopyKvBlocks())
