"""Gradients of both attention operators by the kernels of hal.kernels.attention_backward and attention_extras.

Saved for it are o and the log-sum-exp, 4 bytes a row and head; δ, as large, is a workspace. Up to five launches: δ, dk
with dv, dq, and, where asked for, the mask's gradient and the sinks'.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor

from hal.backends.cuda import attention_launch as launching
from hal.backends.cuda import launch
from hal.backends.cuda.attention_launch import Choice, Problem, Tile, choose
from hal.backends.cuda.launch import Launch
from hal.backends.cuda.rows import power_of_two
from hal.op import Args, empty
from hal.ops._attention_core import head_scale

__all__ = ["dkv_tile", "dq_tile", "gradients", "launches", "mask_tile"]

# Tables as in attention_launch: rows are queries, keys keys.
DQ: dict[tuple[int, int], tuple[Choice, ...]] = {
    (2, 90): (
        Choice(64, 128, 64, 32, 8, 2),
        Choice(128, 128, 64, 32, 8, 2),
        Choice(256, 64, 32, 32, 8, 2),
        Choice(640, 32, 32, 32, 8, 1),
    ),
    (2, 80): (
        Choice(64, 128, 64, 64, 8, 2),
        Choice(128, 64, 64, 64, 8, 2),
        Choice(256, 64, 32, 32, 8, 1),
        Choice(640, 32, 16, 16, 8, 1),
    ),
    (4, 80): (
        Choice(64, 32, 32, 32, 8, 1),
        Choice(128, 32, 32, 32, 8, 1),
        Choice(256, 16, 16, 16, 8, 1),
        Choice(640, 16, 16, 16, 8, 1),
    ),
}
DKV: dict[tuple[int, int], tuple[Choice, ...]] = {
    (2, 90): (
        Choice(64, 64, 128, 32, 8, 2),
        Choice(128, 32, 128, 32, 8, 3),
        Choice(256, 32, 128, 16, 8, 2),
        Choice(640, 32, 32, 32, 8, 1),
    ),
    (2, 80): (
        Choice(64, 32, 128, 32, 8, 2),
        Choice(128, 32, 64, 32, 8, 2),
        Choice(256, 32, 64, 32, 8, 1),
        Choice(640, 16, 32, 16, 8, 1),
    ),
    (4, 80): (
        Choice(64, 32, 32, 32, 8, 1),
        Choice(128, 16, 32, 16, 8, 1),
        Choice(256, 16, 16, 16, 8, 1),
        Choice(640, 16, 16, 16, 8, 1),
    ),
}
MASK: dict[tuple[int, int], tuple[Choice, ...]] = {
    (2, 80): (Choice(128, 64, 64, 64, 8, 1), Choice(256, 32, 32, 32, 8, 1), Choice(640, 16, 16, 16, 8, 1)),
    (4, 80): (Choice(128, 32, 32, 32, 8, 1), Choice(640, 16, 16, 16, 8, 1)),
}
# Widths up to which dk and dv are accumulated beside each other.
BOTH = 128
SINK_ROWS = 1024
DELTA_ELEMENTS = 4096


def dq_tile(p: Problem, capability: int) -> Tile:
    """Tile and options of the kernel over queries."""
    return choose(DQ, p, capability).over_keys()


def dkv_tile(p: Problem, capability: int) -> Tile:
    """Tile and options of the kernel over keys."""
    return choose(DKV, p, capability).over_queries()


def mask_tile(p: Problem, capability: int) -> Tile:
    """Tile and options of the kernel over a mask."""
    return choose(MASK, p, capability).over_keys()


def gradients(
    a: Args, outs: dict[str, Tensor], grads: tuple[Tensor | None, ...], needs: dict[str, bool]
) -> dict[str, Tensor]:
    """By name, those that are needed."""
    p = Problem.of(a)
    do, dlse = grads
    mask, cu_q, cu_k = (vars(a).get(name) for name in ("mask", "cu_seqlens_q", "cu_seqlens_k"))
    needed = {name for name, need in needs.items() if need and getattr(a, name) is not None}
    if (do is None and dlse is None) or not needed or not outs["o"].numel():
        return {}
    device, dtype = a.q.device, a.q.dtype
    if do is None:
        do = empty((1,), dtype=dtype, device=device).zero_().expand(p.o_shape)
    steps = {
        **launching.strides("q", a.q),
        **launching.strides("k", a.k),
        **launching.strides("v", a.v),
        **launching.strides("do", do),
        **launching.lse_strides(p),
        **_dlse_strides(dlse),
        **launching.mask_strides(mask),
        **launching.vector_strides(a),
    }
    values = (
        steps | launching.way(a) | {"scale": head_scale(a.scale, p.D), "WIDE": launching.wide(p, a.q, a.k, a.v, do)}
    )
    kinds = (dtype, dlse is None, *(None if t is None else (t.dtype, t.shape) for t in (mask, a.sinks)))
    how = launching.precision(dtype)
    made = launches(p, device, launch.capability(device), how, kinds, tuple(values.items()))

    lse = outs["lse"]
    delta = empty(p.lse_shape, dtype=torch.float32, device=device)
    made("delta")(outs["o"], do, dlse, delta, cu_q)
    found: dict[str, Tensor] = {}
    if needed & {"k", "v"} and a.k.numel():
        found |= {name: empty(getattr(a, name).shape, dtype=dtype, device=device) for name in needed & {"k", "v"}}
        dk, dv = found.get("k"), found.get("v")
        for name, into in split(dk, dv, p):
            made(name)(a.q, a.k, a.v, do, lse, delta, *into, cu_q, cu_k, mask)
    if "q" in needed:
        found["q"] = empty(a.q.shape, dtype=dtype, device=device)
        made("dq")(a.q, a.k, a.v, do, lse, delta, found["q"], cu_q, cu_k, mask)
    if "mask" in needed and mask is not None:
        found["mask"] = empty(mask.shape, dtype=mask.dtype, device=device)
        if mask.numel():
            made("mask")(a.q, a.k, a.v, do, lse, delta, mask, found["mask"])
    if "sinks" in needed:
        found["sinks"] = empty(a.sinks.shape, dtype=a.sinks.dtype, device=device)
        made("sinks")(lse, delta, a.sinks, found["sinks"])
    return found


def _dlse_strides(dlse: Tensor | None) -> dict[str, int]:
    if dlse is None:
        steps: tuple[int, ...] = (0, 0, 0)
    else:  # (B, H, S), or (T, H)
        steps = dlse.stride() if dlse.dim() == 3 else (0, dlse.stride(1), dlse.stride(0))
    return dict(zip(("dlse_b", "dlse_h", "dlse_s"), steps, strict=True))


@lru_cache(1024)
def launches(
    p: Problem,
    device: torch.device,
    arch: int,
    how: str,
    kinds: tuple[Any, ...],
    values: tuple[tuple[str, Any], ...],
) -> Callable[[str], Launch]:
    """The launches of one kind of call, each made when first asked for; `kinds` are what they are specialised to."""
    told = {**dict(values), **p.sizes, "PRECISION": how}

    @cache
    def made(name: str) -> Launch:
        kernel, grid, options, more = _DESCRIBED[name](p, arch, kinds)
        known = told | more
        wanted = {n: known[n] for n in launch.kernel(kernel).arg_names if n in known}
        return Launch(kernel, grid, device, options, **wanted)

    return made


os.register_at_fork(after_in_child=launches.cache_clear)

Described = tuple[str, tuple[int, ...], dict[str, int], dict[str, Any]]


Pair = tuple[Tensor | None, Tensor | None]


def split(dk: Tensor | None, dv: Tensor | None, p: Problem) -> tuple[tuple[str, Pair], ...]:
    """Launches over keys and what they write: both at once, or each for itself."""
    if dk is None:
        return (("dv", (None, dv)),)
    if dv is None:
        return (("dk", (dk, None)),)
    if max(p.D, p.E) <= BOTH:
        return (("dkv", (dk, dv)),)
    return ("dk", (dk, None)), ("dv", (None, dv))


def _delta(p: Problem, arch: int, kinds: tuple[Any, ...]) -> Described:
    rows = p.rows * p.heads
    columns = power_of_two(p.E)
    blocks = {"BLOCK_E": columns, "BLOCK_M": max(1, DELTA_ELEMENTS // columns)}
    more = {"rows": rows, "HEADS": p.heads, **blocks}
    return "attention_backward.attention_delta_kernel", (-(-rows // blocks["BLOCK_M"]),), {"num_warps": 4}, more


def _dkv(p: Problem, arch: int, kinds: tuple[Any, ...]) -> Described:
    blocks, options = dkv_tile(p, arch)
    tiles = max(1, -(-p.longest_k // blocks["BLOCK_N"]))
    grid = (max(1, tiles * p.pairs),)
    return "attention_backward_keys.attention_dkv_kernel", grid, options, {"tiles": tiles, **blocks}


def _dq(p: Problem, arch: int, kinds: tuple[Any, ...]) -> Described:
    blocks, options = dq_tile(p, arch)
    tiles = max(1, -(-p.longest_q * p.group // blocks["BLOCK_M"]))
    grid = (max(1, tiles * p.pairs),)
    return "attention_backward.attention_dq_kernel", grid, options, {"tiles": tiles, "together": p.together, **blocks}


def _mask(p: Problem, arch: int, kinds: tuple[Any, ...]) -> Described:
    blocks, options = mask_tile(p, arch)
    full = (p.batch, p.heads, p.queries, p.keys)
    shape = kinds[2][1]
    shape = (1,) * (4 - len(shape)) + tuple(shape)
    over = {f"OVER_{axis}": n == 1 < m for axis, n, m in zip("BHSL", shape, full, strict=True)}
    rows, columns = -(-shape[2] // blocks["BLOCK_M"]), -(-shape[3] // blocks["BLOCK_N"])
    more = {"rows": rows, "columns": columns, **over, **blocks}
    return "attention_extras.attention_bias_kernel", (shape[0] * shape[1] * rows * columns,), options, more


def _sinks(p: Problem, arch: int, kinds: tuple[Any, ...]) -> Described:
    more = {"rows": p.rows, "BLOCK_M": SINK_ROWS}
    return "attention_extras.attention_sinks_kernel", (p.heads,), {"num_warps": 4}, more


_DESCRIBED = {"delta": _delta, "dkv": _dkv, "dk": _dkv, "dv": _dkv, "dq": _dq, "mask": _mask, "sinks": _sinks}
