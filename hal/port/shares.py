"""How much of a model's work runs through hal: arithmetic and operator time, inside hal's operators and outside."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from hal.op import OPS, Args

__all__ = ["Shares", "Watch"]


@dataclass
class Shares:
    """Work seen so far, by operator of hal and by torch operator outside it.

    Arithmetic is each operator's cost floor; outside hal, torch's own count for products and attention, else one
    operation per element written. Views and allocations count as none.
    """

    hal_flops: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    other_flops: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    hal_seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    other_seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    @property
    def flops(self) -> float:
        """Share of the arithmetic that ran through hal; 0 where there was none."""
        return _share(self.hal_flops, self.other_flops)

    @property
    def seconds(self) -> float:
        """Share of the time spent in operators that was spent in hal's; 0 where there was none."""
        return _share(self.hal_seconds, self.other_seconds)

    def to_dict(self) -> dict[str, Any]:
        """Shares, and each operator's time and arithmetic, as JSON-able data."""
        return {
            "flops": self.flops,
            "seconds": self.seconds,
            "hal": _by_operator(self.hal_seconds, self.hal_flops),
            "other": _by_operator(self.other_seconds, self.other_flops),
        }


class Watch(TorchDispatchMode):
    """Within the block, every operator is timed and its arithmetic counted into `shares`.

    Operators are timed one by one, so the block runs slower than it would alone; on a device each one is waited for.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.shares = Shares()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        start = time.perf_counter()
        outcome = func(*args, **kwargs)
        device = next((v.device.type for v in (*args, outcome) if isinstance(v, Tensor)), "cpu")
        if device != "cpu":
            torch.accelerator.synchronize()
        seconds = time.perf_counter() - start
        name = func._overloadpacket.__name__
        if func.namespace == "hal":
            self.shares.hal_seconds[name] += seconds
            self.shares.hal_flops[name] += _cost(name, args)
        elif not func.is_view:
            self.shares.other_seconds[name] += seconds
            self.shares.other_flops[name] += _flops(func, args, kwargs, outcome)
        return outcome


def _cost(torch_name: str, packed: tuple[Any, ...]) -> int:
    backward = torch_name.endswith("_bwd")
    op = OPS[torch_name.removesuffix("_bwd").removesuffix("_fwd")]
    # A backward pass of a product is two products; the floor has no word on it otherwise.
    return (2 if backward else 1) * op.cost(Args(**op.unpack(packed[: len(op.schema_names)]))).flops


def _flops(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], outcome: Any) -> int:
    counted = flop_registry.get(func._overloadpacket)
    if counted is not None:
        return int(counted(*args, **kwargs, out_val=outcome))
    results = outcome if isinstance(outcome, tuple | list) else (outcome,)
    if any(word in func._overloadpacket.__name__ for word in ("empty", "zeros", "ones", "full")):
        return 0
    return sum(r.numel() for r in results if isinstance(r, Tensor) and r.is_floating_point())


def _share(inside: Mapping[str, float], outside: Mapping[str, float]) -> float:
    total = sum(inside.values()) + sum(outside.values())
    return sum(inside.values()) / total if total else 0.0


def _by_operator(seconds: Mapping[str, float], flops: Mapping[str, int]) -> list[dict[str, Any]]:
    longest_first = sorted(seconds.items(), key=lambda item: -item[1])
    return [{"op": name, "seconds": s, "flops": flops[name]} for name, s in longest_first]
