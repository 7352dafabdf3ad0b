"""How this backend's Triton kernels are offered: what they accept, and the plain function behind each prepared one."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Any

from hal.capability import Declares, Implementation, Limit, Supports
from hal.op import OPS, Args

__all__ = ["FLOATS", "forward_of", "missing", "offer"]

FLOATS = frozenset({"float32", "float16", "bfloat16"})
NAME = "triton"
PRIORITY = 10
# Releases that the kernels are compiled with in tests: from the first up to, but without, the second.
RELEASES = ((3, 6), (3, 10))


@cache
def missing() -> str | None:
    """Why the kernels cannot be compiled here; None where they can."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    try:
        version = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return "what is imported as triton is not the package triton"
    if not RELEASES[0] <= tuple(int(part) for part in version.split(".")[:2]) < RELEASES[1]:
        first, last = (".".join(map(str, release)) for release in RELEASES)
        return f"triton {version} is installed, and the kernels are for {first} up to, but without, {last}"
    return None


def forward_of(op: str, prepare: Callable[[Args], Callable[..., Any]]) -> Callable[..., Any]:
    """The plain function, with the operator's signature, behind an implementation that prepares."""
    contract = OPS[op]

    @functools.wraps(contract.reference)
    def forward(*args: Any, **kwargs: Any) -> Any:
        return prepare(contract.bind(args, kwargs))(*args, **kwargs)

    return forward


def offer(
    op: str,
    prepare: Callable[[Args], Callable[..., Any]],
    *,
    dtypes: frozenset[str] = FLOATS,
    features: frozenset[str] | None = None,
    limits: Mapping[str, Limit] | None = None,
    where: Callable[[Args], Iterable[str]] | None = None,
    declares: Declares | None = None,
    train: Callable[..., Any] | None = None,
    backward: Callable[..., Any] | None = None,
) -> Implementation:
    """The implementation whose calls `prepare` makes ready; declared bitwise properties are the kernels' own."""

    def runs(a: Args) -> Iterable[str]:
        why = missing()
        if why is not None:
            yield why
        if where is not None:
            yield from where(a)

    runs.__doc__ = "triton is installed" + (f"; {where.__doc__}" if where is not None and where.__doc__ else "")
    return Implementation(
        op,
        NAME,
        forward_of(op, prepare),
        supports=Supports(dtypes=dtypes, features=features, limits=limits or {}, where=runs),
        declares=Declares() if declares is None else declares,
        priority=PRIORITY,
        train=train,
        backward=backward,
        prepare=prepare,
    )
