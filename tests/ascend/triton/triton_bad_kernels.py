"""Kernels that the checks of a dry run must not let through, one for each check."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def copy(x, y, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + at, tl.load(x + at, mask=at < n), mask=at < n)


@triton.jit
def greedy(x, y, n, BLOCK: tl.constexpr):
    """More of the unified buffer than there is."""
    at = tl.arange(0, BLOCK)
    a = tl.load(x + at, mask=at < n, other=0.0)
    b = tl.load(y + at, mask=at < n, other=0.0)
    tl.store(y + at, tl.exp(a) * b + a, mask=at < n)


@triton.jit
def product(x, y, z, n, BLOCK: tl.constexpr, DEPTH: tl.constexpr):
    """An accumulator of BLOCK² float32, which the cube unit holds in L0C."""
    row, depth = tl.arange(0, BLOCK), tl.arange(0, DEPTH)
    acc = tl.zeros((BLOCK, BLOCK), tl.float32)
    for start in range(0, n, DEPTH):
        a = tl.load(x + row[:, None] * n + (start + depth)[None, :])
        b = tl.load(y + (start + depth)[:, None] * BLOCK + row[None, :])
        acc += tl.dot(a, b)
    tl.store(z + row[:, None] * BLOCK + row[None, :], acc)


@triton.jit
def gather(x, places, y, n, BLOCK: tl.constexpr):
    """Loads that no two elements share an address rule for."""
    at = tl.arange(0, BLOCK)
    place = tl.load(places + at, mask=at < n, other=0)
    tl.store(y + at, tl.load(x + place, mask=at < n), mask=at < n)


@triton.jit
def chosen(x, y, n, BLOCK: tl.constexpr):
    """A choice among values by their position."""
    at = tl.arange(0, BLOCK)
    value = tl.load(x + at)
    tl.store(y + at, tl.where(at < n, value, -value))
