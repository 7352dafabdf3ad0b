"""What an implementation accepts and promises, stated as data, and the answer to a request."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from hal.op import Args, Op, Traits

__all__ = ["Accepted", "Answer", "Declares", "Implementation", "Kind", "Limit", "Rejected", "Supports"]

Kind = Literal["native", "composed"]


@dataclass(frozen=True)
class Limit:
    """Inclusive bounds and divisibility of one dimension of a request, such as `head_dim`."""

    min: int | None = None
    max: int | None = None
    multiple_of: int | None = None

    def reasons(self, name: str, value: int) -> Iterable[str]:
        if self.min is not None and value < self.min:
            yield f"{name} is {value}, the least supported is {self.min}"
        if self.max is not None and value > self.max:
            yield f"{name} is {value}, the most supported is {self.max}"
        if self.multiple_of is not None and value % self.multiple_of:
            yield f"{name} is {value}, not a multiple of {self.multiple_of}"


@dataclass(frozen=True)
class Accepted:
    """The implementation takes the request."""


@dataclass(frozen=True)
class Rejected:
    """The implementation does not take the request, for all of these reasons."""

    reasons: tuple[str, ...]


Answer = Accepted | Rejected


@dataclass(frozen=True)
class Supports:
    """What an implementation accepts. None means: whatever the operator's contract allows.

    dtypes: dtype names of the operator's leading tensor. features: names out of the operator's `features`.
    limits: bounds of the dimensions that the operator's traits name. device_types: torch device types.
    architectures: names as the device descriptor gives them. where: reasons that the rest cannot state.
    """

    dtypes: frozenset[str] | None = None
    features: frozenset[str] | None = None
    limits: Mapping[str, Limit] = field(default_factory=dict)
    device_types: frozenset[str] | None = None
    architectures: frozenset[str] | None = None
    where: Callable[[Args], Iterable[str]] | None = None

    def judge(self, traits: Traits, a: Args, device_type: str, architecture: str | None = None) -> Answer:
        """Accepted, or Rejected with every reason there is."""
        reasons: list[str] = []
        if self.device_types is not None and device_type not in self.device_types:
            reasons.append(f"device type {device_type} is not among {_names(self.device_types)}")
        if self.architectures is not None and architecture not in self.architectures:
            reasons.append(f"architecture {architecture} is not among {_names(self.architectures)}")
        if self.dtypes is not None and traits.dtype not in self.dtypes:
            reasons.append(f"dtype {traits.dtype} is not among {_names(self.dtypes)}")
        if self.features is not None:
            reasons.extend(f"{name} is not supported" for name in sorted(traits.features - self.features))
        for name, limit in self.limits.items():
            if name in traits.dims:
                reasons.extend(limit.reasons(name, traits.dims[name]))
        if self.where is not None:
            reasons.extend(self.where(a))
        return Rejected(tuple(reasons)) if reasons else Accepted()

    def to_dict(self) -> dict[str, Any]:
        """The declaration as JSON-able data (`where` by its docstring)."""
        return {
            "dtypes": None if self.dtypes is None else sorted(self.dtypes),
            "features": None if self.features is None else sorted(self.features),
            "limits": {name: asdict(limit) for name, limit in self.limits.items()},
            "device_types": None if self.device_types is None else sorted(self.device_types),
            "architectures": None if self.architectures is None else sorted(self.architectures),
            "where": None if self.where is None else (self.where.__doc__ or self.where.__name__).strip(),
        }


@dataclass(frozen=True)
class Declares:
    """What an implementation promises. Bitwise properties are tested bit for bit, the others under the bounds.

    u_p: unit roundoff of the dtype it rounds P and dS to, by dtype name of the leading tensor (absent = 0).
    """

    u_p: Mapping[str, float] = field(default_factory=dict)
    run_to_run: bool = True
    batch_invariant: bool = False
    stride_invariant: bool = False
    block_permutation: bool = False
    host_lengths: bool = False
    capturable: bool = True
    lse_grad: bool = False
    copies: frozenset[str] = frozenset()
    flushes_subnormals: bool = False
    saturates: bool = False

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"copies": sorted(self.copies), "u_p": dict(self.u_p)}


@dataclass(frozen=True)
class Implementation:
    """One way of computing an operator on one backend.

    forward has the operator's public signature. train, with the same signature, returns (*results, *statistics)
    for a backward pass. backward takes (a, outs, grads, needs): the arguments, the kept results and statistics by
    name, a gradient (or None) per result, and for each differentiable argument whether its gradient is wanted.
    Without a backward, the reference is recomputed and differentiated.
    prepare, where calls must be cheap, is asked once for each plan, with the arguments of its first call, and returns
    what serves the plan's calls in forward's place. Shapes, strides, dtypes, devices and numbers are equal in all of
    them (but for the operator's volatile numbers), so it may keep what follows from those; it may keep no tensor.
    """

    op: str
    name: str
    forward: Callable[..., Any]
    supports: Supports = field(default_factory=Supports)
    declares: Declares = field(default_factory=Declares)
    kind: Kind = "native"
    priority: int = 0
    train: Callable[..., Any] | None = None
    backward: Callable[..., Any] | None = None
    prepare: Callable[[Args], Callable[..., Any]] | None = None

    def judge(self, op: Op, a: Args, device_type: str, architecture: str | None = None) -> Answer:
        return self.supports.judge(op.traits(a), a, device_type, architecture)


def _names(values: Iterable[str]) -> str:
    return ", ".join(sorted(values)) or "none"
