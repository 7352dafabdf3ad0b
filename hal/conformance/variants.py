"""What a variant of a question must agree with: the part of what is expected that its results are set against."""

from __future__ import annotations

import torch
from torch import Tensor

from hal.conformance.inputs import Results, Variant
from hal.conformance.rules import Expected

__all__ = ["restrict"]


def restrict(expected: tuple[Expected, ...], variant: Variant) -> tuple[Expected, ...]:
    """The part of what is expected that a variant's results must equal."""

    def cut(values: list[Tensor | None]) -> Results:
        return variant.expects(tuple(torch.zeros(()) if v is None else v for v in values))

    full = [want.Y for want in expected]
    Y = variant.expects(tuple(full))
    E = cut([torch.zeros_like(f) if w.E is None else w.E for f, w in zip(full, expected, strict=True)])
    open_ = cut(
        [
            torch.zeros_like(f, dtype=torch.bool) if w.open is None else w.open
            for f, w in zip(full, expected, strict=True)
        ]
    )
    exact = cut(
        [
            torch.zeros_like(f, dtype=torch.bool) if w.exact is None else w.exact
            for f, w in zip(full, expected, strict=True)
        ]
    )
    kept = expected[: len(Y)]
    return tuple(
        Expected(w.name, w.dtype, y, None if w.E is None else e, x, o, w.accumulator)
        for w, y, e, x, o in zip(kept, Y, E, exact, open_, strict=True)
    )
