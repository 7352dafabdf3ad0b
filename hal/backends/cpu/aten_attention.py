"""Attention by ATen's CPU flash kernel, brought to the contract's conventions.

The kernel aligns `is_causal` top-left, lets NaN of masked keys through, gives an infinite logit a finite result on
16-bit inputs, and returns 0 for the log-sum-exp of a row that sees nothing. Here causal and window become a slice of
the keys, the kernel's own flag where both alignments agree, or a mask; keys that a mask hides at either end are not
read at all; and a result that is not finite where keys are hidden, or that hides an infinite logit, is computed again
by the reference. Soft cap, sinks and a differing head dim of v are left to the reference.

B batch, S queries, L keys, H query heads, K kv heads, D head dim.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from hal.capability import Declares, Implementation, Supports
from hal.memory import empty
from hal.ops._attention_args import lse_dtype, split_window
from hal.ops._attention_core import Sight
from hal.ops.attention import attention as contract
from hal.ops.attention_varlen import attention_varlen as varlen_contract

__all__ = ["DECLARES", "FLOAT_NAMES", "IMPLEMENTATIONS", "dense"]

Window = tuple[int | None, int | None]

FLOAT_NAMES = frozenset({"float64", "float32", "bfloat16", "float16"})
# Without a mask, the kernel's scalar loop over fewer keys than a vector holds loses the NaN of a query.
VECTOR = 16
# P is rounded to the input's dtype before it meets v.
DECLARES = Declares(
    u_p={"bfloat16": 2.0**-8, "float16": 2.0**-11}, lse_grad=True, capturable=True, copies=frozenset("qkv")
)


def dense(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    window: Window | None,
    mask: Tensor | None,
    scale: float | None,
    with_lse: bool,
) -> tuple[Tensor, Tensor | None]:
    """(o, lse or None) of (B, S, H, D) on (B, L, K, D): the contract without softcap, sinks, another width of v."""
    B, S = q.shape[:2]
    L = k.shape[1]
    if B == 0 or S == 0 or L == 0:
        return _nothing(q, with_lse)
    given = q, k, v, mask
    top_left = False
    if S > 1 or window is not None or mask is not None:
        left, right = split_window(window)
        if left is not None and L - S - left > 0:
            first = L - S - left
            k, v = k[:, first:], v[:, first:]
            mask = mask[..., first:] if mask is not None and mask.ndim and mask.shape[-1] > 1 else mask
            L -= first
        if S > 1 and (causal or left is not None or right is not None):
            # The kernel scales after it has put -inf above the diagonal.
            top_left = causal and left is None and S == L >= VECTOR and mask is None and (scale is None or scale > 0)
            if not top_left:
                mask = _both(Sight(causal, left, right).visible(0, S, S, L, q.device), mask)
        if mask is not None:
            mask = mask[(None,) * (4 - mask.ndim)]
            # Causal and window hide no key from all queries, once the slice is done: only a given mask can be trimmed.
            if given[3] is not None and mask.dtype is torch.bool and mask.shape[3] == L:
                trimmed = _trim(mask, k, v)
                if trimmed is None:
                    return _nothing(q, with_lse)
                mask, k, v = trimmed
    if mask is None and k.shape[1] < VECTOR:
        mask = torch.ones(1, 1, 1, k.shape[1], dtype=torch.bool)
    o, lse = _kernel(q, k, v, mask, top_left, scale, with_lse)
    sound = lse is None or math.isfinite(lse.sum().item())
    if sound and mask is not None:
        sound = math.isfinite(o.sum(dtype=lse_dtype(o.dtype)).item())
    if sound and with_lse and lse is not None:
        if mask is not None:
            sees = mask if mask.dtype is torch.bool else mask != -math.inf
            lse.masked_fill_(~sees.any(-1), -math.inf)
        # A row whose logits are all -inf comes out of the kernel with 0, which is also what an honest row may have.
        sound = not bool((lse == 0).any())
    if not sound:
        q, k, v, mask = given
        o, lse = contract.op.reference(q, k, v, causal=causal, window=window, mask=mask, scale=scale, return_lse=True)
    return o, lse if with_lse else None


def _both(visible: Tensor, mask: Tensor | None) -> Tensor:
    if mask is None:
        return visible
    return mask & visible if mask.dtype is torch.bool else mask.masked_fill(~visible, -math.inf)


def _nothing(q: Tensor, with_lse: bool) -> tuple[Tensor, Tensor | None]:
    """No queries, no keys, or no key that any query sees."""
    B, S, H, _ = q.shape
    o = empty(q.shape, dtype=q.dtype, device=q.device).zero_()
    lse = empty((B, H, S), dtype=lse_dtype(q.dtype), device=q.device).fill_(-math.inf) if with_lse else None
    return o, lse


def _trim(mask: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor | None, Tensor, Tensor] | None:
    """Without the keys at both ends that nobody sees; no mask if nothing is left to hide, None if nobody sees any."""
    one_row = mask.shape[0] == mask.shape[1] == mask.shape[2] == 1
    seen = mask[0, 0, 0] if one_row else mask.any(2).any(1).any(0)
    places = seen.nonzero()
    n = places.shape[0]
    if n == 0:
        return None
    first, last = int(places[0]), int(places[-1]) + 1
    if last - first < mask.shape[3]:
        k, v, mask = k[:, first:last], v[:, first:last], mask[..., first:last]
    return (None if one_row and last - first == n else mask), k, v


def _kernel(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, top_left: bool, scale: float | None, with_lse: bool
) -> tuple[Tensor, Tensor | None]:
    """(o, lse or None). For 16-bit inputs there is always an lse, good to 1e-4 only unless `with_lse`."""
    if q.stride(3) != 1 or k.stride(3) != 1 or v.stride(3) != 1:
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    dtype = q.dtype
    if with_lse and dtype.itemsize == 2:
        q, k, v = q.float(), k.float(), v.float()
    if mask is not None:
        mask = _bias(mask, q.dtype)
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    if not with_lse and dtype.itemsize > 2:
        o = F.scaled_dot_product_attention(q, k, v, mask, 0.0, top_left, scale=scale, enable_gqa=True)
        return o.transpose(1, 2).contiguous(), None
    o, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default(
        q, k, v, 0.0, top_left, attn_mask=mask, scale=scale
    )
    return o.transpose(1, 2).to(dtype).contiguous(), lse.contiguous()


def _bias(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A mask as the kernel adds it beside inputs of `dtype`, none of its ordinary numbers turned into -inf."""
    if mask.dtype is torch.bool:
        return torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, -math.inf)
    wanted = lse_dtype(dtype)
    if mask.dtype is torch.float64 and wanted is not torch.float64:
        mask = mask.clamp(min=torch.finfo(wanted).min).masked_fill(mask == -math.inf, -math.inf)
    return mask if mask.dtype is dtype else mask.to(wanted)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    window: Window | None = None,
    mask: Tensor | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    sinks: Tensor | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    o, lse = dense(q, k, v, causal, window, mask, scale, return_lse)
    return o if lse is None else (o, lse)


