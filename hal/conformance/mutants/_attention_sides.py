"""Causality and windows are one thing: sides around i + (L - S). Faults of both, of results and of gradients.

A fault is a change of the arguments of one sequence, or of its (B, H, S, L) of what is seen.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from hal.conformance.mutants.mutant import Arguments

__all__ = ["CAUSAL", "WINDOW", "looks_ahead", "looks_back", "right", "shift"]

Change = Callable[[Arguments], Arguments]
Side = int | None


def shift(s: Arguments) -> int:
    """Position of query 0 among the keys."""
    return int(s["k"].shape[1] - s["q"].shape[1])


def right(s: Arguments, count: int) -> Arguments:
    """Causality that leaves `count` keys on the right of a query's own; with -1 not even that."""
    if not s["causal"]:
        return {}
    left, narrower = s["window"] or (None, None)
    return {"causal": False, "window": (left, count if narrower is None else min(narrower, count))}


def _sides(change: Callable[[Side, Side, Arguments], tuple[Side, Side]]) -> Change:
    return lambda s: {"window": s["window"] and change(s["window"][0], s["window"][1], s)}


def _more(count: Side, by: int) -> Side:
    return None if count is None else max(count + by, 0)


def _from_the_left(left: Side, right: Side, s: Arguments) -> tuple[Side, Side]:
    """A window around i, not around i + (L - S)."""
    return (None if left is None else left + shift(s)), (None if right is None else right - shift(s))


def _one_more(seen: Tensor, sign: int) -> Tensor:
    """In the middle row of the first head, the next key on one side is seen too."""
    if not seen.numel():
        return seen
    found = seen.clone()
    i = seen.shape[2] // 2
    row = seen[0, 0, i].nonzero()
    at = (int(row.max()) if sign > 0 else int(row.min())) + sign if row.numel() else -1
    if 0 <= at < seen.shape[3]:
        found[0, 0, i, at] = True
    return found


def looks_ahead(seen: Tensor, s: Arguments) -> Tensor:
    """One row of one head sees one key ahead."""
    return _one_more(seen, 1) if s["causal"] else seen


def looks_back(seen: Tensor, s: Arguments) -> Tensor:
    """One row of one head sees one key past the window."""
    return _one_more(seen, -1) if s["window"] is not None and s["window"][0] is not None else seen


CAUSAL: Mapping[str, Change] = {
    "it is never causal": lambda s: {"causal": False},
    "it is always causal": lambda s: {"causal": True},
    "causal is aligned top-left": lambda s: right(s, -shift(s)),
    "a query sees the key after its own": lambda s: right(s, 1),
    "a query does not see its own key": lambda s: right(s, -1),
}

WINDOW: Mapping[str, Change] = {
    "the window is ignored": lambda s: {"window": None},
    "a window count of 0 is unbounded": _sides(lambda left, right, s: (left or None, right or None)),
    "the window has no right side": _sides(lambda left, right, s: (left, None)),
    "the window is one wider on the left": _sides(lambda left, right, s: (_more(left, 1), right)),
    "the window is one narrower on the left": _sides(lambda left, right, s: (_more(left, -1), right)),
    "the window is one wider on the right": _sides(lambda left, right, s: (left, _more(right, 1))),
    "the window stands around i": _sides(_from_the_left),
    "the window needs causality": lambda s: {} if s["causal"] else {"window": None},
    "a window makes causal": lambda s: {"causal": s["causal"] or s["window"] is not None},
}
