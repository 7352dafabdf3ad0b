"""What the implementations of a run say of themselves, for the report's capability matrix."""

from __future__ import annotations

from collections.abc import Iterable

from hal.capability import Implementation
from hal.conformance.report import Accepts, Bounds, Offer, Result
from hal.conformance.site import Site

__all__ = ["offer", "offers"]


def offers(site: Site, results: Iterable[Result]) -> tuple[Offer, ...]:
    """What each implementation that was judged accepts and declares, in the order of first appearance."""
    judged = dict.fromkeys((result.op, result.implementation) for result in results)
    return tuple(offer(site.implementation(op, name)) for op, name in judged)


def offer(implementation: Implementation) -> Offer:
    """One implementation's declaration as data."""
    supports = implementation.supports
    told = supports.to_dict()
    limits = {name: Bounds(**bounds) for name, bounds in told.pop("limits").items()}
    where = told.pop("where")
    return Offer(
        op=implementation.op,
        implementation=implementation.name,
        kind=implementation.kind,
        accepts=Accepts(**told, limits=limits, where=None if where is None else " ".join(where.split())),
        declares=implementation.declares.to_dict(),
    )
