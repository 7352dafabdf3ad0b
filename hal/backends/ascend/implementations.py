"""All that the Ascend backend implements."""

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

__all__ = ["IMPLEMENTATIONS"]

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
