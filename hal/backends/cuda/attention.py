"""attention by the kernels of hal.kernels.attention and hal.kernels.attention_backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hal.backends.cuda import attention_launch as launching
from hal.backends.cuda.attention_gradients import gradients
from hal.backends.cuda.offers import offer
from hal.capability import Declares, Implementation
from hal.op import Args, empty

__all__ = ["DECLARES", "IMPLEMENTATIONS", "nothing"]


def attention(a: Args) -> Callable[..., Tensor | tuple[Tensor, Tensor]]:
    p = launching.Problem.of(a)
    o_shape, lse_shape, dtype, device = p.o_shape, p.lse_shape, a.q.dtype, a.q.device
    if not a.q.numel():
        return lambda *_, return_lse=False, **__: nothing(p, dtype, device, return_lse)
    of = launching.forward(a, p)

    def call(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        mask: Tensor | None = None,
        sinks: Tensor | None = None,
        return_lse: bool = False,
        **_: Any,
    ) -> Tensor | tuple[Tensor, Tensor]:
        o = empty(o_shape, dtype=dtype, device=device)
        if not return_lse:
            of(False)(q, k, v, o, None, None, None, mask, sinks)
            return o
        lse = empty(lse_shape, dtype=torch.float32, device=device)
        of(True)(q, k, v, o, lse, None, None, mask, sinks)
        return o, lse

    return call


def _backward(
    a: Args, outs: dict[str, Tensor], grads: tuple[Tensor | None, ...], needs: tuple[bool, ...]
) -> tuple[Tensor | None, ...]:
    names = ("q", "k", "v", "mask", "sinks")
    found = gradients(a, outs, grads, dict(zip(names, needs, strict=True)))
    return tuple(found.get(name) for name in names)


def nothing(
    p: launching.Problem, dtype: torch.dtype, device: torch.device, with_lse: bool
) -> Tensor | tuple[Tensor, Tensor]:
    o = empty(p.o_shape, dtype=dtype, device=device)
    return (o, empty(p.lse_shape, dtype=torch.float32, device=device)) if with_lse else o


DECLARES = Declares(
    # P is rounded to the inputs' dtype before it meets v, dS before it meets q and k.
    u_p={"bfloat16": 2.0**-8, "float16": 2.0**-11},
    batch_invariant=True,
    lse_grad=True,
)

IMPLEMENTATIONS: tuple[Implementation, ...] = (offer("attention", attention, declares=DECLARES, backward=_backward),)
