"""Cases of copy_kv_blocks.

Shape letters: N blocks, P slots per block, K kv heads, D head dim of k, E head dim of v.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from hal.conformance.case import Case, Param
from hal.conformance.cases._family import DTYPES, Family, P, alike, change, elsewhere
from hal.conformance.cases._pages import CODES, cache
from hal.conformance.cases._values import special
from hal.conformance.inputs import Draft, Draw

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy


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
        "special": False,
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
        sources = torch.tensor(src, dtype=torch.int64)

        def caches(name: str, width: int) -> list[Tensor]:
            found = {f"{name}{i}": cache(draw, f"{name}{i}", (p.N, p.P, p.K, width), to) for i in range(p.layers)}
            odd = p.special and to.itemsize > 1
            return [special(draw, key, t) if odd else t for key, t in found.items()]

        return Draft(
            {
                "k_caches": caches("k", p.D),
                "v_caches": caches("v", E),
                "src": alike(sources, 0) if p.pairs == "fan" else sources,
                "dst": torch.tensor(dst, dtype=torch.int64),
            }
        )

    def grid(self) -> Iterator[Case]:
        for dtype in DTYPES:
            yield self.case(dtype, "grid")
            yield self.case(dtype, "edge", pairs="chain", layers=1)
            yield self.case(dtype, "edge", pairs="ring")
            yield self.case(dtype, "edge", "empty", pairs="nothing")
            yield self.case(dtype, "edge", "strided", pairs="fan")
            yield self.case(dtype, "edge", "special", special=True)
        for pairs in ("swap", "self"):
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


FAMILIES = (CopyKvBlocks(),)
