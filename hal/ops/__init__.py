"""The operator set. The body of each reference function is the operator's meaning."""

from __future__ import annotations

from hal.ops.activations import gelu_and_mul, silu_and_mul
from hal.ops.attention import attention
from hal.ops.attention_varlen import attention_varlen
from hal.ops.cross_entropy import cross_entropy
from hal.ops.kv_cache import copy_kv_blocks, gather_kv_cache, write_kv_cache
from hal.ops.linear import linear
from hal.ops.merge_attention import merge_attention
from hal.ops.norms import add_rms_norm, layer_norm, rms_norm
from hal.ops.paged_attention import paged_attention
from hal.ops.rotary import rotary_cache, rotary_embedding
from hal.ops.sampling import top_k_top_p_probs, top_k_top_p_sample
from hal.ops.softmax import softmax

__all__ = [
    "add_rms_norm",
    "attention",
    "attention_varlen",
    "copy_kv_blocks",
    "cross_entropy",
    "gather_kv_cache",
    "gelu_and_mul",
    "layer_norm",
    "linear",
    "merge_attention",
    "paged_attention",
    "rms_norm",
    "rotary_cache",
    "rotary_embedding",
    "silu_and_mul",
    "softmax",
    "top_k_top_p_probs",
    "top_k_top_p_sample",
    "write_kv_cache",
]
