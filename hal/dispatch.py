"""The way of a call: straight to the bound plan where nothing else must see it, else through the torch op.

The short way asks a few cheap questions (the gate), forms a key of the arguments' metadata and the settings in
force, and calls the plan found under it. Validation and selection run when a key is new.
"""

from __future__ import annotations

import functools
import operator
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.nn import Parameter

from hal import settings
from hal.contract import Args, BoundPlan, Dispatcher, Op
from hal.errors import HalError, TransformError
from hal.kinds import check_kinds, check_packed, fits_int64
from hal.locks import LOCK
from hal.recording import recorder

__all__ = ["clear", "device_of", "install", "plan_by_id", "plan_key", "plan_packed", "public_function", "validated"]

P = ParamSpec("P")
R = TypeVar("R")

_is_compiling = torch.compiler.is_compiling
_function_modes = torch._C._len_torch_function_stack
_dispatch_modes = torch._C._len_torch_dispatch_stack
_functorch_level = torch._C._functorch.peek_interpreter_stack
_grad_enabled = torch.is_grad_enabled
_autocast = torch._C._is_any_autocast_enabled
_deterministic = torch._C._get_deterministic_algorithms
_policy_key = settings.policy_key
_metadata = operator.attrgetter("dtype", "shape", "device")
_forward_ad = torch.autograd.forward_ad

# Keys hold shapes: calls of ever new shapes must not fill the memory.
_MAX_PLANS = 8192

_loader: Callable[[], Dispatcher] | None = None
_dispatcher: Dispatcher | None = None
_caches: list[dict[Any, BoundPlan]] = []


def install(loader: Callable[[], Dispatcher]) -> None:
    """Say where the dispatcher comes from; it is loaded on the first call of an operator."""
    global _loader
    _loader = loader


def dispatcher() -> Dispatcher:
    """The dispatcher in use."""
    global _dispatcher
    if _dispatcher is None:
        if _loader is None:
            raise HalError("no dispatcher is installed; `import hal` rather than its parts")
        _dispatcher = _loader()
    return _dispatcher


def clear() -> None:
    """Forget all bound plans: after a plug-in was registered, and in a forked child."""
    with LOCK:
        for cache in _caches:
            cache.clear()


os.register_at_fork(after_in_child=clear)


def public_function(op: Op, reference: Callable[P, R]) -> Callable[P, R]:
    """The operator's public function."""
    plans = _new_cache()
    volatile = bool(op.volatile)
    record = recorder(op) if op.grad else None
    n_results = len(op.results)

    @functools.wraps(reference)
    def call(*args: P.args, **kwargs: P.kwargs) -> Any:
        if (
            _is_compiling()
            or _function_modes()
            or _dispatch_modes()
            or _functorch_level() is not None
            or _forward_ad._current_level >= 0
            or _autocast()
        ):
            return long_way(op, args, kwargs)
        parts: list[Any] = [_policy_key(), _deterministic()]
        values: Sequence[Any] = args
        if kwargs:
            parts += kwargs
            values = (*args, *kwargs.values())
        if volatile:
            values = steady(op, values, (*op.signature.parameters,)[: len(args)] + tuple(kwargs))
        try:
            found = _fingerprint(parts, values)
        except RuntimeError:  # a tensor without shape or strides: validation says so
            new_plan(op, op.bind(args, kwargs))
            raise
        if found & _STRANGE:
            return long_way(op, args, kwargs)
        key = tuple(parts)
        try:
            plan = plans.get(key)
        except TypeError:  # an argument that cannot be hashed is of a kind that no operator takes: validation says so
            plan = new_plan(op, op.bind(args, kwargs))
        if plan is None:
            plan = plans[key] = _bounded(plans, new_plan(op, op.bind(args, kwargs)))
        try:
            if found and _grad_enabled():
                if record is None:
                    return long_way(op, args, kwargs)
                packed = op.pack(*args, **kwargs)
                plan.tally.calls += 1
                return op.public(record(plan, *packed)[:n_results], packed)
            plan.tally.calls += 1
            return plan.call(*args, **kwargs)
        except HalError:
            raise
        except Exception:  # the key leaves out what hardly any tensor has, such as an opaque layout
            validated(op, op.bind(args, kwargs))
            raise

    return call


