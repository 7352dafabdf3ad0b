"""Philox4x32-10 in int64 tensor arithmetic: the same words on every device, no state, no host reads.

Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011. The key is a 64-bit
seed (low word first) and the counter a 64-bit number (low word first, upper half zero), so word ``w`` of
counter ``c`` is a pure function of (seed, c, w). Sampling draws its Gumbel noise from it, and conformance
its inputs: those go through integers only (and at most one float64 multiplication, which IEEE 754 rounds
in one way), so that two machines that never met hold the same bits.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hal.errors import ArgumentError

__all__ = ["block", "integers", "normal", "permutation", "to_uniform", "uniform", "words"]

MASK = 0xFFFFFFFF
ROUNDS = 10
WEYL = (0x9E3779B9, 0xBB67AE85)
# Both multipliers exceed 2^31. Less 2^32 they are negative and small enough that the product with a 32-bit
# word stays inside int64; adding the word to the upper half undoes the shift. No step relies on wrap-around.
MULTIPLIERS = (0xD2511F53 - (1 << 32), 0xCD9E8D57 - (1 << 32))

# Which half of an int64 is its upper one.
_UPPER = 1 if sys.byteorder == "little" else 0

# Words are made in pieces whose temporaries stay in a core's cache.
CHUNK = 1 << 15

Key = int | Tensor


def _upper(value: Tensor) -> Tensor:
    """Upper 32 bits of int64, signed: by a shift on a CPU, where that is fastest, elsewhere read in place.

    A shift costs torch_npu a copy of its count from the host each time, which torch_npu 2.10 cannot capture in a graph.
    """
    if value.device.type == "cpu":
        return value >> 32
    return value.unsqueeze(-1).view(torch.int32)[..., _UPPER]


def _halves(multiplier: int, word: Tensor) -> tuple[Tensor, Tensor]:
    """Upper and lower 32 bits of the unsigned product."""
    product = word * multiplier
    return _upper(product) + word, product & MASK


def _parts(value: Key) -> tuple[Any, Any]:
    """Lower and upper 32 bits of a number or of a tensor."""
    upper = value >> 32 if isinstance(value, int) else _upper(value).to(torch.int64)
    return value & MASK, upper & MASK


def block(key: tuple[Key, Key], counter: tuple[Tensor, Tensor, Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Four 32-bit words (int64, 0 … 2^32 − 1) of a 2-word key and a 4-word counter, all broadcast."""
    k0, k1 = key
    c0, c1, c2, c3 = counter
    for _ in range(ROUNDS):
        hi0, lo0 = _halves(MULTIPLIERS[0], c0)
        hi1, lo1 = _halves(MULTIPLIERS[1], c2)
        c0, c1, c2, c3 = hi1 ^ c1 ^ k0, lo1, hi0 ^ c3 ^ k1, lo0
        k0, k1 = (k0 + WEYL[0]) & MASK, (k1 + WEYL[1]) & MASK
    return c0, c1, c2, c3


def _four(seed: Key, counters: Tensor) -> tuple[Tensor, ...]:
    zero = torch.zeros((), dtype=torch.int64, device=counters.device)
    return block(_parts(seed), (*_parts(counters), zero, zero))


def words(seed: Key, counters: Tensor, word: int = 0) -> Tensor:
    """Word ``word`` (0 … 3) of each counter under the key ``seed``.

    ``seed`` is a number (taken modulo 2^64) or an int64 tensor that broadcasts with ``counters``, int64.
    The result is int64 in 0 … 2^32 − 1, of the broadcast shape.
    """
    shape = counters.shape if isinstance(seed, int) else torch.broadcast_shapes(seed.shape, counters.shape)
    return _four(seed, counters)[word].expand(shape)


def to_uniform(word: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """((word >> 9) + 0.5) · 2⁻²³: strictly inside (0, 1), exact in float32 and float64."""
    return ((word & ~0x1FF).to(dtype) + 256.0) * 2.0**-32


def _stream(seed: int, count: int, device: torch.device | str | None) -> Tensor:
    """The first ``count`` words of the stream (counter 0 word 0 … 3, counter 1 word 0 …), int64 (count,)."""
    end = -(-count // 4)
    pieces = [
        torch.stack(_four(seed, torch.arange(low, min(low + CHUNK, end), device=device)), dim=-1).flatten()
        for low in range(0, end, CHUNK)
    ]
    if not pieces:
        return torch.empty(0, dtype=torch.int64, device=device)
    return torch.cat(pieces)[:count]


def uniform(
    seed: int,
    shape: Sequence[int],
    *,
    dtype: torch.dtype = torch.float64,
    device: torch.device | str | None = None,
) -> Tensor:
    """Uniform values in (0, 1) with 24 bits, in float64 or float32 (the same values in both)."""
    return to_uniform(_stream(seed, math.prod(shape), device), dtype).reshape(tuple(shape))


def normal(seed: int, shape: Sequence[int], *, device: torch.device | str | None = None) -> Tensor:
    """Values of mean 0 and variance 1, shaped like a normal out to 4.9, float64.

    Each is the sum of eight 16-bit integers (Irwin–Hall) less its mean, exact in int64 and in float64,
    times one constant.
    """
    count = math.prod(shape)
    scale = math.sqrt(12.0 / 8.0 / (65536.0**2 - 1.0))
    out = torch.empty(count, dtype=torch.float64, device=device)
    for low in range(0, count, CHUNK):
        high = min(low + CHUNK, count)
        four = _four(seed, torch.arange(low, high, device=device))
        total = sum((w >> 16) + (w & 0xFFFF) for w in four) - 4 * 65535
        torch.mul(torch.as_tensor(total).to(torch.float64), scale, out=out[low:high])
    return out.reshape(tuple(shape))


def integers(
    seed: int, shape: Sequence[int], low: int, high: int, *, device: torch.device | str | None = None
) -> Tensor:
    """Integers in low … high − 1, int64. Needs low < high unless the shape is empty."""
    count = math.prod(shape)
    if high <= low:
        if count:
            raise ArgumentError(f"no integer lies in [{low}, {high}): ask for low < high")
        return torch.empty(tuple(shape), dtype=torch.int64, device=device)
    pairs = _stream(seed, 2 * count, device).reshape(count, 2)
    wide = ((pairs[:, 0] >> 1) << 32) | pairs[:, 1]
    return (wide % (high - low) + low).reshape(tuple(shape))


def permutation(seed: int, n: int, *, device: torch.device | str | None = None) -> Tensor:
    """A permutation of 0 … n − 1, int64: the stable order of n 63-bit keys."""
    keys = integers(seed, (n,), 0, (1 << 63) - 1, device=device)
    return torch.argsort(keys, stable=True)
