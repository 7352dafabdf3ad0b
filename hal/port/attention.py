"""Attention modules: projections, norms of q and k, rotary, cache and attention, as the module's own forward does them.

The forward is run once with a recorder in the place of the attention function: what it hands over shows which norms
and which rotary it has, and which constants (scale, softcap, sinks). Only a module whose every step is understood
gets another forward; the attention function itself is hal's either way.

B batch, S query length, H query heads, K kv heads, D head dim, R rotary dim.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from hal.ops import rotary_embedding
from hal.port import interface, probe, rotary
from hal.port.fuse import Fused
from hal.port.record import Changes
from hal.port.rotary import RotaryForm

__all__ = ["ATTENTION_RUNS", "NOT_RECOGNISED", "Attentions", "is_attention"]

NOT_RECOGNISED = "its projections are laid out in a way that hal does not know"
ATTENTION_RUNS = "; attention itself runs through hal"

_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
_PROBE = "hal_probe"
_BATCH, _LENGTH = 2, 3
# What an attention function may be handed and hal's attention either understands or has no use for:
# a sliding window is in the mask.
_UNDERSTOOD = frozenset({"scaling", "softcap", "s_aux", "sliding_window", "dropout"})

_QKNorm = Literal["none", "per head", "over all heads"]


@dataclass(frozen=True)
class _Form:
    norm: _QKNorm
    rotary: RotaryForm | None
    scaling: float
    softcap: float | None
    sinks: str | None  # name of the module's parameter

    def __str__(self) -> str:
        parts = [] if self.norm == "none" else [f"q and k normed {self.norm}"]
        parts += ["no rotary" if self.rotary is None else f"rotary in {self.rotary}"]
        parts += [] if self.softcap is None else [f"softcap {self.softcap:g}"]
        parts += [] if self.sinks is None else ["sinks"]
        return ", ".join(parts)


@dataclass
class _Recorder:
    """Stands in for the attention function and for the cache."""

    calls: list[tuple[Tensor, Tensor, Tensor, Any, dict[str, Any]]] = field(default_factory=list)
    updates: int = 0
    output: Tensor | None = None

    def attention(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Any,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        self.calls.append((query, key, value, mask, kwargs | dict(enumerate(args))))  # type: ignore[arg-type]
        batch, heads, length, _ = query.shape
        self.output = probe.random(batch, length, heads, value.shape[-1], like=value)
        return self.output, None

    def update(self, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        self.updates += 1
        return key, value


class Attentions:
    """Replaces the attention modules of one model; kinds already probed are remembered."""

    def __init__(self) -> None:
        self._forms: dict[tuple[Any, ...], _Form | str] = {}

    def replace(self, changes: Changes, path: str, module: nn.Module, selected: bool, tied: set[int]) -> None:
        """Replace an attention module's forward, or say why its own stays. Its linear layers come first.

        selected: whether the model's attention implementation is hal's. tied: ids of shared parameters.
        """
        if "forward" in module.__dict__:
            changes.leave(path, module, "its forward was replaced before")
            return
        dropout = float(getattr(module, "attention_dropout", 0.0) or 0.0)
        if dropout and module.training:
            changes.leave(path, module, f"it trains with dropout {dropout:g}, which hal has not")
            return
        if not selected:
            changes.leave(path, module, "its model does not take attention from transformers' attention interface")
            return
        key = probe.same_kind(module)
        if key not in self._forms:
            self._forms[key] = _form(module)
        form = self._forms[key]
        if isinstance(form, str):
            changes.leave(path, module, form + ATTENTION_RUNS)
            return
        how = str(form) + (f"; its own forward while it trains with dropout {dropout:g}" if dropout else "")
        ops = ("attention",) if form.rotary is None else ("rotary_embedding", "attention")
        fused = None
        if Fused.possible(module, _PROJECTIONS[:3], tied):
            fused = Fused(module, _PROJECTIONS[:3])
            changes.on_undo(fused.undo)
        changes.replace_forward(path, module, _forward(form, type(module).forward, fused), ops, how)


def is_attention(module: nn.Module) -> bool:
    """Whether the module has the parts of an attention module in transformers' manner."""
    return all(isinstance(getattr(module, name, None), nn.Module) for name in _PROJECTIONS) and isinstance(
        getattr(module, "head_dim", None), int
    )


