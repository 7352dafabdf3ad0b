"""Merging attention over two disjoint sets of keys into attention over both.

T packed tokens (or B batch and S queries), H heads, E head dim of v.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from hal.accuracy import Accumulator, Accuracy
from hal.arithmetic import compute_dtype, result, widen
from hal.errors import ShapeError
from hal.op import Args, Cost, Meta, Traits, dtype_name, op
from hal.ops._attention_args import lse_dtype
from hal.ops._checks import check_dtype, check_floating, check_same_device, check_same_dtype, check_shape

__all__ = ["merge_attention"]


def _pack(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Any, ...]:
    return out_a, lse_a, out_b, lse_b


def _validate(a: Args) -> None:
    name = "merge_attention"
    check_floating(name, "out_a", a.out_a)
    check_floating(name, "out_b", a.out_b)
    check_same_dtype(name, out_a=a.out_a, out_b=a.out_b)
    wanted = lse_dtype(a.out_a.dtype)
    check_dtype(name, "lse_a", a.lse_a, (wanted,))
    check_dtype(name, "lse_b", a.lse_b, (wanted,))
    check_same_device(name, out_a=a.out_a, lse_a=a.lse_a, out_b=a.out_b, lse_b=a.lse_b)
    if a.out_a.ndim not in (3, 4):
        raise ShapeError(
            f"{name}: out_a has shape {tuple(a.out_a.shape)}; supported are (T, H, E) with lse (T, H), as "
            "attention_varlen returns them, and (B, S, H, E) with lse (B, H, S), as attention does"
        )
    check_shape(name, "out_b", a.out_b, tuple(a.out_a.shape), "the shape of out_a")
    shape = _lse_shape(a.out_a)
    check_shape(name, "lse_a", a.lse_a, shape, "as attention returns it with out_a")
    check_shape(name, "lse_b", a.lse_b, shape, "as attention returns it with out_b")


def _lse_shape(out: Tensor) -> tuple[Any, ...]:
    if out.ndim == 3:
        return out.shape[0], out.shape[1]
    return out.shape[0], out.shape[2], out.shape[1]


def _meta(a: Args) -> tuple[Meta, ...]:
    return Meta(a.out_a.shape, a.out_a.dtype), Meta(a.lse_a.shape, a.lse_a.dtype)


def _traits(a: Args) -> Traits:
    return Traits(dtype=dtype_name(a.out_a.dtype), dims={"v_head_dim": a.out_a.shape[-1]})


def _cost(a: Args) -> Cost:
    outs, logs = a.out_a.numel(), a.lse_a.numel()
    return Cost(flops=3 * outs + 8 * logs, bytes=3 * (outs * a.out_a.element_size() + logs * a.lse_a.element_size()))


def _weights(lse_a: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Both weights, neither above 1, and the exponent that was taken out of them."""
    top = torch.maximum(lse_a, lse_b)
    top = torch.where(top == -math.inf, 0.0, top)
    return torch.exp(lse_a - top), torch.exp(lse_b - top), top


def _beside(lse: Tensor, out: Tensor) -> Tensor:
    """lse brought next to the axes of out: (B, H, S) to (B, S, H, 1), (T, H) to (T, H, 1)."""
    return (lse if out.ndim == 3 else lse.transpose(1, 2))[..., None]


def _bound(a: Args, expected: tuple[Tensor, ...], acc: Accumulator) -> tuple[Tensor, ...]:
    w_a, w_b, top = _weights(a.lse_a, a.lse_b)
    total = torch.where(w_a + w_b == 0, 1.0, w_a + w_b)
    apart = torch.where((w_a == 0) | (w_b == 0), 0.0, (a.lse_a - a.lse_b).abs())
    shares = [
        _beside(w / total, out) * torch.where(_beside(w, out) == 0, 0.0, out.abs())
        for w, out in ((w_a, a.out_a), (w_b, a.out_b))
    ]
    # exp(x) of an x known to eps·|x| is known to eps·|x|; the logarithm of a sum within [1, 2] adds 2·eps.
    E_lse = acc.eps * (3 + torch.minimum(w_a, w_b) * apart + top.abs())
    return (4 + _beside(apart, a.out_a)) * acc.eps * (shares[0] + shares[1]), E_lse


def _exact(a: Args, expected: tuple[Tensor, ...]) -> tuple[Tensor | None, ...]:
    one_sided = (a.lse_a == -math.inf) | (a.lse_b == -math.inf)
    return _beside(one_sided, a.out_a).expand(a.out_a.shape), one_sided


@op(
    schema="Tensor out_a, Tensor lse_a, Tensor out_b, Tensor lse_b",
    results=("out", "lse"),
    pack=_pack,
    validate=_validate,
    meta=_meta,
    traits=_traits,
    dims=("v_head_dim",),
    cost=_cost,
    accuracy=Accuracy(
        rule="bound",
        bound=_bound,
        exact=_exact,
        notes="(4 + |lse_a - lse_b|)·eps·(w_a|a| + w_b|b|): each weight is an exponential of a difference, then two "
        "products, a sum and a quotient. One empty side returns the other bit for bit.",
    ),
)
def merge_attention(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over the keys of both pieces, from attention over each.

    Args:
        out_a, out_b: (T, H, E) or (B, S, H, E), one floating dtype.
        lse_a, lse_b: (T, H) or (B, H, S), natural logarithms, float32 (float64 for float64 outputs). A piece with
            -inf saw no key and weighs nothing, whatever its out holds.

    Returns:
        out in out_a's dtype and lse, shaped like the inputs. Both pieces empty gives 0 and -inf.

    Raises:
        ShapeError, DtypeError, DeviceError: tensors that do not fit the above.

    Source: Milakov and Gimelshein 2018, "Online normalizer calculation for softmax".
    """
    dtype = compute_dtype(out_a.dtype)
    w_a, w_b, top = _weights(lse_a.to(dtype), lse_b.to(dtype))
    total = w_a + w_b
    empty = total == 0
    total = torch.where(empty, 1.0, total)
    out = torch.zeros_like(out_a, dtype=dtype, memory_format=torch.contiguous_format)
    for w, piece in ((w_a, out_a), (w_b, out_b)):
        out = out + _beside(w, piece) * torch.where(_beside(w, piece) == 0, 0.0, widen(piece))
    lse = torch.where(empty, -math.inf, top + torch.log(total))
    return result(out / _beside(total, out), out_a.dtype), lse.contiguous()
