"""What the attention kernels share: where rows lie, which keys they see, and what a score becomes.

A tile is BLOCK_M rows of queries by BLOCK_N keys. A head's width is taken in two parts, powers of two, the second of
which may be absent (0): 192 is 128 and 64, 576 is 512 and 64, 80 is 64 and 16, 72 is 64 and 16 with 8 left empty.

Scores. x is what a product q·k becomes before the softmax, m the largest x of a row in the unit of the exponent; a
weight is exp2(exponent(x, m)). Three ways, chosen by constants:
- plain: x = q·k, exponent x·unit − m, unit = |scale|·log₂e (q changes its sign if the scale is negative);
- SOFTCAP: x = tanh(q·k·before), before = scale/cap, exponent x·unit − m, unit = cap·log₂e;
- NATURAL, for a bias, which log₂e could carry past the largest number: x = q·k·before, or unit·tanh(q·k·before) with
  unit = cap, plus the bias; exponent (x − m)·log₂e.

Legend of suffixes: M rows of queries, N keys, W a part of a width.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = [
    "biased",
    "dot",
    "exponent",
    "logit",
    "packed",
    "part",
    "place",
    "put",
    "rows_of",
    "sequence",
    "slope",
    "span",
    "visible",
    "zero_tail",
]

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
LOWEST = tl.constexpr(-3.4028234663852886e38)
INFINITY = tl.constexpr(float("inf"))


@triton.jit
def sequence(cu, stride, b, rows):
    """(first row, number of rows) of sequence b: by the prefix sums, or, without them, all its `rows`."""
    if cu is None:
        first, length = 0, rows
    else:
        first = tl.load(cu + b * stride)
        length = tl.load(cu + (b + 1) * stride) - first
    return first, length


@triton.jit
def place(program, tiles, pairs, together):
    """(tile, pair) of a program; a pair is a sequence and a kv head.

    `together` pairs are done at a time, so that what they read stays in the cache; of these, last tiles come first:
    under a causal mask they have most to do.
    """
    section = program // (together * tiles)
    rest = program - section * (together * tiles)
    width = tl.minimum(together, pairs - section * together)
    return tiles - 1 - rest // width, section * together + rest % width


@triton.jit
def rows_of(x, first, count: tl.constexpr, stride, WIDE: tl.constexpr):
    """Addresses of `count` rows from `first` on, `stride` apart; WIDE: an offset from x may pass 2³¹ elements."""
    row_R = first + tl.arange(0, count)
    if WIDE:
        row_R = row_R.to(tl.int64)
    return x + row_R * stride


@triton.jit
def part(x_R, stride, exist_R, START: tl.constexpr, WIDTH: tl.constexpr, BLOCK_W: tl.constexpr, WIDE: tl.constexpr):
    """Columns START … START + BLOCK_W of the rows at x_R, 0 past WIDTH and in rows that do not exist (None: all do)."""
    w_W = START + tl.arange(0, BLOCK_W)
    step_W = w_W.to(tl.int64) * stride if WIDE else w_W * stride
    at_RW = x_R[:, None] + step_W[None, :]
    if START + BLOCK_W <= WIDTH:
        if exist_R is None:
            loaded_RW = tl.load(at_RW)
        else:
            loaded_RW = tl.load(at_RW, mask=exist_R[:, None], other=0.0)
    else:
        exist_RW = (w_W < WIDTH)[None, :]
        if exist_R is not None:
            exist_RW = exist_RW & exist_R[:, None]
        loaded_RW = tl.load(at_RW, mask=exist_RW, other=0.0)
    return loaded_RW


@triton.jit
def put(x_R, t_RW, exist_R, START: tl.constexpr, WIDTH: tl.constexpr, BLOCK_W: tl.constexpr):
    """Store columns START … START + BLOCK_W of rows that exist, a unit stride apart, in x's dtype."""
    w_W = START + tl.arange(0, BLOCK_W)
    exist_RW = exist_R[:, None]
    if START + BLOCK_W > WIDTH:
        exist_RW = exist_RW & (w_W < WIDTH)[None, :]
    tl.store(x_R[:, None] + w_W[None, :], t_RW.to(x_R.dtype.element_ty), mask=exist_RW)


