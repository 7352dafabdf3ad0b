"""Running a module once on small random inputs, to see what it computes rather than what it is called."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["close", "placement", "random", "same_kind", "unplain"]

_SEED = 20_231


def random(*shape: int, like: Tensor) -> Tensor:
    """Standard normal values, the same on every run and device."""
    generator = torch.Generator().manual_seed(_SEED + len(shape) + math.prod(shape))
    return torch.randn(shape, generator=generator).to(like.device, like.dtype)


def close(found: Tensor, expected: Tensor, roundings: int = 16) -> bool:
    """Whether two results differ by some roundings of the largest value at most; another formula differs far more."""
    if found.shape != expected.shape:
        return False
    largest = float(expected.abs().max()) if expected.numel() else 0.0
    allowed = roundings * torch.finfo(found.dtype).eps * largest
    return bool(((found.double() - expected.double()).abs() <= allowed).all())


def placement(module: nn.Module) -> Tensor | None:
    """A parameter that tells device and dtype; None if the module cannot run (none, meta, not floating, mixed)."""
    parameters = list(module.parameters())
    if not parameters:
        return None
    first = parameters[0]
    same = all(p.device == first.device and p.dtype == first.dtype for p in parameters)
    return first if same and first.is_floating_point() and first.device.type != "meta" else None


def unplain(module: nn.Module) -> str | None:
    """Why the module is not what its class says: something else already stands in its place."""
    if "forward" in module.__dict__:
        return "its forward was replaced before"
    for name, parameter in module.named_parameters():
        if type(parameter) is not nn.Parameter or type(parameter.data) is not Tensor:
            return f"its {name} is a {type(parameter.data).__name__}, not a plain tensor"
        if parameter.device.type == "meta":
            return "its weights are on the meta device: load them first"
    return None


def same_kind(module: nn.Module) -> tuple[Any, ...]:
    """A key that modules share when one probe can speak for all: class, attributes, the same of all inside; no index.

    A child's attributes count: two nn.GELU may be two functions.
    """
    inside = tuple((name, type(child), _attributes(child)) for name, child in module.named_modules())
    parameters = ((name, tuple(p.shape), p.dtype, p.device) for name, p in module.named_parameters())
    return inside, tuple(parameters)


def _attributes(module: nn.Module) -> tuple[tuple[str, Any], ...]:
    """Plain values, and functions by identity, such as an activation."""
    found = []
    for name, value in sorted(vars(module).items()):
        if name.startswith("_") or name in ("layer_idx", "training", "forward"):
            continue
        if isinstance(value, int | float | str | None):
            found.append((name, value))
        elif callable(value):
            found.append((name, id(value)))
    return tuple(found)
