"""All that the Ascend backend implements, and what of it the machine's chip can have."""

from __future__ import annotations

from hal.backends.ascend import (
    activations,
    attention,
    attention_varlen,
    composed,
    cross_entropy,
    kv_cache,
    linear,
    norms,
    paged_attention,
    rotary,
    softmax,
    triton,
)
from hal.capability import Implementation

__all__ = ["IMPLEMENTATIONS", "for_chip"]

IMPLEMENTATIONS: tuple[Implementation, ...] = (
    *activations.IMPLEMENTATIONS,
    *attention.IMPLEMENTATIONS,
    *attention_varlen.IMPLEMENTATIONS,
    *cross_entropy.IMPLEMENTATIONS,
    *kv_cache.IMPLEMENTATIONS,
    *linear.IMPLEMENTATIONS,
    *norms.IMPLEMENTATIONS,
    *paged_attention.IMPLEMENTATIONS,
    *rotary.IMPLEMENTATIONS,
    *softmax.IMPLEMENTATIONS,
    *triton.IMPLEMENTATIONS,
    *composed.IMPLEMENTATIONS,
)


def for_chip(architecture: str | None) -> tuple[Implementation, ...]:
    """Those declared for a chip; all of them where none is known, as without a device."""
    if architecture is None:
        return IMPLEMENTATIONS
    named = ((found, found.supports.architectures) for found in IMPLEMENTATIONS)
    return tuple(found for found, chips in named if chips is None or architecture in chips)
