"""attention by the libraries behind torch's scaled_dot_product_attention: cuDNN, and FlashAttention 2.

They are called by their own names, so that torch never chooses another. Both align `is_causal` top-left, so causal
calls are taken where both alignments agree: as many queries as keys, or one query, which sees every key anyway. Their
masks, windows, soft caps and sinks are left to other implementations. P is rounded to the input's dtype before it
meets v.

Gradients run the forward pass again and differentiate it: what the libraries keep for their own backward pass (the
state of a random generator) is not the operator's to keep.

B batch, S queries, L keys, H query heads, K kv heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from hal.backends.cuda.offers import forward_of
from hal.capability import Declares, Implementation, Limit, Supports
from hal.op import Args
from hal.recording import autograd_enabled

__all__ = ["IMPLEMENTATIONS"]

Gradients = tuple[Tensor | None, ...]
Library = Callable[[Tensor, Tensor, Tensor, bool, float | None, bool], tuple[Tensor, Tensor]]


def _cudnn(
    q_BHSD: Tensor, k_BKLD: Tensor, v_BKLD: Tensor, causal: bool, scale: float | None, lse: bool
) -> tuple[Tensor, Tensor]:
    found = torch.ops.aten._scaled_dot_product_cudnn_attention(
        q_BHSD, k_BKLD, v_BKLD, None, lse, 0.0, causal, False, scale=scale
    )
    return found[0], found[1]


def _flash(
    q_BHSD: Tensor, k_BKLD: Tensor, v_BKLD: Tensor, causal: bool, scale: float | None, lse: bool
) -> tuple[Tensor, Tensor]:
    found = torch.ops.aten._scaled_dot_product_flash_attention(q_BHSD, k_BKLD, v_BKLD, 0.0, causal, False, scale=scale)
    return found[0], found[1]


def _laid(x: Tensor) -> Tensor:
    """(B, S, H, D) as the libraries take it: (B, H, S, D) of memory that is (B, S, H, D), from a multiple of 16 bytes.

    They take other strides too, and read past or across rows that do not start at such multiples.
    """
    if not x.is_contiguous() or x.data_ptr() % 16:
        x = x.clone(memory_format=torch.contiguous_format)
    return x.transpose(1, 2)


def _top_left(a: Args) -> bool:
    return bool(a.causal) and a.q.shape[1] > 1


def _prepared(library: Library) -> Callable[[Args], Callable[..., Any]]:
    def prepare(a: Args) -> Callable[..., Any]:
        B, S, H, _ = a.q.shape
        causal, scale, wanted = _top_left(a), a.scale, a.return_lse

        def call(q: Tensor, k: Tensor, v: Tensor, **_: Any) -> Any:
            o, lse = library(_laid(q), _laid(k), _laid(v), causal, scale, wanted)
            o = o.transpose(1, 2).contiguous()
            return (o, lse.reshape(B, H, S)) if wanted else o

        return call

    return prepare


def _backward(backend: SDPBackend) -> Callable[..., Gradients]:
    def backward(a: Args, outs: dict[str, Tensor], grads: Gradients, needs: tuple[bool, ...]) -> Gradients:
        do = grads[0]
        if do is None:
            return (None,) * len(needs)
        leaves = [t.detach().requires_grad_(need) for t, need in zip((a.q, a.k, a.v), needs, strict=False)]
        with autograd_enabled(), sdpa_kernel(backend):
            q, k, v = (_laid(t) for t in leaves)
            o = F.scaled_dot_product_attention(q, k, v, is_causal=_top_left(a), scale=a.scale, enable_gqa=True)
            asked = [t for t in leaves if t.requires_grad]
            found = iter(torch.autograd.grad(o.transpose(1, 2), asked, do))
        return (*(next(found) if t.requires_grad else None for t in leaves), None, None)

    return backward


def _agrees(a: Args) -> Iterable[str]:
    """some queries and keys; causal with as many queries as keys, or one query"""
    (_, S, *_), (_, L, *_) = a.q.shape, a.k.shape
    if not a.q.numel() or not L:
        yield "there are no queries or no keys"
    if _top_left(a) and S != L:
        yield f"causal with {S} queries and {L} keys, and the library aligns it to the first key"
    if a.scale is not None and a.scale <= 0:
        yield f"scale is {a.scale}, and the library takes those above 0"


def _implementation(name: str, library: Library, backend: SDPBackend, head_dim: Limit) -> Implementation:
    prepare = _prepared(library)
    return Implementation(
        "attention",
        name,
        forward_of("attention", prepare),
        supports=Supports(
            dtypes=frozenset({"float16", "bfloat16"}),
            features=frozenset({"causal", "gqa", "lse", "scale"}),
            limits={"head_dim": head_dim},
            where=_agrees,
        ),
        # Their backward passes add gradients of q in any order.
        declares=Declares(
            u_p={"bfloat16": 2.0**-8, "float16": 2.0**-11}, run_to_run=False, copies=frozenset({"q", "k", "v"})
        ),
        priority=5,
        backward=_backward(backend),
        prepare=prepare,
    )


IMPLEMENTATIONS: tuple[Implementation, ...] = (
    _implementation("cudnn", _cudnn, SDPBackend.CUDNN_ATTENTION, Limit(min=8, max=128, multiple_of=8)),
    _implementation("flash", _flash, SDPBackend.FLASH_ATTENTION, Limit(min=8, max=256, multiple_of=8)),
)
