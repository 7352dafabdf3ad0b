"""What a call costs on the host, item by item, beside torch's own calls of the same run.

    python -m hal.bench.call_cost [--json PATH] [--device cpu] [--rounds N]

"over bare" is what a way of calling adds to the implementation called directly with the same arguments (for a
recorded call: as for a backward pass); the limits are the design's. On a CUDA device, where the implementation's own
launch is most of a call, the limit is on the whole of it: so many times a torch.add of the same run. The items below
"short way" are measured alone, so they need not add up to it.
"""

from __future__ import annotations

import argparse
import functools
import json
import platform
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import hal
from hal import dispatch, settings
from hal.bench.timing import settle, take_turns
from hal.conformance.environment import environment
from hal.contract import Args, Op, dtype_name
from hal.files import check_writable, write_whole
from hal.memory import empty

__all__ = ["Item", "Subject", "measure", "subjects"]

BARE = "implementation, called directly"
BARE_TRAIN = "implementation, as for a backward pass, called directly"
SHORT = "short way"
ROUTED = "through torch.ops"
RECORDED = "recorded for autograd"
YARDSTICK = "torch.add"
# Times torch.add, for a call with one result, and for one with more.
ONE_RESULT, MORE_RESULTS = 1.4, 1.8


@dataclass(frozen=True)
class Subject:
    """A call to take apart, torch's calls to stand beside it, and the limit of the way through torch.ops."""

    op: Op
    public: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    peers: dict[str, Callable[..., Any]]
    routed_limit_us: float

    @property
    def title(self) -> str:
        tensors = [value for value in self.args if isinstance(value, Tensor)]
        shapes = " ".join("x".join(map(str, t.shape)) for t in tensors)
        return f"{self.op.name} {shapes} {dtype_name(tensors[0].dtype)} {tensors[0].device.type}"


@dataclass(frozen=True)
class Item:
    """One row of the table; limit_us bounds over_bare_us, limit_adds times_add, where the design states one."""

    call: str
    item: str
    median_us: float
    p99_us: float
    over_bare_us: float | None
    limit_us: float | None
    times_add: float = 0.0
    limit_adds: float | None = None

    @property
    def exceeded(self) -> bool:
        if self.limit_adds is not None and self.times_add > self.limit_adds:
            return True
        return self.limit_us is not None and self.over_bare_us is not None and self.over_bare_us > self.limit_us


