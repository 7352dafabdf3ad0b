"""RMS norms, told apart by one run in bfloat16: it shows where a class rounds and what it adds to the weight.

F features.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hal.ops import layer_norm, rms_norm
from hal.port import probe
from hal.port.record import Changes

__all__ = ["NormForm", "Norms"]

_EPS_NAMES = ("variance_epsilon", "eps", "epsilon")
# Implementations of one formula may sum in another order, which moves a bfloat16 rounding now and then;
# another formula moves it in a quarter of the elements or more.
_MAY_DIFFER = 0.01
_ROWS = 64


@dataclass(frozen=True)
class NormForm:
    """The conventions of an RMS norm."""

    eps: float
    weight_offset: float
    round_before_weight: bool
    eps_name: str = "eps"

    def __str__(self) -> str:
        weight = "weight + 1" if self.weight_offset else "weight"
        return f"{weight} {'after' if self.round_before_weight else 'before'} rounding"


class Norms:
    """Replaces norms of one model; classes already probed are remembered."""

    def __init__(self) -> None:
        self._forms: dict[tuple[Any, ...], NormForm | str] = {}
        self.replaced: dict[nn.Module, NormForm] = {}

    def replace(self, changes: Changes, path: str, module: nn.Module) -> bool:
        """Whether `module` looks like a norm; if so, replace it or say why not."""
        if isinstance(module, nn.LayerNorm):
            self._layer_norm(changes, path, module)
            return True
        name, eps = _eps(module)
        if eps is None or not _one_vector(module):
            return False
        if (why := probe.unplain(module)) is not None:
            changes.leave(path, module, why)
            return True
        key = (*probe.same_kind(module), eps)
        if key not in self._forms:
            self._forms[key] = _form(module, eps, name)
        form = self._forms[key]
        if isinstance(form, str):
            changes.leave(path, module, form)
        else:
            forward = _rms_forward(form, type(module).forward)
            changes.replace_forward(path, module, forward, ("rms_norm",), str(form))
            self.replaced[module] = form
        return True

    def _layer_norm(self, changes: Changes, path: str, module: nn.LayerNorm) -> None:
        if type(module).forward is not nn.LayerNorm.forward:
            changes.leave(path, module, "a layer norm with a forward of its own")
        elif len(module.normalized_shape) != 1:
            changes.leave(path, module, "it normalises over more than the last axis")
        elif (why := probe.unplain(module)) is not None:
            changes.leave(path, module, why)
        else:
            changes.replace_forward(path, module, _layer_norm_forward, ("layer_norm",))


def _rms_forward(form: NormForm, original: Callable[..., Any]) -> Callable[..., Any]:
    eps_name, offset, before = form.eps_name, form.weight_offset, form.round_before_weight

    def forward(self: Any, hidden_states: Tensor) -> Any:
        weight = self.weight
        # After rounding, a weight of another dtype would promote the result: that is the model's own matter.
        if before and weight.dtype is not hidden_states.dtype:
            return original(self, hidden_states)
        eps = self.__dict__[eps_name]
        return rms_norm(hidden_states, weight, eps, weight_offset=offset, round_before_weight=before)

    return forward


def _layer_norm_forward(self: Any, input: Tensor) -> Tensor:
    return layer_norm(input, self.weight, self.bias, self.eps)


def _eps(module: nn.Module) -> tuple[str, float | None]:
    """Name and value of a norm's epsilon, which it may change later."""
    for name in _EPS_NAMES:
        value = vars(module).get(name)
        if isinstance(value, float) and value > 0:
            return name, value
    return "", None


def _one_vector(module: nn.Module) -> bool:
    parameters = dict(module.named_parameters())
    if any(True for _ in module.children()) or any(True for _ in module.buffers()):
        return False
    return set(parameters) == {"weight"} and parameters["weight"].ndim == 1


def _form(module: nn.Module, eps: float, name: str) -> NormForm | str:
    clone: Any = copy.deepcopy(module).to(device="cpu", dtype=torch.bfloat16)
    n_features = clone.weight.shape[0]
    with torch.no_grad():
        weight_F = probe.random(n_features, like=clone.weight)
        clone.weight.copy_(weight_F)
        x_TF = probe.random(_ROWS, n_features, like=weight_F)
        x_TF[::2] *= math.sqrt(eps)  # rows in which eps counts
        try:
            found = type(module).forward(clone, x_TF)
        except Exception as error:
            return f"its forward could not be tried: {type(error).__name__}: {error}"
        if not isinstance(found, Tensor) or found.shape != x_TF.shape or found.dtype is not x_TF.dtype:
            return "its result is not one tensor like its input"
        shares = {form: _differing(form, x_TF, weight_F, found) for form in _forms(eps, name)}
    best = min(shares, key=shares.__getitem__)
    if shares[best] > _MAY_DIFFER:
        return "it has weight and eps, but computes none of the RMS norms that hal has"
    return best


def _forms(eps: float, name: str) -> list[NormForm]:
    return [NormForm(eps, offset, before, name) for offset in (0.0, 1.0) for before in (False, True)]


def _differing(form: NormForm, x_TF: Tensor, weight_F: Tensor, found: Tensor) -> float:
    expected = rms_norm.op.reference(
        x_TF,
        weight_F,
        form.eps,
        weight_offset=form.weight_offset,
        round_before_weight=form.round_before_weight,
    )
    return float((expected != found).float().mean())
