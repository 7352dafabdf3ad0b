"""silu_and_mul and gelu_and_mul by the kernels of hal.kernels.activations and activations_backward.

For the backward pass nothing is kept but the input: each value is cheaper to make again than to store.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from hal.backends.cuda import launch, rows
from hal.backends.cuda.offers import offer
from hal.backends.cuda.plans import remembered, signature
from hal.backends.cuda.tactics import Tactic, tuned
from hal.capability import Declares, Implementation
from hal.op import Args, empty

__all__ = ["IMPLEMENTATIONS"]

Gradients = tuple[Tensor | None, ...]

# Elements of a half: with 4 warps a thread loads two times 16 bytes of gate and up each.
TILE = 2048


@tuned()
def activation_tactic(features: int, capability: int) -> Tactic:
    """The tile of the activations' kernels. Nothing is summed along a row, which may be cut anywhere."""
    columns = min(max(rows.power_of_two(features), rows.NARROWEST), TILE)
    return Tactic({"BLOCK_R": max(1, min(TILE // columns, rows.MOST_ROWS)), "BLOCK_F": columns}, {"num_warps": 4})


def _launch(name: str, x: rows.Rows, features: int, a: Args, **values: Any) -> launch.Launch:
    tactic = activation_tactic(features, launch.capability(a.x.device))
    tiles = rows.tiles(x.rows, tactic) * -(-features // tactic.constants["BLOCK_F"])
    numbers = {"rows": x.rows, "features": features, "x_stride": x.stride}
    return launch.Launch(
        f"{name}_kernel", (tiles,), a.x.device, tactic.options, **numbers, **values, **tactic.constants
    )


def _silu_values(a: Args) -> dict[str, Any]:
    limit = None if a.limit is None else float(a.limit)
    return {"limit": limit, "alpha": float(a.alpha), "up_offset": float(a.up_offset)}


def _gelu_values(a: Args) -> dict[str, Any]:
    return {"TANH": a.approximate == "tanh"}


Values = Callable[[Args], dict[str, Any]]


def _prepare(op: str, values: Values, a: Args) -> Callable[..., Tensor]:
    features = a.x.shape[-1] // 2
    shape, dtype, device = (*a.x.shape[:-1], features), a.x.dtype, a.x.device
    if not a.x.numel():
        return lambda x, **_: empty(shape, dtype=dtype, device=device)
    x_rows = rows.Rows.of(a.x)
    lay, run = x_rows.lay, _launch(f"activations.{op}", x_rows, features, a, **values(a))

    def call(x: Tensor, **_: Any) -> Tensor:
        y = empty(shape, dtype=dtype, device=device)
        run(lay(x), y)
        return y

    return call


def _prepare_backward(op: str, values: Values, a: Args, dy: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    shape, dtype, device = a.x.shape, a.x.dtype, a.x.device
    x_rows, dy_rows = rows.Rows.of(a.x), rows.Rows.of(dy)
    name, features = f"activations_backward.{op}_backward", a.x.shape[-1] // 2
    run = _launch(name, x_rows, features, a, dy_stride=dy_rows.stride, **values(a))
    lay, lay_dy = x_rows.lay, dy_rows.lay

    def call(x: Tensor, dy: Tensor) -> Tensor:
        dx = empty(shape, dtype=dtype, device=device)
        run(lay(x), lay_dy(dy), dx)
        return dx

    return call


def _backward(
    op: str, values: Values, a: Args, outs: dict[str, Tensor], grads: Gradients, needs: tuple[bool, ...]
) -> Gradients:
    (dy,) = grads
    if dy is None or not needs[0] or not a.x.numel():
        return (None,)
    key = (op, signature(dy), *map(signature, vars(a).values()))
    return (remembered(key, lambda: _prepare_backward(op, values, a, dy))(a.x, dy),)


def _offer(op: str, values: Values) -> Implementation:
    return offer(
        op,
        partial(_prepare, op, values),
        declares=Declares(batch_invariant=True, copies=frozenset({"x"})),
        backward=partial(_backward, op, values),
    )


IMPLEMENTATIONS: tuple[Implementation, ...] = (
    _offer("silu_and_mul", _silu_values),
    _offer("gelu_and_mul", _gelu_values),
)
