"""Rotary position embedding: x·cos + turned(x)·sin, where turned swaps the halves, or each pair, of the head dim."""

from __future__ import annotations

import torch
from torch import Tensor

from hal.backends.ascend.simulator import numerics
from hal.backends.ascend.simulator.operators import operator

__all__: list[str] = []

_HALF, _INTERLEAVE = 0, 1


def _turned(x: Tensor, mode: int) -> Tensor:
    if mode == _HALF:
        left, right = x.chunk(2, -1)
        return torch.cat((-right, left), -1)
    if mode == _INTERLEAVE:
        pairs = x.unflatten(-1, (-1, 2))
        return torch.stack((-pairs[..., 1], pairs[..., 0]), -1).flatten(-2)
    raise NotImplementedError(f"rotary mode {mode} is not simulated; half (0) and interleave (1) are")


def _turned_back(x: Tensor, mode: int) -> Tensor:
    """The transpose of _turned, which is its negative."""
    return -_turned(x, mode)


def _summed_to(values: Tensor, like: Tensor) -> Tensor:
    dims = [dim for dim in range(values.dim()) if like.shape[dim] != values.shape[dim]]
    return numerics.total(values, dims, keepdim=True) if dims else values


@operator("aclnnRotaryPositionEmbedding", "tttit")
def rotary_position_embedding(x: Tensor, cos: Tensor, sin: Tensor, mode: int, out: Tensor) -> None:
    values = numerics.wide(x)
    numerics.store(out, values * numerics.wide(cos) + _turned(values, mode) * numerics.wide(sin))


@operator("aclnnRotaryPositionEmbeddingV2", "tttitt")
def rotary_position_embedding_v2(
    x: Tensor, cos: Tensor, sin: Tensor, mode: int, rotate: Tensor | None, out: Tensor
) -> None:
    values = numerics.wide(x)
    turned = _turned(values, mode) if rotate is None else numerics.product(x, rotate.to(x.dtype))
    numerics.store(out, values * numerics.wide(cos) + turned * numerics.wide(sin))


@operator("aclnnRotaryPositionEmbeddingGrad", "ttttittt")
def rotary_position_embedding_grad(
    dy: Tensor,
    cos: Tensor,
    sin: Tensor,
    x: Tensor | None,
    mode: int,
    dx: Tensor,
    dcos: Tensor | None,
    dsin: Tensor | None,
) -> None:
    upstream = numerics.wide(dy)
    numerics.store(dx, upstream * numerics.wide(cos) + _turned_back(upstream * numerics.wide(sin), mode))
    if x is None:
        return
    values = numerics.wide(x)
    for out, factor in ((dcos, values), (dsin, _turned(values, mode))):
        if out is not None and out.numel():
            numerics.store(out, _summed_to(upstream * factor, out))


def _apply(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, mode: int) -> None:
    """Turn query and key in place; where cos is narrower than the head, the rest of the head stays."""
    width = cos.shape[-1]
    c, s = numerics.wide(cos), numerics.wide(sin)
    for x in (query, key):
        part = x[..., :width]
        values = numerics.wide(part)
        numerics.store(part, values * c + _turned(values, mode) * s)


@operator("aclnnApplyRotaryPosEmb", "tttti")
def apply_rotary_pos_emb(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, layout: int) -> None:
    _apply(query, key, cos, sin, _HALF)


@operator("aclnnApplyRotaryPosEmbV2", "ttttis")
def apply_rotary_pos_emb_v2(
    query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, layout: int, rotary_mode: str
) -> None:
    modes = {"half": _HALF, "interleave": _INTERLEAVE}
    if rotary_mode not in modes:
        raise NotImplementedError(f"rotary mode {rotary_mode!r} is not simulated; half and interleave are")
    _apply(query, key, cos, sin, modes[rotary_mode])
