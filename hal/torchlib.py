"""The torch ops behind the public functions: schemas, kernels, fake kernels and autograd, built from an `Op`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._C import DispatchKey

from hal import dispatch
from hal.contract import Args, BoundPlan, Op
from hal.errors import TransformError

__all__ = ["backward_schema", "forward_schema", "recompute", "register"]

LIBRARY = torch.library.Library("hal", "FRAGMENT")


class _LastPlan(threading.local):
    """Hands the plan of a forward kernel to the autograd recording that follows it in the same thread."""

    plan: BoundPlan | None = None


_last = _LastPlan()


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
    if op.grad:
        LIBRARY.define(backward_schema(op))
        LIBRARY.impl(f"{op.name}_bwd", _backward_kernel(op), "CompositeExplicitAutograd")
        torch.library.register_fake(f"hal::{op.name}_bwd", _backward_fake(op), lib=LIBRARY)
        _register_autograd(op)
        _refuse_gradient(f"{op.name}_bwd", f"{op.name} has no second derivative")
    elif op.results:
        _refuse_gradient(op.name, f"{op.name} has no gradient")


def recompute(op: Op, a: Args, grads: tuple[Tensor | None, ...], needs: tuple[bool, ...]) -> tuple[Tensor | None, ...]:
    """Gradients by running the reference again and differentiating it."""
    leaves: dict[str, Tensor] = {}
    for name, need in zip(op.grad, needs, strict=True):
        value = getattr(a, name)
        if need and value is not None:
            leaves[name] = value.detach().requires_grad_()
    with _autograd_enabled():
        arguments = {k: v.detach() if isinstance(v, Tensor) else v for k, v in vars(a).items()} | leaves
        outs = op.outs(Args(**arguments), op.reference(**arguments))
        pairs = [(o, g) for o, g in zip(outs, grads, strict=True) if g is not None and o.requires_grad]
        if not pairs:
            return tuple(None for _ in op.grad)
        found = torch.autograd.grad(
            [o for o, _ in pairs], list(leaves.values()), [g for _, g in pairs], allow_unused=True
        )
    by_name = dict(zip(leaves, found, strict=True))
    return tuple(by_name.get(name) for name in op.grad)


@contextmanager
def _autograd_enabled() -> Iterator[None]:
    # A kernel runs below the autograd dispatch keys: grad mode alone would record nothing.
    keys = (DispatchKey.AutogradFunctionality, DispatchKey.AutogradOther, DispatchKey.ADInplaceOrView)
    excluded = [key for key in keys if torch._C._dispatch_tls_is_dispatch_key_excluded(key)]
    for key in excluded:
        torch._C._dispatch_tls_set_dispatch_key_excluded(key, False)
    try:
        with torch.enable_grad():
            yield
    finally:
        for key in excluded:
            torch._C._dispatch_tls_set_dispatch_key_excluded(key, True)


def _forward_kernel(op: Op) -> Callable[..., Any]:
    n_results = len(op.results)

    def kernel(*packed: Any) -> Any:
        if op.grad:
            *packed_args, save = packed
        else:
            packed_args, save = list(packed), False
        plan, arguments = dispatch.plan_packed(op, packed_args)
        plan.tally.calls += 1
        if not save:
            a = Args(**arguments)
            outs = op.outs(a, plan.call(**arguments))
            if op.grad and op.stats:
                outs = (*outs, *(outs[0].new_empty(0, dtype=m.dtype) for m in op.meta(a)[n_results:]))
        else:
            _last.plan = plan
            outs = plan.train(Args(**arguments))
        if not op.results:
            return None
        return outs[0] if len(outs) == 1 else outs

    return kernel


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
    n_args, n_kept, n_results = len(op.schema_names), len(op.saves), len(op.results)

    def kernel(*packed: Any) -> Any:
        arguments = op.unpack(packed[:n_args])
        outs = dict(zip(op.saves, packed[n_args : n_args + n_kept], strict=True))
        grads = packed[n_args + n_kept : n_args + n_kept + n_results]
        plan_id, needs = packed[-2], tuple(packed[-1])
        plan = dispatch.plan_by_id(plan_id) or dispatch.plan_packed(op, packed[:n_args])[0]
        found = plan.backward(Args(**arguments), outs, grads, needs)
        device = dispatch.device_of(packed)
        results = tuple(
            _gradient(arguments[name], d, need, device) for name, d, need in zip(op.grad, found, needs, strict=True)
        )
        return results[0] if len(results) == 1 else results

    return kernel


def _gradient(argument: Tensor | None, found: Tensor | None, need: bool, device: torch.device) -> Tensor:
    if argument is None or not need:
        return torch.empty(0, device=device)
    if found is None:
        return torch.zeros_like(argument, memory_format=torch.contiguous_format)
    return found.to(argument.dtype).contiguous()


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
    names, n_results, n_stats = op.schema_names, len(op.results), len(op.stats)
    out_names = (*op.results, *op.stats)
    grad_positions = tuple(names.index(name) for name in op.grad)

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        outs = output if isinstance(output, tuple) else (output,)
        ctx.plan, _last.plan = _last.plan, None
        ctx.set_materialize_grads(False)
        if n_stats:
            ctx.mark_non_differentiable(*outs[n_results:])
        *packed, ctx.saved = inputs
        if not ctx.saved:
            return
        tensors = [v for v in packed if isinstance(v, Tensor)]
        ctx.layout = tuple(None if isinstance(v, Tensor) else (v,) for v in packed)
        ctx.save_for_backward(*tensors, *(outs[out_names.index(name)] for name in op.saves))

    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        if not ctx.saved:
            raise TransformError(
                f"{op.name}_fwd was called with save=False and then differentiated; call hal.ops.{op.name}, "
                "or pass save=True"
            )
        kept = list(ctx.saved_tensors)
        packed = [kept.pop(0) if slot is None else slot[0] for slot in ctx.layout]
        needs = [ctx.needs_input_grad[i] for i in grad_positions]
        found = _op("_bwd")(*packed, *kept, *grads[:n_results], ctx.plan.id if ctx.plan else 0, needs)
        found = found if isinstance(found, tuple | list) else (found,)
        results: list[Tensor | None] = [None] * (len(names) + 1)
        for position, need, gradient in zip(grad_positions, needs, found, strict=True):
            results[position] = gradient if need else None
        return tuple(results)

    def _op(suffix: str) -> Any:
        return getattr(torch.ops.hal, op.name + suffix).default

    torch.library.register_autograd(f"hal::{op.name}_fwd", backward, setup_context=setup_context, lib=LIBRARY)


def _refuse_gradient(name: str, what: str) -> None:
    def backward(ctx: Any, *grads: Any) -> Any:
        raise TransformError(f"{what}; detach its inputs, or differentiate only once")

    torch.library.register_autograd(f"hal::{name}", backward, setup_context=lambda ctx, inputs, output: None, lib=LIBRARY)


def _returns(n: int) -> str:
    return "Tensor" if n == 1 else "(" + ", ".join(["Tensor"] * n) + ")"
