"""attention_varlen by the kernels of hal.kernels.attention and hal.kernels.attention_backward.

Lengths stay on the device: grids come from the upper bounds, and programs that find nothing to do end at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hal.backends.cuda import attention_launch as launching
from hal.backends.cuda.attention import DECLARES, nothing
from hal.backends.cuda.attention_gradients import gradients
from hal.backends.cuda.offers import offer
from hal.capability import Implementation
from hal.op import Args, empty

__all__ = ["IMPLEMENTATIONS"]


def attention_varlen(a: Args) -> Callable[..., Tensor | tuple[Tensor, Tensor]]:
    p = launching.Problem.of(a)
    o_shape, lse_shape, dtype, device = p.o_shape, p.lse_shape, a.q.dtype, a.q.device
    if not a.q.numel():
        return lambda *_, return_lse=False, **__: nothing(p, dtype, device, return_lse)
    of = launching.forward(a, p)

    def call(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        *,
        sinks: Tensor | None = None,
        return_lse: bool = False,
        **_: Any,
    ) -> Tensor | tuple[Tensor, Tensor]:
        o = empty(o_shape, dtype=dtype, device=device)
        cu_q, cu_k = cu_seqlens_q, cu_seqlens_k
        if not return_lse:
            of(False)(q, k, v, o, None, cu_q, cu_k, None, sinks)
            return o
        lse = empty(lse_shape, dtype=torch.float32, device=device)
        of(True)(q, k, v, o, lse, cu_q, cu_k, None, sinks)
        return o, lse

    return call


def _backward(
    a: Args, outs: dict[str, Tensor], grads: tuple[Tensor | None, ...], needs: tuple[bool, ...]
) -> tuple[Tensor | None, ...]:
    names = ("q", "k", "v", "sinks")
    found = gradients(a, outs, grads, dict(zip(names, needs, strict=True)))
    return tuple(found.get(name) for name in names)


IMPLEMENTATIONS: tuple[Implementation, ...] = (
    offer("attention_varlen", attention_varlen, declares=DECLARES, backward=_backward),
)
