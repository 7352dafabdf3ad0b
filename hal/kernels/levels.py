"""Levels of a row of logits that parts of it lie above, found without sorting.

A level is searched for over the ordered bits of a float32: each pass over the logits counts what lies above 2^BITS
candidates, as numbers of logits (exact) or as their mass, exp((x − best)/temperature), summed in float32 in one fixed
order, which cannot fall as a level sinks. At 2 bits a pass float32 takes 16 passes at most, bfloat16 eight.

Scope: x is a row of `length` logits, float32, float16 or bfloat16, with any stride. NaN reads as −inf, which lies above
no level. SHIFT is how many last bits of a float32 number are 0 in each of them.

Shape suffixes: V a tile of the row; G its groups of LANES neighbours, those of a thread's load; P candidates.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["TINY", "bound_of", "grouped", "last_kept", "logits_tile", "mass_of", "rate_of", "score_of"]

LOG2_E = tl.constexpr(1.4426950408889634)
TINY = tl.constexpr(1.1754943508222875e-38)


@triton.jit
def logits_tile(x, start, vocabulary, stride, BLOCK_V: tl.constexpr):
    """A tile of a row, float32, −inf where it is NaN and past the end, and its tokens."""
    at_V = start + tl.arange(0, BLOCK_V)
    x_V = tl.load(x + at_V * tl.cast(stride, tl.int64), mask=at_V < vocabulary, other=float("-inf")).to(tl.float32)
    return tl.where(x_V != x_V, float("-inf"), x_V), at_V


@triton.jit
def rate_of(temperature):
    """1 / temperature; what rounds to 0 must not divide 0 by 0."""
    return 1.0 / tl.maximum(temperature, TINY)


@triton.jit
def score_of(x_V, best, rate):
    """(x − best)/temperature; +inf less itself would be NaN."""
    return tl.where(x_V == best, 0.0, (x_V - best) * rate)


@triton.jit
def mass_of(x_V, best, rate):
    """exp of the score."""
    return tl.exp2(score_of(x_V, best, rate) * LOG2_E)


@triton.jit
def _code(x, SHIFT: tl.constexpr):
    """Of a float32 number whose last SHIFT bits are 0, an integer (int64) that orders as it does."""
    bits = x.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64) >> SHIFT


@triton.jit
def _decoded(code, SHIFT: tl.constexpr):
    """The number of a code."""
    bits = (code << SHIFT).to(tl.int32)
    # Negative numbers have the complement of their bits: the last ones come back as 0.
    bits = tl.where(code < 0, (bits | ((1 << SHIFT) - 1)) ^ 0x7FFFFFFF, bits)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _pivots(low, high, BITS: tl.constexpr):
    """2^BITS codes, of which the last is below `high`, in the midst of as many equal parts of low … high."""
    return low + (((high - low) * (2 * tl.arange(0, 1 << BITS) + 1)) >> (BITS + 1))


@triton.jit
def _narrowed(low, high, pivot_P, above_P, wanted):
    """Where the least code lies that has less than `wanted` above it."""
    low = tl.maximum(low, tl.max(tl.where(above_P >= wanted, pivot_P + 1, low), 0))
    return low, tl.minimum(high, tl.min(tl.where(above_P < wanted, pivot_P, high), 0))


@triton.jit
def bound_of(top_G, best, wanted, BITS: tl.constexpr, SHIFT: tl.constexpr):
    """The `wanted`-th largest of a tile in registers; −inf if it has no more above that."""
    low, high = _code(tl.full((), float("-inf"), tl.float32), SHIFT), _code(best, SHIFT)
    while low < high:
        pivot_P = _pivots(low, high, BITS)
        above_P = tl.sum((top_G[None, :] > _decoded(pivot_P, SHIFT)[:, None]).to(tl.int32), 1)
        low, high = _narrowed(low, high, pivot_P, above_P, wanted)
    return _decoded(low, SHIFT)


@triton.jit
def grouped(v_V, LANES: tl.constexpr):
    """A tile as (G, LANES): the elements of a thread's load in a row, so that their sum costs no exchange."""
    return tl.reshape(v_V, (v_V.shape[0] // LANES, LANES))


@triton.jit
def _above(
    x,
    length,
    stride,
    level_P,
    best,
    rate,
    BLOCK_V: tl.constexpr,
    LANES: tl.constexpr,
    STAGES: tl.constexpr,
    MASSES: tl.constexpr,
):
    """How many logits (fewer than 2²⁴, so exact in float32), or how much mass, each level has above it."""
    LEVELS: tl.constexpr = level_P.shape[0]
    above_PG = tl.zeros((LEVELS, BLOCK_V // LANES), tl.float32)
    for start in tl.range(0, length, BLOCK_V, num_stages=STAGES):
        x_V, _ = logits_tile(x, start, length, stride, BLOCK_V)
        x_GL = grouped(x_V, LANES)
        weight_GL = tl.full((BLOCK_V // LANES, LANES), 1.0, tl.float32)
        if MASSES:
            weight_GL = mass_of(x_GL, best, rate)
        above_PG += tl.sum(tl.where(x_GL[None, :, :] > level_P[:, None, None], weight_GL[None, :, :], 0.0), 2)
    return tl.sum(above_PG, 1)


@triton.jit
def _level(
    x,
    length,
    stride,
    low,
    best,
    rate,
    wanted,
    BLOCK_V: tl.constexpr,
    LANES: tl.constexpr,
    STAGES: tl.constexpr,
    BITS: tl.constexpr,
    SHIFT: tl.constexpr,
    MASSES: tl.constexpr,
):
    """The least level, from `low` to the best, that has less than `wanted` above it; and how much that is."""
    low, high = _code(low, SHIFT), _code(best, SHIFT)
    # Of the best, and of each level that `high` came to be: it grows as they sink.
    above = tl.zeros((), tl.float32)
    while low < high:
        pivot_P = _pivots(low, high, BITS)
        above_P = _above(x, length, stride, _decoded(pivot_P, SHIFT), best, rate, BLOCK_V, LANES, STAGES, MASSES)
        above = tl.maximum(above, tl.max(tl.where(above_P < wanted, above_P, 0.0), 0))
        low, high = _narrowed(low, high, pivot_P, above_P, wanted)
    return _decoded(low, SHIFT), above


@triton.jit
def _place(x, length, stride, level, wanted, BLOCK_V: tl.constexpr):
    """Where the `wanted`-th logit (1 …) stands that equals a level, or the last one if there are fewer."""
    place = tl.full((), -1, tl.int32)
    seen = tl.zeros((), tl.int32)
    for start in range(0, length, BLOCK_V):
        x_V, at_V = logits_tile(x, start, length, stride, BLOCK_V)
        equal_V = (x_V == level).to(tl.int32)
        found = tl.sum(equal_V, 0)
        if (found > 0) & (seen < wanted):
            first_V = (equal_V > 0) & (seen + tl.cumsum(equal_V, 0) <= wanted)
            place = tl.max(tl.where(first_V, at_V, -1), 0)
        seen += found
    return place


@triton.jit
def last_kept(
    x,
    length,
    stride,
    low,
    best,
    rate,
    k,
    p,
    mass,
    vocabulary,
    BLOCK_V: tl.constexpr,
    LANES: tl.constexpr,
    STAGES: tl.constexpr,
    BITS: tl.constexpr,
    SHIFT: tl.constexpr,
):
    """Level, and place of the last logit kept of those that equal it, among these logits, which include `low`.

    mass is that of the whole row, which top-p shares out unless top-k left less.
    """
    level, wanted, shared = low, tl.cast(vocabulary, tl.int32), mass
    if k < vocabulary:
        level, above = _level(
            x, length, stride, low, best, rate, k.to(tl.float32), BLOCK_V, LANES, STAGES, BITS, SHIFT, False
        )
        wanted = k - above.to(tl.int32)
        if p < 1.0:
            level_1 = tl.full((1,), level, tl.float32)
            above = tl.sum(_above(x, length, stride, level_1, best, rate, BLOCK_V, LANES, STAGES, True), 0)
            shared = above + wanted.to(tl.float32) * mass_of(level, best, rate)
    if p < 1.0:
        # Never nothing: the best token stays.
        share = tl.maximum(p * shared, TINY)
        least, above = _level(x, length, stride, level, best, rate, share, BLOCK_V, LANES, STAGES, BITS, SHIFT, True)
        # How many equal tokens it takes to reach the share, as far as an integer tells.
        equal = tl.minimum(tl.ceil((share - above) / mass_of(least, best, rate)), 16777216.0).to(tl.int32)
        wanted = tl.maximum(tl.where(least == level, tl.minimum(wanted, equal), equal), 1)
        level = least
    place = tl.cast(length, tl.int32) - 1
    if wanted < length:
        place = _place(x, length, stride, level, wanted, BLOCK_V)
    return level, place
