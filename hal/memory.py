"""Where implementations get memory for results and workspaces, so that conformance can poison and fence it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

__all__ = ["allocator", "empty"]

Allocator = Callable[[Sequence[int], torch.dtype, torch.device], Tensor]

_allocator: Allocator | None = None


def empty(shape: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
    """An uninitialised contiguous tensor. Every element of a result must be written by who asked for it."""
    if _allocator is None:
        return torch.empty(shape, dtype=dtype, device=device)
    return _allocator(shape, dtype, device)


@contextmanager
def allocator(replacement: Allocator) -> Iterator[None]:
    """Serve `empty` from `replacement` within the block, in every thread (backward runs in threads of its own)."""
    global _allocator
    previous, _allocator = _allocator, replacement
    try:
        yield
    finally:
        _allocator = previous
