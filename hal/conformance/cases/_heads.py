"""What the attention families share: heads' values, visibility by the contract's words, and the paths that must agree.

Shape letters: B batch, S queries, L keys, H query heads, K kv heads, D head dim of q and k, E head dim of v.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hal.conformance.cases._family import P
from hal.conformance.inputs import Draw, Results, Variant

__all__ = ["OPTIONS", "expanded", "heads", "merged", "options", "sinks", "visible"]

OPTIONS: dict[str, Any] = {
    "H": 2,
    "K": 1,
    "D": 64,
    "E": None,
    "causal": False,
    "window": None,
    "softcap": None,
    "scale": None,
    "sinks": None,
    "loud": False,
    "lse": False,
    "spread": 1.5,
}


def heads(draw: Draw, name: str, lead: tuple[int, ...], n: int, width: int, dtype: torch.dtype, size: float) -> Tensor:
    """(*lead, n, width) values of one size."""
    return (draw.normal(name, (*lead, n, width)) * size).to(dtype)


def sinks(p: P, draw: Draw, dtype: torch.dtype) -> Tensor | None:
    """One logit per query head, around the size of the others."""
    if p.sinks is None:
        return None
    logits = draw.normal("sinks", (p.H,)) * 2
    if p.loud:  # the exponential of its distance to the scores overflows float64
        logits[0] = 1000.0
    return logits.to(dtype if p.sinks == "same" else getattr(torch, p.sinks))


def options(p: P, draw: Draw, dtype: torch.dtype) -> dict[str, Any]:
    """The options that every attention op has."""
    return {
        "causal": p.causal,
        "window": None if p.window is None else tuple(p.window),
        "softcap": p.softcap,
        "scale": p.scale,
        "sinks": sinks(p, draw, dtype),
        "return_lse": p.lse,
    }


def visible(queries: int, keys: int, causal: bool, window: list[int | None] | None) -> Tensor:
    """(S, L): whether query i may see key j, i standing at i + (L − S)."""
    at = torch.arange(queries)[:, None] + (keys - queries)
    j = torch.arange(keys)
    seen = torch.ones(queries, keys, dtype=torch.bool)
    if causal:
        seen &= j <= at
    left, right = window if window is not None else (None, None)
    if left is not None:
        seen &= j >= at - left
    if right is not None:
        seen &= j <= at + right
    return seen


def expanded(args: Mapping[str, Any], names: tuple[str, ...], axis: int, group: int) -> Variant:
    """Every query head with a kv head of its own: GQA is that, and nothing else."""
    part = dict(args) | {name: args[name].repeat_interleave(group, axis) for name in names}
    return Variant("kv heads expanded", (part,))


def merged(parts: list[Results], lse_axes: bool) -> tuple[Results, tuple[Tensor, Tensor]]:
    """Pieces over disjoint keys merged in float64, and what their own roundings may add.

    A piece's o errs by u_out|o_i| more than the whole's bound says; an error of its lse moves weight w_i to others.
    """
    outs, logs = [o.double() for o, _ in parts], [lse.double() for _, lse in parts]
    total = torch.logsumexp(torch.stack(logs), 0)
    safe = torch.where(total == -math.inf, 0.0, total)
    weights = [torch.exp(lse - safe) for lse in logs]
    if lse_axes:
        weights, beside = (
            [w.transpose(1, 2)[..., None] for w in weights],
            [lse.transpose(1, 2)[..., None] for lse in logs],
        )
    else:
        weights, beside = [w[..., None] for w in weights], [lse[..., None] for lse in logs]
    o = torch.stack([w * t for w, t in zip(weights, outs, strict=True)]).sum(0)
    u_out = torch.finfo(parts[0][0].dtype).eps / 2
    u_lse = torch.finfo(parts[0][1].dtype).eps / 2
    extra = torch.zeros_like(o)
    for w, t, lse in zip(weights, outs, beside, strict=True):
        drift = u_lse * torch.where(lse.isfinite(), lse.abs(), 0.0)
        extra = extra + w * (u_out * t.abs() + drift * (t.abs() + o.abs()))
    finite = [torch.where(lse.isfinite(), lse.abs(), 0.0) for lse in logs]
    return (o, total), (extra, u_lse * torch.stack(finite).amax(0))
