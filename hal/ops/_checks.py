"""Checks that validations share. They read metadata only, so they run on fake tensors too."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from hal.contract import FLOATS, dtype_name
from hal.errors import ArgumentError, DeviceError, DtypeError, ShapeError

__all__ = [
    "check_dtype",
    "check_floating",
    "check_number",
    "check_rank",
    "check_same_device",
    "check_same_dtype",
    "check_shape",
]


def check_tensor(op: str, name: str, value: Any) -> None:
    if not isinstance(value, Tensor):
        raise ArgumentError(f"{op}: {name} is {type(value).__name__}, but it must be a tensor")


def check_dtype(op: str, name: str, t: Tensor, allowed: Iterable[torch.dtype]) -> None:
    """DtypeError unless `t` has one of the allowed dtypes."""
    check_tensor(op, name, t)
    allowed = tuple(allowed)
    if t.dtype not in allowed:
        names = ", ".join(dtype_name(d) for d in allowed)
        raise DtypeError(
            f"{op}: {name} has dtype {dtype_name(t.dtype)}, but it must be one of {names}; convert it first"
        )


def check_floating(op: str, name: str, t: Tensor) -> None:
    """DtypeError unless `t` is float64, float32, bfloat16 or float16."""
    check_dtype(op, name, t, FLOATS)


def check_same_dtype(op: str, **tensors: Tensor | None) -> None:
    """DtypeError unless all tensors given share one dtype."""
    given = {name: t for name, t in tensors.items() if t is not None}
    if len({t.dtype for t in given.values()}) > 1:
        listed = ", ".join(f"{name} {dtype_name(t.dtype)}" for name, t in given.items())
        raise DtypeError(f"{op}: {listed}, but these must share one dtype; convert them first")


def check_same_device(op: str, **tensors: Tensor | None) -> None:
    """DeviceError unless all tensors given are on one device."""
    given = {name: t for name, t in tensors.items() if t is not None}
    if len({t.device for t in given.values()}) > 1:
        listed = ", ".join(f"{name} on {t.device}" for name, t in given.items())
        raise DeviceError(f"{op}: {listed}, but all tensors must be on one device; move them first")


def check_rank(op: str, name: str, t: Tensor, rank: int, layout: str = "") -> None:
    """ShapeError unless `t` has `rank` dimensions; `layout` shows the axes, such as "(B, S, H, D)"."""
    check_tensor(op, name, t)
    if t.dim() != rank:
        raise ShapeError(
            f"{op}: {name} has shape {tuple(t.shape)}, but it must have {rank} dimensions {layout}".rstrip()
        )


def check_shape(op: str, name: str, t: Tensor, shape: tuple[Any, ...], why: str = "") -> None:
    """ShapeError unless `t` has exactly this shape; `why` says where the shape comes from."""
    check_tensor(op, name, t)
    if tuple(t.shape) != tuple(shape):
        text = f"{op}: {name} has shape {tuple(t.shape)}, but it must be {tuple(shape)}"
        raise ShapeError(f"{text} ({why})" if why else text)


def check_number(op: str, name: str, value: Any) -> None:
    """ArgumentError unless `value` is a real number and not NaN."""
    if isinstance(value, bool) or not isinstance(value, int | float | torch.SymInt | torch.SymFloat):
        raise ArgumentError(f"{op}: {name} is {value!r}, but it must be a number")
    if isinstance(value, float) and value != value:
        raise ArgumentError(f"{op}: {name} is NaN, but it must be a number")
