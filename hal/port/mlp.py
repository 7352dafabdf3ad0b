"""Gated MLPs: down(act(gate(x)) * up(x)), with gate and up apart or in one linear layer.

T tokens, F features.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from hal.ops import gelu_and_mul, silu_and_mul
from hal.port import probe
from hal.port.fuse import Fused
from hal.port.record import Changes

__all__ = ["MLPs"]

_ACTIVATIONS: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "silu": (functional.silu, "silu_and_mul"),
    "gelu": (functional.gelu, "gelu_and_mul"),
    "gelu tanh": (lambda x: functional.gelu(x, approximate="tanh"), "gelu_and_mul"),
}
_GATE_UP = ("gate_proj", "up_proj")
_ACTIVATION_NAMES = ("act_fn", "activation_fn", "act")


@dataclass(frozen=True)
class _Form:
    activation: str
    fused: bool  # one linear layer gives gate and up


class MLPs:
    """Replaces the gated MLPs of one model; kinds already probed are remembered."""

    def __init__(self) -> None:
        self._forms: dict[tuple[Any, ...], _Form | str] = {}

    def replace(self, changes: Changes, path: str, module: nn.Module, tied: set[int]) -> bool:
        """Whether `module` looks like a gated MLP; if so, replace it or say why not. Its linear layers come first.

        tied: ids of shared parameters.
        """
        children = dict(module.named_children())
        fused = "gate_up_proj" in children
        if "down_proj" not in children or not (fused or {"gate_proj", "up_proj"} <= set(children)):
            return False
        if "forward" in module.__dict__:
            changes.leave(path, module, "its forward was replaced before")
            return True
        if any(isinstance(m, nn.Dropout) and m.p > 0 for m in module.modules()):
            changes.leave(path, module, "it has dropout, which hal has not")
            return True
        key = probe.same_kind(module)
        if key not in self._forms:
            self._forms[key] = _form(module, fused)
        form = self._forms[key]
        if isinstance(form, str):
            changes.leave(path, module, form)
        else:
            name = _ACTIVATIONS[form.activation][1]
            together = None
            if not form.fused and Fused.possible(module, _GATE_UP, tied):
                together = Fused(module, _GATE_UP)
                changes.on_undo(together.undo)
            forward = _forward(form, together, type(module).forward, *_activation_of(module))
            changes.replace_forward(path, module, forward, (name,), form.activation)
        return True


def _forward(
    form: _Form, fused: Fused | None, original: Callable[..., Any], name: str, activation: Any
) -> Callable[..., Any]:
    act = _and_mul(form.activation)
    kind = type(activation)

    def changed(self: Any) -> bool:
        """Whether another activation was put in, or hooks on it want its call. A copy has a copy of it."""
        now = self._modules.get(name)
        if now is None:
            return self.__dict__.get(name) is not activation
        return type(now) is not kind or bool(now._forward_hooks or now._forward_pre_hooks)

    if form.fused:

        def forward(self: Any, x: Tensor) -> Any:
            if changed(self):
                return original(self, x)
            return self.down_proj(act(self.gate_up_proj(x)))
    else:

        def forward(self: Any, x: Tensor) -> Any:
            if changed(self):
                return original(self, x)
            gate_up = None if fused is None else fused(self, x)
            if gate_up is None:
                gate_up = torch.cat((self.gate_proj(x), self.up_proj(x)), -1)
            return self.down_proj(act(gate_up))

    return forward


def _and_mul(activation: str) -> Callable[[Tensor], Tensor]:
    if activation == "silu":
        return silu_and_mul
    if activation == "gelu":
        return gelu_and_mul
    return lambda x: gelu_and_mul(x, approximate="tanh")


def _form(module: nn.Module, fused: bool) -> _Form | str:
    like = probe.placement(module)
    first = getattr(module, "gate_up_proj" if fused else "gate_proj")
    if like is None or not isinstance(first, nn.Linear):
        return "its layers are not linear layers of one dtype and device"
    _, activation = _activation_of(module)
    if not callable(activation):
        return "it has no activation that hal could recognise"
    name = _activation(activation, like)
    if name is None:
        return "its activation is neither SiLU nor a GELU"
    x_TF = probe.random(2, first.in_features, like=like)
    with torch.no_grad():
        try:
            found = type(module).forward(module, x_TF)
        except Exception as error:
            return f"its forward could not be tried: {type(error).__name__}: {error}"
        expected = _composed(module, x_TF, name, fused)
    if not isinstance(found, Tensor) or found.dtype is not expected.dtype or not probe.close(found, expected):
        return "it computes something else than down(act(gate(x)) * up(x))"
    return _Form(name, fused)


def _activation_of(module: nn.Module) -> tuple[str, Any]:
    """Name and value of the activation."""
    held = ((name, getattr(module, name, None)) for name in _ACTIVATION_NAMES)
    return next(((name, value) for name, value in held if value is not None), ("", None))


def _composed(module: Any, x_TF: Tensor, activation: str, fused: bool) -> Tensor:
    gate, up = module.gate_up_proj(x_TF).chunk(2, -1) if fused else (module.gate_proj(x_TF), module.up_proj(x_TF))
    result: Tensor = module.down_proj(_ACTIVATIONS[activation][0](gate) * up)
    return result


def _activation(activation: Callable[[Tensor], Tensor], like: Tensor) -> str | None:
    x = torch.linspace(-8, 8, 257, device=like.device)
    with torch.no_grad():
        found = activation(x)
        # The two GELUs differ by up to 5e-4 here; float32 evaluations of one by about 1e-6.
        return next((n for n, (f, _) in _ACTIVATIONS.items() if torch.allclose(found, f(x), rtol=0, atol=1e-5)), None)
