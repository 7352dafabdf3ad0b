"""How references compute: the same body runs as the implementation, as the float64 oracle or as the baseline.

`run` computes in float32 (float64 for float64 inputs) and rounds results to their dtype. `oracle` computes in
float64 and leaves results unrounded, but keeps every rounding that is part of an operator's meaning (`stored`).
`baseline` is `run` with the roundings that an implementation declares for its intermediates (`lossy`).
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

__all__ = ["baseline", "compute_dtype", "lossy", "oracle", "oracle_of", "result", "smallest_number", "stored", "widen"]

P = ParamSpec("P")
R = TypeVar("R")


class _Stored(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, t: Tensor, dtype: torch.dtype) -> Tensor:
        return t.to(dtype).to(t.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


@dataclass(frozen=True)
class _Mode:
    oracle: bool = False
    p_dtype: torch.dtype | None = None
    stands_for: torch.dtype | None = None


_RUN = _Mode()
_mode: ContextVar[_Mode] = ContextVar("hal_arithmetic", default=_RUN)


def _current() -> _Mode:
    # Under torch.compile a reference is only traced as the body of a torch op's backward, always as `run`.
    return _RUN if torch.compiler.is_compiling() else _mode.get()


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which a reference computes on inputs of `dtype`: float32, or float64 for float64 and the oracle."""
    return torch.float64 if dtype is torch.float64 or _current().oracle else torch.float32


def smallest_number(dtype: torch.dtype) -> float:
    """The smallest normal number of what implementations compute in on inputs of `dtype`: of float32, or of float64.

    The oracle, which computes in float64 throughout, gets the same answer.
    """
    stands_for = _current().stands_for
    dtype = stands_for if stands_for is not None and dtype is torch.float64 else dtype
    return torch.finfo(torch.float64 if dtype is torch.float64 else torch.float32).tiny


def widen(t: Tensor) -> Tensor:
    """`t` (floating) in its compute dtype."""
    return t.to(compute_dtype(t.dtype))


def stored(t: Tensor, dtype: torch.dtype) -> Tensor:
    """`t` rounded to `dtype`, still in its own dtype: a storage rounding that is part of the operator's meaning.

    Its derivative is the identity: gradients pass unrounded.
    """
    stands_for = _current().stands_for
    if stands_for is not None and dtype is torch.float64:
        dtype = stands_for
    if dtype is t.dtype:
        return t
    rounded: Tensor = _Stored.apply(t, dtype)  # type: ignore[no-untyped-call]
    return rounded


def result(t: Tensor, dtype: torch.dtype) -> Tensor:
    """The final rounding of a result to `dtype`; the oracle leaves it out."""
    return t if _current().oracle else t.to(dtype)


def lossy(t: Tensor) -> Tensor:
    """A rounding that implementations may declare (u_p); only the baseline of such a one applies it."""
    p_dtype = _current().p_dtype
    return t if p_dtype is None else stored(t, p_dtype)


def oracle(fn: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Run a reference as the oracle: float64 arithmetic, `stored` roundings applied, results unrounded."""
    token = _mode.set(_Mode(oracle=True))
    try:
        return fn(*args, **kwargs)
    finally:
        _mode.reset(token)


def oracle_of(dtype: torch.dtype, fn: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Run a reference as the oracle on float64 tensors that stand for tensors of `dtype`.

    The values are the same as with those; but autograd rounds a gradient to the dtype of what it is the gradient of,
    and here that is float64.
    """
    token = _mode.set(_Mode(oracle=True, stands_for=dtype))
    try:
        return fn(*args, **kwargs)
    finally:
        _mode.reset(token)


def baseline(p_dtype: torch.dtype | None, fn: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Run a reference as the honest baseline: float32 arithmetic, with `lossy` rounding to `p_dtype` if given."""
    token = _mode.set(_Mode(p_dtype=p_dtype))
    try:
        return fn(*args, **kwargs)
    finally:
        _mode.reset(token)
