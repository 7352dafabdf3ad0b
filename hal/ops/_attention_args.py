"""What the attention operators share outside arithmetic: argument checks, features, visible pairs for the cost."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hal.contract import Args, dtype_name
from hal.errors import ArgumentError, DtypeError, ShapeError
from hal.ops._checks import check_same_device

__all__ = [
    "FEATURES",
    "MAX_HEAD_DIM",
    "bounded",
    "check_cu_shape",
    "check_devices",
    "check_heads",
    "check_host_copy",
    "check_index",
    "check_options",
    "check_upper_bound",
    "features",
    "lse_dtype",
    "split_window",
    "visible_pairs",
]

MAX_HEAD_DIM = 576

FEATURES = ("causal", "window", "softcap", "scale", "sinks", "lse", "gqa", "different_v_dim")
"""Features that every attention operator knows."""

Window = tuple[int | None, int | None]


def split_window(window: Window | None) -> Window:
    """The window as the torch op's two arguments."""
    if window is None:
        return None, None
    if not isinstance(window, tuple | list) or len(window) != 2:
        raise ArgumentError(
            f"window is {window!r}; pass (left, right), inclusive counts of keys, None for unbounded "
            "(a model's sliding_window W is (W - 1, 0)), or None for no window"
        )
    return window[0], window[1]


def lse_dtype(dtype: torch.dtype) -> torch.dtype:
    """dtype of the log-sum-exp that goes with outputs of `dtype`."""
    return torch.float64 if dtype is torch.float64 else torch.float32


def check_heads(op: str, q: Tensor, k: Tensor, v: Tensor) -> None:
    """ShapeError unless the last two axes, (heads, width), of q, k and v fit."""
    (heads, width), (kv_heads, k_width), (v_heads, v_width) = q.shape[-2:], k.shape[-2:], v.shape[-2:]
    if kv_heads != v_heads:
        raise ShapeError(f"{op}: k has {kv_heads} heads, v has {v_heads}; they must have the same number")
    if kv_heads == 0 or heads == 0 or heads % kv_heads:
        raise ShapeError(
            f"{op}: {heads} query heads on {kv_heads} kv heads; the query heads must be a multiple of the kv heads, "
            "and there must be one at least"
        )
    if width != k_width:
        raise ShapeError(f"{op}: q has head dim {width}, k has {k_width}; they must be equal (only v may differ)")
    for name, n in (("q and k", width), ("v", v_width)):
        if not 1 <= n <= MAX_HEAD_DIM:
            raise ShapeError(f"{op}: the head dim of {name} is {n}; supported are 1 to {MAX_HEAD_DIM}")


def check_options(op: str, a: Args, heads: int) -> None:
    """Errors for window, softcap, scale and sinks that mean nothing."""
    for side, n in zip(("left", "right"), split_window(a.window), strict=True):
        if n is not None and n < 0:
            raise ArgumentError(f"{op}: window {side} is {n}; it counts keys and is 0 or more, None means unbounded")
    if a.softcap is not None and not 0 < a.softcap < math.inf:
        raise ArgumentError(f"{op}: softcap is {a.softcap}; it must be finite and above 0, None switches it off")
    if a.scale is not None and not math.isfinite(a.scale):
        raise ArgumentError(f"{op}: scale is {a.scale}; it must be finite, None means 1/sqrt(head dim)")
    if a.sinks is not None:
        if not a.sinks.is_floating_point() or a.sinks.element_size() < 2:
            raise DtypeError(
                f"{op}: sinks is {dtype_name(a.sinks.dtype)}; supported are float64, float32, bfloat16, float16"
            )
        if tuple(a.sinks.shape) != (heads,):
            raise ShapeError(
                f"{op}: sinks has shape {tuple(a.sinks.shape)}; it holds one logit per query head, ({heads},)"
            )


def check_index(op: str, name: str, t: Tensor, dtype: torch.dtype, shape: Sequence[Any], letters: str) -> None:
    """Errors unless an index tensor has this dtype and shape (None = any size)."""
    if t.dtype is not dtype:
        raise DtypeError(
            f"{op}: {name} is {dtype_name(t.dtype)}; it must be {dtype_name(dtype)}: "
            f"call {name}.to(torch.{dtype_name(dtype)})"
        )
    if t.ndim != len(shape) or any(n is not None and n != m for n, m in zip(shape, t.shape, strict=True)):
        raise ShapeError(f"{op}: {name} has shape {tuple(t.shape)}; it must be {letters}")


def check_upper_bound(op: str, name: str, value: int) -> None:
    """ArgumentError for a negative upper bound."""
    if value < 0:
        raise ArgumentError(f"{op}: {name} is {value}; it is an upper bound of lengths, 0 or more")


def bounded(longest: int, rows: int) -> int:
    """An upper bound of lengths, no more than the rows there are: a generous bound must not cost memory."""
    return min(longest, rows)


def check_cu_shape(op: str, name: str, cu: Tensor) -> None:
    """Errors unless `cu` is an int32 vector that can hold prefix sums."""
    check_index(op, name, cu, torch.int32, (None,), "(B + 1,)")
    if cu.shape[0] == 0:
        raise ShapeError(f"{op}: {name} is empty; it holds B + 1 prefix sums, the first of them 0")


def check_host_copy(op: str, name: str, host: Tensor | None, device: Tensor) -> None:
    """Errors unless a host copy of lengths is an int32 CPU tensor shaped like the device's."""
    if host is None:
        return
    if host.device.type != "cpu":
        raise ArgumentError(f"{op}: {name}_cpu is on {host.device}; it is the host's copy of {name}: pass a CPU tensor")
    check_index(op, f"{name}_cpu", host, torch.int32, tuple(device.shape), f"shaped like {name}")


def features(a: Args, heads: int, kv_heads: int, width: int, v_width: int) -> set[str]:
    """Features of a request that every attention operator shares."""
    return {
        name
        for name, used in (
            ("causal", a.causal),
            ("window", any(n is not None for n in split_window(a.window))),
            ("softcap", a.softcap is not None),
            ("scale", a.scale is not None),
            ("sinks", a.sinks is not None),
            ("lse", a.return_lse),
            ("gqa", heads != kv_heads),
            ("different_v_dim", width != v_width),
        )
        if used
    }


def visible_pairs(queries: int, keys: int, causal: bool, window: Window | None) -> int:
    """Number of (query, key) pairs that causal and window leave."""
    left, right = split_window(window)
    if causal:
        right = 0 if right is None else min(right, 0)
    shift = keys - queries
    ends = queries * keys if right is None else _clamped_sum(queries, shift + right + 1, keys)
    starts = 0 if left is None else _clamped_sum(queries, shift - left, keys)
    return ends - starts


def _clamped_sum(n: int, first: int, top: int) -> int:
    """Sum over i in 0 … n-1 of (first + i) clamped to 0 … top."""
    low = min(max(0, -first), n)
    high = min(max(low, top - first), n)
    count = high - low
    return count * first + (low + high - 1) * count // 2 + (n - high) * top


def check_devices(op: str, a: Args, *names: str) -> None:
    """DeviceError unless these arguments live on one device."""
    check_same_device(op, **{name: getattr(a, name) for name in names if getattr(a, name) is not None})
