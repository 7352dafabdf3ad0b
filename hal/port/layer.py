"""Decoder layers that norm before attention and before the MLP: the middle residual and its norm as one call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from hal.ops import add_rms_norm
from hal.port import probe
from hal.port.norms import NormForm
from hal.port.record import Changes

__all__ = ["Layers"]

_CHILDREN = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}


class Layers:
    """Replaces the decoder layers of one model, after their parts; kinds already probed are remembered."""

    def __init__(self, norms: dict[nn.Module, NormForm]) -> None:
        self._norms = norms
        self._fits: dict[tuple[Any, ...], bool] = {}

    def replace(self, changes: Changes, path: str, module: nn.Module) -> None:
        """Replace the layer's forward if it is of this kind; its parts run through hal in any case."""
        children = dict(module.named_children())
        if set(children) != _CHILDREN or "forward" in module.__dict__:
            return
        form = self._norms.get(children["post_attention_layernorm"])
        if form is None or any(getattr(m, "attention_dropout", 0) and m.training for m in module.modules()):
            return
        key = probe.same_kind(module)
        forward = _forward(form, type(module).forward)
        if key not in self._fits:
            self._fits[key] = _fits(module, forward)
        if self._fits[key]:
            changes.replace_forward(path, module, forward, ("add_rms_norm",), "residual and norm in one")


def _forward(form: NormForm, original: Callable[..., Any]) -> Callable[..., Any]:
    eps_name, offset, before = form.eps_name, form.weight_offset, form.round_before_weight

    def forward(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        norm = self.post_attention_layernorm
        # Hooks on the norm want its call, checkpointing wants the class's forward, another dtype its promotion.
        if (
            norm._forward_hooks
            or norm._forward_pre_hooks
            or (self.training and getattr(self, "gradient_checkpointing", False))
            or args
            or "past_key_values" in kwargs
            or (before and norm.weight.dtype is not hidden_states.dtype)
        ):
            return original(self, hidden_states, *args, **kwargs)
        attended, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **kwargs)
        if attended.dtype is not hidden_states.dtype:  # autocast: the sum promotes
            residual = hidden_states + attended
            return residual + self.mlp(norm(residual))
        eps = norm.__dict__[eps_name]
        normed, residual = add_rms_norm(
            attended, hidden_states, norm.weight, eps, weight_offset=offset, round_before_weight=before
        )
        return residual + self.mlp(normed)

    return forward


def _fits(module: Any, forward: Callable[..., Any]) -> bool:
    like = probe.placement(module)
    dim = getattr(getattr(module.self_attn, "q_proj", None), "in_features", None)
    head_dim = getattr(module.self_attn, "head_dim", None)
    if like is None or dim is None or head_dim is None:
        return False
    hidden = probe.random(1, 2, dim, like=like)
    angles = probe.random(1, 2, head_dim // 2, like=like).float().repeat(1, 1, 2)
    cos_sin = angles.cos().to(like.dtype), angles.sin().to(like.dtype)
    with torch.no_grad():
        try:
            found, expected = (
                f(module, hidden, attention_mask=None, position_embeddings=cos_sin)
                for f in (type(module).forward, forward)
            )
        except Exception:
            return False
    return isinstance(found, Tensor) and isinstance(expected, Tensor) and probe.close(found, expected)
