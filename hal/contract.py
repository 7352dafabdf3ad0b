"""What an operator is: the reference, its companions and the data they exchange."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from hal.accuracy import Accuracy
from hal.errors import HalError

if TYPE_CHECKING:
    from hal.capability import Implementation

__all__ = [
    "FLOATS",
    "OPS",
    "Args",
    "BoundPlan",
    "Cost",
    "Dispatcher",
    "Meta",
    "Op",
    "Tally",
    "Traits",
    "dtype_name",
]

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class Args(SimpleNamespace):
    """One call's arguments, defaults filled in: one attribute per public parameter."""


@dataclass(frozen=True)
class Meta:
    """Shape and dtype of a result."""

    shape: Sequence[Any]
    dtype: torch.dtype


@dataclass(frozen=True)
class Traits:
    """What capabilities are judged on: leading dtype, features in use, dimensions that limits may bound."""

    dtype: str
    features: frozenset[str] = frozenset()
    dims: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Cost:
    """The floor of a call: arithmetic, and bytes with each input read once and each result written once."""

    flops: int
    bytes: int


@dataclass
class Tally:
    """Calls of one implementation, counted where they happen."""

    op: str
    backend: str
    implementation: str
    kind: str
    device: str
    calls: int = 0


class BoundPlan(Protocol):
    """A selected implementation, ready to be called with the operator's public signature."""

    id: int
    tally: Tally
    call: Callable[..., Any]
    implementation: Implementation

    def train(self, a: Args) -> tuple[Tensor, ...]:
        """Results and statistics of a call whose gradient will be asked for."""
        ...

    def backward(
        self, a: Args, outs: dict[str, Tensor], grads: tuple[Tensor | None, ...], needs: tuple[bool, ...]
    ) -> tuple[Tensor | None, ...]:
        """A gradient, or None for zero, for each of the operator's differentiable arguments."""
        ...


class Dispatcher(Protocol):
    """Turns a validated call into a plan; `selection` provides the one in use."""

    def plan(self, op: Op, a: Args) -> BoundPlan: ...

    def by_id(self, plan_id: int) -> BoundPlan | None: ...


