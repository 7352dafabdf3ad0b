"""Rotary position embedding: rotating query and key heads by the angles of their positions.

Shape letters: H query heads, K key heads, D head dim, R rotated dims (R ≤ D), M table length; q is (…, H, D).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hal.accuracy import Accumulator, Accuracy
from hal.arithmetic import compute_dtype, result, widen
from hal.errors import ArgumentError, ShapeError
from hal.op import Args, Cost, Meta, Traits, dtype_name, op
from hal.ops._checks import check_dtype, check_floating, check_same_device, check_same_dtype
from hal.ops._rotary_scaling import rotary_cache

__all__ = ["rotary_cache", "rotary_embedding"]


def _pack(
    q: Tensor,
    k: Tensor | None,
    positions: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    interleaved: bool = False,
    rotary_dim: int | None = None,
) -> tuple[Any, ...]:
    return q, k, positions, _constant(cos), _constant(sin), interleaved, rotary_dim


def _constant(table: Tensor) -> Tensor:
    """A table that autograd leaves alone, on every way of a call alike."""
    return table.detach() if isinstance(table, Tensor) and table.requires_grad else table


def _validate(a: Args) -> None:
    name = "rotary_embedding"
    check_floating(name, "q", a.q)
    if a.k is not None:
        check_floating(name, "k", a.k)
    check_dtype(name, "positions", a.positions, (torch.int64,))
    check_dtype(name, "cos", a.cos, (torch.float32,))
    check_dtype(name, "sin", a.sin, (torch.float32,))
    check_same_device(name, q=a.q, k=a.k, positions=a.positions, cos=a.cos, sin=a.sin)
    if a.q.dim() < 2:
        raise ShapeError(f"{name}: q has shape {tuple(a.q.shape)}; it must be (…, H, D)")
    if a.k is not None:
        check_same_dtype(name, q=a.q, k=a.k)
        if a.k.dim() != a.q.dim() or a.k.shape[:-2] != a.q.shape[:-2] or a.k.shape[-1] != a.q.shape[-1]:
            raise ShapeError(
                f"{name}: q has shape {tuple(a.q.shape)} and k {tuple(a.k.shape)}; they may differ in the "
                "number of heads only"
            )
    if a.positions.shape != a.q.shape[:-2]:
        raise ShapeError(
            f"{name}: positions has shape {tuple(a.positions.shape)} and q {tuple(a.q.shape)}; there is one "
            f"position per token, so it must be {tuple(a.q.shape[:-2])}: expand it (stride 0 is fine)"
        )
    _validate_tables(name, a)


def _validate_tables(name: str, a: Args) -> None:
    if a.cos.dim() != 2 or a.cos.shape != a.sin.shape:
        raise ShapeError(
            f"{name}: cos has shape {tuple(a.cos.shape)} and sin {tuple(a.sin.shape)}; both are (max_pos, "
            "rotary_dim / 2)"
        )
    half, dim = a.cos.shape[1], a.q.shape[-1]
    if a.rotary_dim is not None and a.rotary_dim != 2 * half:
        raise ShapeError(
            f"{name}: rotary_dim is {a.rotary_dim} and the tables have {half} columns; a table has "
            "rotary_dim / 2 columns, and rotary_dim is even"
        )
    if not 0 < 2 * half <= dim:
        raise ShapeError(
            f"{name}: the tables' {half} columns rotate {2 * half} dims and q has D = {dim}; 0 < rotary_dim "
            "≤ D is required"
        )


def _check_values(
    q: Tensor,
    k: Tensor | None,
    positions: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    interleaved: bool = False,
    rotary_dim: int | None = None,
) -> None:
    count = positions.numel()
    if count == 1:
        low = high = positions.item()
    elif count:
        least, most = torch.aminmax(positions)
        low, high = least.item(), most.item()
    else:
        return
    if low < 0 or high >= cos.shape[0]:
        raise ArgumentError(
            f"rotary_embedding: positions run from {low} to {high}; the tables hold 0 … {cos.shape[0] - 1}: "
            "build them longer with rotary_cache"
        )


def _meta(a: Args) -> tuple[Meta, ...]:
    return Meta(tuple(a.q.shape), a.q.dtype), Meta((0,) if a.k is None else tuple(a.k.shape), a.q.dtype)


def _traits(a: Args) -> Traits:
    rotated, dim = 2 * a.cos.shape[1], a.q.shape[-1]
    used = {"interleaved": a.interleaved, "partial": rotated != dim, "key": a.k is not None}
    return Traits(
        dtype=dtype_name(a.q.dtype),
        features=frozenset(name for name, on in used.items() if on),
        dims={"head_dim": dim, "rotary_dim": rotated, "tokens": a.positions.numel()},
    )


def _cost(a: Args) -> Cost:
    elements, heads = a.q.numel(), a.q.shape[-2]
    if a.k is not None:
        elements, heads = elements + a.k.numel(), heads + a.k.shape[-2]
    tokens, half = a.positions.numel(), a.cos.shape[1]
    # Per rotated pair four products and two sums; of the tables, the rows that the positions name.
    return Cost(
        flops=6 * half * heads * tokens,
        bytes=2 * elements * a.q.element_size() + 8 * tokens + 2 * tokens * half * a.cos.element_size(),
    )


def _pairs(x: Tensor, half: int, interleaved: bool) -> tuple[Tensor, Tensor]:
    """First and second member of each rotated pair, (…, R/2) each."""
    if interleaved:
        return x[..., 0 : 2 * half : 2], x[..., 1 : 2 * half : 2]
    return x[..., :half], x[..., half : 2 * half]


def _joined(first: Tensor, second: Tensor, rest: Tensor, interleaved: bool) -> Tensor:
    rotated = torch.stack((first, second), -1).flatten(-2) if interleaved else torch.cat((first, second), -1)
    return torch.cat((rotated, rest), -1)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    half = cos.shape[-1]
    xf = widen(x)
    x1, x2 = _pairs(xf, half, interleaved)
    return _joined(x1 * cos - x2 * sin, x2 * cos + x1 * sin, xf[..., 2 * half :], interleaved)


def _angles(a: Args, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin of each token's angles, (…, 1, R/2)."""
    return a.cos[a.positions].to(dtype).unsqueeze(-2), a.sin[a.positions].to(dtype).unsqueeze(-2)


