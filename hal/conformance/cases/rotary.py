"""Cases of rotary_embedding.

Shape letters: H query heads, K key heads, D head dim, R rotated dims, M table length.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from hal.conformance.case import Case, Param
from hal.conformance.cases._family import DTYPES, HALVES, Family, P, change, elsewhere, rows
from hal.conformance.cases._values import values
from hal.conformance.inputs import Draft, Draw

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy


class RotaryEmbedding(Family):
    """rotary_embedding."""

    op = "rotary_embedding"
    defaults: ClassVar[dict[str, Any]] = {
        "lead": [6],
        "H": 3,
        "K": 1,
        "D": 64,
        "R": None,
        "M": 50,
        "interleaved": False,
        "told": False,
        "x": "normal",
        "positions": "random",
        "scale": 1.0,
    }
    arranged = ("q", "k", "positions", "cos", "sin")
    bad: ClassVar[dict[str, Any]] = {
        "device": elsewhere("positions"),
        "q_rank": ("ShapeError", ("q",), change("q", lambda q: q[0, 0])),
        "k_dim": ("ShapeError", ("k",), change("k", lambda k: k[..., 1:])),
        "k_tokens": ("ShapeError", ("k",), change("k", lambda k: k[1:])),
        "k_dtype": ("DtypeError", ("k",), change("k", lambda k: k.double())),
        "positions_dtype": ("DtypeError", ("positions", "int32"), change("positions", lambda p: p.int())),
        "positions_shape": ("ShapeError", ("positions",), change("positions", lambda p: p[1:])),
        "cos_dtype": ("DtypeError", ("cos", "bfloat16"), change("cos", lambda c: c.bfloat16())),
        "cos_rank": ("ShapeError", ("cos",), change("cos", lambda c: c[0])),
        "sin_shape": ("ShapeError", ("sin",), change("sin", lambda s: s[1:])),
        "rotary_dim": ("ShapeError", ("rotary_dim",), change("rotary_dim", lambda _: 62)),
        "position_high": ("ArgumentError", ("positions", "49"), change("positions", lambda p: p + 50)),
        "position_negative": ("ArgumentError", ("positions", "-"), change("positions", lambda p: p - 100)),
    }

    def draft(self, p: P, draw: Draw, dtype: torch.dtype) -> Draft:
        lead, rotated = tuple(p.lead), p.D if p.R is None else p.R
        # Points of the unit circle by the rational map: divisions and products round alike everywhere, cos may not.
        t = draw.uniform("angle", (p.M, rotated // 2), -2.0, 2.0)
        cos, sin = (1 - t * t) / (1 + t * t) * p.scale, 2 * t / (1 + t * t) * p.scale
        positions = draw.integers("positions", lead, 0, p.M)
        if p.positions == "ends":
            positions = torch.where(positions % 2 == 0, 0, p.M - 1)
        elif p.positions == "same":
            positions = torch.full((1,) * len(lead), p.M // 2).expand(lead)
        args = {
            "q": values(draw, "q", p.x, (*lead, p.H, p.D), dtype),
            "k": None if p.K is None else values(draw, "k", p.x, (*lead, p.K, p.D), dtype),
            "positions": positions,
            "cos": cos.float(),
            "sin": sin.float(),
            "interleaved": p.interleaved,
            "rotary_dim": rotated if p.told else None,
        }
        draft = Draft(args)
        if lead[0] > 1:
            axes = {"q": 0, "k": 0, "positions": 0}
            result_axes = (0, None if p.K is None else 0)
            draft.variants.append(rows(args, axes, lead[0] - 1, lead[0], result_axes))
        return draft

    def grid(self) -> Iterator[Case]:
        for dtype in DTYPES:
            for interleaved in (False, True):
                yield self.case(dtype, "grid", H=7, K=1, interleaved=interleaved)
                yield self.case(dtype, "grid", H=3, K=3, D=80, R=32, interleaved=interleaved)
            yield self.case(dtype, "grid", lead=[2, 5], H=9, K=3, D=20)
            yield self.case(dtype, "edge", lead=[7], D=20, M=3000)  # positions that 8 bits do not tell apart
            yield self.case(dtype, "edge", "special", lead=[4], D=16, x="special")
        for dtype in HALVES:
            yield self.case(dtype, "grid", H=2, K=1, D=192, R=64, interleaved=True, told=True)
            yield self.case(dtype, "edge", H=4, K=1, D=64, scale=1.25)
        yield self.case("float32", "edge", H=3, K=1, D=128, positions="ends")
        yield self.case("bfloat16", "grid", H=3, K=None, D=96)
        yield self.case("float32", "edge", H=1, K=1, D=2, interleaved=True)
        yield self.case("float32", "edge", H=2, K=2, D=576, R=64)
        yield self.case("float16", "edge", H=2, K=2, D=72, x="large")
        for dtype in DTYPES:
            yield self.case(dtype, "edge", "empty", lead=[0])
            yield self.case(dtype, "edge", H=3, K=1, D=128, positions="same")
        yield self.case("float32", "edge", "empty", lead=[2, 0], K=None)
        yield self.case("float32", "edge", lead=[1], H=71, K=1, D=64)
        for dtype, layout in (
            ("float32", "transposed"),
            ("bfloat16", "sliced"),
            ("float16", "stepped"),
            ("float32", "gapped"),
            ("bfloat16", "reversed"),
        ):
            yield self.case(dtype, "edge", "strided", H=4, K=2, D=40, layout=layout)
        for dtype in DTYPES:
            yield self.case(dtype, "grid", lead=[3, 37], H=9, K=3, D=64, M=4000, suite="full")
            yield self.case(dtype, "grid", lead=[70], H=8, K=8, D=256, R=128, interleaved=True, suite="full")
        yield from self.bad_cases()

    def strategy(self) -> SearchStrategy[dict[str, Param]]:
        from hypothesis import strategies as st

        @st.composite
        def recipe(draw: Any) -> dict[str, Param]:
            half = draw(st.integers(1, 40))
            made: dict[str, Param] = {
                "lead": draw(st.lists(st.integers(1, 5), min_size=1, max_size=3)),
                "H": draw(st.integers(1, 9)),
                "K": draw(st.one_of(st.none(), st.integers(1, 4))),
                "D": 2 * half + draw(st.integers(0, 9)),
                "R": 2 * half,
                "interleaved": draw(st.booleans()),
            }
            if draw(st.booleans()):
                made["layout"] = draw(st.sampled_from(["transposed", "sliced", "stepped", "gapped", "reversed"]))
            return made

        return recipe()


FAMILIES = (RotaryEmbedding(),)
