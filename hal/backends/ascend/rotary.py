"""rotary_embedding by aclnnRotaryPositionEmbedding, in float32.

npu_rotary_mul rounds cos and sin to x's dtype first, which the contract does not: so x goes in as float32. Its
gradient is the rotation by the opposite angle. The range [-1, 1] that the document gives for cos and sin is not
enforced by anything; the attention factors of yarn and longrope go past it.

Shape suffixes: T tokens, H heads, D head dim, R rotary dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hal.backends.ascend.chips import for_bf16_chips
from hal.capability import Declares, Implementation, Supports
from hal.op import Args

__all__ = ["IMPLEMENTATIONS"]

Gradients = tuple[Tensor | None, ...]

MAX_HEADS = 999


def _angles(table: Tensor, positions: Tensor, interleaved: bool) -> Tensor:
    """One value for each rotated dim of each token: (1, T, 1, R)."""
    rows_TC = table.index_select(0, positions.reshape(-1))
    rows_TR = rows_TC.repeat_interleave(2, -1) if interleaved else torch.cat((rows_TC, rows_TC), -1)
    return rows_TR[None, :, None]


def _rotated(x: Tensor, cos_1T1R: Tensor, sin_1T1R: Tensor, interleaved: bool) -> Tensor:
    if not x.numel():
        return torch.empty_like(x, memory_format=torch.contiguous_format)
    H, D = x.shape[-2:]
    R = cos_1T1R.shape[-1]
    x_1THD = x.reshape(1, -1, H, D)
    mode = "interleave" if interleaved else "half"
    y_1THR = torch.ops.npu.npu_rotary_mul(x_1THD[..., :R].float().contiguous(), cos_1T1R, sin_1T1R, mode).to(x.dtype)
    y_1THD = y_1THR if R == D else torch.cat((y_1THR, x_1THD[..., R:]), -1)
    return y_1THD.view(x.shape)


def rotary_embedding(
    q: Tensor,
    k: Tensor | None,
    positions: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    interleaved: bool = False,
    rotary_dim: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    cos_1T1R, sin_1T1R = (_angles(table, positions, interleaved) for table in (cos, sin))
    rotated_k = None if k is None else _rotated(k, cos_1T1R, sin_1T1R, interleaved)
    return _rotated(q, cos_1T1R, sin_1T1R, interleaved), rotated_k


def _backward(a: Args, outs: dict[str, Tensor], grads: Gradients, needs: tuple[bool, ...]) -> Gradients:
    cos_1T1R, sin_1T1R = (_angles(table, a.positions, a.interleaved) for table in (a.cos, a.sin))
    sin_1T1R = -sin_1T1R
    return tuple(
        None if dy is None or not need else _rotated(dy, cos_1T1R, sin_1T1R, a.interleaved)
        for dy, need in zip(grads, needs, strict=True)
    )


def _reasons(a: Args) -> list[str]:
    """at most 999 heads"""
    heads = max(t.shape[-2] for t in (a.q, a.k) if t is not None)
    return [f"{heads} heads, the most supported are {MAX_HEADS}"] if heads > MAX_HEADS else []


IMPLEMENTATIONS = (
    for_bf16_chips(
        Implementation(
            "rotary_embedding",
            "aclnn",
            rotary_embedding,
            Supports(where=_reasons),
            Declares(batch_invariant=True, stride_invariant=True, copies=frozenset({"q", "k"})),
            priority=10,
            backward=_backward,
        )
    ),
)
