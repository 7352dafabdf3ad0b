"""Rotary position embedding with the model's own cos and sin.

B batch, S query length, H query heads, K kv heads, D head dim, R rotary dim.

transformers hands every layer cos and sin of shape (B or 1, S, R), each value twice: once for either half of a pair.
The operator wants a table with one row per position and each value once. The table is made once per forward.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from hal.ops import rotary_embedding
from hal.port.record import Changes

__all__ = ["RotaryForm", "Tables", "replace_rotary", "rotate"]

Table = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class RotaryForm:
    """How an attention module rotates: which elements form a pair, and how its cos and sin repeat."""

    rotary_dim: int
    interleaved: bool
    repeats_neighbours: bool  # cos is (c0, c0, c1, c1, …) rather than (c0, c1, …, c0, c1, …)

    def __str__(self) -> str:
        return "interleaved pairs" if self.interleaved else "halves"


class Tables(tuple[Tensor, Tensor]):
    """(cos, sin) as the model made them, with the operator's tables made on first use and kept."""

    _tables: dict[RotaryForm, Table]

    def of(self, form: RotaryForm) -> Table:
        tables = self.__dict__.setdefault("_tables", {})
        if form not in tables:
            tables[form] = _table(self, form)
        table: Table = tables[form]
        return table


def rotate(q_BSHD: Tensor, k_BSKD: Tensor, cos_sin: tuple[Tensor, Tensor], form: RotaryForm) -> tuple[Tensor, Tensor]:
    """Rotated q and k."""
    positions, cos, sin = cos_sin.of(form) if type(cos_sin) is Tables else _table(cos_sin, form)
    if positions.shape[0] != q_BSHD.shape[0]:
        positions = positions.expand(q_BSHD.shape[0], -1)
    rotated = rotary_embedding(
        q_BSHD, k_BSKD, positions, cos, sin, interleaved=form.interleaved, rotary_dim=form.rotary_dim
    )
    return cast(tuple[Tensor, Tensor], rotated)


def replace_rotary(changes: Changes, path: str, module: nn.Module) -> bool:
    """Whether `module` makes cos and sin; if so, let it hand them on with room for the operator's tables."""
    if not any(name.endswith("inv_freq") for name, _ in module.named_buffers(recurse=False)):
        return False
    if "forward" in module.__dict__:
        changes.leave(path, module, "its forward was replaced before")
        return True
    changes.replace_forward(path, module, _forward(type(module).forward), (), "cos and sin stay the model's own")
    return True


def _forward(original: Callable[..., Any]) -> Callable[..., Any]:
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        cos_sin = original(self, *args, **kwargs)
        if torch.compiler.is_compiling() or not isinstance(cos_sin, tuple):
            return cos_sin
        return Tables(cos_sin)

    return forward


def _table(cos_sin: tuple[Tensor, Tensor], form: RotaryForm) -> Table:
    cos, sin = cos_sin
    half = form.rotary_dim // 2
    each = slice(None, None, 2) if form.repeats_neighbours else slice(half)
    batch, length = cos.shape[:2]
    positions = torch.arange(batch * length, device=cos.device).view(batch, length)
    return positions, cos[..., each].reshape(-1, half).float(), sin[..., each].reshape(-1, half).float()