def _forward(form: _Form, original: Callable[..., Any], fused: Fused | None) -> Callable[..., Any]:
    rotary_dim = 0 if form.rotary is None else form.rotary.rotary_dim

    def forward(
        self: Any,
        hidden_states: Tensor,
        position_embeddings: Any = None,
        attention_mask: Tensor | None = None,
        cache: Any = None,
        **kwargs: Any,
    ) -> Any:
        if (
            not interface.selected(self.config)
            or (self.training and self.attention_dropout)
            or kwargs.get("position_bias") is not None
            or "past_key_values" in kwargs
            or kwargs.get("output_attentions")
            # A width that was not probed: the module may treat it in a way of its own.
            or (rotary_dim and position_embeddings[0].shape[-1] != rotary_dim)
        ):
            return original(
                self,
                hidden_states=hidden_states,
                position_embeddings=position_embeddings,
                attention_mask=attention_mask,
                cache=cache,
                **kwargs,
            )
        batch, length = hidden_states.shape[:2]
        q, k, v = _projected(self, form.norm, hidden_states, fused)
        if form.rotary is not None:
            q, k = rotary.rotate(q, k, position_embeddings, form.rotary)
        if cache is not None:
            k, v = cache.update(k.transpose(1, 2), v.transpose(1, 2), self.layer_idx, kwargs=kwargs)
            k, v = k.transpose(1, 2), v.transpose(1, 2)
        causal = kwargs.get("is_causal")
        o_BSHD = interface.attend(
            q,
            k,
            v,
            attention_mask,
            self.is_causal if causal is None else causal,
            form.scaling,
            form.softcap,
            None if form.sinks is None else getattr(self, form.sinks),
        )
        return self.o_proj(o_BSHD.view(batch, length, -1)), None

    return forward


