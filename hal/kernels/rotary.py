"""rotary_embedding, and its gradient, which is the rotation by the opposite angles.

Scope: q is (tokens, H, D) and k, which may be None, (tokens, K, D), with any strides of tokens and heads and a unit
last one, float32, float16 or bfloat16; positions are int64; cos and sin are float32 (max_pos, HALF) with unit last
strides; results are contiguous. Arithmetic is float32. A token's angles are loaded once, by its position, for all its
heads. Programs take tokens in turn, so any number of programs will do.

Limits: no float64; one token at a time, so a token of few heads keeps little of the device busy.

Floor, s bytes an element: 2s·tokens·(H + K)·D + 8·tokens·(1 + HALF) bytes, which the kernel meets, and 3 flops for
each element of the 2·HALF rotated ones.

Shape suffixes: H heads of a tile (of q, or K of k), D a head's dims, P its rotated pairs.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hal.kernels.tiles import offsets, within

__all__ = ["rotary_kernel"]


@triton.jit
def _rotate(
    x,
    y,
    stride,
    cos_P,
    sin_P,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    D: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_REST: tl.constexpr,
):
    """One token's heads: those of x, `stride` apart, to y, D apart."""
    dtype: tl.constexpr = y.dtype.element_ty
    for first in range(0, HEADS, BLOCK_H):
        if INTERLEAVED:
            mask_HD = within(first, HEADS, 0, 2 * HALF, BLOCK_H, 2 * BLOCK_P)
            x_HD = tl.load(x + offsets(first, stride, 0, BLOCK_H, 2 * BLOCK_P), mask=mask_HD, other=0.0)
            one_HP, two_HP = tl.split(tl.reshape(x_HD.to(tl.float32), (BLOCK_H, BLOCK_P, 2)))
            turned = tl.join(one_HP * cos_P - two_HP * sin_P, two_HP * cos_P + one_HP * sin_P)
            y_HD = tl.reshape(turned, (BLOCK_H, 2 * BLOCK_P))
            tl.store(y + offsets(first, D, 0, BLOCK_H, 2 * BLOCK_P), y_HD.to(dtype), mask=mask_HD)
        else:
            mask_HP = within(first, HEADS, 0, HALF, BLOCK_H, BLOCK_P)
            x_at_HP, y_at_HP = offsets(first, stride, 0, BLOCK_H, BLOCK_P), offsets(first, D, 0, BLOCK_H, BLOCK_P)
            one_HP = tl.load(x + x_at_HP, mask=mask_HP, other=0.0).to(tl.float32)
            two_HP = tl.load(x + HALF + x_at_HP, mask=mask_HP, other=0.0).to(tl.float32)
            tl.store(y + y_at_HP, (one_HP * cos_P - two_HP * sin_P).to(dtype), mask=mask_HP)
            tl.store(y + HALF + y_at_HP, (two_HP * cos_P + one_HP * sin_P).to(dtype), mask=mask_HP)
        if BLOCK_REST:
            mask_HD = within(first, HEADS, 2 * HALF, D, BLOCK_H, BLOCK_REST)
            rest_HD = tl.load(x + offsets(first, stride, 2 * HALF, BLOCK_H, BLOCK_REST), mask=mask_HD)
            tl.store(y + offsets(first, D, 2 * HALF, BLOCK_H, BLOCK_REST), rest_HD, mask=mask_HD)


@triton.jit(do_not_specialize=["tokens"])  # 1 token is turned as it is among many
def rotary_kernel(
    q,
    k,
    positions,
    cos,
    sin,
    q_out,
    k_out,
    tokens,
    q_token_stride,
    q_head_stride,
    k_token_stride,
    k_head_stride,
    positions_stride,
    cos_stride,
    sin_stride,
    H: tl.constexpr,
    K: tl.constexpr,
    HALF: tl.constexpr,
    D: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BACK: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_REST: tl.constexpr,
):
    """q_out, k_out = q, k with the first 2·HALF dims of each head turned by the angles of the token's position.

    BACK turns the other way. BLOCK_H heads of q at a time, BLOCK_K of k; BLOCK_P ≥ HALF; BLOCK_REST ≥ D − 2·HALF, and 0
    where that is 0: the dims that are copied.
    """
    at_P = tl.arange(0, BLOCK_P)
    for token in range(tl.program_id(0), tokens, tl.num_programs(0)):
        position = tl.load(positions + token * tl.cast(positions_stride, tl.int64))
        cos_P = tl.load(cos + position * cos_stride + at_P, mask=at_P < HALF, other=0.0)[None, :]
        sin_P = tl.load(sin + position * sin_stride + at_P, mask=at_P < HALF, other=0.0)[None, :]
        if BACK:
            sin_P = -sin_P
        q_from, q_to = q + token * tl.cast(q_token_stride, tl.int64), q_out + token * tl.cast(H * D, tl.int64)
        _rotate(q_from, q_to, q_head_stride, cos_P, sin_P, H, HALF, D, INTERLEAVED, BLOCK_H, BLOCK_P, BLOCK_REST)
        if k is not None:
            k_from, k_to = k + token * tl.cast(k_token_stride, tl.int64), k_out + token * tl.cast(K * D, tl.int64)
            _rotate(k_from, k_to, k_head_stride, cos_P, sin_P, K, HALF, D, INTERLEAVED, BLOCK_K, BLOCK_P, BLOCK_REST)
