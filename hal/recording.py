"""Autograd: what a forward pass keeps, how its gradients are found, and the two ways of recording it.

Eager calls on plain tensors are recorded by an `autograd.Function` of the operator, which costs a third of what the
torch op's own autograd does; compilers and modes see the torch op. Both keep the same things and share `backward`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._C import DispatchKey

from hal.contract import Args, BoundPlan, Op

__all__ = ["autograd_enabled", "backward", "gradients", "keep", "recompute", "recorder"]

_autocast = torch._C._is_any_autocast_enabled


def recorder(op: Op) -> Callable[..., Any]:
    """`(plan, *packed) -> results and statistics`, recorded for autograd."""

    def forward(ctx: Any, plan: BoundPlan, *packed: Any) -> tuple[Tensor, ...]:
        outs = plan.train(Args(**op.unpack(packed)))
        keep(ctx, op, plan, packed, outs)
        return outs

    def backward_of(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return (None, *backward(ctx, op, grads, ctx.needs_input_grad[1:]))

    namespace = {"forward": staticmethod(forward), "backward": staticmethod(backward_of)}
    function = type(f"hal_{op.name}", (torch.autograd.Function,), namespace)
    apply: Callable[..., Any] = function.apply  # type: ignore[attr-defined]
    return apply


def keep(ctx: Any, op: Op, plan: BoundPlan | None, packed: Sequence[Any], outs: tuple[Tensor, ...]) -> None:
    """Save for backward: every tensor argument and the results and statistics that the operator names."""
    ctx.plan = plan
    ctx.set_materialize_grads(False)
    if op.stats:
        ctx.mark_non_differentiable(*outs[len(op.results) :])
    names = (*op.results, *op.stats)
    ctx.layout = tuple(None if isinstance(value, Tensor) else (value,) for value in packed)
    ctx.save_for_backward(
        *(value for value in packed if isinstance(value, Tensor)),
        *(outs[names.index(name)] for name in op.saves),
    )


def backward(ctx: Any, op: Op, grads: Sequence[Tensor | None], needed: Sequence[bool]) -> tuple[Tensor | None, ...]:
    """One gradient, or None, for each of the torch op's arguments."""
    kept = iter(ctx.saved_tensors)
    packed = [next(kept) if slot is None else slot[0] for slot in ctx.layout]
    outs = list(kept)
    needs = [needed[i] for i in op.grad_positions]
    plan: BoundPlan | None = ctx.plan
    if plan is None or torch.is_grad_enabled():  # traced, or to be differentiated again: the torch op must see it
        torch_op = getattr(torch.ops.hal, f"{op.name}_bwd").default
        found = torch_op(*packed, *outs, *grads[: len(op.results)], 0 if plan is None else plan.id, needs)
        found = found if isinstance(found, tuple | list) else (found,)
    else:
        found = gradients(op, plan, packed, outs, tuple(grads[: len(op.results)]), tuple(needs))
    results: list[Tensor | None] = [None] * len(packed)
    for position, need, gradient in zip(op.grad_positions, needs, found, strict=True):
        results[position] = gradient if need else None
    return tuple(results)


def gradients(
    op: Op,
    plan: BoundPlan,
    packed: Sequence[Any],
    outs: Sequence[Tensor],
    grads: tuple[Tensor | None, ...],
    needs: tuple[bool, ...],
) -> tuple[Tensor, ...]:
    """Gradients of the differentiable arguments, contiguous and in their dtypes; shape (0,) where not needed."""
    if _autocast():
        with torch._C._DisableAutocast():
            return gradients(op, plan, packed, outs, grads, needs)
    a = Args(**op.unpack(packed))
    found = plan.backward(a, dict(zip(op.saves, outs, strict=True)), grads, needs)
    device = next(value.device for value in packed if isinstance(value, Tensor))
    return tuple(
        _finished(getattr(a, name), gradient, need, device)
        for name, gradient, need in zip(op.grad, found, needs, strict=True)
    )


def recompute(op: Op, a: Args, grads: tuple[Tensor | None, ...], needs: tuple[bool, ...]) -> tuple[Tensor | None, ...]:
    """Gradients by running the reference again and differentiating it."""
    leaves: dict[str, Tensor] = {}
    for name, need in zip(op.grad, needs, strict=True):
        value = getattr(a, name)
        if need and value is not None:
            leaves[name] = value.detach().requires_grad_()
    with autograd_enabled():
        arguments = {k: v.detach() if isinstance(v, Tensor) else v for k, v in vars(a).items()} | leaves
        if op.optional_result is not None:
            arguments[op.optional_result] = grads[-1] is not None
        outs = op.outs(Args(**arguments), op.reference(**arguments))
        # an empty result passes nothing on, and some devices' backward passes refuse it
        pairs = [(o, g) for o, g in zip(outs, grads, strict=True) if g is not None and o.requires_grad and o.numel()]
        if not pairs:
            return tuple(None for _ in op.grad)
        found = torch.autograd.grad(
            [o for o, _ in pairs], list(leaves.values()), [g for _, g in pairs], allow_unused=True
        )
    by_name = dict(zip(leaves, found, strict=True))
    return tuple(by_name.get(name) for name in op.grad)


def _finished(argument: Tensor | None, found: Tensor | None, need: bool, device: torch.device) -> Tensor:
    if argument is None or not need:
        return torch.empty(0, device=device)
    if found is None:
        return torch.zeros_like(argument, memory_format=torch.contiguous_format)
    return found.to(argument.dtype).contiguous()


@contextmanager
def autograd_enabled() -> Iterator[None]:
    """Operations within the block are recorded, also inside an operator's own kernel."""
    # A torch op's kernel runs below the autograd dispatch keys: grad mode alone would record nothing.
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
