"""rotary_embedding by the kernel of hal.kernels.rotary."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from hal.backends.ascend.triton import launch
from hal.op import empty

__all__ = ["rotary_embedding"]

HEADS_AND_DIMS = 2048  # elements of a tile: interleaved pairs are parted in the unified buffer, which doubles them
INTERLEAVED_PAIRS = 64  # the 950's compiler (bishengir-compile 1.2.0) dies of 16-bit tiles of 32 interleaved pairs


def _heads(x: Tensor) -> Tensor:
    """x as (tokens, heads, D) with a unit last stride, without a copy where its strides allow it."""
    x = x.reshape(-1, *x.shape[-2:])
    return x if x.stride(-1) == 1 else x.contiguous()


def _blocks(heads: int, k_heads: int, dim: int, half: int, interleaved: bool) -> dict[str, Any]:
    pairs = max(launch.power_of_two(half), INTERLEAVED_PAIRS if interleaved else launch.NARROWEST)
    rest = dim - 2 * half
    width = max(2 * pairs, launch.power_of_two(rest) if rest else 0)
    most = max(1, HEADS_AND_DIMS // width)
    return {
        "BLOCK_H": min(launch.power_of_two(heads), most),
        "BLOCK_K": min(launch.power_of_two(max(k_heads, 1)), most),
        "BLOCK_P": pairs,
        "BLOCK_REST": max(launch.power_of_two(rest), launch.NARROWEST) if rest else 0,
    }


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
    q_out = empty(q.shape, dtype=q.dtype, device=q.device)
    k_out = None if k is None else empty(k.shape, dtype=k.dtype, device=k.device)
    if not positions.numel():
        return q_out, k_out
    q_THD, k_TKD, half = _heads(q), None if k is None else _heads(k), cos.shape[1]
    tokens, heads, dim = q_THD.shape
    positions_T = positions.reshape(-1)
    cos, sin = (t if t.stride(1) == 1 else t.contiguous() for t in (cos, sin))
    k_heads, k_strides = (0, (0, 0)) if k_TKD is None else (k_TKD.shape[1], k_TKD.stride()[:2])
    launch.run(
        "rotary.rotary_kernel",
        tokens,
        q.device,
        q_THD,
        k_TKD,
        positions_T,
        cos,
        sin,
        q_out,
        k_out,
        tokens,
        *q_THD.stride()[:2],
        *k_strides,
        positions_T.stride(0),
        cos.stride(0),
        sin.stride(0),
        H=heads,
        K=k_heads,
        HALF=half,
        D=dim,
        INTERLEAVED=interleaved,
        BACK=False,
        **_blocks(heads, k_heads, dim, half, interleaved),
    )
    return q_out, k_out
