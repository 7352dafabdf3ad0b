"""From a call to a plan: a pure function of operator, request, device and settings."""

from __future__ import annotations

import difflib
import itertools
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hal import dispatch, dispatch_report, host, recording, registry, settings
from hal.capability import Accepted, Answer, Implementation, Rejected
from hal.contract import OPS, Args, BoundPlan, Dispatcher, Op, Tally
from hal.errors import ConfigError, DeviceError, HalError, TransformError, UnsupportedError
from hal.locks import LOCK
from hal.settings_model import Settings

__all__ = ["Candidate", "Explanation", "Plan", "auto_backend", "dispatcher", "explain", "serving"]


@dataclass(frozen=True)
class Candidate:
    """One implementation that was considered, with every reason against it."""

    backend: str
    implementation: Implementation
    foreign: bool
    answer: Answer

    @property
    def label(self) -> str:
        return f"{self.backend}/{self.implementation.name}"

    @property
    def kind(self) -> str:
        return "foreign" if self.foreign else self.implementation.kind

    @property
    def reasons(self) -> tuple[str, ...]:
        return self.answer.reasons if isinstance(self.answer, Rejected) else ()

    @property
    def accepted(self) -> bool:
        return isinstance(self.answer, Accepted)


@dataclass(frozen=True)
class Explanation:
    """What was chosen for a call, and each other candidate with its reasons."""

    op: Op
    device: torch.device
    backend: str
    chosen: Candidate | None
    candidates: tuple[Candidate, ...]

    def to_dict(self) -> dict[str, Any]:
        return {
            "op": self.op.name,
            "device": str(self.device),
            "backend": self.backend,
            "chosen": self.chosen.label if self.chosen else None,
            "candidates": [
                {
                    "backend": c.backend,
                    "implementation": c.implementation.name,
                    "kind": c.kind,
                    "priority": c.implementation.priority,
                    "accepted": c.accepted,
                    "reasons": list(c.reasons),
                    "declares": c.implementation.declares.to_dict(),
                }
                for c in self.candidates
            ],
        }


def explain(op: Op, a: Args, device: torch.device | None = None) -> Explanation:
    """What would serve this call under the settings in force; raises only for settings that mean nothing."""
    if device is None:
        device = dispatch.device_of(list(vars(a).values()))
    policy = settings.current()
    _check_forced(policy)
    name, foreign = _backend_for(policy, device)
    found = _judge(op, a, device, policy, name, foreign)
    chosen = _first(found)
    if chosen is None and policy.fallback == "portable" and not foreign and not name.startswith(registry.PORTABLE):
        found += _judge(op, a, device, policy, f"{registry.PORTABLE}:{device.type}", False)
        chosen = _first(found)
    if chosen is None and policy.fallback == "cpu" and not foreign and device.type != "cpu":
        found += _judge(op, a, device, policy, "cpu", True)
        chosen = _first(found)
    return Explanation(op, device, name, chosen, tuple(found))


def auto_backend(device: torch.device) -> str:
    """The backend that `auto` gives a device: one that claims it, else the portable one."""
    if device.type == "cpu":
        return "cpu"
    for found in registry.load_all():
        if found.parameterised or device.type not in found.device_types:
            continue
        if found.claims is None or found.claims(device):
            return found.name
    return f"{registry.PORTABLE}:{device.type}"


def serving(device: torch.device) -> str:
    """The backend that serves a device under the settings in force; ConfigError or DeviceError if none does."""
    return _backend_for(settings.current(), device)[0]


