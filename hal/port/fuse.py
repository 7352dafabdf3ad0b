"""Linear layers that read the same input, as one: their weights become views of one buffer.

The parameters stay the same objects with the same values, so optimisers, state dicts and checkpoints see nothing of
it, and no memory is doubled. Whatever breaks the arrangement later (a move to another device, an adapter in a layer's
place, a hook on it) is noticed at the next call, which then takes the layers one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hal.ops import linear
from hal.port.linear import autocast

__all__ = ["Fused"]

_grad_enabled = torch.is_grad_enabled
_compiling = torch.compiler.is_compiling


class Fused:
    """Several linear layers of one parent, computed as one product while nothing forbids it."""

    def __init__(self, parent: nn.Module, names: Sequence[str]) -> None:
        layers = [getattr(parent, name) for name in names]
        weights = [layer.weight for layer in layers]
        biases = [layer.bias for layer in layers]
        self.sizes = [layer.out_features for layer in layers]
        with torch.no_grad():
            self._weight = torch.cat([w.data for w in weights])
            self._bias = None if biases[0] is None else torch.cat([b.data for b in biases])
            _repoint(weights, self._weight, self.sizes)
            if self._bias is not None:
                _repoint(biases, self._bias, self.sizes)
        self._parts = [
            (
                name,
                layer,
                layer.weight,
                layer.weight.data_ptr(),
                layer.bias,
                layer.bias is not None and layer.bias.data_ptr(),
            )
            for name, layer in zip(names, layers, strict=True)
        ]

    @staticmethod
    def possible(parent: nn.Module, names: Sequence[str], tied: set[int]) -> bool:
        """Whether the named layers of `parent` can be one: run by hal, of one input width, dtype and device, untied."""
        layers = [m for name in names if isinstance(m := getattr(parent, name, None), nn.Linear)]
        if len(layers) < len(names) or not all("forward" in layer.__dict__ for layer in layers):
            return False
        first = layers[0]
        for layer in layers:
            if layer.in_features != first.in_features or (layer.bias is None) != (first.bias is None):
                return False
            for p, q in ((layer.weight, first.weight), (layer.bias, first.bias)):
                if p is not None and (
                    id(p) in tied or p.dtype is not q.dtype or p.device != q.device or not p.is_contiguous()
                ):
                    return False
        return True

    def __call__(self, parent: Any, x: Tensor) -> Tensor | None:
        """The layers' results side by side on the last axis, or None if they must be called one by one."""
        if _compiling() or _grad_enabled() or autocast():
            return None
        modules = parent._modules
        for name, layer, weight, pointer, bias, bias_pointer in self._parts:
            parameters = layer._parameters
            if (
                modules[name] is not layer
                or layer._forward_hooks
                or layer._forward_pre_hooks
                or parameters["weight"] is not weight
                or weight.data_ptr() != pointer
                or parameters["bias"] is not bias
                or (bias is not None and bias.data_ptr() != bias_pointer)
            ):
                return None
        return linear(x, self._weight, self._bias)

    def undo(self) -> None:
        """Give each parameter memory of its own again, with the values it has now."""
        for _, _, weight, pointer, bias, bias_pointer in self._parts:
            if weight.data_ptr() == pointer:
                weight.data = weight.data.clone()
            if bias is not None and bias.data_ptr() == bias_pointer:
                bias.data = bias.data.clone()


def _repoint(parameters: Sequence[nn.Parameter], buffer: Tensor, sizes: Sequence[int]) -> None:
    for parameter, part in zip(parameters, buffer.split(list(sizes)), strict=True):
        parameter.data = part
