"""Checks that many operators share, made for the names of their parameters."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from hal.backends.ascend.simulator.constraints import P310, Check, Constraint

__all__ = [
    "FLOATS",
    "HALVES",
    "ROWS",
    "absent",
    "contiguous",
    "dtypes",
    "each",
    "no_bfloat16",
    "one_dtype",
    "taking",
]

FLOATS = (torch.float16, torch.bfloat16, torch.float32)
HALVES = (torch.float16, torch.bfloat16)

ROWS: tuple[Constraint, ...] = ()


def taking(names: Sequence[str], check: Callable[..., str | None]) -> Check:
    """`check`, called with the parameters of these names."""

    def named(*values: Any) -> str | None:
        return check(*values)

    named.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in names]
    )
    return named


def each(*names: str, test: Callable[[Tensor], str | None]) -> Check:
    """Apply `test` to each named tensor, or list of tensors, that is given; it says what is wrong with one."""

    def check(*values: Tensor | list[Tensor] | None) -> str | None:
        for name, value in zip(names, values, strict=True):
            for tensor in value if isinstance(value, list) else [value]:
                found = None if tensor is None else test(tensor)
                if found is not None:
                    return f"{name} {found}"
        return None

    return taking(names, check)


def dtypes(*names: str, allowed: Sequence[torch.dtype]) -> Check:
    """Each named tensor has one of the dtypes."""
    return each(*names, test=lambda t: None if t.dtype in allowed else f"of {_short(t.dtype)}")


def contiguous(*names: str) -> Check:
    return each(
        *names,
        test=lambda t: None if t.is_contiguous() else f"of shape {tuple(t.shape)} with strides {t.stride()}",
    )


def one_dtype(*names: str) -> Check:
    """All named tensors that are given have one dtype."""

    def check(*values: Tensor | list[Tensor] | None) -> str | None:
        tensors = [v[0] if isinstance(v, list) else v for v in values]
        given = [(name, t.dtype) for name, t in zip(names, tensors, strict=True) if t is not None]
        if len({dtype for _, dtype in given}) <= 1:
            return None
        return ", ".join(f"{name} of {_short(dtype)}" for name, dtype in given)

    return taking(names, check)


def no_bfloat16(operators: str | tuple[str, ...], page: str, *names: str) -> Constraint:
    """The row that says what a 310P has not."""
    first = operators if isinstance(operators, str) else operators[0]
    return Constraint(
        operator=operators,
        rule=f"no operand of {first.removeprefix('aclnn')} is bfloat16, which the 310P has not",
        page=page,
        enforced_by="document",
        check=each(*names, test=lambda t: "of bfloat16" if t.dtype is torch.bfloat16 else None),
        socs=P310,
    )


def absent(operators: str | tuple[str, ...], page: str) -> Constraint:
    """The row that says that a 310P has no such operator."""
    first = operators if isinstance(operators, str) else operators[0]
    return Constraint(
        operator=operators,
        rule=f"the chip is not a 310P, which the page of {first.removeprefix('aclnn')} does not name",
        page=page,
        enforced_by="document",
        check=lambda: "one",
        socs=P310,
    )


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
