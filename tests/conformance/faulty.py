"""Implementations that are wrong on purpose, each in one way, written on top of the references."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import hal.ops  # noqa: F401  (fills OPS)
from hal import memory
from hal.conformance.mutants.mutant import reference
from hal.contract import OPS

Call = Callable[..., Any]


def truncated(t: Tensor, dtype: torch.dtype) -> Tensor:
    """float32 to bfloat16 by cutting bits off."""
    assert dtype is torch.bfloat16
    return (t.float().contiguous().view(torch.int32) & -65536).view(torch.float32).to(dtype)


def plain_attention(
    a: dict[str, Any],
    *,
    round_p: Callable[[Tensor], Tensor] = lambda p: p,
    head: Callable[[int, int, int], int] | None = None,
    to: Callable[[Tensor, torch.dtype], Tensor] = lambda t, dtype: t.to(dtype),
    nan_safe: bool = True,
    dead: float = 0.0,
    base: float = math.e,
    top_left: bool = False,
) -> Any:
    """Dense attention written once more, plainly, with places to go wrong in."""
    q, k, v = a["q"].float(), a["k"].float(), a["v"].float()
    (B, S, H, D), (_, L, K, _) = q.shape, k.shape
    pick = [(h // (H // K)) if head is None else head(h, H, K) for h in range(H)]
    k, v = k[:, :, pick], v[:, :, pick]
    scale = D**-0.5 if a["scale"] is None else a["scale"]
    at = torch.arange(S)[:, None] + (0 if top_left else L - S)
    j = torch.arange(L)
    seen = torch.ones(S, L, dtype=torch.bool)
    if a["causal"]:
        seen = seen & (j <= at)
    if a["window"] is not None:
        left, right = a["window"]
        seen = seen if left is None else seen & (j >= at - left)
        seen = seen if right is None else seen & (j <= at + right)
    seen = seen.expand(B, H, S, L)
    bias = 0.0
    if a["mask"] is not None:
        if a["mask"].dtype is torch.bool:
            seen = seen & a["mask"]
        else:
            bias, seen = a["mask"].float().masked_fill(a["mask"] == -math.inf, 0.0), seen & (a["mask"] != -math.inf)
    if nan_safe:
        used = seen.any(2).any(1)[:, :, None, None]
        k, v = k.masked_fill(~used, 0.0), v.masked_fill(~used, 0.0)
    s = torch.einsum("bshd,blhd->bhsl", q, k) * scale
    if a["softcap"] is not None:
        s = a["softcap"] * torch.tanh(s / a["softcap"])
    s = (s + bias).masked_fill(~seen, -math.inf)
    if a["sinks"] is not None:
        s = torch.cat((s, a["sinks"].float()[None, :, None, None].expand(B, H, S, 1)), -1)
    lse = torch.logsumexp(s, -1)
    p = torch.softmax(s.masked_fill((lse == -math.inf)[..., None], 0.0), -1)[..., :L]
    o = torch.einsum("bhsl,blhe->bshe", round_p(p), v)
    rows = seen.any(-1).transpose(1, 2)[..., None]
    o = to(torch.where(rows, o, torch.tensor(dead)), a["q"].dtype).contiguous()
    return (o, lse / math.log(base)) if a["return_lse"] else o


def attention(**how: Any) -> Call:
    @functools.wraps(reference("attention"))
    def call(*args: Any, **kwargs: Any) -> Any:
        return plain_attention(dict(vars(OPS["attention"].bind(args, kwargs))), **how)

    return call


def rms_into(fill: Callable[[Tensor, Tensor], None]) -> Call:
    """rms_norm into memory of hal's allocator; `fill` writes y."""

    @functools.wraps(reference("rms_norm"))
    def call(*args: Any, **kwargs: Any) -> Tensor:
        a = vars(OPS["rms_norm"].bind(args, kwargs))
        y = memory.empty(a["x"].shape, dtype=a["x"].dtype, device=a["x"].device)
        fill(y, reference("rms_norm")(**a))
        return y

    return call
