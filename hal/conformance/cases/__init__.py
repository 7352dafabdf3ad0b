"""The cases: one module per family of ops, recipes drawn by hypothesis, and shapes captured from a real model."""

from __future__ import annotations

import importlib
from functools import lru_cache
from typing import TYPE_CHECKING

from hal.errors import ArgumentError

if TYPE_CHECKING:
    from hal.conformance.case import Case
    from hal.conformance.cases._family import Family

MODULES = (
    "norms",
    "pointwise",
    "products",
    "rotary",
    "attention",
    "ragged",
    "cache_writing",
    "cache_gathering",
    "cache_copying",
    "paged",
    "cross_entropy",
    "sampling",
)


@lru_cache(maxsize=1)
def families() -> dict[str, Family]:
    """The family of each op that has cases."""
    found: dict[str, Family] = {}
    for name in MODULES:
        module = importlib.import_module(f"hal.conformance.cases.{name}")
        found |= {family.op: family for family in module.FAMILIES}
    return found


def family(op: str) -> Family:
    """The family of an op."""
    try:
        return families()[op]
    except KeyError:
        raise ArgumentError(f"no conformance cases for {op!r}; ops with cases are {', '.join(families())}") from None


@lru_cache(maxsize=64)
def _own(op: str) -> tuple[Case, ...]:
    """All cases of an op, each id once, the quick ones' order kept."""
    from hal.conformance.cases import captured, drawn, gradients

    found: dict[str, Case] = {}
    for case in (*family(op).grid(), *drawn.cases(op), *captured.cases(op), *gradients.cases(op)):
        if case.id not in found or found[case.id].suite == "full":
            found[case.id] = case
    return tuple(found.values())


def collect(op: str | None, suite: str, backend: str | None) -> list[Case]:
    """The cases of a suite; plug-ins of `backend` may add their own."""
    if suite not in ("quick", "full"):
        raise ArgumentError(f"no suite is named {suite!r}; there are quick and full")
    found: list[Case] = []
    for name in families() if op is None else (family(op).op,):
        found += [case for case in (*_own(name), *_plugged(name, backend)) if suite == "full" or case.suite == "quick"]
    return found


def _plugged(op: str, backend: str | None) -> list[Case]:
    if backend is None:
        return []
    from hal import registry

    return list(registry.cases(op))


def listed(case_id: str) -> Case | None:
    """The case of this id, if a suite lists it."""
    op = case_id.partition("/")[0]
    if op not in families():
        return None
    return next((case for case in _own(op) if case.id == case_id), None)
