"""softmax by the kernels of hal.kernels.softmax, softmax_backward and softmax_pieces.

Rows that a program's registers hold are read once. Longer ones are cut into pieces, two launches, where they are the
last axis; along an inner axis, whose columns keep programs enough busy, they are walked in blocks. For the backward
pass the kernels take x, which is kept in any case, not the result.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hal.backends.cuda import launch, rows
from hal.backends.cuda.offers import offer
from hal.backends.cuda.plans import remembered, signature
from hal.backends.cuda.tactics import Tactic, tuned
from hal.capability import Declares, Implementation
from hal.op import Args, empty

__all__ = ["IMPLEMENTATIONS"]

Gradients = tuple[Tensor | None, ...]

# The longest row that a program holds: 32 warps of 1,024. With its gradient, half.
WHOLE_ROW = 32_768
# Elements of a piece of a longer row, and how many pieces' sums are put together at a time.
PIECE, PIECES = 8192, 128
# Along an inner axis: columns of a tile, 128 bytes at 16 bits, and elements of a tile.
COLUMNS, TILE, LARGEST = 64, 4096, 16_384


@tuned()
def softmax_tactic(length: int, inner: int, gradient: bool, capability: int) -> Tactic | None:
    """The tile of softmax_kernel or softmax_backward_kernel; None for a last axis that is cut into pieces.

    It depends on the shape of a matrix alone, so that no row's result depends on how many matrices there are.
    """
    if inner == 1:
        # For sm_80 ptxas keeps softmax_kernel to 48 registers, which do not hold 32 elements a thread.
        per_warp = rows.WARP // 2 if gradient or capability < 90 else rows.WARP
        columns = max(rows.power_of_two(length), rows.NARROWEST)
        if length > (WHOLE_ROW // 2 if gradient else WHOLE_ROW):
            return None
        warps = 4 if columns <= rows.NARROW else max(1, min(32, columns // per_warp))
        taken = max(1, min(warps * per_warp // columns, rows.MOST_ROWS))
        return Tactic({"BLOCK_R": taken, "BLOCK_L": columns, "AXIS": 1, "WHOLE": True}, {"num_warps": warps})
    columns = min(max(rows.power_of_two(inner), rows.NARROWEST), COLUMNS)
    held = rows.power_of_two(length) * columns
    whole = held <= (LARGEST // 2 if gradient else LARGEST)
    block = rows.power_of_two(length) if whole else TILE // columns // (2 if gradient else 1)
    warps = max(1, min(16, block * columns // (rows.WARP // 4 if gradient else rows.WARP // 2)))
    return Tactic({"BLOCK_R": columns, "BLOCK_L": block, "AXIS": 0, "WHOLE": whole}, {"num_warps": warps})


@tuned()
def pieces_tactic(length: int, capability: int) -> Tactic:
    """The piece of softmax_pieces_kernel and softmax_apply_kernel."""
    return Tactic({"BLOCK_L": PIECE}, {"num_warps": max(1, PIECE // rows.WARP)})


@dataclass(frozen=True)
class _Layout:
    """A tensor as (outer, rows, length), with the strides of these; `copied` if only a copy lies so."""

    strides: tuple[int, int, int]
    copied: bool

    @classmethod
    def of(cls, x: Tensor, dim: int, inner: int) -> _Layout:
        length = x.shape[dim]
        if inner == 1:
            laid = rows.Rows.of(x.flatten(dim))
            return cls((0, laid.stride, 1), laid.copied)
        outer = rows.one_axis(x.shape[:dim], x.stride()[:dim])
        within = rows.one_axis(x.shape[dim + 1 :], x.stride()[dim + 1 :])
        if outer is None or within != 1:
            return cls((length * inner, 1, inner), True)
        return cls((outer, 1, x.stride(dim)), False)

    def lay(self, x: Tensor) -> Tensor:
        return x.contiguous() if self.copied else x

    def named(self, name: str) -> dict[str, int]:
        """The kernel's numbers, of the tensor that it knows by this name."""
        return dict(zip((f"{name}_outer_stride", f"{name}_row_stride", f"{name}_stride"), self.strides, strict=True))


