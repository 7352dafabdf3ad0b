"""What every family of cases shares: defaults, the case constructor, poison, layouts, variants, bad input."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from hal.conformance.case import Case, Param, Suite, make
from hal.conformance.inputs import LAYOUTS, Draft, Draw, Inputs, Results, Variant, differs, place
from hal.contract import OPS
from hal.errors import ArgumentError

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

__all__ = ["DTYPES", "HALVES", "Family", "P", "alike", "change", "elsewhere", "product", "rows"]

DTYPES = ("float64", "float32", "bfloat16", "float16")
HALVES = ("bfloat16", "float16")
DENSE_LAST = ("contiguous", "offset", "sliced", "gapped", "swapped")
POISONS = ("nan", "inf", "huge")
P = SimpleNamespace
Spoil = Callable[[dict[str, Any]], None]


class Family:
    """The cases of one op.

    defaults: every recipe parameter with its default; ids spell out only what differs. `layout` and `poison`
    belong to every family. arranged: the parameters that `layout` applies to. bad: kind -> (error, words that
    its message must contain, what to do to the arguments).
    """

    op: ClassVar[str]
    # Caches must keep a last stride of 1.
    dense_last: ClassVar[tuple[str, ...]] = ()
    defaults: ClassVar[Mapping[str, Any]] = {}
    arranged: ClassVar[tuple[str, ...]] = ()
    bad: ClassVar[Mapping[str, tuple[str, tuple[str, ...], Spoil]]] = {}

    def draft(self, p: P, draw: Draw, dtype: torch.dtype) -> Draft:
        """The tensors of a recipe, on the CPU."""
        raise NotImplementedError

    def grid(self) -> Iterator[Case]:
        """The listed cases, quick ones and full ones."""
        raise NotImplementedError

    def strategy(self) -> SearchStrategy[dict[str, Param]]:
        """Recipes to draw from (hypothesis)."""
        raise NotImplementedError

    def case(self, dtype: str, *tags: str, suite: Suite = "quick", **params: Any) -> Case:
        """A case of this family; parameters equal to their defaults are left out of the id."""
        known = self._defaults()
        unknown = set(params) - set(known)
        if unknown:
            raise ArgumentError(
                f"{self.op} cases have no parameter {', '.join(sorted(unknown))}; they have {', '.join(known)}"
            )
        told = {key: _plain(value) for key, value in params.items() if _plain(value) != known[key]}
        ordered = {key: told[key] for key in known if key in told}
        return make(self.op, dtype, ordered, tags, suite)

    def params(self, case: Case) -> P:
        """The case's parameters, defaults filled in."""
        known = self._defaults()
        unknown = set(case.params) - set(known)
        if unknown:
            raise ArgumentError(
                f"{case.id}: {self.op} cases have no parameter {', '.join(sorted(unknown))}; "
                f"they have {', '.join(known)}"
            )
        return P(**(known | dict(case.params)))

    def drafted(self, case: Case) -> Draft:
        """The draft of a case, with its layout and, for a bad-input case, the damage done."""
        p, dtype = self.params(case), getattr(torch, case.dtype)
        if p.captured is not None:
            from hal.conformance.cases import captured

            return captured.draft(p.captured, dtype)
        draft = self.draft(p, Draw(case.seed), dtype)
        if p.layout != "contiguous":
            draft.layouts |= {name: self._legal(name, p.layout) for name in self._tensors(draft)}
        if p.bad is not None:
            if p.bad not in self.bad:
                raise ArgumentError(f"{case.id}: {self.op} knows no bad input {p.bad!r}; it has {', '.join(self.bad)}")
            draft.raises, draft.mentions, spoil = self.bad[p.bad]
            draft.unused, draft.layouts = {}, {}
            spoil(draft.args)
        return draft

    def build(self, case: Case, device: str | torch.device) -> Inputs:
        """The inputs of a case."""
        poison = None if case.bad_input else self.poison(case)
        return place(self.drafted(case), device, poison, OPS[self.op].host_lengths)

    def poison(self, case: Case) -> str:
        """What stands where nothing may look."""
        asked = case.params.get("poison", "auto")
        return POISONS[case.seed % 3] if asked == "auto" else str(asked)

    def other_layouts(self, case: Case, draft: Draft) -> dict[str, str]:
        """A layout per tensor for the strided variant of a contiguous case."""
        return {name: self._other(case.seed + i, name, draft.args[name]) for i, name in enumerate(self._tensors(draft))}

    def _other(self, at: int, name: str, value: Tensor | list[Tensor]) -> str:
        """A legal layout that differs from the dense one on a tensor of this shape, if there is one."""
        t = value if isinstance(value, Tensor) else value[0]
        legal = [kind for kind in LAYOUTS[2:] if self._legal(name, kind) == kind and differs(t.shape, kind)]
        return legal[at % len(legal)] if legal else "offset"

    def bad_cases(self, **params: Any) -> Iterator[Case]:
        """One case per kind of bad input."""
        for kind in self.bad:
            yield self.case("float32", "edge", "bad-input", bad=kind, **params)

    def _tensors(self, draft: Draft) -> list[str]:
        held = {name for name, value in draft.args.items() if isinstance(value, Tensor) or _is_list(value)}
        return [name for name in self.arranged if name in held]

    def _legal(self, name: str, layout: str) -> str:
        return layout if name not in self.dense_last or layout in DENSE_LAST else "swapped"

    def _defaults(self) -> dict[str, Any]:
        return {**self.defaults, "layout": "contiguous", "poison": "auto", "captured": None, "bad": None, "grad": False}


def rows(
    args: Mapping[str, Any],
    axes: Mapping[str, int],
    start: int,
    stop: int,
    result_axes: Sequence[int | None],
    declared: str = "batch_invariant",
) -> Variant:
    """The variant that runs some of the rows alone; `axes` gives the batch axis of each argument that has one."""
    part = dict(args)
    for name, axis in axes.items():
        if isinstance(part[name], Tensor):
            part[name] = part[name].narrow(axis, start, stop - start)

    def expects(results: Results) -> Results:
        return tuple(
            t if axis is None else t.narrow(axis, start, stop - start)
            for t, axis in zip(results, result_axes, strict=True)
        )

    return Variant(f"rows {start} to {stop - 1} alone", (part,), expects, declared=declared)


def alike(t: Tensor, axis: int) -> Tensor:
    """The first of an axis in place of all: a stride of 0."""
    return t.narrow(axis, 0, min(1, t.shape[axis])).expand(t.shape)


def change(name: str, make: Callable[[Any], Any]) -> Spoil:
    """A spoiler that replaces one argument."""

    def spoil(args: dict[str, Any]) -> None:
        args[name] = make(args[name])

    return spoil


def elsewhere(name: str) -> tuple[str, tuple[str, ...], Spoil]:
    """The bad input of a tensor on another device than the others."""
    return "DeviceError", (name, "meta"), change(name, lambda t: t.to("meta"))


def _is_list(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], Tensor)


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def product(**axes: Iterable[Any]) -> Iterator[dict[str, Any]]:
    """Every combination of the named axes."""
    import itertools

    for values in itertools.product(*axes.values()):
        yield dict(zip(axes, values, strict=True))