def _projected(module: Any, norm: _QKNorm, hidden: Tensor, fused: Fused | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """q (B, S, H, D), k and v (B, S, K, D), before rotary."""
    heads = (*hidden.shape[:2], -1, module.head_dim)
    together = None if fused is None else fused(module, hidden)
    if fused is None or together is None:
        q, k, v = module.q_proj(hidden), module.k_proj(hidden), module.v_proj(hidden)
    else:
        q, k, v = torch.split_with_sizes(together, fused.sizes, -1)
    v = v.view(heads)
    if norm == "over all heads":
        return module.q_norm(q).view(heads), module.k_norm(k).view(heads), v
    if norm == "per head":
        return module.q_norm(q.view(heads)), module.k_norm(k.view(heads)), v
    return q.view(heads), k.view(heads), v


def _form(module: nn.Module) -> _Form | str:
    like = probe.placement(module)
    if like is None:
        return "its weights are not plain tensors of one dtype and device"
    if "cache" not in inspect.signature(inspect.unwrap(type(module).forward)).parameters:
        return "its forward takes no cache"
    try:
        with torch.no_grad():
            return _recognised(module, like)
    except Exception as error:
        return f"its forward could not be traced: {type(error).__name__}: {error}"


def _recognised(module: Any, like: Tensor) -> _Form | str:
    hidden = probe.random(_BATCH, _LENGTH, module.q_proj.in_features, like=like)
    found: _Form | str = "its head dim is odd"
    for form in _rotary_forms(module):
        cos_sin = _angles(form, like)
        recorder = _Recorder()
        try:
            with _recording(module.config, recorder):
                output = type(module).forward(
                    module,
                    hidden_states=hidden,
                    position_embeddings=cos_sin,
                    attention_mask=None,
                    cache=recorder,
                )
        except RuntimeError as error:  # cos and sin of another width than this module's
            found = f"its forward could not be traced: {error}"
            continue
        found = _matched(module, recorder, hidden, cos_sin, form, output)
        if not isinstance(found, str):
            return found
    return found


def _matched(
    module: Any,
    recorder: _Recorder,
    hidden: Tensor,
    cos_sin: tuple[Tensor, Tensor],
    candidate: RotaryForm,
    output: Any,
) -> _Form | str:
    if len(recorder.calls) != 1 or recorder.updates != 1:
        return "it does not call the attention function and the cache once each"
    query, key, value, mask, constants = recorder.calls[0]
    unknown = sorted(str(k) for k, v in constants.items() if k not in _UNDERSTOOD and v is not None)
    if unknown or mask is not None:
        return f"it hands {', '.join(unknown) or 'a mask of its own'} to attention, which hal's does not know"
    if not isinstance(output, tuple) or len(output) != 2 or recorder.output is None:
        return "its result is not (output, weights)"
    if not probe.close(output[0], module.o_proj(recorder.output.reshape(*hidden.shape[:2], -1))):
        return "it does more with attention's result than o_proj"
    handed = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    sinks = constants.get("s_aux")
    for norm in _norms(module):
        try:
            q, k, v = _projected(module, norm, hidden)
        except RuntimeError:  # a norm of another width
            continue
        for form in (None, candidate):
            expected = (q, k, v) if form is None else (*_reference_rotated(q, k, cos_sin, form), v)
            if all(map(probe.close, handed, expected)):
                name = None if sinks is None else next((n for n, p in module.named_parameters() if p is sinks), None)
                if sinks is not None and name is None:
                    return "its sinks are not a parameter of its own"
                return _Form(norm, form, float(constants["scaling"]), constants.get("softcap"), name)
    return "its query, key and value are not projections, norms and rotary in a way that hal knows"


def _norms(module: nn.Module) -> tuple[_QKNorm, ...]:
    has = isinstance(getattr(module, "q_norm", None), nn.Module) and isinstance(
        getattr(module, "k_norm", None), nn.Module
    )
    return ("per head", "over all heads", "none") if has else ("none",)


def _rotary_forms(module: Any) -> Iterator[RotaryForm]:
    parameters = getattr(module.config, "rope_parameters", None) or {}
    share = parameters.get("partial_rotary_factor") or getattr(module.config, "partial_rotary_factor", None) or 1
    for dim in dict.fromkeys((int(module.head_dim * share), module.head_dim)):
        if dim % 2 == 0:
            yield RotaryForm(dim, False, False)
            yield RotaryForm(dim, True, False)
            yield RotaryForm(dim, True, True)


def _angles(form: RotaryForm, like: Tensor) -> tuple[Tensor, Tensor]:
    # Through float32, as models compute them: the operator's tables hold them exactly then.
    half = probe.random(_BATCH, _LENGTH, form.rotary_dim // 2, like=like).float()
    angles = half.repeat_interleave(2, -1) if form.repeats_neighbours else torch.cat((half, half), -1)
    return angles.cos().to(like.dtype), angles.sin().to(like.dtype)


def _reference_rotated(q: Tensor, k: Tensor, cos_sin: tuple[Tensor, Tensor], form: RotaryForm) -> tuple[Tensor, Tensor]:
    positions, cos, sin = rotary.Tables(cos_sin).of(form)
    rotated: tuple[Tensor, Tensor] = rotary_embedding.op.reference(
        q, k, positions, cos, sin, interleaved=form.interleaved, rotary_dim=form.rotary_dim
    )
    return rotated


@contextmanager
def _recording(config: Any, recorder: _Recorder) -> Iterator[None]:
    """Let the model's attention function be the recorder, for this configuration only."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    before = config._attn_implementation_internal
    ALL_ATTENTION_FUNCTIONS[_PROBE] = recorder.attention
    config._attn_implementation_internal = _PROBE
    try:
        yield
    finally:
        config._attn_implementation_internal = before
        del ALL_ATTENTION_FUNCTIONS[_PROBE]