@dataclass(frozen=True, eq=False)
class Op:
    """One operator of the contract. See `hal.op.op` for what each field means."""

    name: str
    reference: Callable[..., Any]
    signature: inspect.Signature
    schema: str
    results: tuple[str, ...]
    pack: Callable[..., tuple[Any, ...]]
    validate: Callable[[Args], None]
    meta: Callable[[Args], tuple[Meta, ...]]
    traits: Callable[[Args], Traits]
    cost: Callable[[Args], Cost]
    accuracy: Accuracy
    features: tuple[str, ...] = ()
    dims: tuple[str, ...] = ()
    grad: tuple[str, ...] = ()
    stats: tuple[str, ...] = ()
    compute_stats: Callable[[Args, tuple[Tensor, ...]], tuple[Tensor, ...]] | None = None
    saves: tuple[str, ...] = ()
    optional_result: str | None = None
    to_outs: Callable[[Args, Any], tuple[Tensor, ...]] | None = None
    from_outs: Callable[[tuple[Tensor, ...], tuple[Any, ...]], Any] | None = None
    check_values: Callable[..., None] | None = None
    splits: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    mutates: tuple[str, ...] = ()
    autocast: tuple[str, ...] = ()
    host_lengths: tuple[str, ...] = ()
    volatile: tuple[str, ...] = ()
    # Derived once, as plain attributes: torch.compile cannot trace the lock of a cached_property.
    schema_names: tuple[str, ...] = field(init=False)
    one_to_one: bool = field(init=False)
    grad_positions: tuple[int, ...] = field(init=False)
    steady_names: frozenset[str] = field(init=False)
    places: tuple[tuple[str, Any], ...] = field(init=False)
    torch_op: Any = field(init=False, default=None)

    def __post_init__(self) -> None:
        names = tuple(part.split()[-1] for part in self.schema.split(","))
        object.__setattr__(self, "schema_names", names)
        object.__setattr__(self, "grad_positions", tuple(names.index(name) for name in self.grad))
        parts = (part for name in self.volatile for part in (name, *self.splits.get(name, ())))
        object.__setattr__(self, "steady_names", frozenset(parts))
        object.__setattr__(self, "places", tuple(self._places()))
        object.__setattr__(self, "one_to_one", names == tuple(self.signature.parameters))

    def registered(self, torch_op: Any) -> None:
        """Note the torch op that calls lower to, once it is defined."""
        object.__setattr__(self, "torch_op", torch_op)

    def __reduce__(self) -> tuple[Any, ...]:
        return _op_by_name, (self.name, self.reference.__module__)

    def __repr__(self) -> str:
        return f"<hal op {self.name}{self.signature}>"

    @property
    def torch_name(self) -> str:
        """Name of the torch op that a call lowers to."""
        return f"{self.name}_fwd" if self.grad else self.name

    def bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Args:
        """The call's arguments by name, defaults filled in; TypeError as for any Python function."""
        bound = self.signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return Args(**bound.arguments)

    def unpack(self, packed: Sequence[Any]) -> dict[str, Any]:
        """Public keyword arguments from the torch op's positional ones."""
        if self.one_to_one:
            return dict(zip(self.schema_names, packed, strict=True))
        return {name: packed[at] if type(at) is int else _joined(packed, at) for name, at in self.places}

    def _places(self) -> Iterator[tuple[str, Any]]:
        """Where each public parameter stands among the torch op's arguments.

        A position, or None for one that the torch op does not have, or for a split parameter its positions and
        whether they are alternatives (a tensor or a number) rather than the members of a tuple.
        """
        for name in self.signature.parameters:
            parts = tuple(self.schema_names.index(part) for part in self.splits.get(name, ()))
            own = self.schema_names.index(name) if name in self.schema_names else None
            if not parts:
                yield name, own
            elif own is None:
                yield name, (parts, len(parts) == 1)
            else:
                yield name, ((own, *parts), True)

    def outs(self, a: Args, public_result: Any) -> tuple[Tensor, ...]:
        """The torch op's results from the public result."""
        if self.to_outs is not None:
            return self.to_outs(a, public_result)
        if not self.results:
            return ()
        outs = public_result if isinstance(public_result, tuple) else (public_result,)
        if self.optional_result is not None and not getattr(a, self.optional_result):
            outs = (*outs, outs[0].new_empty(0, dtype=self.meta(a)[len(outs)].dtype))
        return outs

    def public(self, outs: tuple[Tensor, ...], packed: tuple[Any, ...]) -> Any:
        """The public result from the torch op's results."""
        if self.from_outs is not None:
            return self.from_outs(outs, packed)
        if not self.results:
            return None
        if self.optional_result is not None and not packed[self.schema_names.index(self.optional_result)]:
            outs = outs[:-1]
        return outs[0] if len(outs) == 1 else outs

    def trained(self, forward: Callable[..., Any], a: Args) -> tuple[Tensor, ...]:
        """Results and statistics, from an implementation that computes results only."""
        if self.optional_result is not None:
            a = Args(**vars(a) | {self.optional_result: True})
        outs = self.outs(a, forward(**vars(a)))
        return outs if self.compute_stats is None else (*outs, *self.compute_stats(a, outs))


OPS: dict[str, Op] = {}


def _joined(packed: Sequence[Any], at: tuple[tuple[int, ...], bool] | None) -> Any:
    if at is None:
        return None
    positions, alternatives = at
    present = tuple([packed[position] for position in positions])
    if alternatives:
        return next((value for value in present if value is not None), None)
    return None if all(value is None for value in present) else present


def _op_by_name(name: str, module: str) -> Op:
    importlib.import_module(module)  # an unpickling process may not have declared the operator yet
    if name not in OPS:
        raise HalError(f"no operator is named {name!r}; this hal has {', '.join(sorted(OPS))}")
    return OPS[name]


def dtype_name(dtype: torch.dtype) -> str:
    """'bfloat16' for torch.bfloat16."""
    return str(dtype).removeprefix("torch.")
