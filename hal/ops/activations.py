"""Gated activations of the feed-forward block: one fused input, gate first, then up.

Shape letters: F features of the result; x is (…, 2F).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from hal.accuracy import Accumulator, Accuracy, smallest_normal
from hal.arithmetic import result, widen
from hal.errors import ArgumentError, ShapeError
from hal.op import Args, Cost, Meta, Traits, dtype_name, op
from hal.ops._checks import check_floating, check_number

__all__ = ["gelu_and_mul", "silu_and_mul"]

APPROXIMATIONS = ("none", "tanh")


def _check_halves(name: str, x: Tensor) -> None:
    check_floating(name, "x", x)
    if x.dim() == 0 or x.shape[-1] % 2:
        raise ShapeError(
            f"{name}: x has shape {tuple(x.shape)}; it is (…, 2F), gate then up, so its last axis must be "
            "even: concatenate gate and up on the last axis"
        )


def _check_finite(name: str, **numbers: float) -> None:
    for what, value in numbers.items():
        check_number(name, what, value)
        if isinstance(value, float) and not math.isfinite(value):
            raise ArgumentError(f"{name}: {what} is {value}; it must be a finite number")


def _meta(a: Args) -> tuple[Meta, ...]:
    return (Meta((*a.x.shape[:-1], a.x.shape[-1] // 2), a.x.dtype),)


def _dims(a: Args) -> dict[str, int]:
    return {"features": a.x.shape[-1] // 2}


def _silu_pack(x: Tensor, *, limit: float | None = None, alpha: float = 1.0, up_offset: float = 0.0) -> tuple[Any, ...]:
    return x, limit, alpha, up_offset


def _silu_validate(a: Args) -> None:
    _check_halves("silu_and_mul", a.x)
    _check_finite("silu_and_mul", alpha=a.alpha, up_offset=a.up_offset)
    if a.limit is not None:
        check_number("silu_and_mul", "limit", a.limit)
    if isinstance(a.limit, float | int) and a.limit <= 0:
        raise ArgumentError(
            f"silu_and_mul: limit is {a.limit}; it clamps gate to at most limit and up to ±limit, so it "
            "must be a positive number, or None for no clamp"
        )


def _silu_traits(a: Args) -> Traits:
    used = {"limit": a.limit is not None, "alpha": a.alpha != 1.0, "up_offset": a.up_offset != 0.0}
    return Traits(dtype_name(a.x.dtype), frozenset(name for name, on in used.items() if on), _dims(a))


def _silu_cost(a: Args) -> Cost:
    n = a.x.numel()
    # Per result: exponential, add, divide, two products; alpha, offset and the two clamps one each.
    per = 5 + (a.alpha != 1.0) + (a.up_offset != 0.0) + 3 * (a.limit is not None)
    return Cost(flops=per * (n // 2), bytes=(n + n // 2) * a.x.element_size())


def _silu_halves(a: Args, x: Tensor) -> tuple[Tensor, Tensor]:
    gate, up = x.chunk(2, -1)
    if a.limit is not None:
        gate, up = gate.clamp(max=a.limit), up.clamp(-a.limit, a.limit)
    return gate, up + a.up_offset


def _never_zero(activated: Tensor, gate: Tensor) -> Tensor:
    """The activated gate, which is 0 for a gate of 0 alone.

    What rounds to 0 becomes as little as the bounds leave open, so that times an infinite up it is not NaN, whatever
    the accumulator. Its derivative stays what it was.
    """
    info = torch.finfo(activated.dtype)
    least = (gate.detach().abs() * info.tiny).clamp(min=info.tiny * info.eps)
    least = torch.where(gate < 0, -least, least)  # copysign, which some devices compute on the host
    return activated + torch.where((activated == 0) & (gate != 0), least, 0.0)


def _finite(error: Tensor) -> Tensor:
    # Where Y is NaN or Inf there is no error to bound: R4 judges those positions.
    return torch.where(error.isfinite(), error, 0.0)


def _silu_bound(a: Args, expected: tuple[Tensor, ...], acc: Accumulator) -> tuple[Tensor, ...]:
    gate, up = _silu_halves(a, a.x)
    error = 4 * acc.eps * (1 + (a.alpha * gate).abs()) * expected[0].abs()
    if a.up_offset:
        error = error + acc.eps * (gate * torch.sigmoid(a.alpha * gate) * a.up_offset).abs()
    return (_finite(error + smallest_normal(acc) * (gate * up).abs()),)


def _silu_gradient_bound(
    a: Args, expected: tuple[Tensor, ...], grads: tuple[Tensor | None, ...], acc: Accumulator
) -> tuple[Tensor | None, ...]:
    (dy,) = grads
    assert dy is not None
    gate, up = _silu_halves(a, a.x)
    z = a.alpha * gate
    share, rest = torch.sigmoid(z), torch.sigmoid(-z)
    slope = share * (1 + (z * rest).abs())
    relative, least = 4 * acc.eps * (1 + z.abs()), smallest_normal(acc) * (1 + z.abs())
    of_gate = up.abs() * (relative * slope + 2 * acc.eps * share * z.abs() + least)
    if a.up_offset:
        of_gate = of_gate + acc.eps * abs(a.up_offset) * slope
    of_up = gate.abs() * (relative * share + least)
    if a.limit is not None:  # past the limit there is no gradient at all
        raw_gate, raw_up = a.x.chunk(2, -1)
        of_gate = torch.where(raw_gate <= a.limit, of_gate, 0.0)
        of_up = torch.where(raw_up.abs() <= a.limit, of_up, 0.0)
    return (_finite(torch.cat((of_gate, of_up), -1) * dy.abs().repeat((1,) * (dy.dim() - 1) + (2,))),)


SILU_ACCURACY = Accuracy(
    bound=_silu_bound,
    gradient_bound=_silu_gradient_bound,
    notes="sigmoid(z), z = alpha·gate: z rounds once, ε|z| absolute, hence at most ε|z| relative in "
    "exp(−z), which adds 2ε of its own; the sum 1 + exp(−z), the division and two products ε each: 4ε(1 + "
    "|z|)|Y| holds them. exp(−z) overflows float32 below z = −88.7, where sigmoid is under 2⁻¹²⁷ and "
    "becomes 0: 2⁻¹²⁶|gate||up| absolute. The sum up + up_offset is a rounding relative to itself; an "
    "implementation that rounds up_offset to its accumulator adds ε|up_offset|. Gradients: that of up is "
    "dy·gate·σ, as y; that of gate dy·up·σ(1 + z(1 − σ)), each factor with the relative error of σ, but 1 − σ "
    "taken as a difference with ε absolute, which σ|z| multiplies.",
)


@op(
    schema="Tensor x, float? limit, float alpha, float up_offset",
    results=("y",),
    pack=_silu_pack,
    validate=_silu_validate,
    meta=_meta,
    traits=_silu_traits,
    dims=("features",),
    cost=_silu_cost,
    accuracy=SILU_ACCURACY,
    features=("limit", "alpha", "up_offset"),
    grad=("x",),
)
def silu_and_mul(x: Tensor, *, limit: float | None = None, alpha: float = 1.0, up_offset: float = 0.0) -> Tensor:
    """y = gate · sigmoid(alpha · gate) · (up + up_offset), with gate, up = the halves of x's last axis
    (SwiGLU).

    ``limit`` first clamps gate to at most limit and up to −limit … limit. The defaults are Llama's gated
    unit (Shazeer 2020); gpt-oss has limit 7, alpha 1.702, up_offset 1. All in float32 (float64 for
    float64), rounded once. An infinite up gives Inf of the sign of gate·up for every finite gate but 0,
    however little is left of the gate; 0·Inf and gate = −Inf give NaN.

    x: (…, 2F), any float. Result: (…, F), dtype of x. Raises ShapeError (odd last axis), DtypeError, and
    ArgumentError for a limit that is not positive or other numbers that are not finite."""
    gate, up = _silu_halves(Args(limit=limit, up_offset=up_offset), widen(x))
    return result(_never_zero(gate * torch.sigmoid(alpha * gate), gate) * up, x.dtype).contiguous()


def _gelu_pack(x: Tensor, *, approximate: str = "none") -> tuple[Any, ...]:
    return x, approximate


def _gelu_validate(a: Args) -> None:
    _check_halves("gelu_and_mul", a.x)
    if a.approximate not in APPROXIMATIONS:
        raise ArgumentError(
            f"gelu_and_mul: approximate is {a.approximate!r}; supported are 'none' (erf) and 'tanh', and "
            "neither stands in for the other: choose the one the model was trained with"
        )


def _gelu_traits(a: Args) -> Traits:
    return Traits(dtype_name(a.x.dtype), frozenset({"tanh"} if a.approximate == "tanh" else ()), _dims(a))


def _gelu_cost(a: Args) -> Cost:
    n = a.x.numel()
    # Per result: erf or tanh, add, three or four products; the cubic of "tanh" four more.
    per = 9 if a.approximate == "tanh" else 5
    return Cost(flops=per * (n // 2), bytes=(n + n // 2) * a.x.element_size())


def _gelu_bound(a: Args, expected: tuple[Tensor, ...], acc: Accumulator) -> tuple[Tensor, ...]:
    gate, up = a.x.chunk(2, -1)
    return (_finite(4 * acc.eps * gate.abs() * up.abs()),)


def _gelu_gradient_bound(
    a: Args, expected: tuple[Tensor, ...], grads: tuple[Tensor | None, ...], acc: Accumulator
) -> tuple[Tensor | None, ...]:
    (dy,) = grads
    assert dy is not None
    gate, up = a.x.chunk(2, -1)
    if a.approximate == "none":
        density = torch.exp(-0.5 * gate.square()) * math.sqrt(0.5 / math.pi)
        slope = gate.abs() * density * (4 + gate.square())
    else:
        inner = math.sqrt(2 / math.pi) * (gate + 0.044715 * gate.pow(3))
        factor = 0.5 * gate.abs() * math.sqrt(2 / math.pi) * (1 + 3 * 0.044715 * gate.square())
        falls = torch.cosh(inner).pow(-2)  # 1 − tanh²
        # The difference 1 − tanh² has an error of its own until tanh rounds to 1 whoever computes it.
        slope = factor * (falls * (4 + 8 * inner.abs()) + 4 * (falls / acc.eps**2).clamp(max=1.0))
    of_gate = up.abs() * acc.eps * (4 + slope)
    return (_finite(torch.cat((of_gate * dy.abs(), 4 * acc.eps * (gate * dy).abs()), -1)),)


GELU_ACCURACY = Accuracy(
    bound=_gelu_bound,
    gradient_bound=_gelu_gradient_bound,
    notes="1 + erf(z) (or tanh) lies in 0 … 2 and cancels for negative gates, so its error is absolute: 1 "
    "to 2 ε of erf, at most 0.5·kε from an argument that errs by kε relative (|z|·f′(z) < 0.5), one "
    "rounding of the sum; halved, times |gate||up| with two products: 4ε|gate||up|. Gradients: that of up is dy·gelu, "
    "4ε|gate||dy|; that of gate dy·up·(Φ + gate·Φ′) with Φ at 4ε absolute and Φ′ = φ at (4 + gate²)ε relative (its "
    "argument gate²/2 rounds twice); with tanh, Φ′ = ½(1 − t²)·z′ has the argument's error 4|z|ε twice, and a "
    "difference that errs by ε absolute in t twice.",
)


@op(
    schema="Tensor x, str approximate",
    results=("y",),
    pack=_gelu_pack,
    validate=_gelu_validate,
    meta=_meta,
    traits=_gelu_traits,
    dims=("features",),
    cost=_gelu_cost,
    accuracy=GELU_ACCURACY,
    features=("tanh",),
    grad=("x",),
)
def gelu_and_mul(x: Tensor, *, approximate: str = "none") -> Tensor:
    """y = gelu(gate) · up, with gate, up = the halves of x's last axis (GeGLU).

    ``approximate="none"``: gelu(g) = g/2 · (1 + erf(g/√2)); ``"tanh"``: g/2 · (1 + tanh(√(2/π)(g + 0.044715
    g³))), as in Hendrycks and Gimpel 2016. In float32 (float64 for float64), rounded once. Infinite values as in
    ``silu_and_mul``.

    x: (…, 2F), any float. Result: (…, F), dtype of x. Raises ShapeError (odd last axis), DtypeError and
    ArgumentError."""
    gate, up = widen(x).chunk(2, -1)
    if approximate == "none":
        twice_share = 1 + torch.erf(gate * math.sqrt(0.5))
    else:
        twice_share = 1 + torch.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate * gate * gate))
    return result(_never_zero(0.5 * gate * twice_share, gate) * up, x.dtype).contiguous()