@triton.jit
def dot(a, b, c, PRECISION: tl.constexpr):
    """a·b + c in float32; c may be None."""
    if c is None:
        product = tl.dot(a, b, input_precision=PRECISION)
    else:
        product = tl.dot(a, b, c, input_precision=PRECISION)
    return product


@triton.jit
def logit(product, before, unit, SOFTCAP: tl.constexpr, NATURAL: tl.constexpr):
    """x of q·k, without a bias."""
    x = product
    if SOFTCAP:
        # tanh z = 1 − 2/(e^2z + 1), right at both infinities; its error beside a small z is one of the cap.
        x = 1.0 - 2.0 / (tl.exp2(product * (before * (2.0 * LOG2E))) + 1.0)
        if NATURAL:
            x *= unit
    elif NATURAL:
        x *= before
    return x


@triton.jit
def slope(x, unit, SOFTCAP: tl.constexpr, NATURAL: tl.constexpr):
    """Of the cap at x (without a bias): 1 − tanh²."""
    tanh = x
    if NATURAL:
        tanh = x / unit
    return 1.0 - tanh * tanh


@triton.jit
def exponent(x, m, unit, NATURAL: tl.constexpr):
    """What 2 is raised to for a weight."""
    if NATURAL:
        e = (x - m) * LOG2E
    else:
        e = x * unit - m
    return e


@triton.jit
def packed(row, GROUP: tl.constexpr, BLOCK_M: tl.constexpr):
    """(query, head of its group) of BLOCK_M rows from `row`, a multiple of it: a query's heads are neighbours."""
    r_M = tl.arange(0, BLOCK_M)
    if BLOCK_M % GROUP == 0:  # as below, in terms that need fewer registers
        i_M, g_M = row // GROUP + r_M // GROUP, r_M % GROUP
    else:
        i_M, g_M = (row + r_M) // GROUP, (row + r_M) % GROUP
    return i_M, g_M


@triton.jit
def visible(i, j, keys, shift, left, right):
    """Which of the sequence's keys j its queries i see by length and window; one is a row, the other a column."""
    seen = j < keys
    if right is not None:
        seen = seen & (j <= i + (shift + right))
    if left is not None:
        seen = seen & (j >= i + (shift - left))
    return seen


@triton.jit
def span(first_i, last_i, keys, shift, left, right, BLOCK_N: tl.constexpr):
    """What the queries first_i … last_i see of the keys, as ends of ranges: (first, last, whole_from, whole_to).

    first … last are seen by one of them, whole_from … whole_to, multiples of BLOCK_N, by all; the latter may be empty.
    """
    first, whole_from = 0, 0
    last, whole_to = keys, keys
    if right is not None:
        last = tl.minimum(keys, tl.maximum(last_i + shift + right + 1, 0))
        whole_to = tl.minimum(keys, tl.maximum(first_i + shift + right + 1, 0))
    if left is not None:
        first = tl.maximum(first_i + shift - left, 0)
        whole_from = tl.cdiv(tl.maximum(last_i + shift - left, 0), BLOCK_N) * BLOCK_N
    whole_to = tl.maximum(whole_from, whole_to // BLOCK_N * BLOCK_N)
    return first, last, whole_from, whole_to


@triton.jit
def biased(x, seen, at, exist):
    """(x, seen) with the mask at these addresses: bool (True = seen), or a bias, in which −inf hides."""
    if at.dtype.element_ty == tl.int1:
        seen = seen & tl.load(at, mask=exist, other=0).to(tl.int1)
    else:
        bias = tl.load(at, mask=exist, other=-INFINITY)
        seen = seen & (bias != -INFINITY)
        if at.dtype.element_ty == tl.float64:  # its lowest number is no infinity
            bias = tl.where(bias < LOWEST, LOWEST, bias)
        x += bias.to(tl.float32)
    return x, seen


@triton.jit
def zero_tail(x, cu, stride, batch, rows, row_elements, BLOCK: tl.constexpr):
    """Zero in the rows of x past the last sequence, the programs taking blocks of them in turn."""
    first = tl.load(cu + batch * stride).to(tl.int64) * row_elements
    end = tl.cast(rows, tl.int64) * row_elements
    for start in range(first + tl.program_id(0) * BLOCK, end, tl.num_programs(0) * BLOCK):
        at = start + tl.arange(0, BLOCK)
        tl.store(x + at, tl.zeros((BLOCK,), x.dtype.element_ty), mask=at < end)
