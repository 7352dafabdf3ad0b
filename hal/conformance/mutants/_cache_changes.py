"""What faults of the operators on a paged KV cache share: which arguments they change, and codes as bytes."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from hal.conformance.mutants.mutant import Arguments, Candidate, before

READERS = ("paged_attention", "gather_kv_cache")
CACHES = ("k_cache", "v_cache")
Change = Callable[[Arguments], Arguments]


def given(change: Change) -> Callable[[str], Candidate]:
    """Arguments that are taken for others."""
    return lambda op: before(op, change)


def finite(t: Tensor) -> Tensor:
    """Infinity as the largest number; NaN stays."""
    return t.clamp(-torch.finfo(t.dtype).max, torch.finfo(t.dtype).max)


def raw(t: Tensor) -> Tensor:
    """Codes as bytes, which every operation takes."""
    return t.view(torch.uint8) if t.element_size() == 1 else t
