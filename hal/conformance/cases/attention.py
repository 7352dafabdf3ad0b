"""Cases of attention over dense batches.

Shape letters: B batch, S queries, L keys, H query heads, K kv heads, D head dim of q and k, E head dim of v.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from hal.conformance.case import Case, Param
from hal.conformance.cases._family import DTYPES, HALVES, Family, P, alike, change, elsewhere, rows
from hal.conformance.cases._heads import OPTIONS, expanded, heads, merged, options, visible
from hal.conformance.inputs import Draft, Draw, Results, Variant

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

MASKS = ("bool", "columns", "dead", "bias", "bias32", "holes", "lowest", "low", "alibi")


class Attention(Family):
    """attention."""

    op = "attention"
    defaults: ClassVar[dict[str, Any]] = {
        "B": 1,
        "S": 5,
        "L": 9,
        **OPTIONS,
        "mask": None,
        "mask_shape": "BHSL",
        "special": False,
        "spoilt": False,
        "expand_kv": False,
    }
    arranged = ("q", "k", "v", "mask", "sinks")
    bad: ClassVar[dict[str, Any]] = {
        "device": elsewhere("k"),
        "q_rank": ("ShapeError", ("q",), change("q", lambda q: q[0])),
        "head_ratio": ("ShapeError", ("head",), change("q", lambda q: q[:, :, :1].expand(-1, -1, 3, -1))),
        "head_dim": ("ShapeError", ("head dim",), change("k", lambda k: k[..., 1:])),
        "batch": ("ShapeError", ("batch",), change("q", lambda q: torch.cat((q, q)))),
        "lengths": ("ShapeError", ("keys",), change("v", lambda v: v[:, 1:])),
        "k_dtype": ("DtypeError", ("k",), change("k", lambda k: k.double())),
        "int_q": ("DtypeError", ("q", "int64"), change("q", lambda q: q.long())),
        "mask_dtype": ("DtypeError", ("mask", "int64"), change("mask", lambda _: torch.zeros(5, 9, dtype=torch.int64))),
        "mask_shape": ("ShapeError", ("mask",), change("mask", lambda _: torch.ones(4, 9, dtype=torch.bool))),
        "softcap_zero": ("ArgumentError", ("softcap",), change("softcap", lambda _: 0.0)),
        "softcap_negative": ("ArgumentError", ("softcap",), change("softcap", lambda _: -30.0)),
        "scale_nan": ("ArgumentError", ("scale",), change("scale", lambda _: math.nan)),
        "window_negative": ("ArgumentError", ("window",), change("window", lambda _: (-1, 0))),
        "window_number": ("ArgumentError", ("window",), change("window", lambda _: 4)),
        "sinks_shape": ("ShapeError", ("sinks",), change("sinks", lambda _: torch.zeros(3))),
        "sinks_dtype": ("DtypeError", ("sinks",), change("sinks", lambda _: torch.zeros(4, dtype=torch.int64))),
        "head_dim_577": (
            "ShapeError",
            ("577",),
            lambda args: args.update({name: torch.zeros(1, 3, 2, 577) for name in ("q", "k", "v")}),
        ),
    }

    def draft(self, p: P, draw: Draw, dtype: torch.dtype) -> Draft:
        E = p.D if p.E is None else p.E
        q = heads(draw, "q", (p.B, p.S), p.H, p.D, dtype, p.spread)
        k = heads(draw, "k", (p.B, p.L), p.K, p.D, dtype, 1.0)
        v = heads(draw, "v", (p.B, p.L), p.K, E, dtype, 1.0)
        if p.expand_kv:
            k, v = alike(k, 0), alike(v, 0)
        mask = None if p.mask is None else self.mask(p, draw, dtype)
        seen_BHSL = visible(p.S, p.L, p.causal, p.window).expand(p.B, p.H, p.S, p.L)
        if mask is not None:
            seen_BHSL = seen_BHSL & (mask if mask.dtype is torch.bool else mask != -math.inf)
        if p.special:
            q[0, 0, 0, 0] = math.nan
        args: dict[str, Any] = {"q": q, "k": k, "v": v, "mask": mask, **options(p, draw, dtype)}
        draft = Draft(args)
        unseen_BL = ~seen_BHSL.any(2).any(1)
        if unseen_BL.any() and not p.expand_kv:
            draft.unused |= dict.fromkeys(("k", "v"), unseen_BL[:, :, None, None])
            if not p.special:
                for name in ("k", "v"):
                    args[name] = args[name].masked_fill(unseen_BL[:, :, None, None], 0.0)
        if p.spoilt:
            self._spoil(p, draft)
        elif not p.special:
            draft.variants += self._variants(p, args, seen_BHSL)
        return draft

    def mask(self, p: P, draw: Draw, dtype: torch.dtype) -> Tensor:
        """A mask of one kind, over the axes that mask_shape names (o: one, broadcast)."""
        full = {"B": p.B, "H": p.H, "S": p.S, "L": p.L}
        shape = tuple(full.get(letter, 1) for letter in p.mask_shape)
        if p.mask in ("bool", "columns", "dead"):
            seen = draw.uniform("mask", shape) < 0.6
            if p.mask == "columns":
                seen[..., torch.arange(shape[-1]) % 4 == 1] = False
            if p.mask == "dead":
                seen[..., : max(1, shape[-2] // 3), :] = False
            mask = seen
        else:
            bias = draw.normal("mask", shape) * 2
            if p.mask == "alibi":
                bias = -0.25 * (torch.arange(shape[-1]).flip(0)).double().expand(shape)
            elif p.mask == "holes":
                bias = bias.masked_fill(draw.uniform("holes", shape) < 0.4, -math.inf)
                bias[..., torch.arange(shape[-1]) % 5 == 3] = -math.inf
            elif p.mask == "floor":
                bias[..., 1:, :] = torch.finfo(dtype).min  # whole rows of it, beside small logits
            elif p.mask in ("low", "lowest"):
                # float16's lowest is a number like any other in every dtype, and small enough to bound errors by.
                floor = torch.finfo(torch.float16 if p.mask == "low" else dtype).min
                bias = bias.masked_fill(draw.uniform("holes", shape) < 0.4, floor)
                bias[..., :1, :] = floor  # a row of nothing else is a mean, not a dead row
            mask = bias.to(torch.float32 if p.mask == "bias32" else dtype)
        if p.mask_shape == "BHSL" or len(p.mask_shape) < 4:
            return mask
        return mask.expand(p.B, p.H, p.S, p.L)

    def _spoil(self, p: P, draft: Draft) -> None:
        """A NaN value that some query sees may spoil every query of its sequence and head, and nothing else."""
        draft.args["v"][0, -1, 0, 0] = math.nan
        o_BSH = torch.zeros(p.B, p.S, p.H, dtype=torch.bool)
        o_BSH[0, :, : p.H // p.K] = True
        E = p.D if p.E is None else p.E
        draft.unjudged["o"] = o_BSH[..., None].expand(p.B, p.S, p.H, E)
        if p.lse:
            draft.unjudged["lse"] = o_BSH.transpose(1, 2)

    def _variants(self, p: P, args: dict[str, Any], seen_BHSL: Tensor) -> Iterator[Variant]:
        lse_axis = 0 if p.lse else None
        if p.B > 1:
            axes = {"q": 0, "k": 0, "v": 0}
            if args["mask"] is not None and args["mask"].dim() == 4 and args["mask"].shape[0] == p.B:
                axes["mask"] = 0
            yield rows(args, axes, p.B - 1, p.B, (0, lse_axis))
        if p.H > p.K:
            yield expanded(args, ("k", "v"), 2, p.H // p.K)
        if p.S > 1:
            yield self._last_row(p, args)
        if p.window is None:
            far = p.S + p.L
            yield Variant("an unbounded window", (args | {"window": (None, None)},))
            yield Variant("a window wider than everything", (args | {"window": (far, far)},))
        if p.mask is None:
            yield Variant("a mask that is True throughout", (args | {"mask": torch.ones(1, 1, dtype=torch.bool)},))
        if p.L > 1 and p.S:
            yield self._split(p, args, seen_BHSL)

    def _last_row(self, p: P, args: dict[str, Any]) -> Variant:
        mask = args["mask"]
        if mask is not None and mask.dim() >= 2 and mask.shape[-2] == p.S:
            mask = mask[..., -1:, :]

        def expects(results: Results) -> Results:
            o, lse = results
            return o[:, -1:], lse[..., -1:] if p.lse else lse

        return Variant("the last query alone", (args | {"q": args["q"][:, -1:], "mask": mask},), expects)

    def _split(self, p: P, args: dict[str, Any], seen_BHSL: Tensor) -> Variant:
        wide = torch.float64 if args["q"].dtype is torch.float64 else torch.float32
        bias = torch.zeros(p.B, p.H, p.S, p.L, dtype=wide)
        if args["mask"] is not None and args["mask"].dtype is not torch.bool:
            bias = bias + args["mask"].to(wide)
        bias = bias.masked_fill(~seen_BHSL, -math.inf)
        at = (p.L + 1) // 2
        whole = args | {"causal": False, "window": None, "return_lse": True}
        calls = tuple(
            whole
            | {
                "k": args["k"][:, low:high],
                "v": args["v"][:, low:high],
                "mask": bias[..., low:high],
                "sinks": args["sinks"] if low == 0 else None,
            }
            for low, high in ((0, at), (at, p.L))
        )

        def combine(parts: list[Results]) -> Results:
            (o, lse), _ = merged(parts, True)
            return (o, lse) if p.lse else (o, lse.new_empty(0))

        def extra(parts: list[Results]) -> tuple[Tensor | float, ...]:
            _, (o, lse) = merged(parts, True)
            return (o, lse) if p.lse else (o, 0.0)

        return Variant("keys in two pieces, merged", calls, combine=combine, extra=extra)

    def grid(self) -> Iterator[Case]:
        for dtype in DTYPES:
            yield self.case(dtype, "grid", S=17, L=17, H=3, K=1, causal=True, lse=True)
            yield self.case(dtype, "grid", B=2, S=7, L=33, H=4, K=2, D=80, lse=True)
            yield self.case(dtype, "edge", S=4, L=19, H=7, K=1, causal=True, lse=True)
            yield self.case(dtype, "edge", S=13, L=6, H=2, K=2, causal=True, lse=True)  # rows that see nothing
            yield self.case(dtype, "grid", S=21, L=21, H=3, K=3, D=20, causal=True, window=[6, 0])
            yield self.case(dtype, "grid", S=9, L=24, H=2, K=1, D=96, window=[5, 3], lse=True)
            yield self.case(dtype, "grid", S=9, L=30, H=4, K=2, softcap=1.5, causal=True, lse=True)
            yield self.case(dtype, "grid", S=9, L=30, H=4, K=2, scale=0.5, lse=True)
            yield self.case(dtype, "grid", S=9, L=12, H=6, K=2, sinks="same", causal=True, lse=True)
            yield self.case(dtype, "grid", S=9, L=12, H=2, K=1, window=[4, 0], lse=True)
            yield self.case(dtype, "grid", S=9, L=12, H=2, K=1, window=[0, 3], lse=True)
            yield self.case(dtype, "edge", S=9, L=5, H=6, K=2, sinks="same", loud=True, causal=True, lse=True)
            # Scores whose exponentials overflow unless the largest is taken out.
            spread = 600.0 if dtype == "float64" else 60.0
            yield self.case(dtype, "edge", S=5, L=40, H=2, K=1, D=32, spread=spread, lse=True)
            # Hidden logits so much larger than the seen ones that nothing is left of these beside them.
            yield self.case(dtype, "edge", S=9, L=9, H=2, K=1, D=32, causal=True, spread=4 * spread, lse=True)
            # One key more or less is one part in 8,193 of the mass; near equal scores leave no room for it in lse.
            yield self.case(dtype, "edge", S=1, L=8193, H=2, K=1, D=16, spread=0.1, lse=True)
            yield self.case(
                dtype,
                "grid",
                S=8,
                L=20,
                H=2,
                K=1,
                D=24,
                E=40,
                softcap=2.0,
                mask="bias",
                sinks="same",
                causal=True,
                window=[7, None],
                lse=True,
            )
            # The lowest number leaves nothing of a logit: rows of nothing else are means, by logits next to 0 alone.
            yield self.case(dtype, "edge", S=6, L=23, H=4, K=2, D=32, mask="floor", spread=0.001)
            for mask in ("bool", "dead", "bias", "holes", "lowest", "low"):
                yield self.case(dtype, "grid", B=2, S=6, L=23, H=4, K=2, D=32, mask=mask, lse=True)
        for dtype, D in zip(DTYPES * 3, (1, 20, 64, 72, 80, 96, 128, 192, 256, 576, 3, 120), strict=True):
            yield self.case(
                dtype, "grid", S=6, L=37, H=2, K=1, D=D, causal=True, lse=True, spread=2.0 if D > 1 else 4.0
            )
        for D in (20, 64, 72, 192, 576):
            yield self.case("bfloat16", "grid", S=6, L=37, H=2, K=1, D=D, causal=True)
        for dtype in HALVES:
            yield self.case(dtype, "grid", S=3, L=40, H=71, K=1, D=64, causal=True)
            yield self.case(dtype, "grid", S=3, L=40, H=4, K=2, D=192, E=128, causal=True, lse=True)
            yield self.case(dtype, "grid", S=9, L=12, H=6, K=2, sinks="float32", causal=True, window=[4, 0], lse=True)
            yield self.case(dtype, "edge", S=5, L=64, H=2, K=2, mask="bias32", lse=True)
            yield self.case(dtype, "edge", S=5, L=300, H=2, K=1, spread=12.0, lse=True)
        for dtype in ("float32", "bfloat16"):
            yield self.case(dtype, "grid", S=1, L=129, H=9, K=3)
            yield self.case(dtype, "edge", "poison", B=2, S=6, L=23, H=4, K=2, mask="columns", lse=True)
            yield self.case(dtype, "edge", "poison", S=3, L=40, H=2, K=1, window=[4, 0], causal=True, lse=True)
            yield self.case(dtype, "edge", B=2, S=6, L=8, H=4, K=2, D=32, spoilt=True, lse=True)
            for shape in ("BooL", "oHSL", "SL", "ooSo", "L"):
                yield self.case(dtype, "grid", B=2, S=6, L=8, H=4, K=2, D=32, mask="bool", mask_shape=shape, lse=True)
            yield self.case(dtype, "grid", S=6, L=30, H=2, K=1, mask="alibi", mask_shape="BoSL", causal=True)
        for dtype in DTYPES:
            yield self.case(dtype, "edge", "empty", S=0, L=9)
        yield self.case("float32", "edge", "empty", S=4, L=0, lse=True)
        yield self.case("float32", "edge", "empty", S=4, L=0, sinks="same", lse=True)
        yield self.case("float32", "edge", "empty", S=3, L=0, H=3, D=4, sinks="same", lse=True)
        yield self.case("bfloat16", "edge", "empty", B=0, lse=True)
        for dtype in DTYPES:
            yield self.case(dtype, "edge", "special", S=5, L=7, H=2, K=1, special=True, lse=True)
            yield self.case(dtype, "edge", "strided", B=2, S=5, L=9, H=4, K=2, expand_kv=True)
        for i, layout in enumerate(("offset", "sliced", "stepped", "transposed", "gapped", "reversed", "swapped")):
            yield self.case(
                ("float32", "bfloat16", "float16")[i % 3],
                "edge",
                "strided",
                B=2,
                S=7,
                L=12,
                H=4,
                K=2,
                D=40,
                causal=True,
                mask="bool",
                layout=layout,
            )
        for dtype in DTYPES:
            yield self.case(dtype, "grid", B=2, S=65, L=130, H=9, K=3, causal=True, lse=True, suite="full")
            yield self.case(dtype, "grid", S=1, L=2100, H=8, K=2, D=128, lse=True, suite="full")
            yield self.case(dtype, "grid", S=40, L=600, H=4, K=1, D=64, causal=True, window=[127, 0], suite="full")
            for D in (16, 33, 48, 64, 112, 128, 160, 224, 256, 320, 512, 576):
                yield self.case(dtype, "grid", S=9, L=50, H=3, K=1, D=D, causal=True, lse=True, suite="full")
            yield self.case(dtype, "grid", S=5, L=60, H=71, K=1, D=64, lse=True, suite="full")
            for mask in MASKS:
                yield self.case(dtype, "grid", S=30, L=70, H=4, K=2, mask=mask, causal=True, lse=True, suite="full")
        yield from self.bad_cases(H=4, K=2)

    def strategy(self) -> SearchStrategy[dict[str, Param]]:
        from hypothesis import strategies as st

        @st.composite
        def recipe(draw: Any) -> dict[str, Param]:
            K = draw(st.integers(1, 3))
            made: dict[str, Param] = {
                "B": draw(st.integers(1, 3)),
                "S": draw(st.integers(1, 20)),
                "L": draw(st.integers(2, 45)),
                "H": K * draw(st.integers(1, 4)),
                "K": K,
                "D": draw(st.integers(4, 140)),
            }
            optional(
                draw,
                made,
                E=st.integers(2, 100),
                causal=st.just(True),
                softcap=st.sampled_from([1.0, 20.0]),
                scale=st.sampled_from([0.05, 0.3]),
                sinks=st.sampled_from(["same", "float32"]),
                lse=st.just(True),
                window=st.lists(st.one_of(st.none(), st.integers(0, 20)), min_size=2, max_size=2),
                mask=st.sampled_from(["bool", "dead", "bias", "holes"]),
                layout=st.sampled_from(["sliced", "stepped", "transposed", "gapped", "reversed", "swapped"]),
            )
            return made

        return recipe()


def optional(draw: Any, made: dict[str, Param], **choices: Any) -> None:
    """Draw some of the choices into a recipe."""
    from hypothesis import strategies as st

    for name, choice in choices.items():
        if draw(st.booleans()):
            made[name] = draw(choice)


FAMILIES = (Attention(),)
