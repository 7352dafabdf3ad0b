"""What `hal bench` sets beside hal: the same calls as other libraries make them, with the operators' own arguments.

A peer gives, for an operator, a function of the operator's arguments, or None where it has nothing like it. Peers
compute what the benchmark's calls ask for, not every option of the operator. The copy is no peer but the roof of what
is bound by memory: it moves the floor's bytes.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["DEFAULT", "PEERS", "peer"]

Call = Callable[..., Any]
DEFAULT = ("torch", "compile")


def _rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), weight, 1e-6)


def _add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    total = x + residual
    return _rms_norm(total, weight), total


def _layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.layer_norm(x, (x.shape[-1],), weight, bias, 1e-5)


def _silu_and_mul(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, -1)
    return F.silu(gate) * up


def _gelu_and_mul(x: Tensor, approximate: str) -> Tensor:
    gate, up = x.chunk(2, -1)
    return F.gelu(gate, approximate=approximate) * up


def _softmax(x: Tensor) -> Tensor:
    return x.softmax(-1)


def _rotary(q: Tensor, k: Tensor, positions: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    c, s = (torch.cat((t, t), -1)[positions][:, None].to(q.dtype) for t in (cos, sin))

    def turned(x: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        return x * c + torch.cat((-second, first), -1) * s

    return turned(q), turned(k)


def _attention(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True).transpose(1, 2)


def _cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits, target)


def _sample(logits: Tensor, seed: Tensor, temperature: float, top_k: int, top_p: float) -> Tensor:
    best, ids = (logits.float() / temperature).topk(top_k, -1)
    probs = best.softmax(-1)
    probs = torch.where(probs.cumsum(-1) - probs < top_p, probs, 0.0)
    return ids.gather(-1, torch.multinomial(probs, 1)).squeeze(-1)


_TORCH: dict[str, Call] = {
    "rms_norm": _rms_norm,
    "add_rms_norm": _add_rms_norm,
    "layer_norm": _layer_norm,
    "silu_and_mul": _silu_and_mul,
    "gelu_and_mul": _gelu_and_mul,
    "softmax": _softmax,
    "rotary_embedding": _rotary,
    "attention": _attention,
    "cross_entropy": _cross_entropy,
    "top_k_top_p_sample": _sample,
}


def _torch(op: str) -> Call | None:
    return _TORCH.get(op)


@cache
def _compile(op: str) -> Call | None:
    # Of attention torch.compile makes what eager runs: the library call.
    made = _TORCH.get(op) if op != "attention" else None
    return None if made is None else torch.compile(made, dynamic=False)


def _sdpa(backend: str) -> Callable[[str], Call | None]:
    def of(op: str) -> Call | None:
        if op != "attention":
            return None
        from torch.nn.attention import SDPBackend, sdpa_kernel

        chosen = getattr(SDPBackend, backend)

        def call(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
            with sdpa_kernel(chosen):
                return _attention(q, k, v, causal)

        return call

    return of


def _flex(op: str) -> Call | None:
    if op != "attention":
        return None
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    compiled: Any = torch.compile(flex_attention, dynamic=False)

    @cache
    def block_mask(queries: int, device: torch.device) -> Any:
        return create_block_mask(lambda b, h, i, j: i >= j, None, None, queries, queries, device=device)

    def call(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        mask = block_mask(q.shape[1], q.device) if causal else None
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        found: Tensor = compiled(q, k, v, block_mask=mask, enable_gqa=True)
        return found.transpose(1, 2)

    return call


def _liger(op: str) -> Call | None:
    ops = "liger_kernel.ops"

    def function(module: str, name: str) -> Any:
        return getattr(importlib.import_module(f"{ops}.{module}"), name)

    if op == "rms_norm":
        norm = function("rms_norm", "LigerRMSNormFunction")
        return lambda x, weight: norm.apply(x, weight, 1e-6)
    if op == "add_rms_norm":
        fused = function("fused_add_rms_norm", "LigerFusedAddRMSNormFunction")
        return lambda x, residual, weight: fused.apply(x, residual, weight, 1e-6)
    if op == "layer_norm":
        layer = function("layer_norm", "LigerLayerNormFunction")
        return lambda x, weight, bias: layer.apply(x, weight, bias, 1e-5)
    if op == "softmax":
        softmax = function("softmax", "LigerSoftmaxFunction")
        return lambda x: softmax.apply(x)
    if op == "silu_and_mul":
        silu = function("swiglu", "LigerSiLUMulFunction")
        return lambda x: silu.apply(*(t.contiguous() for t in x.chunk(2, -1)))
    if op == "gelu_and_mul":
        gelu = function("geglu", "LigerGELUMulFunction")
        return lambda x, approximate: gelu.apply(*(t.contiguous() for t in x.chunk(2, -1)))
    return None


def _quack(op: str) -> Call | None:
    if op in ("rms_norm", "add_rms_norm"):
        norm = importlib.import_module("quack.rmsnorm").rmsnorm
        if op == "rms_norm":
            return lambda x, weight: norm(x, weight, eps=1e-6)
        return lambda x, residual, weight: norm(x, weight, residual=residual, eps=1e-6, prenorm=True)
    if op == "softmax":
        softmax: Call = importlib.import_module("quack.softmax").softmax
        return softmax
    if op == "cross_entropy":
        loss = importlib.import_module("quack.cross_entropy").cross_entropy
        return lambda logits, target: loss(logits, target, reduction="mean")
    return None


# The module that each needs, and what it offers.
PEERS: dict[str, tuple[str, Callable[[str], Call | None]]] = {
    "torch": ("torch", _torch),
    "compile": ("triton", _compile),
    "cudnn": ("torch", _sdpa("CUDNN_ATTENTION")),
    "flash": ("torch", _sdpa("FLASH_ATTENTION")),
    "flex": ("triton", _flex),
    "liger": ("liger_kernel", _liger),
    "quack": ("quack", _quack),
}


def peer(name: str, op: str) -> Call | None:
    """The peer's function for an operator; None where it is not installed, or has none."""
    module, offers = PEERS[name]
    return offers(op) if importlib.util.find_spec(module) is not None else None
