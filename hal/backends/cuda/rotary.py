"""rotary_embedding by the kernel of hal.kernels.rotary: q and k in one launch, a program for each token.

The gradient is the same launch of the upstream gradients, turned the other way; nothing is kept for it but the
positions and the tables.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from hal.backends.cuda import launch, rows
from hal.backends.cuda.offers import offer
from hal.backends.cuda.plans import remembered, signature
from hal.backends.cuda.tactics import Tactic, tuned
from hal.capability import Declares, Implementation, Limit
from hal.op import Args, empty

__all__ = ["IMPLEMENTATIONS"]

Gradients = tuple[Tensor | None, ...]

# Pairs of a tile: with 2 warps 4 loads of 16 bytes at 16 bits from each of a head's halves.
PAIRS = 2048
# Pairs that a warp takes: few, so that the fewer heads of k still make loads of 16 bytes.
WARP = 1024


@tuned()
def rotary_tactic(heads: int, k_heads: int, dim: int, half: int, capability: int) -> Tactic:
    """The tile of rotary_kernel."""
    rest = dim - 2 * half
    pairs = max(rows.power_of_two(half), rows.NARROWEST // 2)
    most = max(1, PAIRS // max(pairs, rows.power_of_two(rest) // 2 if rest else 0))
    taken = min(rows.power_of_two(heads), most)
    constants = {
        "BLOCK_H": taken,
        "BLOCK_K": min(rows.power_of_two(max(k_heads, 1)), most),
        "BLOCK_P": pairs,
        "BLOCK_REST": max(rows.power_of_two(rest), rows.NARROWEST) if rest else 0,
    }
    return Tactic(constants, {"num_warps": max(1, min(4, taken * pairs // WARP))})


@dataclass(frozen=True)
class _Heads:
    """A tensor as (tokens, heads, D) with a unit last stride; `copied` if only a copy lies so."""

    heads: int
    token_stride: int
    head_stride: int
    copied: bool

    @classmethod
    def of(cls, x: Tensor) -> _Heads:
        heads, dim = x.shape[-2:]
        tokens = rows.one_axis(x.shape[:-2], x.stride()[:-2])
        if tokens is None or (dim > 1 and x.stride(-1) != 1):
            return cls(heads, heads * dim, dim, True)
        return cls(heads, tokens, x.stride(-2), False)

    def lay(self, x: Tensor) -> Tensor:
        return x.contiguous() if self.copied else x


def _table(t: Tensor) -> tuple[Callable[[Tensor], Tensor], int]:
    """What gives a table like this one a unit last stride, and its row stride then."""
    if t.shape[1] == 1 or t.stride(1) == 1:
        return _itself, t.stride(0)
    return Tensor.contiguous, t.shape[1]


def _itself(t: Tensor) -> Tensor:
    return t


Turn = Callable[[Tensor, Tensor | None, Tensor, Tensor, Tensor], tuple[Tensor, Tensor | None]]


def _turn(q: Tensor, k: Tensor | None, a: Args, back: bool) -> Turn:
    """A function of (q, k, positions, cos, sin) that turns tensors that lie as these."""
    half, dim, device = a.cos.shape[1], q.shape[-1], q.device
    q_heads, k_heads = _Heads.of(q), None if k is None else _Heads.of(k)
    step = rows.one_axis(a.positions.shape, a.positions.stride())
    lay_cos, cos_stride = _table(a.cos)
    lay_sin, sin_stride = _table(a.sin)
    lay_positions = Tensor.contiguous if step is None else _itself
    tactic = rotary_tactic(q_heads.heads, k_heads.heads if k_heads else 0, dim, half, launch.capability(device))
    run = launch.Launch(
        "rotary.rotary_kernel",
        (a.positions.numel(),),
        device,
        tactic.options,
        tokens=a.positions.numel(),
        q_token_stride=q_heads.token_stride,
        q_head_stride=q_heads.head_stride,
        k_token_stride=k_heads.token_stride if k_heads else 0,
        k_head_stride=k_heads.head_stride if k_heads else 0,
        positions_stride=1 if step is None else step,
        cos_stride=cos_stride,
        sin_stride=sin_stride,
        H=q_heads.heads,
        K=k_heads.heads if k_heads else 0,
        HALF=half,
        D=dim,
        INTERLEAVED=a.interleaved,
        BACK=back,
        **tactic.constants,
    )
    q_shape, k_shape, dtype = q.shape, None if k is None else k.shape, q.dtype
    lay, lay_k = q_heads.lay, k_heads.lay if k_heads else None

    def turn(q: Tensor, k: Tensor | None, positions: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor | None]:
        q_out = empty(q_shape, dtype=dtype, device=device)
        k_out = None
        if k is not None and k_shape is not None and lay_k is not None:
            k, k_out = lay_k(k), empty(k_shape, dtype=dtype, device=device)
        run(lay(q), k, lay_positions(positions), lay_cos(cos), lay_sin(sin), q_out, k_out)
        return q_out, k_out

    return turn


def _prepare(a: Args) -> Callable[..., tuple[Tensor, Tensor | None]]:
    device, dtype, shapes = a.q.device, a.q.dtype, [None if t is None else t.shape for t in (a.q, a.k)]
    if not a.q.numel() and (a.k is None or not a.k.numel()):
        return lambda *_, **__: tuple(
            None if shape is None else empty(shape, dtype=dtype, device=device) for shape in shapes
        )
    turn = _turn(a.q, a.k, a, False)

    def call(
        q: Tensor, k: Tensor | None, positions: Tensor, cos: Tensor, sin: Tensor, **_: Any
    ) -> tuple[Tensor, Tensor | None]:
        return turn(q, k, positions, cos, sin)

    return call


def _backward(a: Args, outs: dict[str, Tensor], grads: Gradients, needs: tuple[bool, ...]) -> Gradients:
    wanted = [g if need and g is not None and g.numel() else None for g, need in zip(grads, needs, strict=True)]
    upstream = [g for g in wanted if g is not None]
    if not upstream:
        return None, None
    first, second = upstream[0], upstream[1] if len(upstream) > 1 else None
    tables = a.positions, a.cos, a.sin
    key = ("rotary_embedding", a.interleaved, *map(signature, (first, second, *tables)))
    found = iter(remembered(key, lambda: _turn(first, second, a, True))(first, second, *tables))
    return tuple(None if g is None else next(found) for g in wanted)


IMPLEMENTATIONS: tuple[Implementation, ...] = (
    offer(
        "rotary_embedding",
        _prepare,
        limits={"head_dim": Limit(max=4096)},
        declares=Declares(batch_invariant=True, copies=frozenset({"q", "k", "positions", "cos", "sin"})),
        backward=_backward,
    ),
)
