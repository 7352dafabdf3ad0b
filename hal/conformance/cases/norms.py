"""Cases of rms_norm, add_rms_norm and layer_norm.

Shape letters: T rows, F features.
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

WEIGHTS = ("same", None, "float64", "float32", "bfloat16", "float16")


def _shape(p: P) -> tuple[int, ...]:
    return (*p.lead, p.F) if p.lead is not None else (p.T, p.F)


class _Norm(Family):
    """What the three norms share."""

    weight_center = 1.0
    results: ClassVar[int] = 1
    batched: ClassVar[tuple[str, ...]] = ("x",)

    def draft(self, p: P, draw: Draw, dtype: torch.dtype) -> Draft:
        shape = _shape(p)
        args: dict[str, Any] = {"x": values(draw, "x", p.x, shape, dtype, p.eps)}
        if p.broadcast and shape[0]:
            args["x"] = alike(args["x"], 0)
        self.more(args, p, draw, dtype)
        args["eps"] = p.eps
        draft = Draft(args)
        if shape[0] > 1:
            axes = dict.fromkeys(self.batched, 0)
            draft.variants.append(rows(args, axes, shape[0] - 1, shape[0], (0,) * self.results))
        return draft

    def more(self, args: dict[str, Any], p: P, draw: Draw, dtype: torch.dtype) -> None:
        args["weight"] = self.vector("weight", p.weight, p, draw, dtype)

    def vector(self, name: str, kind: str | None, p: P, draw: Draw, dtype: torch.dtype) -> torch.Tensor | None:
        if kind is None:
            return None
        to = dtype if kind == "same" else getattr(torch, kind)
        return (draw.normal(name, (p.F,)) * 0.5 + (self.weight_center if name == "weight" else 0.0)).to(to)

    def common(self) -> Iterator[Case]:
        """Cases that all three have."""
        for dtype in DTYPES:
            yield self.case(dtype, "grid", T=7, F=576)
            yield self.case(dtype, "grid", T=5, F=33, weight=None)
            yield self.case(dtype, "edge", T=4, F=1000, x="mean50")
            yield self.case(dtype, "edge", T=4, F=1000, x="mean1000")
            yield self.case(dtype, "edge", T=4, F=300, x="tiny")
            yield self.case(dtype, "edge", T=3, F=1536, x="large")
            yield self.case(dtype, "edge", T=6, F=8193)  # one feature more than a power of two
            yield self.case(dtype, "edge", "special", T=6, F=40, x="special")
            yield self.case(dtype, "edge", T=8, F=200, x="zero_row")
            yield self.case(dtype, "edge", T=8, F=72, x="subnormal", eps=0.0)  # squares vanish, the root may not
            yield self.case(dtype, "edge", T=8, F=200, x="zero_row", eps=0.0)
        for dtype in HALVES:
            yield self.case(dtype, "grid", T=5, F=257, weight="float32")
            yield self.case(dtype, "edge", T=2, F=4096, x="outlier")
        yield self.case("float32", "grid", T=5, F=257, weight="bfloat16")
        yield self.case("float16", "grid", T=5, F=257, weight="bfloat16", suite="full")
        for dtype in DTYPES:
            yield self.case(dtype, "edge", "empty", T=0, F=128)
            yield self.case(dtype, "edge", "strided", T=5, F=64, broadcast=True)
        yield self.case("float32", "edge", T=1, F=130)
        yield self.case("float32", "edge", T=9, F=2)
        yield self.case("float32", "edge", lead=[2, 3, 2], F=80)
        yield self.case("float16", "edge", "strided", lead=[6, 7], F=80, layout="gapped")
        yield self.case("bfloat16", "edge", "strided", T=6, F=96, layout="transposed")
        yield self.case("float32", "edge", "strided", T=5, F=64, layout="offset")
        yield self.case("float32", "edge", "strided", T=5, F=70, layout="sliced")
        yield self.case("bfloat16", "edge", "strided", T=5, F=70, layout="stepped")
        yield self.case("float32", "edge", T=8, F=200, x="mixed")
        yield self.case("float32", "edge", T=6, F=64, x="ints")
        for F in (1, 3, 17, 63, 127, 1023, 4097, 8192, 16384):
            for dtype in DTYPES:
                # A single column normalises to ±1 whatever its value; the sign is all there is to get wrong.
                yield self.case(dtype, "grid", T=3, F=F, suite="full")
        for dtype in DTYPES:
            yield self.case(dtype, "grid", T=300, F=576, suite="full")
            yield self.case(dtype, "edge", T=8, F=72, x="subnormal", suite="full")

    def strategy(self) -> SearchStrategy[dict[str, Param]]:
        from hypothesis import strategies as st

        return st.fixed_dictionaries(
            {"T": st.integers(1, 9), "F": st.integers(2, 700)},
            optional={
                "weight": st.sampled_from(WEIGHTS),
                "x": st.sampled_from(["mean50", "tiny", "ints", "mixed", "zero_row"]),
                "eps": st.sampled_from([1e-12, 1e-5, 1e-3]),
                "layout": st.sampled_from(["offset", "sliced", "stepped", "transposed", "gapped"]),
            },
        )


BAD_NORM: dict[str, tuple[str, tuple[str, ...], Any]] = {
    "scalar": ("ShapeError", ("x",), change("x", lambda x: x[0, 0])),
    "weight_shape": ("ShapeError", ("weight",), change("weight", lambda w: w[:-1])),
    "weight_rank": ("ShapeError", ("weight",), change("weight", lambda w: w[None])),
    "int_x": ("DtypeError", ("x", "int32"), change("x", lambda x: x.int())),
    "int_weight": ("DtypeError", ("weight", "int64"), change("weight", lambda w: w.long())),
    "device": elsewhere("weight"),
    "negative_eps": ("ArgumentError", ("eps",), change("eps", lambda e: -1.0)),
    "nan_eps": ("ArgumentError", ("eps",), change("eps", lambda e: float("nan"))),
}


class RmsNorm(_Norm):
    """rms_norm."""

    op = "rms_norm"
    defaults: ClassVar[dict[str, Any]] = {
        "T": 4,
        "F": 64,
        "lead": None,
        "x": "normal",
        "weight": "same",
        "eps": 1e-6,
        "weight_offset": 0.0,
        "round_before_weight": False,
        "broadcast": False,
    }
    arranged: ClassVar[tuple[str, ...]] = ("x", "weight")
    bad: ClassVar[dict[str, Any]] = BAD_NORM

    def more(self, args: dict[str, Any], p: P, draw: Draw, dtype: torch.dtype) -> None:
        super().more(args, p, draw, dtype)
        args |= {"weight_offset": p.weight_offset, "round_before_weight": p.round_before_weight}

    def grid(self) -> Iterator[Case]:
        yield from self.common()
        for dtype in DTYPES:
            yield self.case(dtype, "grid", T=5, F=320, round_before_weight=True)
            yield self.case(dtype, "grid", T=5, F=320, weight_offset=1.0)
            yield self.case(dtype, "grid", T=5, F=320, weight=None, weight_offset=1.0)
            yield self.case(dtype, "edge", T=4, F=300, x="tiny", eps=1e-5)
        for dtype in HALVES:
            yield self.case(dtype, "grid", T=5, F=320, weight="float32", round_before_weight=True)
            yield self.case(dtype, "grid", T=5, F=320, weight_offset=1.0, round_before_weight=True)
            yield self.case(dtype, "grid", T=5, F=320, weight=None, round_before_weight=True)
        yield self.case("float32", "grid", T=5, F=320, eps=0.1)
        yield self.case("float32", "edge", T=5, F=320, eps=0.0)
        yield from self.bad_cases()

    def strategy(self) -> SearchStrategy[dict[str, Param]]:
        from hypothesis import strategies as st

        more = st.fixed_dictionaries(
            {}, optional={"weight_offset": st.sampled_from([1.0, -0.5]), "round_before_weight": st.just(True)}
        )
        return st.builds(lambda a, b: a | b, super().strategy(), more)


class AddRmsNorm(RmsNorm):
    """add_rms_norm."""

    op = "add_rms_norm"
    defaults: ClassVar[dict[str, Any]] = {**RmsNorm.defaults, "round_residual": True, "residual": "normal"}
    arranged = ("x", "residual", "weight")
    results = 2
    batched = ("x", "residual")
    bad: ClassVar[dict[str, Any]] = {
        **BAD_NORM,
        "residual_shape": ("ShapeError", ("residual",), change("residual", lambda r: r[:-1])),
        "residual_dtype": ("DtypeError", ("residual",), change("residual", lambda r: r.double())),
    }

    def more(self, args: dict[str, Any], p: P, draw: Draw, dtype: torch.dtype) -> None:
        super().more(args, p, draw, dtype)
        args["residual"] = values(draw, "residual", p.residual, tuple(args["x"].shape), dtype, p.eps)
        args["round_residual"] = p.round_residual

    def grid(self) -> Iterator[Case]:
        yield from super().grid()
        for dtype in DTYPES:
            yield self.case(dtype, "grid", T=5, F=320, round_residual=False)
            for eps in (1e-6, 1e-5):
                yield self.case(dtype, "edge", T=4, F=300, x="tiny", residual="tiny", eps=eps)
            yield self.case(dtype, "edge", T=8, F=72, x="zero_row", residual="zero_row", eps=0.0)
        for dtype in HALVES:
            yield self.case(dtype, "grid", T=5, F=320, round_residual=False, round_before_weight=True)
            # Where |x| is far above |residual| the rounding of the sum is what the two conventions differ by.
            yield self.case(dtype, "grid", T=6, F=320, x="mean50", round_residual=True)
            yield self.case(dtype, "grid", T=6, F=320, x="mean50", round_residual=False)


class LayerNorm(_Norm):
    """layer_norm."""

    op = "layer_norm"
    defaults: ClassVar[dict[str, Any]] = {
        "T": 4,
        "F": 64,
        "lead": None,
        "x": "normal",
        "weight": "same",
        "bias": "same",
        "eps": 1e-5,
        "broadcast": False,
    }
    arranged = ("x", "weight", "bias")
    bad: ClassVar[dict[str, Any]] = {
        **BAD_NORM,
        "bias_shape": ("ShapeError", ("bias",), change("bias", lambda b: b[:-1])),
        "int_bias": ("DtypeError", ("bias", "int64"), change("bias", lambda b: b.long())),
    }

    def more(self, args: dict[str, Any], p: P, draw: Draw, dtype: torch.dtype) -> None:
        super().more(args, p, draw, dtype)
        args["bias"] = self.vector("bias", p.bias, p, draw, dtype)

    def grid(self) -> Iterator[Case]:
        yield from self.common()
        for dtype in DTYPES:
            yield self.case(dtype, "grid", T=5, F=320, bias=None)
            yield self.case(dtype, "edge", T=4, F=300, x="tiny", eps=1e-6)
        for dtype in HALVES:
            yield self.case(dtype, "grid", T=5, F=257, weight="float32", bias="float32")
        yield self.case("bfloat16", "grid", T=5, F=257, weight="float32", bias="bfloat16")
        yield self.case("float32", "edge", T=8, F=200, x="constant_row")
        yield self.case("bfloat16", "edge", T=8, F=200, x="constant_row")
        yield from self.bad_cases()


FAMILIES = (RmsNorm(), AddRmsNorm(), LayerNorm())
