"""Cases of silu_and_mul, gelu_and_mul and softmax.

Shape letters: T rows, F features of the result, n length of the softmax axis.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from hal.conformance.case import Case, Param
from hal.conformance.cases._family import DTYPES, HALVES, Family, P, alike, change, rows
from hal.conformance.cases._values import values
from hal.conformance.inputs import Draft, Draw

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy


# Gates from where float32 rounds the activated gate to 0, and then from where its exponentials are 0.
CORNERS = (math.nan, math.inf, -math.inf, 0.0, -1.0, 1.0, -4.0, -5.6, -6.8, -14.5, -40.0, -104.0, -700.0, 40.0, 700.0)


def corners(rows: int, features: int) -> Tensor:
    """Gate and up, float64 (rows, 2·features): each pair of corners once, then from the start again."""
    pairs = torch.cartesian_prod(*2 * [torch.tensor(CORNERS, dtype=torch.float64)])
    at = torch.arange(rows * features).reshape(rows, features) % len(pairs)
    return torch.cat((pairs[at, 0], pairs[at, 1]), -1)


class _Gated(Family):
    """What the gated activations share: x is (T, 2F), gate first."""

    arranged = ("x",)

    def draft(self, p: P, draw: Draw, dtype: torch.dtype) -> Draft:
        shape = (*p.lead, 2 * p.F) if p.lead is not None else (p.T, 2 * p.F)
        x = values(draw, "x", p.x, shape, torch.float64) if p.x != "corners" else corners(p.T, p.F)
        x = (x * p.spread).to(dtype)
        args: dict[str, Any] = {"x": alike(x, 0) if p.broadcast else x} | self.told(p)
        draft = Draft(args)
        if shape[0] > 1:
            draft.variants.append(rows(args, {"x": 0}, shape[0] // 2, shape[0], (0,)))
        return draft

    def told(self, p: P) -> dict[str, Any]:
        """The arguments other than x."""
        raise NotImplementedError

    def common(self) -> Iterator[Case]:
        """Cases that both have."""
        for dtype in DTYPES:
            yield self.case(dtype, "grid", T=7, F=173, spread=2.0)
            yield self.case(dtype, "edge", T=5, F=257, spread=8.0)
            yield self.case(dtype, "edge", T=5, F=128, spread=40.0)  # exponentials of the gates overflow float32
            yield self.case(dtype, "edge", "special", T=5, F=20, x="special")
            yield self.case(dtype, "edge", "special", T=5, F=45, x="corners")
        yield self.case("float32", "edge", T=1, F=1, spread=2.0)
        yield self.case("float32", "edge", T=64, F=1, spread=2.0)
        for dtype in DTYPES:
            yield self.case(dtype, "edge", "empty", T=0, F=64)
            yield self.case(dtype, "edge", "strided", T=5, F=64, spread=2.0, broadcast=True)
        yield self.case("float16", "edge", lead=[2, 3, 2], F=40, spread=2.0)
        for dtype, layout in (
            ("bfloat16", "sliced"),
            ("float32", "stepped"),
            ("float16", "transposed"),
            ("float32", "gapped"),
            ("bfloat16", "offset"),
        ):
            yield self.case(dtype, "edge", "strided", T=6, F=70, layout=layout, spread=2.0)
        for dtype in DTYPES:
            yield self.case(dtype, "grid", T=40, F=1536, spread=3.0, suite="full")
            yield self.case(dtype, "edge", T=5, F=128, spread=30.0, suite="full")

    def strategy(self) -> SearchStrategy[dict[str, Param]]:
        from hypothesis import strategies as st

        return st.fixed_dictionaries(
            {"T": st.integers(1, 20), "F": st.integers(1, 300), "spread": st.sampled_from([0.5, 2.0, 6.0])},
            optional={
                "x": st.sampled_from(["ints", "mixed"]),
                "layout": st.sampled_from(["sliced", "stepped", "gapped"]),
            },
        )


BAD_GATED: dict[str, tuple[str, tuple[str, ...], Any]] = {
    "odd": ("ShapeError", ("x",), change("x", lambda x: x[..., 1:])),
    "scalar": ("ShapeError", ("x",), change("x", lambda x: x[0, 0])),
    "int_x": ("DtypeError", ("x", "int64"), change("x", lambda x: x.long())),
}


class SiluAndMul(_Gated):
    """silu_and_mul."""

    op = "silu_and_mul"
    defaults: ClassVar[dict[str, Any]] = {
        "T": 4,
        "F": 64,
        "lead": None,
        "x": "normal",
        "spread": 1.0,
        "limit": None,
        "alpha": 1.0,
        "up_offset": 0.0,
        "broadcast": False,
    }
    bad: ClassVar[dict[str, Any]] = {
        **BAD_GATED,
        "zero_limit": ("ArgumentError", ("limit",), change("limit", lambda _: 0.0)),
        "nan_alpha": ("ArgumentError", ("alpha",), change("alpha", lambda _: math.nan)),
    }

    def told(self, p: P) -> dict[str, Any]:
        return {"limit": p.limit, "alpha": p.alpha, "up_offset": p.up_offset}

    def grid(self) -> Iterator[Case]:
        yield from self.common()
        for dtype in DTYPES:
            # gpt-oss; the spread sends a third of the gates and ups past the limit
            yield self.case(dtype, "grid", T=7, F=173, spread=7.0, limit=7.0, alpha=1.702, up_offset=1.0)
            yield self.case(dtype, "grid", T=7, F=90, spread=3.0, alpha=1.702)
            yield self.case(dtype, "grid", T=7, F=90, spread=2.0, up_offset=1.0)
            yield self.case(dtype, "grid", T=7, F=90, spread=3.0, limit=2.5)
            yield self.case(dtype, "edge", "special", T=5, F=20, x="special", limit=2.5)
            yield self.case(dtype, "edge", "special", T=5, F=45, x="corners", alpha=1.702)
        yield from self.bad_cases()

    def strategy(self) -> SearchStrategy[dict[str, Param]]:
        from hypothesis import strategies as st

        more = st.fixed_dictionaries(
            {},
            optional={
                "limit": st.sampled_from([1.0, 7.0]),
                "alpha": st.sampled_from([0.5, 1.702]),
                "up_offset": st.sampled_from([1.0, -0.25]),
            },
        )
        return st.builds(lambda a, b: a | b, super().strategy(), more)


class GeluAndMul(_Gated):
    """gelu_and_mul."""

    op = "gelu_and_mul"
    defaults: ClassVar[dict[str, Any]] = {
        "T": 4,
        "F": 64,
        "lead": None,
        "x": "normal",
        "spread": 1.0,
        "approximate": "erf",
        "broadcast": False,
    }
    bad: ClassVar[dict[str, Any]] = {
        **BAD_GATED,
        "approximate": ("ArgumentError", ("approximate", "tanh"), change("approximate", lambda _: "quick")),
    }

    def told(self, p: P) -> dict[str, Any]:
        # "none" is no word for a recipe: ids spell None so.
        return {"approximate": "none" if p.approximate == "erf" else p.approximate}

    def grid(self) -> Iterator[Case]:
        yield from self.common()
        for dtype in DTYPES:
            yield self.case(dtype, "grid", T=7, F=173, spread=2.0, approximate="tanh")
            yield self.case(dtype, "edge", T=5, F=257, spread=6.0, approximate="tanh")
            yield self.case(dtype, "edge", "special", T=5, F=45, x="corners", approximate="tanh")
        yield from self.bad_cases()

    def strategy(self) -> SearchStrategy[dict[str, Param]]:
        from hypothesis import strategies as st

        more = st.fixed_dictionaries({}, optional={"approximate": st.just("tanh")})
        return st.builds(lambda a, b: a | b, super().strategy(), more)


class Softmax(Family):
    """softmax."""

    op = "softmax"
    defaults: ClassVar[dict[str, Any]] = {
        "shape": [4, 64],
        "dim": -1,
        "x": "normal",
        "spread": 2.0,
        "holes": False,
        "dead": False,
        "rise": 0.0,
        "broadcast": False,
    }
    arranged = ("x",)
    bad: ClassVar[dict[str, Any]] = {
        "dim_high": ("ArgumentError", ("dim",), change("dim", lambda _: 2)),
        "dim_low": ("ArgumentError", ("dim",), change("dim", lambda _: -3)),
        "scalar": ("ShapeError", ("x",), change("x", lambda x: x[0, 0])),
        "int_x": ("DtypeError", ("x", "int64"), change("x", lambda x: x.long())),
    }

    def draft(self, p: P, draw: Draw, dtype: torch.dtype) -> Draft:
        shape, axis = tuple(p.shape), p.dim % len(p.shape)
        x = values(draw, "x", p.x, shape, torch.float64) * p.spread
        if p.rise:
            # the first 64 lie far below the others
            low = torch.arange(shape[axis]) < 64
            x = x - p.rise * low.reshape([-1 if i == axis else 1 for i in range(len(shape))])
        x = x.to(dtype)
        if p.holes:
            x = x.masked_fill(draw.uniform("holes", shape) < 0.3, -math.inf)
        if p.dead:
            # whole rows of −inf, every third
            kept = [1 if i == axis else n for i, n in enumerate(shape)]
            count = math.prod(kept)
            x = x.masked_fill((torch.arange(count) % 3 == 0).reshape(kept), -math.inf)
        if p.broadcast:
            x = alike(x, 0)
        draft = Draft({"x": x, "dim": p.dim})
        if shape and axis != 0 and shape[0] > 1:
            draft.variants.append(rows(draft.args, {"x": 0}, shape[0] - 1, shape[0], (0,)))
        return draft

    def grid(self) -> Iterator[Case]:
        for dtype in DTYPES:
            yield self.case(dtype, "grid", shape=[7, 333])
            yield self.case(dtype, "grid", shape=[6, 5, 7], dim=0)
            yield self.case(dtype, "grid", shape=[6, 45, 7], dim=1)
            yield self.case(dtype, "edge", shape=[9, 100], holes=True, dead=True)
            yield self.case(dtype, "edge", shape=[3, 1025], spread=3.0 if dtype == "float16" else 20.0)
            yield self.case(dtype, "edge", shape=[4, 200], x="mean1000", spread=1.0)
            yield self.case(dtype, "edge", shape=[4, 200], rise=1000.0)
            yield self.case(dtype, "edge", shape=[6, 8193])  # one term more than a power of two
        for dtype in DTYPES:
            yield self.case(dtype, "edge", "special", shape=[6, 40], x="special")
        yield self.case("float32", "edge", shape=[77])
        yield self.case("bfloat16", "edge", shape=[2, 3, 4, 50], dim=2)
        yield self.case("bfloat16", "edge", shape=[2, 2, 14, 18], dim=1)  # two terms: a rounded y shows in dx
        yield self.case("float32", "edge", "special", shape=[5, 1])  # one column: 1 whatever x is
        for dtype in DTYPES:
            yield self.case(dtype, "edge", "empty", shape=[0, 9])
            yield self.case(dtype, "edge", "strided", shape=[5, 64], broadcast=True)
        yield self.case("float32", "edge", "empty", shape=[9, 0])
        yield self.case("float32", "edge", "empty", shape=[9, 0], dim=0, x="special")
        yield self.case("bfloat16", "edge", "empty", shape=[0])
        yield self.case("float32", "edge", shape=[9, 40], dim=0, holes=True, dead=True)
        for dtype, layout in (
            ("float32", "transposed"),
            ("bfloat16", "sliced"),
            ("float16", "stepped"),
            ("float32", "gapped"),
            ("bfloat16", "reversed"),
        ):
            yield self.case(dtype, "edge", "strided", shape=[6, 70], layout=layout)
        for dtype in HALVES:
            yield self.case(dtype, "edge", shape=[2, 4099], spread=4.0)
        for dtype in DTYPES:
            yield self.case(dtype, "grid", shape=[8, 32771], suite="full")
            yield self.case(dtype, "grid", shape=[3, 16, 8, 5], dim=1, suite="full")
        yield from self.bad_cases()

    def strategy(self) -> SearchStrategy[dict[str, Param]]:
        from hypothesis import strategies as st

        @st.composite
        def recipe(draw: Any) -> dict[str, Param]:
            shape = draw(st.lists(st.integers(2, 24), min_size=1, max_size=4))
            made: dict[str, Param] = {"shape": shape, "dim": draw(st.integers(-len(shape), len(shape) - 1))}
            for flag in ("holes", "dead"):
                if draw(st.booleans()):
                    made[flag] = True
            if draw(st.booleans()):
                made["layout"] = draw(st.sampled_from(["transposed", "sliced", "stepped", "gapped", "reversed"]))
            return made

        return recipe()


FAMILIES = (SiluAndMul(), GeluAndMul(), Softmax())
