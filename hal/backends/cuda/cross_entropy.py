"""cross_entropy and its gradient by the kernels of hal.kernels.cross_entropy.

A training call keeps lse, 4 bytes a row, for the backward pass, which reads the logits once more and writes their
gradient: 2s bytes a logit of s bytes.

Shape letters: T rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from hal.backends.cuda import launch
from hal.backends.cuda.launch import Launch
from hal.backends.cuda.offers import offer
from hal.backends.cuda.rows import power_of_two
from hal.capability import Declares, Implementation, Limit
from hal.op import Args, empty

__all__ = ["IMPLEMENTATIONS"]

# A thread's load, and how many of them it has under way.
LOAD_BYTES, LOADS = 16, 4
WARP = 32
MOST_ROWS = 16
# Bytes of a row that one program reads, in tiles of this many bytes.
CHUNK_BYTES, TILE_BYTES = 32_768, 16_384
# Numbers in a tile of the kernel that combines chunks, and the most programs that share the rows; targets in a tile.
COMBINED, COMBINERS, COUNTED = 1024, 128, 4096
PLANS = 1024


def tile_of(classes: int, itemsize: int, arch: int) -> tuple[dict[str, int], dict[str, int]]:
    """(constants, options) of the kernels over the logits, of rows this long and logits of this size.

    Nothing else may decide on them: a row's result is not to depend on how many rows there are.
    """
    columns = min(max(power_of_two(classes), LOAD_BYTES), TILE_BYTES // itemsize)
    rows = max(1, min(TILE_BYTES // itemsize // columns, MOST_ROWS))
    loaded = LOAD_BYTES * LOADS * WARP
    return {"BLOCK_R": rows, "BLOCK_V": columns}, {"num_warps": max(1, min(8, rows * columns * itemsize // loaded))}


def chunk_of(tile: dict[str, int], itemsize: int, arch: int) -> dict[str, int]:
    """Constants of `statistics_kernel` beside its tile: how much of a row a program reads, and how far ahead."""
    return {"CHUNK": max(tile["BLOCK_V"], CHUNK_BYTES // itemsize), "STAGES": 1}


def _loads(tile: dict[str, int], options: dict[str, int], itemsize: int) -> int:
    """How often the threads of a program pass over a row of its tile."""
    if tile["BLOCK_R"] > 1:
        return 1
    return max(1, tile["BLOCK_V"] * itemsize // (LOAD_BYTES * WARP * options["num_warps"]))


class _Losses:
    """The launches of one kind of forward call; `kept` says whether it stores lse."""

    def __init__(
        self,
        shape: tuple[int, int],
        strides: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
        arch: int,
        kept: bool,
        ignore_index: int,
        smoothing: float,
        z_loss: float,
        reduction: str,
    ) -> None:
        rows, classes = shape
        tile, options = tile_of(classes, dtype.itemsize, arch)
        chunk = chunk_of(tile, dtype.itemsize, arch)
        chunks = -(-classes // chunk["CHUNK"])
        layout = _layout(shape, strides, ignore_index) | {"chunks": chunks}
        reduces, mean, smooth = reduction != "none", reduction == "mean", smoothing != 0.0
        self.statistics = Launch(
            "cross_entropy.statistics_kernel",
            (-(-rows // tile["BLOCK_R"]) * chunks,),
            device,
            options,
            **layout,
            **tile,
            **chunk,
            LANES=LOAD_BYTES // dtype.itemsize,
            LOADS=_loads(tile, options, dtype.itemsize),
            SMOOTH=smooth,
        )
        block_c = power_of_two(chunks)
        block_r = max(1, COMBINED // block_c)
        tiles = -(-rows // block_r)
        # Two tiles in turn cost less than one launch more.
        programs = 1 if reduces and tiles <= 2 else min(tiles, COMBINERS)
        self.losses = Launch(
            "cross_entropy.losses_kernel",
            (programs,),
            device,
            {"num_warps": 4},
            **layout,
            smoothing=smoothing,
            z_loss=z_loss or None,
            BLOCK_R=block_r,
            BLOCK_C=block_c,
            SMOOTH=smooth,
            UNIFORM=smoothing == 1.0,
            REDUCE=reduces,
            MEAN=mean,
        )
        self.total = Launch(
            "cross_entropy.total_kernel",
            (1,),
            device,
            {"num_warps": 1},
            programs=programs,
            BLOCK_P=power_of_two(programs),
            MEAN=mean,
        )
        self.device, self.kept, self.rows = device, kept, (rows,)
        self.loss = () if reduces else (rows,)
        self.partials = (3 if smooth else 2, rows, chunks)
        self.sums = (2, programs) if reduces and programs > 1 else None

    def __call__(self, logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor | None]:
        device = self.device
        loss = empty(self.loss, dtype=torch.float32, device=device)
        lse = empty(self.rows, dtype=torch.float32, device=device) if self.kept else None
        partials = empty(self.partials, dtype=torch.float32, device=device)
        self.statistics(logits, target, partials)
        if self.sums is None:
            self.losses(logits, target, partials, loss, lse, None)
        else:
            sums = empty(self.sums, dtype=torch.float32, device=device)
            self.losses(logits, target, partials, loss, lse, sums)
            self.total(sums, loss)
        return loss, lse


class _Gradient:
    """The launches of one kind of backward call."""

    def __init__(
        self,
        shape: tuple[int, int],
        strides: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
        arch: int,
        share_stride: int,
        ignore_index: int,
        smoothing: float,
        z_loss: float,
        mean: bool,
    ) -> None:
        rows, classes = shape
        tile, options = tile_of(classes, dtype.itemsize, arch)
        layout = _layout(shape, strides, ignore_index)
        self.share = None
        if mean:
            self.share = Launch(
                "cross_entropy.share_kernel",
                (1,),
                device,
                {"num_warps": 8},
                rows=rows,
                target_stride=layout["target_stride"],
                ignore_index=ignore_index,
                BLOCK_R=min(power_of_two(rows), COUNTED),
            )
        self.gradient = Launch(
            "cross_entropy.gradient_kernel",
            (-(-rows // tile["BLOCK_R"]) * -(-classes // tile["BLOCK_V"]),),
            device,
            options,
            **layout,
            **tile,
            share_stride=share_stride,
            smoothing=smoothing,
            z_loss=z_loss or None,
        )

    def __call__(self, logits: Tensor, target: Tensor, lse: Tensor, dloss: Tensor) -> Tensor:
        share = dloss
        if self.share is not None:
            share = empty((), dtype=torch.float32, device=logits.device)
            self.share(target, dloss, share)
        dlogits = empty(logits.shape, dtype=logits.dtype, device=logits.device)
        self.gradient(logits, target, lse, share, dlogits)
        return dlogits


def _layout(shape: tuple[int, int], strides: tuple[int, ...], ignore_index: int) -> dict[str, int]:
    """The numbers that the kernels over rows share."""
    rows, classes = shape
    row_stride, stride, target_stride = strides
    return {
        "rows": rows,
        "classes": classes,
        "row_stride": row_stride,
        "stride": stride,
        "target_stride": target_stride,
        "ignore_index": ignore_index,
    }


# A recorded call is not prepared: what its launches follow from is the key.
_losses, _gradient = lru_cache(PLANS)(_Losses), lru_cache(PLANS)(_Gradient)


def _of(a: Args) -> tuple[Any, ...]:
    """What every launch follows from."""
    logits, target, device = a.logits, a.target, a.logits.device
    strides = (*logits.stride(), target.stride(0))
    return tuple(logits.shape), strides, logits.dtype, device, launch.capability(device)


def _forward(a: Args, kept: bool) -> _Losses:
    return _losses(*_of(a), kept, a.ignore_index, float(a.label_smoothing), float(a.z_loss), a.reduction)


def _of_nothing(reduction: str, device: torch.device) -> Tensor:
    """The loss of no rows: no losses, or 0."""
    return empty((0,) if reduction == "none" else (), dtype=torch.float32, device=device).zero_()


def cross_entropy(a: Args) -> Callable[..., Tensor]:
    if not a.logits.shape[0]:
        reduction, device = a.reduction, a.logits.device
        return lambda logits, target, **_: _of_nothing(reduction, device)
    losses = _forward(a, kept=False)
    return lambda logits, target, **_: losses(logits, target)[0]


def train(
    logits: Tensor,
    target: Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: str = "mean",
) -> tuple[Tensor, Tensor]:
    """The loss, and of each row lse: 0 where it is ignored."""
    if not logits.shape[0]:
        return _of_nothing(reduction, logits.device), empty((0,), dtype=torch.float32, device=logits.device)
    a = Args(
        logits=logits,
        target=target,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        z_loss=z_loss,
        reduction=reduction,
    )
    loss, lse = _forward(a, kept=True)(logits, target)
    assert lse is not None
    return loss, lse


def backward(
    a: Args, outs: dict[str, Tensor], grads: tuple[Tensor | None, ...], needs: tuple[bool, ...]
) -> tuple[Tensor | None, ...]:
    """The gradient of logits, in their dtype."""
    (dloss,) = grads
    if dloss is None or not needs[0]:
        return (None,)
    if not a.logits.shape[0]:
        return (empty(a.logits.shape, dtype=a.logits.dtype, device=a.logits.device),)
    share_stride = dloss.stride(0) if a.reduction == "none" else 0
    numbers = (a.ignore_index, float(a.label_smoothing), float(a.z_loss), a.reduction == "mean")
    return (_gradient(*_of(a), share_stride, *numbers)(a.logits, a.target, outs["lse"], dloss),)


IMPLEMENTATIONS: tuple[Implementation, ...] = (
    offer(
        "cross_entropy",
        cross_entropy,
        # The chunks of a row are combined at once.
        limits={"vocabulary": Limit(max=2**25), "rows": Limit(max=2**30)},
        declares=Declares(batch_invariant=True),
        train=train,
        backward=backward,
    ),
)
