"""Cases of linear.

Shape letters: T rows, I features in, O features out.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from hal.conformance.case import Case, Param
from hal.conformance.cases._family import DTYPES, HALVES, Family, P, alike, change, elsewhere, rows
from hal.conformance.cases._values import values
from hal.conformance.inputs import Draft, Draw

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy


class Linear(Family):
    """linear."""

    op = "linear"
    defaults: ClassVar[dict[str, Any]] = {
        "T": 4,
        "I": 64,
        "O": 32,
        "lead": None,
        "x": "normal",
        "weight": "normal",
        "bias": None,
        "broadcast": False,
    }
    arranged = ("x", "weight", "bias")
    bad: ClassVar[dict[str, Any]] = {
        "device": elsewhere("weight"),
        "inner": ("ShapeError", ("weight",), change("weight", lambda w: w[:, 1:])),
        "weight_rank": ("ShapeError", ("weight",), change("weight", lambda w: w[0])),
        "weight_dtype": ("DtypeError", ("weight",), change("weight", lambda w: w.double())),
        "bias_shape": ("ShapeError", ("bias",), change("bias", lambda _: torch.zeros(3))),
        "int_x": ("DtypeError", ("x", "int64"), change("x", lambda x: x.long())),
        "int_bias": ("DtypeError", ("bias", "int64"), change("bias", lambda _: torch.zeros(32, dtype=torch.int64))),
        "scalar": ("ShapeError", ("x",), change("x", lambda x: x[0, 0])),
    }

    def draft(self, p: P, draw: Draw, dtype: torch.dtype) -> Draft:
        shape = (*p.lead, p.I) if p.lead is not None else (p.T, p.I)
        x = values(draw, "x", p.x, shape, dtype)
        if p.broadcast:
            x = alike(x, 0)
        weight = values(draw, "weight", p.weight, (p.O, p.I), dtype)
        bias = None
        if p.bias is not None:
            to = dtype if p.bias == "same" else getattr(torch, p.bias)
            bias = (draw.normal("bias", (p.O,)) * 3).to(to)
        draft = Draft({"x": x, "weight": weight, "bias": bias})
        if shape[0] > 1:
            draft.variants.append(rows(draft.args, {"x": 0}, shape[0] - 1, shape[0], (0,)))
        return draft

    def grid(self) -> Iterator[Case]:
        for dtype in DTYPES:
            yield self.case(dtype, "grid", T=7, I=177, O=150)
            yield self.case(dtype, "grid", T=5, I=96, O=33, bias="same")
            yield self.case(dtype, "grid", T=1, I=576, O=192)
            # Sums of small integers are exact in every dtype but for the last rounding.
            yield self.case(dtype, "edge", T=9, I=200, O=130, x="ints", weight="ints")
            yield self.case(dtype, "grid", T=5, I=72, O=72)  # nothing but the contract says which axis is which
            yield self.case(dtype, "edge", T=3, I=8193, O=9)  # one product more than a power of two
            yield self.case(dtype, "edge", "special", T=6, I=40, O=20, x="special", weight="ints")  # 0·NaN is NaN
        for dtype in HALVES:
            # Rows of odd length, which a product in pairs reads past: into the next row, and into what is not x.
            yield self.case(dtype, "edge", "special", T=40, I=33, O=24, x="special", weight="ints")
            yield self.case(dtype, "edge", "strided", T=40, I=33, O=24, layout="sliced")
            yield self.case(dtype, "grid", T=5, I=96, O=33, bias="float32")
            yield self.case(dtype, "edge", T=3, I=4097, O=9)
            yield self.case(dtype, "edge", T=6, I=257, O=170, x="mean50")
        yield self.case("float32", "edge", T=3, I=4097, O=9)
        yield self.case("float32", "edge", T=1, I=1, O=9)
        yield self.case("float32", "edge", T=9, I=30, O=1)
        yield self.case("bfloat16", "edge", lead=[2, 3, 2], I=40, O=24, bias="same")
        for dtype in DTYPES:
            yield self.case(dtype, "edge", "empty", T=0, I=40, O=24)
            yield self.case(dtype, "edge", "strided", T=5, I=64, O=20, broadcast=True)
        yield self.case("bfloat16", "edge", "empty", T=3, I=40, O=0)
        yield self.case("float32", "edge", "empty", T=3, I=0, O=5, bias="same")
        yield self.case("float32", "edge", "special", T=6, I=40, O=20, x="special")
        for dtype, layout in (
            ("float32", "transposed"),
            ("bfloat16", "sliced"),
            ("float16", "stepped"),
            ("float32", "gapped"),
            ("bfloat16", "offset"),
        ):
            yield self.case(dtype, "edge", "strided", T=6, I=70, O=33, bias="same", layout=layout)
        for dtype in DTYPES:
            yield self.case(dtype, "grid", T=33, I=1536, O=576, suite="full")
            yield self.case(dtype, "grid", T=70, I=577, O=1537, bias="same", suite="full")
        yield from self.bad_cases()

    def strategy(self) -> SearchStrategy[dict[str, Param]]:
        from hypothesis import strategies as st

        return st.fixed_dictionaries(
            {"T": st.integers(1, 17), "I": st.integers(1, 260), "O": st.integers(1, 90)},
            optional={
                "bias": st.sampled_from(["same", "float32"]),
                "x": st.sampled_from(["ints", "mixed", "mean50"]),
                "layout": st.sampled_from(["sliced", "stepped", "transposed", "gapped"]),
            },
        )


FAMILIES = (Linear(),)
