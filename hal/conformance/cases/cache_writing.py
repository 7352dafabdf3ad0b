"""Cases of write_kv_cache.

Shape letters: T tokens, N blocks, P slots per block, K kv heads, D head dim of k, E head dim of v.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from hal.conformance.case import Case, Param
from hal.conformance.cases._family import DTYPES, Family, P, alike, change, elsewhere
from hal.conformance.cases._pages import CODES, cache, scale
from hal.conformance.cases.attention import optional
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
        "broadcast": False,
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
        if p.broadcast:  # one head, told as several
            args |= {name: alike(args[name], 1) for name in ("k", "v")}
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
            yield self.case(dtype, "edge", "strided", T=6, K=2, D=20, skip="never", broadcast=True)
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


FAMILIES = (WriteKvCache(),)
