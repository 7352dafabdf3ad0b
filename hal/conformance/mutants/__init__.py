"""Implementations that are wrong on purpose, each in one way: what the suite must see to be worth trusting.

One module per family of operators lists them; `convention` says which convention of the contract a mutant breaks.
"""

from __future__ import annotations

import functools

from hal.conformance.mutants.mutant import Candidate, Mutant

__all__ = ["Candidate", "Mutant", "mutants"]


@functools.cache
def mutants() -> tuple[Mutant, ...]:
    """Every mutant, by operator."""
    import hal.ops  # noqa: F401  (fills OPS)
    from hal.conformance.mutants import (
        attention,
        attention_gradients,
        cache,
        everywhere,
        everywhere_gradients,
        gradients,
        losses,
        norms,
        pointwise,
        sampling,
    )
    from hal.contract import OPS

    modules = (
        everywhere, norms, pointwise, losses, attention, cache, sampling, gradients, attention_gradients,
        everywhere_gradients,
    )  # fmt: skip
    found = [mutant for module in modules for mutant in module.MUTANTS]
    order = {op: at for at, op in enumerate(OPS)}
    return tuple(sorted(found, key=lambda mutant: order[mutant.op]))