def long_way(op: Op, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Through the torch op: autograd records it, modes and compilers see it."""
    packed = op.pack(*args, **kwargs)
    if _is_compiling():
        return _lowered(op, packed, True)
    check_packed(op, packed)
    refuse_transforms(op, packed)
    try:
        return _lowered(op, packed, _functorch_level() is not None)
    except HalError:
        raise
    except Exception:  # torch's words for what validation refuses; the kernel, which validates, was not reached
        validated(op, Args(**op.unpack(packed)))
        raise


def _lowered(op: Op, packed: tuple[Any, ...], seen: bool) -> Any:
    """The torch op's results, made public; `seen` says whether a transform or a compiler looks on."""
    if op.autocast and _autocast():
        packed = _cast(op, packed)
    if op.host_lengths and _first_device(packed) == "cuda":
        packed = tuple(
            None if name in op.host_lengths else value for name, value in zip(op.schema_names, packed, strict=True)
        )
    outs = _torch_outs(op, packed, seen)
    if not isinstance(outs, tuple):
        outs = () if outs is None else (outs,)
    return op.public(outs[: len(op.results)], packed)


def _torch_outs(op: Op, packed: tuple[Any, ...], seen: bool) -> Any:
    torch_op = op.torch_op
    if not op.grad:
        if op.mutates and _grad_enabled():
            _refuse_recorded(op, packed)
        return torch_op(*packed)
    if _grad_enabled() and _requires_grad(op, packed):
        return torch_op(*packed, True)
    if seen:
        return torch_op(*packed, False)
    with torch._C._AutoDispatchBelowAutograd():  # nothing to record: spare the autograd kernel, in Python too
        return torch_op(*packed, False)


def _refuse_recorded(op: Op, packed: Sequence[Any]) -> None:
    """TransformError for a written tensor that is part of a graph: autograd would not hear of the write."""
    for name in op.mutates:
        value = packed[op.schema_names.index(name)]
        for t in value if isinstance(value, list | tuple) else (value,):
            if isinstance(t, Tensor) and t.requires_grad:
                raise TransformError(
                    f"{op.name} writes into {name}, which requires a gradient, and has none to give; detach it, or "
                    "call under torch.no_grad()"
                )


def _requires_grad(op: Op, packed: Sequence[Any]) -> bool:
    for position in op.grad_positions:
        value = packed[position]
        if isinstance(value, Tensor) and value.requires_grad:
            return True
    return False


def plan_packed(op: Op, packed: Sequence[Any]) -> tuple[BoundPlan, dict[str, Any]]:
    """The plan of a torch op's call, and the public keyword arguments."""
    arguments = op.unpack(packed)
    plans = _packed_caches(op.name)
    key = plan_key(steady(op, packed, op.schema_names) if op.volatile else packed)
    plan = plans.get(key)
    if plan is None:
        plan = plans[key] = _bounded(plans, new_plan(op, Args(**arguments)))
    return plan, arguments


def plan_key(values: Iterable[Any]) -> tuple[Any, ...]:
    """What a plan is found under: equal keys mean calls that one plan may serve."""
    parts: list[Any] = [_policy_key(), _deterministic()]
    _fingerprint(parts, values)
    return tuple(parts)


def plan_by_id(plan_id: int) -> BoundPlan | None:
    """The plan that a forward pass was bound to, while it lives."""
    return dispatcher().by_id(plan_id) if plan_id else None


def new_plan(op: Op, a: Args) -> BoundPlan:
    """Validate a call and select its implementation."""
    return dispatcher().plan(op, validated(op, a))


def validated(op: Op, a: Args) -> Args:
    """The arguments, or a typed error: first for what no operator takes, then for what this one does not."""
    check_kinds(op, a)
    op.validate(a)
    return a


# What a look at a call's values found: a plain tensor that requires a gradient; a tensor that is not plain.
_REQUIRES_GRAD, _STRANGE = 1, 2
_SCALARS = frozenset({type(None), bool, int, float, str, torch.dtype})


def _fingerprint(parts: list[Any], values: Iterable[Any]) -> int:
    """Add to a plan key what stands for these values, and tell what must be known of them."""
    found = 0
    for value in values:
        kind = type(value)
        if kind is Tensor or kind is Parameter:
            # Shape fixes the strides of a contiguous tensor; asking is cheaper than hashing them.
            parts += (_metadata(value), value.is_contiguous() or _strides(value))
            if value.requires_grad:
                found |= _REQUIRES_GRAD
        elif kind in _SCALARS:  # the type too: True and 1 are equal, but not equally legal
            parts += (kind, value)
        elif isinstance(value, list | tuple):
            members: list[Any] = []
            found |= _fingerprint(members, value)
            parts.append(tuple(members))
        elif isinstance(value, Tensor):
            parts.append((_metadata(value), _strides(value)))
            found |= _STRANGE | (_REQUIRES_GRAD if value.requires_grad else 0)
        else:
            parts += (kind, value)
    return found


def _strides(value: Tensor) -> Any:
    return value.stride() if value.layout is torch.strided else value.layout


def steady(op: Op, values: Iterable[Any], names: Iterable[str]) -> list[Any]:
    """The values of a call, with numbers that change from call to call replaced by their type."""
    named = zip(names, values, strict=False)
    return [_kind(v) if name in op.steady_names and not isinstance(v, Tensor) else v for name, v in named]


def _kind(value: Any) -> Any:
    return value if type(value) is int and not fits_int64(value) else type(value)


def device_of(values: Sequence[Any]) -> torch.device:
    """Device of a call: that of its first tensor."""
    for value in values:
        if isinstance(value, Tensor):
            return value.device
        if isinstance(value, list | tuple) and value and isinstance(value[0], Tensor):
            return value[0].device
    return torch.device("cpu")


def refuse_transforms(op: Op, packed: Sequence[Any]) -> None:
    """TransformError for what torch would otherwise answer with a wrong result or an obscure error."""
    level = _functorch_level()
    if level is not None and level.key() == torch._C._functorch.TransformType.Vmap:
        raise TransformError(f"{op.name} does not run under vmap; write the batch into the tensors' own axes")
    if (
        level is not None
        and op.results
        and _grad_enabled()
        and any(isinstance(t, Tensor) and t.requires_grad for t in packed)
    ):
        raise TransformError(
            f"{op.name} is not differentiated by torch.func's transforms; use torch.autograd.grad, or `backward`"
        )
    tangents = _forward_ad._current_level >= 0
    for value in packed:
        kind = type(value)
        if (
            kind in _SCALARS
            or ((kind is Tensor or kind is Parameter) and not tangents)
            or not isinstance(value, Tensor)
        ):
            continue
        if kind.__module__.startswith("torch.distributed.tensor"):
            raise TransformError(f"{op.name} does not take DTensor; pass each rank's local tensor (`.to_local()`)")
        if tangents and _forward_ad.unpack_dual(value).tangent is not None:
            raise TransformError(f"{op.name} has no forward-mode derivative; use reverse mode (`backward`)")


def _cast(op: Op, packed: tuple[Any, ...]) -> tuple[Any, ...]:
    device_type = _first_device(packed)
    if not torch.amp.is_autocast_available(device_type) or not torch.is_autocast_enabled(device_type):
        return packed
    dtype = torch.get_autocast_dtype(device_type)
    return tuple(
        value.to(dtype)
        if name in op.autocast
        and isinstance(value, Tensor)
        and value.is_floating_point()
        and value.dtype is not torch.float64
        else value
        for name, value in zip(op.schema_names, packed, strict=True)
    )


def _first_device(packed: Sequence[Any]) -> str:
    return device_of(packed).type


def _new_cache() -> dict[Any, BoundPlan]:
    cache: dict[Any, BoundPlan] = {}
    _caches.append(cache)
    return cache


@functools.lru_cache(None)
def _packed_caches(name: str) -> dict[Any, BoundPlan]:
    return _new_cache()


def _bounded(plans: dict[Any, BoundPlan], plan: BoundPlan) -> BoundPlan:
    if len(plans) >= _MAX_PLANS:
        plans.clear()
    return plan
