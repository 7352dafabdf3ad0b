"""All that the CUDA backend implements."""

from __future__ import annotations

from hal.backends.cuda import (
    activations,
    attention,
    attention_varlen,
    cross_entropy,
    kv_cache,
    linear,
    merge_attention,
    norms,
    paged_attention,
    rotary,
    sampling,
    sdpa,
    softmax,
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
    *merge_attention.IMPLEMENTATIONS,
    *norms.IMPLEMENTATIONS,
    *paged_attention.IMPLEMENTATIONS,
    *rotary.IMPLEMENTATIONS,
    *sampling.IMPLEMENTATIONS,
    *sdpa.IMPLEMENTATIONS,
    *softmax.IMPLEMENTATIONS,
)
