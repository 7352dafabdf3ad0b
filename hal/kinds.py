"""What kind of value each argument takes, read off the torch op's schema, and the error for any other.

torch's own refusal comes late, in words of the schema, and only on the way through the torch op; and Python would
take True for 1, a number for a flag and a float for a count without a word.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from hal.contract import Args, Op
from hal.errors import ArgumentError

__all__ = ["check_kinds", "check_packed", "fits_int64"]


class _Kind(NamedTuple):
    """How a kind is called, the types that have it beyond doubt, and the test for the others."""

    words: str
    usual: tuple[type, ...]
    holds: Callable[[Any], bool]


class _Parameter(NamedTuple):
    """A public parameter: the kinds that it may have, or that each of its members has; whether it may be None."""

    name: str
    kinds: tuple[_Kind, ...]
    members: bool
    optional: bool


def fits_int64(value: int) -> bool:
    """Whether a number fits what a kernel is handed."""
    return -(2**63) <= value < 2**63


def _is_integer(value: Any) -> bool:
    if isinstance(value, torch.SymInt):
        return True
    return isinstance(value, int) and not isinstance(value, bool) and fits_int64(value)


def _is_number(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float | torch.SymInt | torch.SymFloat):
        return False
    return not isinstance(value, int) or abs(value) < 1e300


_TENSOR = _Kind("a tensor", (Tensor, Parameter), lambda value: isinstance(value, Tensor))
_INTEGER = _Kind("an integer of 64 bits", (int,), _is_integer)
_KINDS = {
    "Tensor": _TENSOR,
    "Tensor[]": _Kind(
        "a list of tensors", (), lambda value: isinstance(value, list | tuple) and all(map(_TENSOR.holds, value))
    ),
    "int": _INTEGER,
    "SymInt": _INTEGER,
    "float": _Kind("a number", (float, int), _is_number),
    "bool": _Kind("True or False", (bool,), lambda value: isinstance(value, bool | torch.SymBool)),
    "str": _Kind("a string", (str,), lambda value: isinstance(value, str)),
    "ScalarType": _Kind("a torch dtype", (torch.dtype,), lambda value: isinstance(value, torch.dtype)),
}


def _written(op: Op) -> dict[str, str]:
    """The schema's types by argument, such as `Tensor?`, without what they say on aliases."""
    found = {}
    for part in op.schema.split(","):
        written, name = part.split()
        before, alias, after = written.partition("(")
        found[name] = before + after.partition(")")[2] if alias else written
    return found


@lru_cache(None)
def _usual(op: Op) -> tuple[frozenset[type], ...]:
    return tuple(
        frozenset((*_KINDS[written.rstrip("?")].usual, *((type(None),) if written.endswith("?") else ())))
        for written in _written(op).values()
    )


@lru_cache(None)
def _known(op: Op) -> set[tuple[type, ...]]:
    """The types of calls that were found to be right, by their types alone."""
    return set()


@lru_cache(None)
def _parameters(op: Op) -> tuple[_Parameter, ...]:
    return tuple(_read(op))


def _read(op: Op) -> Iterator[_Parameter]:
    types = _written(op)
    for name in op.signature.parameters:
        found = [types[part] for part in (name, *op.splits.get(name, ())) if part in types]
        if found:
            kinds = tuple(dict.fromkeys(_KINDS[written.rstrip("?")] for written in found))
            members = name not in types and len(found) > 1
            optional = members or op.signature.parameters[name].default is None
            yield _Parameter(name, kinds, members, optional or (len(found) == 1 and found[0].endswith("?")))


def check_kinds(op: Op, a: Args) -> None:
    """ArgumentError for an argument of a kind that the operator does not take, or a tensor without plain strides."""
    for name, kinds, members, optional in _parameters(op):
        value = getattr(a, name)
        if members:
            # Whether it has members at all, and how many, the operator says best.
            if isinstance(value, list | tuple):
                for i, member in enumerate(value):
                    _check(op, f"{name}[{i}]", member, kinds, optional)
        else:
            _check(op, name, value, kinds, optional)


def check_packed(op: Op, packed: Sequence[Any]) -> None:
    """The same for the torch op's arguments, of which torch would turn many into what it wants; cheap once known."""
    types = (*map(type, packed),)
    known = _known(op)
    if types not in known:
        check_kinds(op, Args(**op.unpack(packed)))
        if all(kind in usual for kind, usual in zip(types, _usual(op), strict=True)):
            known.add(types)


def _check(op: Op, name: str, value: Any, kinds: tuple[_Kind, ...], optional: bool) -> None:
    if value is None and optional:
        return
    if not any(kind.holds(value) for kind in kinds):
        words = " or ".join((*(kind.words for kind in kinds), *(("None",) if optional else ())))
        raise ArgumentError(f"{op.name}: {name} is {_shown(value)}; pass {words}")
    for t in value if isinstance(value, list | tuple) else (value,):
        if isinstance(t, Tensor) and (t.layout is not torch.strided or t.is_nested):
            what = "nested" if t.is_nested else str(t.layout).removeprefix("torch.")
            raise ArgumentError(
                f"{op.name}: {name} is a tensor of layout {what}; pass a plain strided one, for example what "
                "to_dense() or to_padded_tensor() makes of it"
            )


def _shown(value: Any) -> str:
    if isinstance(value, bool | float | str) or value is None:
        return repr(value)
    if isinstance(value, int):
        return repr(value) if fits_int64(value) else f"a number of {value.bit_length()} bits"
    if isinstance(value, list | tuple):
        return f"{type(value).__name__} of {', '.join(sorted({type(v).__name__ for v in value})) or 'nothing'}"
    kind = type(value)
    return kind.__name__ if kind.__module__ in ("builtins", "torch") else f"{kind.__module__}.{kind.__name__}"