def _error(x: Tensor, a: Args, acc: Accumulator) -> Tensor:
    cos, sin = _angles(a, torch.float64)
    half = cos.shape[-1]
    x1, x2 = (part.abs() for part in _pairs(x, half, a.interleaved))
    c, s = cos.abs(), sin.abs()
    untouched = torch.zeros_like(x[..., 2 * half :])
    return 2 * acc.eps * _joined(x1 * c + x2 * s, x2 * c + x1 * s, untouched, a.interleaved)


def _bound(a: Args, expected: tuple[Tensor, ...], acc: Accumulator) -> tuple[Tensor, ...]:
    return _error(a.q, a, acc), torch.zeros_like(expected[1]) if a.k is None else _error(a.k, a, acc)


def _gradient_bound(
    a: Args, expected: tuple[Tensor, ...], grads: tuple[Tensor | None, ...], acc: Accumulator
) -> tuple[Tensor | None, ...]:
    def one(x: Tensor | None, grad: Tensor | None) -> Tensor | None:
        return None if x is None else torch.zeros_like(x) if grad is None else _error(grad, a, acc)

    return one(a.q, grads[0]), one(a.k, grads[1])


def _exact(a: Args, expected: tuple[Tensor, ...]) -> tuple[Tensor | None, ...]:
    if 2 * a.cos.shape[1] == a.q.shape[-1]:
        return None, None
    untouched = torch.arange(a.q.shape[-1], device=a.q.device) >= 2 * a.cos.shape[1]
    return untouched.expand(a.q.shape), None if a.k is None else untouched.expand(a.k.shape)


ACCURACY = Accuracy(
    bound=_bound,
    exact=_exact,
    gradient_bound=_gradient_bound,
    notes="Two products and a sum: ε|x₁c| + ε|x₂s| + ε|Y| ≤ 2ε(|x₁c| + |x₂s|), with cos and sin taken as "
    "given in float32. Dims past rotary_dim are copies, exact. The gradient turns the "
    "other way, at the same error.",
)


def _to_outs(a: Args, public: tuple[Tensor, Tensor | None]) -> tuple[Tensor, ...]:
    q, k = public
    return q, q.new_empty(0) if k is None else k


def _from_outs(outs: tuple[Tensor, ...], packed: tuple[Any, ...]) -> tuple[Tensor, Tensor | None]:
    return outs[0], None if packed[1] is None else outs[1]


@op(
    schema="Tensor q, Tensor? k, Tensor positions, Tensor cos, Tensor sin, bool interleaved, SymInt? rotary_dim",
    results=("q_out", "k_out"),
    pack=_pack,
    validate=_validate,
    meta=_meta,
    traits=_traits,
    dims=("head_dim", "rotary_dim", "tokens"),
    cost=_cost,
    accuracy=ACCURACY,
    features=("interleaved", "partial", "key"),
    grad=("q", "k"),
    to_outs=_to_outs,
    from_outs=_from_outs,
    check_values=_check_values,
)
def rotary_embedding(
    q: Tensor,
    k: Tensor | None,
    positions: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    interleaved: bool = False,
    rotary_dim: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Each pair (x₁, x₂) of a head becomes (x₁·c − x₂·s, x₂·c + x₁·s), with c, s = cos, sin at the token's
    position.

    Pairs are the halves of the first ``rotary_dim`` dims (``interleaved=False``: x[i], x[i + R/2], as NeoX
    and Llama) or neighbours (True: x[2i], x[2i + 1], as GPT-J). Dims past ``rotary_dim`` (None = all that
    the tables have) are copied. Formula: Su et al. 2021, RoFormer. In float32 (float64 for float64),
    rounded once; cos and sin get no gradient.

    q: (…, H, D); k: (…, K, D), same dtype, or None. positions: int64 (…), 0 ≤ position < max_pos. cos, sin:
    float32 (max_pos, rotary_dim / 2), as ``rotary_cache`` makes them. Result: (q', k'), k' None for k None.

    Raises ShapeError, DtypeError, DeviceError, and ArgumentError for a position outside the tables (checked
    for CPU tensors, and on devices under ``HAL_CHECK=1``)."""
    cos_R, sin_R = _angles(Args(cos=cos, sin=sin, positions=positions), compute_dtype(q.dtype))

    def rotate(x: Tensor) -> Tensor:
        return result(_rotated(x, cos_R, sin_R, interleaved), q.dtype).contiguous()

    return rotate(q), None if k is None else rotate(k)
