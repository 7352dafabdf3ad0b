"""The conventions of the contract and the operators that each touches: every pair must have a mutant."""

from __future__ import annotations

__all__ = ["CONVENTIONS", "GRADIENTS", "UNSEEN"]

_ATTENTION = ("attention", "attention_varlen", "paged_attention")
_RMS = ("rms_norm", "add_rms_norm")
_NORMS = (*_RMS, "layer_norm")
_SAMPLERS = ("top_k_top_p_probs", "top_k_top_p_sample")
_CACHE = ("paged_attention", "gather_kv_cache", "write_kv_cache")
_POINTWISE = ("silu_and_mul", "gelu_and_mul", "softmax", "rotary_embedding")
_LOSS = ("cross_entropy",)
# Operators whose results are new tensors, computed from tensors.
_RESULTS = (
    "linear", *_NORMS, *_POINTWISE, *_ATTENTION, "merge_attention", "gather_kv_cache", *_LOSS, *_SAMPLERS
)  # fmt: skip
_WRITERS = ("write_kv_cache", "copy_kv_blocks")

CONVENTIONS: dict[str, tuple[str, ...]] = {
    "ragged ends": ("attention_varlen", "paged_attention", "gather_kv_cache"),
    "lengths are bounds": ("attention_varlen", "paged_attention"),
    "causal": _ATTENTION,
    "mask": ("attention",),
    "row without keys": (*_ATTENTION, "merge_attention"),
    "hidden NaN": (*_ATTENTION, "gather_kv_cache"),
    "lse": (*_ATTENTION, "merge_attention"),
    "window": _ATTENTION,
    "softcap": _ATTENTION,
    "scale": _ATTENTION,
    "sinks": _ATTENTION,
    "grouped heads": _ATTENTION,
    "head dims": _ATTENTION,
    "merging": ("merge_attention",),
    "statistics": _NORMS,
    "eps": _NORMS,
    "weight": _NORMS,
    "rounding": _RMS,
    "rotary": ("rotary_embedding",),
    "gates": ("silu_and_mul", "gelu_and_mul"),
    "softmax": ("softmax",),
    "product": ("linear",),
    "KV cache": (*_CACHE, "copy_kv_blocks"),
    "block table": ("paged_attention", "gather_kv_cache"),
    "quantisation": _CACHE,
    "filters": _SAMPLERS,
    "ties": _SAMPLERS,
    "draw": ("top_k_top_p_sample",),
    "cross entropy": _LOSS,
    "special values": ("linear", *_NORMS, *_POINTWISE, *_ATTENTION, *_LOSS, *_SAMPLERS, "merge_attention",
                       "gather_kv_cache", *_WRITERS),
    "empty inputs": (*_RESULTS, *_WRITERS),
    "strides": (*_RESULTS, *_WRITERS),
    "inputs stay": (*_RESULTS, *_WRITERS),
    "results are new": _RESULTS,
    "memory": (*_RESULTS, *_WRITERS),
    "run to run": (*_RESULTS, *_WRITERS),
    "precision": (
        "linear", *_NORMS, *_POINTWISE, *_ATTENTION, "merge_attention", *_LOSS, "top_k_top_p_probs"
    ),
}  # fmt: skip
"""Convention -> operators whose results show it."""

_DIFFERENTIABLE = ("linear", *_NORMS, *_POINTWISE, "attention", "attention_varlen", *_LOSS)

GRADIENTS: dict[str, tuple[str, ...]] = {
    "row without keys": ("attention", "attention_varlen"),
    "hidden NaN": ("attention", "attention_varlen"),
    "ragged ends": ("attention_varlen",),
    "causal": ("attention", "attention_varlen"),
    "window": ("attention", "attention_varlen"),
    "softcap": ("attention", "attention_varlen"),
    "scale": ("attention", "attention_varlen"),
    "sinks": ("attention", "attention_varlen"),
    "mask": ("attention",),
    "grouped heads": ("attention", "attention_varlen"),
    "lse": ("attention", "attention_varlen"),
    "statistics": _NORMS,
    "eps": _NORMS,
    "weight": _NORMS,
    "rotary": ("rotary_embedding",),
    "gates": ("silu_and_mul", "gelu_and_mul"),
    "softmax": ("softmax",),
    "product": ("linear",),
    "cross entropy": _LOSS,
    "empty inputs": _DIFFERENTIABLE,
    "strides": _DIFFERENTIABLE,
    "inputs stay": _DIFFERENTIABLE,
    "precision": _DIFFERENTIABLE,
}
"""Convention -> operators whose gradients show it."""

UNSEEN: dict[str, str] = {
    "offsets": "a 32-bit address first wraps around past 2^31 elements, and the largest case holds some millions",
}
"""Convention that no case can show -> the reason."""
