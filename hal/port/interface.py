"""hal's attention as transformers' attention interface "hal", and the masks that go with it.

B batch, S query length, L key length, H query heads, K kv heads, D head dim.
"""

from __future__ import annotations

import logging
from typing import Any, cast

import torch
from torch import Tensor, nn

from hal.ops import attention

__all__ = ["NAME", "attend", "register", "selected"]

NAME = "hal"

logger = logging.getLogger("hal")
_warned: set[str] = set()

# Set on a mask that lets every query see exactly its first L keys, so that no kernel need read it.
_ALL_VISIBLE = "_hal_all_visible"


def register() -> None:
    """Make "hal" known to transformers; models use it when their attention implementation is set to it."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, _attention_forward)
    AttentionMaskInterface.register(NAME, _mask)


def selected(config: Any) -> bool:
    """Whether a configuration's attention is hal's."""
    if torch.compiler.is_compiling():
        return bool(config._attn_implementation == NAME)
    # Past the configuration's own attribute look-up, which costs as much as an operator's call.
    return bool(object.__getattribute__(config, "_attn_implementation_internal") == NAME)


def attend(
    q_BSHD: Tensor,
    k_BLKD: Tensor,
    v_BLKD: Tensor,
    mask: Tensor | None,
    causal: bool,
    scale: float | None,
    softcap: float | None = None,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """Attention under transformers' conventions.

    Without a mask, several queries of a causal model see the keys up to their own: a static cache that is just being
    filled has more keys than queries then, and those behind are empty. One query without a mask sees all keys.
    """
    n_queries, n_keys = q_BSHD.shape[1], k_BLKD.shape[1]
    causal = causal and mask is None and n_queries > 1
    visible = n_keys
    if mask is None:
        if causal:
            visible = n_queries
    else:
        if mask.shape[-1] != 1:
            visible = mask.shape[-1]
        if hasattr(mask, _ALL_VISIBLE):
            mask = None
    if visible < n_keys:
        k_BLKD, v_BLKD = k_BLKD[:, :visible], v_BLKD[:, :visible]
    return cast(
        Tensor, attention(q_BSHD, k_BLKD, v_BLKD, causal=causal, mask=mask, softcap=softcap, scale=scale, sinks=sinks_H)
    )


def _attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The interface's signature: q (B, H, S, D), k and v (B, K, L, D); o (B, S, H, D)."""
    if dropout:
        _once("hal's attention has no dropout: while a model trains with it, transformers' SDPA attention runs instead")
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        result: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, is_causal=is_causal,
            position_bias=position_bias, softcap=softcap, **kwargs,
        )  # fmt: skip
        return result
    if kwargs.get("output_attentions"):
        _once("hal's attention does not return attention weights; set the attention implementation to eager for them")
    causal = is_causal if is_causal is not None else bool(getattr(module, "is_causal", True))
    q_BSHD, k_BLKD, v_BLKD = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    if position_bias is not None:
        attention_mask, causal = _biased(attention_mask, position_bias, causal and query.shape[2] > 1)
    return attend(q_BSHD, k_BLKD, v_BLKD, attention_mask, causal, scaling, softcap, s_aux), None


def _biased(mask: Tensor | None, bias: Tensor, causal: bool) -> tuple[Tensor, bool]:
    n_queries, n_keys = bias.shape[-2:]
    if mask is None:
        if not causal:
            return bias, False
        mask = torch.ones(n_queries, n_keys, dtype=torch.bool, device=bias.device).tril()
    if mask.dtype is torch.bool:
        return bias.masked_fill(~mask, float("-inf")), False
    return bias + mask, False


def _mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Any = None,
    attention_mask: Tensor | None = None,
    **kwargs: Any,
) -> Tensor | None:
    """The boolean mask that transformers makes for SDPA, without the slots of a static cache that are yet empty.

    A static cache tells its length as a tensor; where that can be read without waiting for a device, one query needs
    no mask over the empty slots, only the number of keys before them.
    """
    from transformers.masking_utils import causal_mask_function, sdpa_mask

    if mask_function is None:
        mask_function = causal_mask_function
    filled = kv_length
    if isinstance(q_offset, Tensor) and q_offset.device.type == "cpu" and not torch.compiler.is_compiling():
        q_offset = int(q_offset)
        filled = min(q_offset + q_length - kv_offset, kv_length)
        # A last axis of one means all keys, so a single visible key cannot be said by the shape.
        if filled > 1 and q_length == 1 and mask_function is causal_mask_function and _unpadded(attention_mask, filled):
            everything = torch.ones((1, 1, 1, filled), dtype=torch.bool)
            setattr(everything, _ALL_VISIBLE, True)
            return everything
    mask: Tensor | None = sdpa_mask(
        batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask, **kwargs
    )
    if mask is not None and 1 < filled < kv_length:
        mask = mask[..., :filled]
    return mask


def _unpadded(attention_mask: Tensor | None, filled: int) -> bool:
    if attention_mask is None:
        return True
    return (
        attention_mask.device.type == "cpu"
        and attention_mask.shape[-1] >= filled
        and bool(attention_mask[:, :filled].all())
    )


def _once(message: str) -> None:
    if message not in _warned:
        _warned.add(message)
        logger.warning(message)
