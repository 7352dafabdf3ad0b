"""rotary_embedding in few ATen calls: decoding rotates one token at a time, where each call counts.

Shape letters as in hal.ops.rotary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hal.capability import Declares, Implementation
from hal.op import empty

__all__ = ["IMPLEMENTATIONS"]


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
    half = cos.shape[1]
    if k is not None and not interleaved and positions.numel() == 1 and 2 * half == q.shape[-1]:
        return _one_token(q, k, int(positions.item()), cos, sin, half)
    cos_R, sin_R = cos[positions].unsqueeze(-2), sin[positions].unsqueeze(-2)
    if q.dtype is torch.float64:
        cos_R, sin_R = cos_R.double(), sin_R.double()
    return (
        _rotated(q, cos_R, sin_R, interleaved),
        None if k is None else _rotated(k, cos_R, sin_R, interleaved),
    )


def _one_token(q: Tensor, k: Tensor, position: int, cos: Tensor, sin: Tensor, half: int) -> tuple[Tensor, Tensor]:
    """q and k as one tensor of heads: x·(c, c) + swapped(x)·(−s, s)."""
    dtype = q.dtype
    cos_R, sin_R = cos[position], sin[position]
    heads = torch.cat((q, k), -2)
    if dtype.itemsize == 2:
        heads = heads.float()
    elif dtype is torch.float64:
        cos_R, sin_R = cos_R.double(), sin_R.double()
    cos_D = torch.cat((cos_R, cos_R))
    swapped = heads.roll(half, -1).mul_(torch.cat((sin_R.neg(), sin_R)))
    counts = (q.shape[-2], k.shape[-2])
    if dtype.itemsize == 2:
        q_out, k_out = torch.split_with_sizes(swapped.addcmul_(heads, cos_D), counts, -2)
        return q_out.to(dtype), k_out.to(dtype)
    q_swapped, k_swapped = torch.split_with_sizes(swapped, counts, -2)
    return torch.addcmul(q_swapped, q, cos_D), torch.addcmul(k_swapped, k, cos_D)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    half = cos.shape[-1]
    wide = x.float() if x.dtype.itemsize == 2 else x
    y = empty(x.shape, dtype=wide.dtype, device=x.device)
    if interleaved:
        pairs = slice(0, 2 * half, 2), slice(1, 2 * half, 2)
    else:
        pairs = slice(0, half), slice(half, 2 * half)
    (x1, x2), (y1, y2) = ((t[..., pairs[0]], t[..., pairs[1]]) for t in (wide, y))
    torch.mul(x1, cos, out=y1).addcmul_(x2, sin, value=-1)
    torch.mul(x2, cos, out=y2).addcmul_(x1, sin)
    if 2 * half < x.shape[-1]:
        y[..., 2 * half :] = wide[..., 2 * half :]
    return y if y.dtype is x.dtype else y.to(x.dtype)


IMPLEMENTATIONS = (Implementation("rotary_embedding", "aten", rotary_embedding, declares=Declares(), priority=10),)