def subjects(device: torch.device) -> list[Subject]:
    """A norm and an attention of one decoding step, small enough that the call is most of the cost."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device)

    x, weight, bias = draw(1, 64), draw(64), draw(64)
    q, k, v = draw(1, 1, 4, 32), draw(1, 16, 2, 32), draw(1, 16, 2, 32)
    ops = hal.ops
    norm_peers: dict[str, Callable[..., Any]] = {
        "F.rms_norm": lambda x, w: F.rms_norm(x, (64,), w, 1e-6),
        "F.layer_norm": lambda x, w: F.layer_norm(x, (64,), w, bias, 1e-6),
    }
    attention_peers: dict[str, Callable[..., Any]] = {
        "F.scaled_dot_product_attention": lambda q, k, v: F.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), enable_gqa=True
        ),
    }
    return [
        Subject(ops.rms_norm.op, ops.rms_norm, (x, weight), {}, norm_peers, 5.0),
        Subject(ops.add_rms_norm.op, ops.add_rms_norm, (x, draw(1, 64), weight), {}, {}, 5.0),
        Subject(ops.attention.op, ops.attention, (q, k, v), {"causal": True}, attention_peers, 10.0),
    ]


def measure(subject: Subject, rounds: int = 40) -> list[Item]:
    """Take one call apart."""
    device = dispatch.device_of(subject.args)
    timed = take_turns(_candidates(subject), rounds=rounds, between=settle(device))
    ways = (SHORT, ROUTED, RECORDED)
    limits: dict[str, float] = {}
    adds: dict[str, float] = {}
    if device.type == "cuda":
        adds[SHORT] = ONE_RESULT if len(subject.op.results) == 1 or subject.op.optional_result else MORE_RESULTS
    else:
        limits = dict(zip(ways, (2.0, subject.routed_limit_us, 15.0), strict=True))
    add = max(timed[YARDSTICK].median_us, 1e-3)
    items = []
    for name, timing in timed.items():
        bare = timed[BARE_TRAIN if name == RECORDED else BARE]
        over = timing.median_us - bare.median_us if name in ways else None
        median = timing.median_us
        row = (subject.title, name, median, timing.p99_us, over, limits.get(name), median / add, adds.get(name))
        items.append(Item(*row))
    return items


def _candidates(subject: Subject) -> dict[str, Callable[[], Any]]:
    op, public, args, kwargs = subject.op, subject.public, subject.args, subject.kwargs
    bound: Args = op.bind(args, kwargs)
    plan = dispatch.new_plan(op, bound)
    call = plan.call
    packed = op.pack(*args, **kwargs)
    torch_op = getattr(torch.ops.hal, op.torch_name).default
    routed = (*packed, False) if op.grad else packed
    recorded = tuple(a.detach().requires_grad_() if isinstance(a, Tensor) else a for a in args)
    metas = op.meta(bound)[: len(op.results)]
    device = dispatch.device_of(packed)
    key = dispatch.plan_key(args)
    plans = {key: call}
    peers: dict[str, Callable[[], Any]] = {}
    for name, peer in subject.peers.items():
        peers[name] = functools.partial(peer, *args)
        peers[f"{name}, recorded for autograd"] = functools.partial(peer, *recorded)
    first = args[0]
    return {
        YARDSTICK: lambda: torch.add(first, first),
        BARE: lambda: call(*args, **kwargs),
        BARE_TRAIN: lambda: plan.train(bound),
        SHORT: lambda: public(*args, **kwargs),
        "  gate": _gate,
        "  plan key": lambda: dispatch.plan_key(args),
        "  look-up": lambda: plans.get(key),
        "  new plan: bind, validate, select": lambda: dispatch.new_plan(op, op.bind(args, kwargs)),
        "  validation": lambda: op.validate(bound),
        "  allocation of the results": lambda: [empty(m.shape, dtype=m.dtype, device=device) for m in metas],
        ROUTED: lambda: dispatch.long_way(op, args, kwargs),
        RECORDED: lambda: public(*recorded, **kwargs),
        f"torch.ops.hal.{op.torch_name}, called directly": lambda: torch_op(*routed),
        **peers,
    }


def _gate() -> bool:
    return (
        torch.compiler.is_compiling()
        or bool(torch._C._len_torch_function_stack())
        or bool(torch._C._len_torch_dispatch_stack())
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch.autograd.forward_ad._current_level >= 0
        or torch._C._is_any_autocast_enabled()
    )


def document(items: Sequence[Item], device: torch.device) -> dict[str, Any]:
    """The measurement as JSON-able data, with everything it depends on."""
    return {
        "format": "hal-call-cost",
        "version": 2,
        "device": device.type,
        "processor": _processor(),
        "environment": environment(settings.environment()).model_dump(),
        "items": [asdict(item) for item in items],
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print the table, write the JSON. Exit status 1 if a limit is exceeded, 0 otherwise."""
    from rich.console import Console
    from rich.table import Table

    parser = argparse.ArgumentParser(prog="python -m hal.bench.call_cost", description=__doc__)
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the measurement here")
    parser.add_argument("--device", default="cpu", help="torch device (default: cpu)")
    parser.add_argument("--rounds", type=int, default=40, help="turns of 100 calls each (default: 40)")
    options = parser.parse_args(argv)
    if options.json is not None:
        check_writable(options.json)
    device = torch.device(options.device)
    items = [item for subject in subjects(device) for item in measure(subject, options.rounds)]
    # Off a terminal rich assumes 80 columns and cuts the table.
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)
    for call in dict.fromkeys(item.call for item in items):
        table = Table(title=call, title_justify="left", box=None, pad_edge=False)
        table.add_column("µs of host time a call", min_width=56)
        for column in ("median", "p99", "over bare", "limit", "× add", "limit"):
            table.add_column(column, justify="right")
        for item in items:
            if item.call == call:
                cells = [_number(item.median_us), _number(item.p99_us), _number(item.over_bare_us)]
                cells += [_number(item.limit_us), _number(item.times_add)]
                cells.append(_number(item.limit_adds) + (" exceeded" if item.exceeded else ""))
                table.add_row(item.item, *cells, style="red" if item.exceeded else "")
        console.print(table)
        console.print()
    if options.json is not None:
        write_whole(options.json, json.dumps(document(items, device), indent=2, ensure_ascii=False) + "\n")
    return int(any(item.exceeded for item in items))


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


if __name__ == "__main__":
    raise SystemExit(main())