def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    causal: bool = False,
    window: Window | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    sinks: Tensor | None = None,
    return_lse: bool = False,
    cu_seqlens_q_cpu: Tensor | None = None,
    cu_seqlens_k_cpu: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    T, H, _ = q.shape
    o = empty(q.shape, dtype=q.dtype, device=q.device)
    lse = empty((T, H), dtype=lse_dtype(q.dtype), device=q.device) if return_lse else None
    queries, keys = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    for start, stop, first, last in zip(queries, queries[1:], keys, keys[1:], strict=False):
        part, part_lse = dense(
            q[None, start:stop], k[None, first:last], v[None, first:last], causal, window, None, scale, return_lse
        )
        o[start:stop] = part[0]
        if lse is not None and part_lse is not None:
            lse[start:stop] = part_lse[0].T
    o[queries[-1] :] = 0
    if lse is None:
        return o
    lse[queries[-1] :] = 0
    return o, lse


_FEATURES = frozenset(contract.op.features) - {"softcap", "sinks", "different_v_dim"}

IMPLEMENTATIONS = (
    Implementation(
        op="attention",
        name="aten",
        forward=attention,
        supports=Supports(dtypes=FLOAT_NAMES, features=_FEATURES, device_types=frozenset({"cpu"})),
        declares=DECLARES,
        priority=10,
    ),
    Implementation(
        op="attention_varlen",
        name="aten",
        forward=attention_varlen,
        supports=Supports(
            dtypes=FLOAT_NAMES,
            features=frozenset(varlen_contract.op.features) - {"softcap", "sinks", "different_v_dim"},
            device_types=frozenset({"cpu"}),
        ),
        declares=DECLARES,
        priority=10,
    ),
)
