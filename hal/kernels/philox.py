"""Philox4x32-10 and the noise made of it: the words of hal.philox, and its uniform numbers, bit for bit.

Scope: counters below 2³¹, a 64-bit key; word 0 alone.

Shape suffixes: N any tile of counters.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["gumbel"]


@triton.jit
def gumbel(key, counter_N):
    """−log(−log u), float32, u = ((word >> 9) + ½)·2⁻²³ of word 0 of each counter (int32) under the key (int64)."""
    low_N = counter_N.to(tl.uint32, bitcast=True)
    zero_N = low_N * 0
    word_N, _, _, _ = tl.philox(key, low_N, zero_N, zero_N, zero_N)
    # 23 bits and a half: exact in float32.
    u_N = ((word_N >> 9).to(tl.int32).to(tl.float32) + 0.5) * 1.1920928955078125e-07
    return -tl.log(-tl.log(u_N))
