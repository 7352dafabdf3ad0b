"""Linear layers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from hal.ops import linear
from hal.port.probe import unplain
from hal.port.record import Changes

__all__ = ["autocast", "replace_linear"]

autocast = torch._C._is_any_autocast_enabled


def replace_linear(changes: Changes, path: str, module: nn.Module) -> bool:
    """Whether `module` is a linear layer; if so, replace it or say why not."""
    if not isinstance(module, nn.Linear):
        return False
    if type(module).forward is not nn.Linear.forward:
        changes.leave(path, module, "a linear layer with a forward of its own")
    elif (why := unplain(module)) is not None:
        changes.leave(path, module, why)
    else:
        changes.replace_forward(path, module, _forward, ("linear",))
    return True


def _forward(self: Any, input: Tensor) -> Tensor:
    if autocast():
        return _cast(input, self.weight, self.bias)
    return linear(input, self.weight, self.bias)


def _cast(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """A model written for torch expects its products under autocast in the lower dtype; hal's keep their inputs'."""
    device = x.device.type
    if not torch.is_autocast_enabled(device) or x.dtype is torch.float64:
        return linear(x, weight, bias)
    dtype = torch.get_autocast_dtype(device)
    return linear(x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))
