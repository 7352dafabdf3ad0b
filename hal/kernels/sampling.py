"""top_k_top_p_probs and top_k_top_p_sample over the rows of a matrix of logits.

Scope: logits are (rows, vocabulary), float32, float16 or bfloat16, with any strides; temperature, top_p and min_p are
float32 numbers or tensors of any float dtype, top_k an integer or a tensor, one for all rows (stride 0) or one a row.
What the filters keep of a row is a prefix of its descending order, ties by the lowest token: all logits above a level
and, of those that equal it, the tokens up to a limit. So nothing is sorted: levels are found by search over the ordered
bits of a float, with the exact number, or the float32 mass, of the logits above each candidate level.

`gather_kernel` (a program a row) reads the row twice: for the maximum of each of its threads, of which the n-th largest
bounds the n-th largest logit from below, then to copy what reaches this bound, if it is little, in the order of tokens.
`search_kernel` (a program a row) finds level and limit among the copied logits or, where those are too many or hold too
little, in the row itself. `probs_kernel` and `draw_kernel`, many programs a row, read the row once more, to write the
probabilities or to draw; `pick_kernel` takes the best of what the programs of a row drew. Sums have one fixed order.

Limits: no float64; fewer than 2²⁴ tokens.

Floor, s bytes a logit: s·rows·vocabulary bytes read, 4·rows·vocabulary written by the probabilities; 6 flops a logit,
and 80 integer operations for each kept token of a draw. Here a row is read three times, the last two from a cache that
holds it, and once for each 2 bits of a level that is searched in the row itself.

Shape suffixes: V a tile of the vocabulary, or of copied logits; G groups, the tokens of a thread; C chunks of a row.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hal.kernels.levels import TINY, bound_of, grouped, last_kept, logits_tile, mass_of, rate_of, score_of
from hal.kernels.philox import gumbel

__all__ = ["draw_kernel", "gather_kernel", "pick_kernel", "probs_kernel", "search_kernel"]

# A row's state, so many float32 numbers. For all kernels: the best logit, NaN if none is finite; the level, the last
# token kept of those that equal it, and the mass of what is kept. From gather_kernel for search_kernel: how many logits
# reach the bound, which are copied unless they are too many; the bound, their mass, and that of the row.
BEST, LEVEL, LIMIT, MASS = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
COPIED, BOUND, COPIED_MASS, ROW_MASS = tl.constexpr(4), tl.constexpr(5), tl.constexpr(6), tl.constexpr(7)
STATE = tl.constexpr(8)


@triton.jit
def _parameter(pointer, value, stride, row):
    """A row's parameter, float32: out of a tensor, or the number for all."""
    if pointer is not None:
        value = tl.load(pointer + row * tl.cast(stride, tl.int64))
    return tl.cast(value, tl.float32)


@triton.jit
def _temperature(pointer, value, stride, row):
    """A row's temperature, float32; one that is no float32 number but not 0 does not become 0, which is argmax."""
    told = _parameter(pointer, value, stride, row)
    if pointer is not None:
        given = tl.load(pointer + row * tl.cast(stride, tl.int64))
        told = tl.where((told == 0.0) & (given != 0.0), TINY, told)
    return told


@triton.jit
def _kept_ranks(top_k, k, k_stride, temperature, vocabulary, row):
    """How many ranks top-k and temperature 0 leave: 1 … vocabulary."""
    if top_k is not None:
        k = tl.load(top_k + row * tl.cast(k_stride, tl.int64))
    k = tl.cast(k, tl.int64)
    k = tl.where((k <= 0) | (k > vocabulary), vocabulary, k).to(tl.int32)
    return tl.where(temperature == 0.0, 1, k)


@triton.jit
def _kept(x_V, at_V, mass_V, level, limit, least):
    """What the filters keep: above the level, or at it up to a limit, and of min-p's share of the best at least."""
    kept_V = (x_V > level) | ((x_V == level) & (at_V <= limit))
    return kept_V & (x_V != float("-inf")) & (mass_V >= least)