class Plan:
    """A selected implementation bound to one request."""

    def __init__(self, op: Op, a: Args, chosen: Candidate, device: torch.device, policy: Settings) -> None:
        self.id = next(_ids)
        self.op = op
        self.implementation = chosen.implementation
        self.foreign = chosen.foreign
        self.tally: Tally = dispatch_report.tally(
            op.name, chosen.backend, chosen.implementation.name, chosen.kind, device.type
        )
        prepare = chosen.implementation.prepare
        forward = chosen.implementation.forward if prepare is None or chosen.foreign else prepare(a)
        self.call = _bind(op, forward, chosen.foreign, device, policy)

    def train(self, a: Args) -> tuple[Tensor, ...]:
        train = self.implementation.train
        if train is None or self.foreign:
            return self.op.trained(self.call, a)
        if self.op.check_values is not None and a_checked(a):
            self.op.check_values(**vars(a))
        return tuple(train(**vars(a)))

    def backward(
        self, a: Args, outs: dict[str, Tensor], grads: tuple[Tensor | None, ...], needs: tuple[bool, ...]
    ) -> tuple[Tensor | None, ...]:
        implementation = self.implementation
        if self.op.optional_result is not None and grads[-1] is not None and not implementation.declares.lse_grad:
            raise TransformError(
                f"{self.op.name} got a gradient into {self.op.results[-1]}, which {implementation.name} does not "
                f"differentiate; detach it, or choose an implementation that declares lse_grad (`hal explain`)"
            )
        if implementation.backward is None or self.foreign:
            return recording.recompute(self.op, a, grads, needs)
        return tuple(implementation.backward(a, outs, grads, needs))


class _Selection:
    """The dispatcher that `hal` installs."""

    def plan(self, op: Op, a: Args) -> BoundPlan:
        with LOCK:
            explanation = explain(op, a)
            if explanation.chosen is None:
                raise _unsupported(explanation)
            plan = Plan(op, a, explanation.chosen, explanation.device, settings.current())
            _plans[plan.id] = plan
            return plan

    def by_id(self, plan_id: int) -> BoundPlan | None:
        return _plans.get(plan_id)


_ids = itertools.count(1)
_plans: weakref.WeakValueDictionary[int, Plan] = weakref.WeakValueDictionary()
_selection: Dispatcher = _Selection()

registry.on_change(dispatch.clear)


def dispatcher() -> Dispatcher:
    """The dispatcher of this process."""
    return _selection


def a_checked(a: Args) -> bool:
    """Whether this call's values may be read: always on the CPU, under HAL_CHECK=1 elsewhere, never in a capture."""
    device = dispatch.device_of(list(vars(a).values()))
    return device.type == "cpu" or (settings.current().check and not host.capturing(device))


def _backend_for(policy: Settings, device: torch.device) -> tuple[str, bool]:
    """The backend's label for a device, and whether it runs on another one."""
    if policy.backend == "auto":
        return auto_backend(device), False
    name, _, parameter = policy.backend.partition(":")
    found = registry.backend(name)
    if found.parameterised:
        if not parameter:
            raise ConfigError(f"backend {name!r} needs a torch device type: {name}:cpu, {name}:cuda, {name}:npu …")
        served: tuple[str, ...] = (_device_type(name, parameter),)
        label = f"{name}:{served[0]}"
    elif parameter:
        raise ConfigError(f"backend {name!r} takes no device type; write {name}")
    else:
        served, label = found.device_types, name
    if device.type in served:
        return label, False
    if policy.fallback == "cpu" and "cpu" in served:
        return label, True
    raise DeviceError(
        f"the tensors are on {device}, but backend {label!r} serves {', '.join(served)}; move them there, or choose "
        f"HAL_BACKEND=auto{_why_absent(label)}"
    )


def _why_absent(label: str) -> str:
    """Why the backend finds no device here, where it says so."""
    try:
        registry.devices(label)
    except HalError as error:
        return f". It has no device here: {error}"
    return ""


def _device_type(name: str, parameter: str) -> str:
    try:
        return torch.device(parameter).type
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(
            f"backend {name}:{parameter} names no torch device type of this process: {reason}. A type that a "
            f"module brings is known once the module is imported"
        ) from None


