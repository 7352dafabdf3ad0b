"""One workload timed through hal and through its peers, in the same run and on the same inputs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from hal import dispatch
from hal.bench.device_time import Spread, device_times, sets_of
from hal.bench.peers import peer
from hal.bench.timing import Timing, settle, take_turns
from hal.bench.workload import Maker, Workload
from hal.contract import Cost

__all__ = ["COPY", "DIFFERENCE", "Row", "compare"]

COPY = "copy"
COPIES = ("copy_", "kernel")  # which of them is faster depends on the size
# Peers that part by more than this from hal compute something else: their time is shown, with the difference.
DIFFERENCE = 2e-2
UPSTREAM = 1_000_003  # seed of the gradients that backward starts from, the same for every candidate


@dataclass(frozen=True)
class Row:
    """One candidate's figures on one workload.

    floor_us: the least time, from the operator's own count of bytes and flops, at the rates measured in this run.
    difference: of the first result from hal's, ‖a − b‖ / ‖b‖; None where the results are drawn, or for hal itself.
    """

    workload: str
    op: str
    candidate: str
    dtype: str
    bytes: int
    flops: int
    device_us: float
    low_us: float
    high_us: float
    how: str
    host_us: float | None
    host_p99_us: float | None
    floor_us: float | None
    difference: float | None

    @property
    def share(self) -> float | None:
        """Of the floor: 1 is the roof."""
        return None if self.floor_us is None else self.floor_us / self.device_us

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"share": self.share}


def compare(
    workload: Workload,
    device: torch.device,
    dtype: torch.dtype,
    implementations: Sequence[str | None],
    peers: Sequence[str],
    flops_per_us: float | None,
) -> list[Row]:
    """Time a workload: hal's implementations (None = the one that is selected), the peers, and a copy of its bytes."""
    first = workload.make(Maker.of(device, dtype, 0))
    cost = workload.cost(first)
    many = sets_of(cost.bytes, device)
    sets = [first, *(workload.make(Maker.of(device, dtype, seed)) for seed in range(1, many))]
    calls: dict[str, list[Callable[[], Any]]] = {}
    for name, function in _candidates(workload, first, implementations, peers):
        calls[name] = [_call(workload, function, arguments) for arguments in sets]
    results = {name: _results(made[0]()) for name, made in calls.items()}
    copies = {f"{COPY} {how}": [_copy(cost.bytes, device, how) for _ in range(many)] for how in COPIES}
    with torch.no_grad() if not workload.backward else torch.enable_grad():
        on_device = device_times(calls | copies, device)
        on_device[COPY] = min((on_device.pop(name) for name in copies), key=lambda found: found.median_us)
        hosts = _host_times(calls, device) if not workload.backward else {}
    floor = _floor(cost, on_device[COPY].median_us, flops_per_us)
    own = next(iter(results.values()))
    return [
        _row(workload, name, dtype, cost, on_device[name], hosts.get(name), floor, _difference(results.get(name), own))
        for name in (*calls, COPY)
    ]


def _candidates(
    workload: Workload, arguments: dict[str, Any], implementations: Sequence[str | None], peers: Sequence[str]
) -> Iterator[tuple[str, Callable[..., Any]]]:
    import hal

    op = workload.op
    public = getattr(hal.ops, op.name)
    for wanted in implementations:
        if wanted is None:
            plan = dispatch.new_plan(op, op.bind((), arguments))
            yield f"hal/{plan.implementation.name}", public
        else:
            yield f"hal/{wanted}", _forced(public, op.name, wanted)
    for name in peers:
        made = peer(name, op.name)
        if made is not None:
            yield name, made


def _forced(public: Callable[..., Any], op: str, name: str) -> Callable[..., Any]:
    import hal

    @functools.wraps(public)
    def call(**arguments: Any) -> Any:
        with hal.use(impl={op: name}):
            return public(**arguments)

    return call


def _call(workload: Workload, function: Callable[..., Any], arguments: dict[str, Any]) -> Callable[[], Any]:
    if not workload.backward:
        return functools.partial(function, **arguments)
    leaves = {
        name: arguments[name].detach().requires_grad_()
        for name in workload.op.grad
        if isinstance(arguments.get(name), Tensor)
    }
    with torch.enable_grad():
        outs = _results(function(**arguments | leaves))
    grads = [Maker.of(out.device, out.dtype, UPSTREAM).normal(*out.shape) for out in outs]
    return lambda: torch.autograd.grad(outs, list(leaves.values()), grads, retain_graph=True)


def _results(public: Any) -> list[Tensor]:
    return [public] if isinstance(public, Tensor) else list(public)


def _copy(nbytes: int, device: torch.device, how: str) -> Callable[[], Any]:
    """A copy that moves so many bytes, half of them read and half written: the driver's, or an elementwise kernel's."""
    source = torch.empty(max(1, nbytes // 8), dtype=torch.int32, device=device).random_()
    target = torch.empty_like(source)
    return (lambda: target.copy_(source)) if how == "copy_" else (lambda: torch.neg(source, out=target))


def _host_times(calls: Mapping[str, Sequence[Callable[[], Any]]], device: torch.device) -> dict[str, Timing]:
    first = {name: made[0] for name, made in calls.items()}
    return take_turns(first, rounds=8, calls=25, between=settle(device))


def _floor(cost: Cost, copy_us: float, flops_per_us: float | None) -> float:
    """The longer of moving the bytes, as the copy of this run did, and of the arithmetic at the rate given."""
    return copy_us if flops_per_us is None else max(copy_us, cost.flops / flops_per_us)


def _difference(results: list[Tensor] | None, own: list[Tensor]) -> float | None:
    if results is None or results is own or not own[0].is_floating_point():
        return None
    a, b = results[0].float(), own[0].float()
    return float((a - b).norm() / b.norm().clamp(min=1e-30)) if a.shape == b.shape else None


def _row(
    workload: Workload,
    name: str,
    dtype: torch.dtype,
    cost: Cost,
    found: Spread,
    host: Timing | None,
    floor: float,
    difference: float | None,
) -> Row:
    return Row(
        workload=workload.name,
        op=workload.op.name,
        candidate=name,
        dtype=str(dtype).removeprefix("torch."),
        bytes=cost.bytes,
        flops=cost.flops,
        device_us=found.median_us,
        low_us=found.low_us,
        high_us=found.high_us,
        how=found.how,
        host_us=None if host is None else host.median_us,
        host_p99_us=None if host is None else host.p99_us,
        floor_us=floor,
        difference=difference,
    )
