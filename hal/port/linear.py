"""Linear layers."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from hal.ops import linear
from hal.port.probe import unplain
from hal.port.record import Changes

__all__ = ["replace_linear"]


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
    return linear(input, self.weight, self.bias)