def _whole(a: Args, dim: int, dy: Tensor | None, tactic: Tactic) -> Callable[..., Tensor]:
    """A function of x, and of dy for the gradient, that takes one launch."""
    shape, dtype, device = a.x.shape, a.x.dtype, a.x.device
    length, inner = shape[dim], math.prod(shape[dim + 1 :])
    x = _Layout.of(a.x, dim, inner)
    if inner == 1:
        outer, row_count, out = 1, a.x.numel() // length, _Layout((0, length, 1), False)
    else:
        outer, row_count, out = math.prod(shape[:dim]), inner, _Layout((length * inner, 1, inner), False)
    upstream = None if dy is None else _Layout.of(dy, dim, inner)
    strides = x.named("x") | (out.named("y") if upstream is None else upstream.named("dy") | out.named("dx"))
    name = "softmax.softmax_rows_kernel" if inner == 1 else "softmax.softmax_kernel"
    if dy is not None:
        name = "softmax_backward.softmax_backward_kernel"
    run = launch.Launch(
        name,
        (outer * -(-row_count // tactic.constants["BLOCK_R"]),),
        device,
        tactic.options,
        outer=outer,
        rows=row_count,
        length=length,
        **strides,
        **tactic.constants,
    )
    lay = x.lay

    def call(x: Tensor, *_: Any, **__: Any) -> Tensor:
        y = empty(shape, dtype=dtype, device=device)
        run(lay(x), y)
        return y

    def gradient(x: Tensor, dy: Tensor) -> Tensor:
        assert upstream is not None
        dx = empty(shape, dtype=dtype, device=device)
        run(lay(x), upstream.lay(dy), dx)
        return dx

    return call if dy is None else gradient


def _in_pieces(a: Args, dim: int, dy: Tensor | None) -> Callable[..., Tensor]:
    """A function of x, and of dy for the gradient, that takes two launches, of a program for each piece."""
    shape, dtype, device, length = a.x.shape, a.x.dtype, a.x.device, a.x.shape[dim]
    laid = _Layout.of(a.x, dim, 1)
    upstream = None if dy is None else _Layout.of(dy, dim, 1)
    tactic = pieces_tactic(length, launch.capability(device))
    row_count, pieces = a.x.numel() // length, -(-length // tactic.constants["BLOCK_L"])
    numbers = {"rows": row_count, "length": length, "pieces": pieces, "x_stride": laid.strides[1]}
    numbers["dy_stride"] = 0 if upstream is None else upstream.strides[1]
    grid = (row_count * pieces,)
    parts, apply = (
        launch.Launch(f"softmax_pieces.softmax_{name}_kernel", grid, device, tactic.options, **values)
        for name, values in (
            ("pieces", numbers | tactic.constants),
            ("apply", numbers | tactic.constants | {"BLOCK_P": min(rows.power_of_two(pieces), PIECES)}),
        )
    )
    kept = (2 if dy is None else 3, row_count, pieces)

    def call(x: Tensor, *_: Any, **__: Any) -> Tensor:
        return made(laid.lay(x), None)

    def gradient(x: Tensor, dy: Tensor) -> Tensor:
        assert upstream is not None
        return made(laid.lay(x), upstream.lay(dy))

    def made(x: Tensor, dy: Tensor | None) -> Tensor:
        sums, out = empty(kept, dtype=torch.float32, device=device), empty(shape, dtype=dtype, device=device)
        parts(x, dy, sums)
        apply(x, dy, sums, out)
        return out

    return call if dy is None else gradient


def _prepare(a: Args, dy: Tensor | None = None) -> Callable[..., Tensor]:
    shape, dtype, device = a.x.shape, a.x.dtype, a.x.device
    if not a.x.numel():
        return lambda x, *_, **__: empty(shape, dtype=dtype, device=device)
    dim = a.dim % a.x.dim()
    inner = math.prod(shape[dim + 1 :])
    tactic = softmax_tactic(shape[dim], inner, dy is not None, launch.capability(device))
    return _in_pieces(a, dim, dy) if tactic is None else _whole(a, dim, dy, tactic)


def _backward(a: Args, outs: dict[str, Tensor], grads: Gradients, needs: tuple[bool, ...]) -> Gradients:
    (dy,) = grads
    if dy is None or not needs[0] or not a.x.numel():
        return (None,)
    key = ("softmax", signature(dy), signature(a.x), a.dim)
    return (remembered(key, lambda: _prepare(a, dy))(a.x, dy),)


IMPLEMENTATIONS: tuple[Implementation, ...] = (
    offer(
        "softmax",
        lambda a: _prepare(a),
        declares=Declares(batch_invariant=True, copies=frozenset({"x"})),
        backward=_backward,
    ),
)
