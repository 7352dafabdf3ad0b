"""Running transformers models through hal, recognised by structure rather than by name.

`apply(model)` replaces the forward of single module instances and selects hal's attention in the model's own
configuration; classes, torch and transformers stay as they are. What a module computes is
found out by running it once on small random inputs, so a look-alike that computes something else is left alone.
"""

from __future__ import annotations

import weakref
from collections import Counter
from typing import TYPE_CHECKING, Any

from torch import nn

from hal.errors import ArgumentError, UnsupportedError
from hal.port import interface
from hal.port.attention import ATTENTION_RUNS, NOT_RECOGNISED, Attentions, is_attention
from hal.port.layer import Layers
from hal.port.linear import replace_linear
from hal.port.mlp import MLPs
from hal.port.norms import Norms
from hal.port.record import Applied, Changes, Left, Replaced
from hal.port.rotary import replace_rotary

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["Applied", "Left", "Replaced", "apply", "require_transformers"]


# By what was changed, not by the Applied that a caller may drop: that one would keep its model alive.
_changed: weakref.WeakKeyDictionary[nn.Module, Changes] = weakref.WeakKeyDictionary()


def apply(model: PreTrainedModel) -> Applied:
    """Let a transformers model compute with hal's operators, until `undo()` or the end of a `with` block.

    Replaced are RMS and layer norms (with the rounding the model has), linear layers, gated MLPs, rotary embedding and
    attention; `print(apply(model))` lists what was replaced, what was left and why. Parameters keep their names, their
    values and the total of their memory; those of q, k and v, and of gate and up, come to lie side by side in it. A
    module that trains with dropout is left alone; applied in eval mode, it goes back to its own forward while it
    trains.

    Raises ArgumentError if the model is none of transformers' or is already applied, UnsupportedError if transformers
    is missing or too old.
    """
    require_transformers()
    from transformers import PreTrainedModel

    if not isinstance(model, PreTrainedModel):
        raise ArgumentError(
            f"hal.port.transformers.apply takes a transformers model (PreTrainedModel), not a {type(model).__name__}"
        )
    if any((m in _changed and _changed[m].active) or _is_ours(m) for m in model.modules()):
        raise ArgumentError(
            f"this {type(model).__name__}, or a part of it, already runs through hal (a copy of a model that does is "
            "one too); undo() the first apply before another"
        )
    changes = Changes()
    try:
        _replace(model, changes)
    except BaseException:
        changes.undo()
        raise
    _changed[model] = changes
    return Applied(model, changes)


def require_transformers() -> None:
    """UnsupportedError, saying what to install, unless a transformers that hal knows is there."""
    needed = "pip install 'torch-hal[transformers]'"
    try:
        import transformers
    except ImportError as error:
        raise UnsupportedError(
            f"this needs the package transformers, which cannot be imported ({error}); {needed}"
        ) from error
    if not hasattr(transformers, "AttentionMaskInterface"):
        raise UnsupportedError(f"transformers {transformers.__version__} has no AttentionMaskInterface; {needed}")


def _replace(model: Any, changes: Changes) -> None:
    modules = list(model.named_modules())
    norms, mlps, attentions = Norms(), MLPs(), Attentions()
    tied = _tied(model)
    selected = _select_attention(model, changes)
    rest = [(path, module) for path, module in modules if not replace_linear(changes, path, module)]
    inside_mlps: set[nn.Module] = set()
    for path, module in rest:
        if is_attention(module):
            attentions.replace(changes, path, module, selected, tied)
        elif mlps.replace(changes, path, module, tied):
            inside_mlps.update(module.modules())
        elif not norms.replace(changes, path, module) and not replace_rotary(changes, path, module):
            _leave(changes, path, module, selected, inside_mlps)
    layers = Layers(norms.replaced)
    for path, module in modules:
        layers.replace(changes, path, module)


def _is_ours(module: nn.Module) -> bool:
    """Whether an apply replaced the module's forward: of this model, of one around or inside it, or of its original."""
    return str(getattr(module.__dict__.get("forward"), "__module__", None)).startswith("hal.port.")


def _leave(changes: Changes, path: str, module: nn.Module, selected: bool, inside_mlps: set[nn.Module]) -> None:
    """Note a module that computes something of its own and stays as it is."""
    if module in inside_mlps:
        return
    if any(True for _ in module.children()):
        if "Attention" in type(module).__name__ and any(hasattr(module, name) for name in ("scaling", "is_causal")):
            changes.leave(path, module, NOT_RECOGNISED + (ATTENTION_RUNS if selected else ""))
    elif isinstance(module, nn.Dropout):
        if module.p > 0:
            changes.leave(path, module, "dropout stays the model's own")
    elif not isinstance(module, nn.Identity | nn.ModuleList | nn.ModuleDict):
        changes.leave(path, module, "hal has no operator for it")


def _select_attention(model: Any, changes: Changes) -> bool:
    """Make "hal" the attention implementation of the model's configurations, with the way back."""
    if not model._can_set_attn_implementation():
        changes.leave("", model, "it does not take its attention from transformers' attention interface")
        return False
    interface.register()
    before = [(config, config._attn_implementation_internal) for config in _configs(model)]

    def back() -> None:
        for config, name in before:
            config._attn_implementation_internal = name

    changes.on_undo(back)
    for config, _ in before:
        config._attn_implementation_internal = interface.NAME
    return True


def _tied(model: nn.Module) -> set[int]:
    """Ids of the parameters that more than one module holds."""
    counts = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
    return {key for key, count in counts.items() if count > 1}


def _configs(model: Any) -> list[Any]:
    from transformers import PreTrainedModel

    configs = [m.config for m in model.modules() if isinstance(m, PreTrainedModel) and m._can_set_attn_implementation()]
    return list({id(config): config for config in configs}.values())
