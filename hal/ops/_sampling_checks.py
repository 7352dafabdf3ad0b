"""Argument checks shared by the sampling operators."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hal.errors import ArgumentError, DtypeError, ShapeError
from hal.op import Args, dtype_name
from hal.ops._checks import check_floating, check_rank, check_same_device

__all__ = ["check_parameter_values", "check_parameters", "check_seed"]

UPPER = {"temperature": math.inf, "top_p": 1.0, "min_p": 1.0}
RANGES = {"temperature": "finite and not negative", "top_p": "between 0 and 1", "min_p": "between 0 and 1"}


def check_parameters(op: str, a: Args) -> None:
    """Shapes, dtypes and devices of logits and parameters, and the values of those that are numbers."""
    check_floating(op, "logits", a.logits)
    check_rank(op, "logits", a.logits, 2)
    if a.logits.shape[1] == 0:
        raise ShapeError(f"{op}: logits has no tokens to choose from; V must be at least 1")
    parameters = {name: getattr(a, name) for name in ("temperature", "top_k", "top_p", "min_p")}
    tensors = {name: value for name, value in parameters.items() if isinstance(value, Tensor)}
    check_same_device(op, logits=a.logits, **tensors)
    for name, value in parameters.items():
        if isinstance(value, Tensor):
            _check_rows(op, name, value, a.logits.shape[0])
            _check_parameter_dtype(op, name, value)
        elif value is not None:
            _check_number(op, name, value)


def check_seed(op: str, a: Args) -> None:
    """A number that fits int64, or an int64 tensor () or (B,)."""
    if isinstance(a.seed, Tensor):
        check_same_device(op, logits=a.logits, seed=a.seed)
        _check_rows(op, "seed", a.seed, a.logits.shape[0])
        if a.seed.dtype is not torch.int64:
            raise DtypeError(f"{op}: seed is {dtype_name(a.seed.dtype)}; a tensor of seeds is int64")
    elif isinstance(a.seed, bool) or not isinstance(a.seed, int | torch.SymInt):
        raise ArgumentError(
            f"{op}: seed is {a.seed!r}; it must be an integer or an int64 tensor () or (B,), for there is no "
            "hidden generator to draw one from"
        )
    elif isinstance(a.seed, int) and not -(2**63) <= a.seed < 2**63:
        raise ArgumentError(f"{op}: seed is {a.seed}; it must fit a signed 64-bit integer")


def check_parameter_values(
    op: str, temperature: float | Tensor | None, top_p: float | Tensor | None, min_p: float | Tensor | None
) -> None:
    """The values of parameters that are tensors."""
    for name, value in (("temperature", temperature), ("top_p", top_p), ("min_p", min_p)):
        if not isinstance(value, Tensor):
            continue
        good = value.isfinite() & (value >= 0.0) & (value <= UPPER[name])
        if not bool(good.all()):
            wrong = value[~good].flatten()[0].item()
            raise ArgumentError(f"{op}: {name} holds {wrong}; it must be {RANGES[name]}")


def _check_rows(op: str, name: str, value: Tensor, rows: int) -> None:
    if value.ndim > 1 or (value.ndim == 1 and value.shape[0] != rows):
        raise ShapeError(
            f"{op}: {name} has shape {tuple(value.shape)}; supported are a number, a tensor () and a tensor "
            f"({rows},), one value per row of logits"
        )


def _check_parameter_dtype(op: str, name: str, value: Tensor) -> None:
    if name == "top_k":
        if value.dtype not in (torch.int32, torch.int64):
            raise DtypeError(f"{op}: top_k is {dtype_name(value.dtype)}; supported are int32 and int64")
    else:
        check_floating(op, name, value)


def _check_number(op: str, name: str, value: float) -> None:
    if name == "top_k":
        if isinstance(value, bool) or not isinstance(value, int | torch.SymInt):
            raise ArgumentError(f"{op}: top_k is {value!r}; it must be an integer (0 or less keeps every token)")
    elif not (math.isfinite(value) and 0.0 <= value <= UPPER[name]):
        raise ArgumentError(f"{op}: {name} is {value}; it must be {RANGES[name]}")
