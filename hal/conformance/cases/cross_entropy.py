"""Cases of cross_entropy.

Shape letters: T rows, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from hal.conformance.case import Case, Param
from hal.conformance.cases._family import DTYPES, Family, P, alike, change, elsewhere
from hal.conformance.inputs import Draft, Draw, Variant

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

REDUCTIONS = ("mean", "sum", "each")


class CrossEntropy(Family):
    """cross_entropy."""

    op = "cross_entropy"
    defaults: ClassVar[dict[str, Any]] = {
        "T": 6,
        "V": 33,
        "spread": 3.0,
        "ignored": "some",
        "ignore_index": -100,
        "smoothing": 0.0,
        "z": 0.0,
        "reduction": "mean",
        "holes": False,
        "odd": False,
        "broadcast": False,
    }
    arranged = ("logits", "target")
    bad: ClassVar[dict[str, Any]] = {
        "device": elsewhere("target"),
        "rank": ("ShapeError", ("logits",), change("logits", lambda x: x[None])),
        "rows": ("ShapeError", ("target",), change("target", lambda t: t[1:])),
        "target_dtype": ("DtypeError", ("target", "int32"), change("target", lambda t: t.int())),
        "int_logits": ("DtypeError", ("logits", "int64"), change("logits", lambda x: x.long())),
        "classes": ("ShapeError", ("V",), change("logits", lambda x: x[:, :0])),
        "target_high": ("ArgumentError", ("target", "33"), change("target", lambda t: torch.full_like(t, 33))),
        "target_low": ("ArgumentError", ("target", "-1"), change("target", lambda t: torch.full_like(t, -1))),
        "reduction": ("ArgumentError", ("reduction", "mean"), change("reduction", lambda _: "average")),
        "smoothing": ("ArgumentError", ("label_smoothing",), change("label_smoothing", lambda _: 1.5)),
        "smoothing_nan": ("ArgumentError", ("label_smoothing",), change("label_smoothing", lambda _: math.nan)),
        "z_loss": ("ArgumentError", ("z_loss",), change("z_loss", lambda _: -1.0)),
    }

    def draft(self, p: P, draw: Draw, dtype: torch.dtype) -> Draft:
        logits = (draw.normal("logits", (p.T, p.V)) * p.spread).to(dtype)
        target = draw.integers("target", (p.T,), 0, p.V)
        if p.holes:
            holes = draw.uniform("holes", (p.T, p.V)) < 0.3
            holes[torch.arange(p.T), target] = False
            logits = logits.masked_fill(holes, -math.inf)
        if p.odd:
            # a row each: NaN, +Inf, the target's logit −Inf, no finite logit, +Inf at the target; some are ignored
            logits[0::9, 0], logits[2::9, 0], logits[5::9] = math.nan, math.inf, -math.inf
            logits[3::9, target[3::9]], logits[6::9, target[6::9]] = -math.inf, math.inf
        if p.broadcast:
            logits = alike(logits, 0)
        if p.ignored == "some":
            target = torch.where(torch.arange(p.T) % 3 == 1, p.ignore_index, target)
        elif p.ignored == "all":
            target = torch.full_like(target, p.ignore_index)
        args: dict[str, Any] = {
            "logits": logits,
            "target": target,
            "ignore_index": p.ignore_index,
            "label_smoothing": p.smoothing,
            "z_loss": p.z,
            "reduction": "none" if p.reduction == "each" else p.reduction,
        }
        draft = Draft(args)
        ignored_T1 = (target == p.ignore_index)[:, None]
        if ignored_T1.any():
            draft.unused["logits"] = ignored_T1
            args["logits"] = logits.masked_fill(ignored_T1, 0.0)
        if p.T > 1 and p.reduction == "each":
            part = args | {"logits": args["logits"][-1:], "target": target[-1:]}
            draft.variants.append(
                Variant("the last row alone", (part,), lambda r: (r[0][-1:],), declared="batch_invariant")
            )
        if p.T and p.reduction != "each":
            order = draw.permutation("rows", p.T)
            moved = args | {"logits": args["logits"][order], "target": target[order]}
            draft.variants.append(Variant("rows in another order", (moved,)))
        return draft

    def grid(self) -> Iterator[Case]:
        for dtype in DTYPES:
            for reduction in REDUCTIONS:
                yield self.case(dtype, "grid", "poison", T=9, V=177, reduction=reduction)
            yield self.case(dtype, "grid", "poison", T=9, V=100, smoothing=0.1, reduction="each")
            yield self.case(dtype, "grid", "poison", T=9, V=100, z=0.01, reduction="each")
            yield self.case(dtype, "grid", "poison", T=9, V=100, smoothing=0.2, z=0.001)
            yield self.case(dtype, "edge", "poison", T=7, V=50, spread=50.0, reduction="each")
            yield self.case(dtype, "edge", "poison", T=7, V=50, spread=400.0, reduction="each")
            # one class more than a power of two
            yield self.case(dtype, "edge", "poison", T=5, V=8193, spread=1.0, reduction="each")
            yield self.case(dtype, "edge", "special", "poison", T=9, V=33, odd=True, reduction="each")
            yield self.case(dtype, "edge", "poison", T=9, V=33, ignore_index=2, reduction="each")
            yield self.case(dtype, "edge", "poison", T=4, V=33, ignored="all")
            yield self.case(dtype, "edge", "empty", T=0, V=33)
            yield self.case(dtype, "edge", "strided", T=5, V=50, ignored="never", broadcast=True, reduction="each")
        for reduction in REDUCTIONS:
            yield self.case("float32", "edge", "poison", T=4, V=33, ignored="all", reduction=reduction)
            yield self.case("float32", "edge", "empty", T=0, V=33, reduction=reduction)
        yield self.case("bfloat16", "grid", T=5, V=1025, ignored="never", smoothing=0.1, z=0.01)
        yield self.case("float32", "edge", "special", T=5, V=1, ignored="never")  # one class: the loss is 0
        yield self.case("float32", "edge", T=6, V=40, holes=True, reduction="each")
        yield self.case("float32", "edge", T=1, V=33, ignored="never")
        for i, layout in enumerate(("sliced", "stepped", "transposed", "gapped")):
            yield self.case(
                ("float32", "bfloat16", "float16")[i % 3], "edge", "strided", T=6, V=70, layout=layout, reduction="each"
            )
        for dtype in DTYPES:
            yield self.case(dtype, "grid", "poison", T=20, V=32003, reduction="each", suite="full")
            yield self.case(dtype, "grid", "poison", T=300, V=257, smoothing=0.1, suite="full")
        yield from self.bad_cases()

    def strategy(self) -> SearchStrategy[dict[str, Param]]:
        from hypothesis import strategies as st

        return st.fixed_dictionaries(
            {"T": st.integers(1, 12), "V": st.integers(2, 300), "reduction": st.sampled_from(REDUCTIONS)},
            optional={
                "smoothing": st.sampled_from([0.05, 0.5]),
                "z": st.sampled_from([0.01, 1.0]),
                "spread": st.sampled_from([0.5, 20.0]),
                "ignored": st.sampled_from(["all", "never"]),
                "layout": st.sampled_from(["sliced", "stepped", "transposed"]),
            },
        )


FAMILIES = (CrossEntropy(),)
