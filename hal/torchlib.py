"""The torch ops behind the public functions: schemas, kernels, fake kernels and autograd, built from an `Op`."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hal import dispatch, recording
from hal.contract import Args, BoundPlan, Op
from hal.errors import TransformError

__all__ = ["backward_schema", "forward_schema", "register"]

_autocast = torch._C._is_any_autocast_enabled

LIBRARY = torch.library.Library("hal", "FRAGMENT")


class _LastPlan(threading.local):
    """Hands the plan of a forward kernel to the autograd recording that follows it in the same thread."""

    plan: BoundPlan | None = None


_last = _LastPlan()
_empties: dict[tuple[str, torch.dtype, torch.device], tuple[torch.Tensor, ...]] = {}


def forward_schema(op: Op) -> str:
    """Schema of the torch op that the public function lowers to."""
    if not op.results:
        return f"{op.name}({op.schema}) -> ()"
    if not op.grad:
        return f"{op.name}({op.schema}) -> {_returns(len(op.results))}"
    return f"{op.name}_fwd({op.schema}, bool save) -> {_returns(len(op.results) + len(op.stats))}"


def backward_schema(op: Op) -> str:
    """Schema of the torch op that computes the gradients of a differentiable operator."""
    kept = "".join(f", Tensor? kept_{name}" for name in op.saves)
    grads = "".join(f", Tensor? grad_{name}" for name in op.results)
    return f"{op.name}_bwd({op.schema}{kept}{grads}, int plan, bool[] needs) -> {_returns(len(op.grad))}"


def register(op: Op) -> None:
    """Define the operator's torch ops with their kernels, fake kernels and autograd."""
    name = op.torch_name
    LIBRARY.define(forward_schema(op))
    LIBRARY.impl(name, _forward_kernel(op), "CompositeExplicitAutograd")
    torch.library.register_fake(f"hal::{name}", _forward_fake(op), lib=LIBRARY)
    op.registered(getattr(torch.ops.hal, name).default)
    if op.grad:
        LIBRARY.define(backward_schema(op))
        LIBRARY.impl(f"{op.name}_bwd", _backward_kernel(op), "CompositeExplicitAutograd")
        torch.library.register_fake(f"hal::{op.name}_bwd", _backward_fake(op), lib=LIBRARY)
        _register_autograd(op)
        _refuse_gradient(f"{op.name}_bwd", f"{op.name} has no second derivative")
    elif op.results:
        _refuse_gradient(op.name, f"{op.name} has no gradient")


def _forward_kernel(op: Op) -> Callable[..., Any]:
    plain = op.to_outs is None and op.optional_result is None
    single, stats = plain and len(op.results) == 1, bool(op.stats)

    def inference(*packed: Any) -> Any:
        if _autocast():  # it has had its say in the call; an implementation's own products are none of its business
            with torch._C._DisableAutocast():
                return inference(*packed)
        plan, arguments = dispatch.plan_packed(op, packed)
        plan.tally.calls += 1
        outcome = plan.call(**arguments)
        if single and not stats:
            return outcome
        outs = (outcome,) if single else op.outs(Args(**arguments), outcome)
        if stats:
            outs += _no_stats(op, arguments)
        return outs[0] if len(outs) == 1 else outs or None

    def differentiable(*packed: Any) -> Any:
        if not packed[-1]:
            return inference(*packed[:-1])
        if _autocast():
            with torch._C._DisableAutocast():
                return differentiable(*packed)
        plan, arguments = dispatch.plan_packed(op, packed[:-1])
        plan.tally.calls += 1
        _last.plan = plan
        outs = plan.train(Args(**arguments))
        return outs[0] if len(outs) == 1 else outs

    return differentiable if op.grad else inference


def _no_stats(op: Op, arguments: dict[str, Any]) -> tuple[torch.Tensor, ...]:
    """The (0,) results that stand for statistics nobody keeps: made once, for they hold nothing that could change."""
    leading = arguments[op.schema_names[0]]
    key = (op.name, leading.dtype, leading.device)
    found = _empties.get(key)
    if found is None:
        metas = op.meta(Args(**arguments))[len(op.results) :]
        found = tuple(torch.empty(0, dtype=meta.dtype, device=leading.device) for meta in metas)
        _empties[key] = found
    return found


def _forward_fake(op: Op) -> Callable[..., Any]:
    n_results = len(op.results)

    def fake(*packed: Any) -> Any:
        _last.plan = None
        packed_args, save = (packed[:-1], packed[-1]) if op.grad else (packed, False)
        a = Args(**op.unpack(packed_args))
        op.validate(a)
        if not op.results:
            return None
        device = dispatch.device_of(packed_args)
        if save and op.optional_result is not None:
            setattr(a, op.optional_result, True)
        outs = tuple(
            torch.empty(meta.shape if save or i < n_results else (0,), dtype=meta.dtype, device=device)
            for i, meta in enumerate(op.meta(a))
        )
        return outs[0] if len(outs) == 1 else outs

    return fake


def _backward_kernel(op: Op) -> Callable[..., Any]:
    n_args, n_outs = len(op.schema_names), len(op.schema_names) + len(op.saves)

    def kernel(*packed: Any) -> Any:
        arguments, outs, grads, (plan_id, needs) = (
            packed[:n_args],
            packed[n_args:n_outs],
            packed[n_outs:-2],
            packed[-2:],
        )
        plan = dispatch.plan_by_id(plan_id) or dispatch.plan_packed(op, arguments)[0]
        found = recording.gradients(op, plan, arguments, outs, grads, tuple(needs))
        return found[0] if len(found) == 1 else found

    return kernel


def _backward_fake(op: Op) -> Callable[..., Any]:
    n_args = len(op.schema_names)

    def fake(*packed: Any) -> Any:
        arguments = op.unpack(packed[:n_args])
        device = dispatch.device_of(packed)
        results = []
        for name, need in zip(op.grad, packed[-1], strict=True):
            value = arguments[name]
            if value is None or not need:
                results.append(torch.empty(0, device=device))
            else:
                results.append(value.new_empty(value.shape))
        return results[0] if len(results) == 1 else tuple(results)

    return fake


def _register_autograd(op: Op) -> None:
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        plan, _last.plan = _last.plan, None
        *packed, ctx.saved = inputs
        if ctx.saved:
            recording.keep(ctx, op, plan, packed, output if isinstance(output, tuple) else (output,))

    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        if not ctx.saved:
            raise TransformError(
                f"{op.name}_fwd was called with save=False and then differentiated; call hal.ops.{op.name}, "
                "or pass save=True"
            )
        return (*recording.backward(ctx, op, grads, ctx.needs_input_grad), None)

    torch.library.register_autograd(f"hal::{op.name}_fwd", backward, setup_context=setup_context, lib=LIBRARY)


def _refuse_gradient(name: str, what: str) -> None:
    def backward(ctx: Any, *grads: Any) -> Any:
        raise TransformError(f"{what}; detach its inputs, or differentiate only once")

    torch.library.register_autograd(
        f"hal::{name}", backward, setup_context=lambda ctx, inputs, output: None, lib=LIBRARY
    )


def _returns(n: int) -> str:
    return "Tensor" if n == 1 else "(" + ", ".join(["Tensor"] * n) + ")"