@triton.jit
def gather_kernel(
    logits,
    temperature,
    top_k,
    state,
    copies,
    tokens,
    vocabulary,
    row_stride,
    stride,
    temperature_value,
    temperature_stride,
    k_value,
    k_stride,
    BLOCK_V: tl.constexpr,
    STAGES: tl.constexpr,
    LANES: tl.constexpr,
    CAPACITY: tl.constexpr,
    BITS: tl.constexpr,
    SHIFT: tl.constexpr,
    FILTERS: tl.constexpr,
    MASSES: tl.constexpr,
):
    """A row's best logit and, if it FILTERS, the copies (rows, CAPACITY) of the logits near it, with their tokens.

    Without FILTERS everything is kept. MASSES: the masses of row and copies are wanted.
    """
    row = tl.program_id(0).to(tl.int64)
    x = logits + row * tl.cast(row_stride, tl.int64)
    state += row * STATE
    GROUPS: tl.constexpr = BLOCK_V // LANES
    top_G = tl.full((GROUPS,), float("-inf"), tl.float32)
    finite_G = tl.full((GROUPS,), float("-inf"), tl.float32)
    for start in tl.range(0, vocabulary, BLOCK_V, num_stages=STAGES):
        x_V, _ = logits_tile(x, start, vocabulary, stride, BLOCK_V)
        top_G = tl.maximum(top_G, tl.max(grouped(x_V, LANES), 1))
        finite_V = tl.where(x_V == float("inf"), float("-inf"), x_V)
        finite_G = tl.maximum(finite_G, tl.max(grouped(finite_V, LANES), 1))
    best = tl.max(top_G, 0)
    tl.store(state + BEST, tl.where(tl.max(finite_G, 0) == float("-inf"), float("nan"), best))
    if FILTERS:
        told = _temperature(temperature, temperature_value, temperature_stride, row)
        k, rate = _kept_ranks(top_k, k_value, k_stride, told, vocabulary, row), rate_of(told)
        bound = bound_of(top_G, best, tl.where(k < vocabulary, k, tl.minimum(GROUPS // 2 + 1, vocabulary)), BITS, SHIFT)
        copies += row * CAPACITY
        tokens += row * CAPACITY
        copied = tl.zeros((), tl.int32)
        mass_G = tl.zeros((GROUPS,), tl.float32)
        copied_G = tl.zeros((GROUPS,), tl.float32)
        for start in range(0, vocabulary, BLOCK_V):
            x_V, at_V = logits_tile(x, start, vocabulary, stride, BLOCK_V)
            reaches_V = (x_V >= bound) & (at_V < vocabulary)
            reaching = tl.sum(reaches_V.to(tl.int32), 0)
            if (reaching > 0) & (copied < CAPACITY):
                place_V = copied + tl.cumsum(reaches_V.to(tl.int32), 0) - 1
                fits_V = reaches_V & (place_V < CAPACITY)
                tl.store(copies + place_V, x_V, mask=fits_V)
                tl.store(tokens + place_V, at_V, mask=fits_V)
            copied += reaching
            if MASSES:
                mass_V = mass_of(x_V, best, rate)
                mass_G += tl.sum(grouped(mass_V, LANES), 1)
                copied_G += tl.sum(grouped(tl.where(reaches_V, mass_V, 0.0), LANES), 1)
        tl.store(state + COPIED, copied.to(tl.float32))
        tl.store(state + BOUND, bound)
        if MASSES:
            tl.store(state + ROW_MASS, tl.sum(mass_G, 0))
            tl.store(state + COPIED_MASS, tl.sum(copied_G, 0))
    else:
        tl.store(state + LEVEL, float("-inf"))
        tl.store(state + LIMIT, -1.0)


@triton.jit
def search_kernel(
    logits,
    temperature,
    top_k,
    top_p,
    min_p,
    state,
    copies,
    tokens,
    vocabulary,
    row_stride,
    stride,
    temperature_value,
    temperature_stride,
    k_value,
    k_stride,
    p_value,
    p_stride,
    min_p_value,
    min_p_stride,
    BLOCK_V: tl.constexpr,
    STAGES: tl.constexpr,
    LANES: tl.constexpr,
    CAPACITY: tl.constexpr,
    BITS: tl.constexpr,
    SHIFT: tl.constexpr,
    FILTERS: tl.constexpr,
    MASSES: tl.constexpr,
    NORMALISE: tl.constexpr,
):
    """A row's level and limit, if it FILTERS, and, to NORMALISE, the mass of what is kept."""
    row = tl.program_id(0).to(tl.int64)
    x = logits + row * tl.cast(row_stride, tl.int64)
    state += row * STATE
    best = tl.load(state + BEST)
    told = _temperature(temperature, temperature_value, temperature_stride, row)
    rate = rate_of(told)
    level = tl.full((), float("-inf"), tl.float32)
    limit = tl.full((), -1, tl.int32)
    if FILTERS:
        k = _kept_ranks(top_k, k_value, k_stride, told, vocabulary, row)
        p, mass, share = tl.full((), 1.0, tl.float32), tl.zeros((), tl.float32), tl.zeros((), tl.float32)
        if MASSES:
            p = _parameter(top_p, p_value, p_stride, row)
            mass = tl.load(state + ROW_MASS)
            share = tl.load(state + COPIED_MASS)
        bound, copied = tl.load(state + BOUND), tl.load(state + COPIED).to(tl.int32)
        # The copies hold the answer if they are as many as top-k leaves or, without it, more than top-p does.
        enough = (copied >= k) | (bound == float("-inf")) | ((k >= vocabulary) & (p < 1.0) & (share > p * mass))
        if best == best:
            if enough & (copied <= CAPACITY):
                copies += row * CAPACITY
                level, place = last_kept(
                    copies, copied, 1, bound, best, rate, k, p, mass, vocabulary, CAPACITY, 4, 1, BITS, SHIFT
                )
                limit = tl.load(tokens + row * CAPACITY + place, mask=place >= 0, other=-1)
            else:
                level, limit = last_kept(
                    x,
                    vocabulary,
                    stride,
                    level,
                    best,
                    rate,
                    k,
                    p,
                    mass,
                    vocabulary,
                    BLOCK_V,
                    LANES,
                    STAGES,
                    BITS,
                    SHIFT,
                )
        tl.store(state + LEVEL, level)
        tl.store(state + LIMIT, limit.to(tl.float32))
    if NORMALISE:
        least = _parameter(min_p, min_p_value, min_p_stride, row)
        total_G = tl.zeros((BLOCK_V // LANES,), tl.float32)
        for start in tl.range(0, vocabulary, BLOCK_V, num_stages=STAGES):
            x_V, at_V = logits_tile(x, start, vocabulary, stride, BLOCK_V)
            mass_V = mass_of(x_V, best, rate)
            kept_V = _kept(x_V, at_V, mass_V, level, limit, least)
            total_G += tl.sum(grouped(tl.where(kept_V, mass_V, 0.0), LANES), 1)
        tl.store(state + MASS, tl.sum(total_G, 0))


@triton.jit
def probs_kernel(
    logits,
    temperature,
    min_p,
    state,
    probs,
    vocabulary,
    row_stride,
    stride,
    temperature_value,
    temperature_stride,
    min_p_value,
    min_p_stride,
    chunks,
    BLOCK_V: tl.constexpr,
):
    """probs (rows, vocabulary): of each token its mass in that of what is kept, or 0; a program writes one tile."""
    row, chunk = (tl.program_id(0) // chunks).to(tl.int64), tl.program_id(0) % chunks
    state += row * STATE
    best, level, limit, mass = (
        tl.load(state + BEST),
        tl.load(state + LEVEL),
        tl.load(state + LIMIT).to(tl.int32),
        tl.load(state + MASS),
    )
    rate = rate_of(_temperature(temperature, temperature_value, temperature_stride, row))
    least = _parameter(min_p, min_p_value, min_p_stride, row)
    x_V, at_V = logits_tile(logits + row * tl.cast(row_stride, tl.int64), chunk * BLOCK_V, vocabulary, stride, BLOCK_V)
    mass_V = mass_of(x_V, best, rate)
    p_V = tl.where(_kept(x_V, at_V, mass_V, level, limit, least), mass_V / mass, 0.0)
    # A row with nothing finite is certain of token 0.
    p_V = tl.where(best == best, p_V, (at_V == 0).to(tl.float32))
    tl.store(probs + row * vocabulary + at_V, p_V, mask=at_V < vocabulary)


@triton.jit
def draw_kernel(
    logits,
    temperature,
    min_p,
    seed,
    state,
    totals,
    drawn,
    vocabulary,
    row_stride,
    stride,
    temperature_value,
    temperature_stride,
    min_p_value,
    min_p_stride,
    seed_stride,
    chunks,
    CHUNK: tl.constexpr,
    BLOCK_V: tl.constexpr,
    EACH: tl.constexpr,
):
    """totals and drawn (rows, chunks): the largest score + noise among a chunk's kept tokens, and its first token.

    seed is one for all rows, to which the row is added, or (EACH) one for each.
    """
    row, chunk = (tl.program_id(0) // chunks).to(tl.int64), tl.program_id(0) % chunks
    state += row * STATE
    best, level, limit = tl.load(state + BEST), tl.load(state + LEVEL), tl.load(state + LIMIT).to(tl.int32)
    rate = rate_of(_temperature(temperature, temperature_value, temperature_stride, row))
    least = _parameter(min_p, min_p_value, min_p_stride, row)
    key = tl.load(seed + row * tl.cast(seed_stride, tl.int64))
    if not EACH:
        key += row
    x = logits + row * tl.cast(row_stride, tl.int64)
    most = tl.full((), float("-inf"), tl.float32)
    token = tl.zeros((), tl.int32)
    for start in range(chunk * CHUNK, tl.minimum((chunk + 1) * CHUNK, vocabulary), BLOCK_V):
        x_V, at_V = logits_tile(x, start, vocabulary, stride, BLOCK_V)
        kept_V = _kept(x_V, at_V, mass_of(x_V, best, rate), level, limit, least)
        # Noise costs far more than a look, and filters leave few tiles with anything.
        if tl.max(kept_V.to(tl.int32), 0) > 0:
            total_V = tl.where(kept_V, score_of(x_V, best, rate) + gumbel(key, at_V), float("-inf"))
            found = tl.max(total_V, 0)
            first = tl.min(tl.where(total_V == found, at_V, vocabulary), 0)
            token = tl.where(found > most, first, token)
            most = tl.maximum(found, most)
    tl.store(totals + row * chunks + chunk, most)
    tl.store(drawn + row * chunks + chunk, token)


@triton.jit
def pick_kernel(state, totals, drawn, ids, chunks, BLOCK_C: tl.constexpr):
    """ids (rows,): the token of the largest total, the lowest of several; 0 where no logit is finite."""
    row = tl.program_id(0).to(tl.int64)
    at_C = tl.arange(0, BLOCK_C)
    total_C = tl.load(totals + row * chunks + at_C, mask=at_C < chunks, other=float("-inf"))
    token_C = tl.load(drawn + row * chunks + at_C, mask=at_C < chunks, other=0)
    token = tl.min(tl.where(total_C == tl.max(total_C, 0), token_C, 2147483647), 0)
    best = tl.load(state + row * STATE + BEST)
    tl.store(ids + row, tl.where(best == best, token, 0).to(tl.int64))