def _judge(op: Op, a: Args, device: torch.device, policy: Settings, name: str, foreign: bool) -> list[Candidate]:
    label = name.partition(":")[0]
    found = registry.implementations(label, op.name)
    has_native = any(i.kind == "native" and _made_for(i, name, device) for i in found)
    forced = policy.implementations.get(op.name)
    if forced is not None and forced not in [i.name for i in found]:
        names = ", ".join(i.name for i in found) or "none"
        raise ConfigError(f"HAL_IMPL asks for {op.name}={forced}, but backend {name!r} has {names}")
    candidates = []
    for implementation in found:
        answer = implementation.judge(
            op, a, "cpu" if foreign else device.type, _architecture(implementation, name, device)
        )
        reasons = list(answer.reasons) if isinstance(answer, Rejected) else []
        declares = implementation.declares
        if torch.are_deterministic_algorithms_enabled() and not declares.run_to_run:
            reasons.append("torch.use_deterministic_algorithms is on, and it does not declare run_to_run")
        if policy.invariant and not declares.batch_invariant:
            reasons.append("HAL_INVARIANT is on, and it does not declare batch_invariant")
        if forced is not None and implementation.name != forced:
            reasons.append(f"HAL_IMPL asks for {forced}")
        if implementation.kind == "composed" and has_native and policy.fallback == "error" and forced is None:
            reasons.append("composed; HAL_FALLBACK=error allows it only where the backend has no native implementation")
        candidates.append(Candidate(name, implementation, foreign, Rejected(tuple(reasons)) if reasons else Accepted()))
    return candidates


def _made_for(implementation: Implementation, name: str, device: torch.device) -> bool:
    """Whether it is for this chip at all: one of another architecture is no native implementation here."""
    wanted = implementation.supports.architectures
    return wanted is None or _architecture(implementation, name, device) in wanted


def _architecture(implementation: Implementation, name: str, device: torch.device) -> str | None:
    if implementation.supports.architectures is None:
        return None
    present = registry.devices(name)
    index = device.index or 0
    return present[index].architecture if index < len(present) else None


def _first(candidates: list[Candidate]) -> Candidate | None:
    return next((c for c in candidates if c.accepted), None)


def _check_forced(policy: Settings) -> None:
    for name in policy.implementations:
        if name not in OPS:
            near = difflib.get_close_matches(name, OPS, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ConfigError(f"HAL_IMPL names the operator {name!r}; there are {', '.join(sorted(OPS))}{hint}")


def _unsupported(e: Explanation) -> UnsupportedError:
    lines = [f"  {c.label}: {'; '.join(c.reasons)}" for c in e.candidates]
    text = "\n".join(lines) or f"  backend {e.backend!r} registers no implementation of it"
    return UnsupportedError(
        f"no implementation of {e.op.name} takes this call on {e.device} with backend {e.backend!r}:\n{text}\n"
        "change the call, or allow others with HAL_FALLBACK=portable (composed on the same device) or cpu",
        {c.label: c.reasons for c in e.candidates},
    )


def _bind(
    op: Op, forward: Callable[..., Any], foreign: bool, device: torch.device, policy: Settings
) -> Callable[..., Any]:
    call = _on_cpu(op, forward, device) if foreign else forward
    if op.mutates:
        call = _bumping(op, call)
    check = op.check_values
    if check is not None and (device.type == "cpu" or policy.check):
        call = _checking(check, call, device)
    return call


def _checking(check: Callable[..., None], call: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
    def checked(*args: Any, **kwargs: Any) -> Any:
        if not host.capturing(device):
            check(*args, **kwargs)
        return call(*args, **kwargs)

    return checked


def _bumping(op: Op, call: Callable[..., Any]) -> Callable[..., Any]:
    """Kernels write behind autograd's back: tell it which tensors changed."""

    def bumping(*args: Any, **kwargs: Any) -> Any:
        outcome = call(*args, **kwargs)
        a = op.bind(args, kwargs)
        for name in op.mutates:
            value = getattr(a, name)
            for t in value if isinstance(value, list | tuple) else (value,):
                if not t.is_inference():
                    torch.autograd.graph.increment_version(t)
        return outcome

    return bumping


def _on_cpu(op: Op, forward: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
    def move(value: Any, target: torch.device) -> Any:
        if isinstance(value, Tensor):
            return value.to(target)
        if isinstance(value, list | tuple):
            return type(value)(move(v, target) for v in value)
        return value

    def foreign(*args: Any, **kwargs: Any) -> Any:
        a = op.bind(args, kwargs)
        moved = {name: move(value, torch.device("cpu")) for name, value in vars(a).items()}
        outcome = forward(**moved)
        for name in op.mutates:
            before, after = getattr(a, name), moved[name]
            pairs = zip(before, after, strict=True) if isinstance(before, list | tuple) else [(before, after)]
            for target, source in pairs:
                target.copy_(source)
        return move(outcome, device)

    return foreign
