"""Copies, casts and rearrangements: values move unchanged but for one rounding to the target's dtype."""

from __future__ import annotations

import torch
from torch import Tensor

from hal.backends.ascend.simulator import numerics
from hal.backends.ascend.simulator.operators import operator

Number = int | float | bool


@operator("aclnnInplaceCopy", "tt")
def copy(self_ref: Tensor, src: Tensor) -> None:
    self_ref.copy_(src)


@operator("aclnnCast", "tTt")
def cast(self: Tensor, dtype: torch.dtype, out: Tensor) -> None:
    numerics.store(out, self)


@operator("aclnnCat", "lit")
def cat(tensors: list[Tensor], dim: int, out: Tensor) -> None:
    # As in torch, a lone dimension of length 0 is left out, whatever the rank of the others.
    out.copy_(torch.cat(tensors, dim))


@operator("aclnnStack", "lit")
def stack(tensors: list[Tensor], dim: int, out: Tensor) -> None:
    out.copy_(torch.stack(tensors, dim))


@operator("aclnnSplitWithSize", "tail")
def split_with_size(self: Tensor, split_size: list[int], dim: int, out: list[Tensor]) -> None:
    for target, part in zip(out, self.split(split_size, dim), strict=True):
        target.copy_(part)


@operator("aclnnConstantPadNd", "takt")
def constant_pad(self: Tensor, padding: list[int], value: Number, out: Tensor) -> None:
    out.copy_(torch.nn.functional.pad(self, padding, value=value))


@operator("aclnnRepeat", "tat")
def repeat(self: Tensor, repeats: list[int], out: Tensor) -> None:
    out.copy_(self.repeat(repeats))


@operator("aclnnRepeatInterleave", "ttit")
@operator("aclnnRepeatInterleaveInt", "tiit")
def repeat_interleave(self: Tensor, repeats: Tensor | int, output_size: int, out: Tensor) -> None:
    out.copy_(torch.repeat_interleave(self, repeats))


@operator("aclnnRepeatInterleaveWithDim", "ttiit")
@operator("aclnnRepeatInterleaveIntWithDim", "tiiit")
def repeat_interleave_dim(self: Tensor, repeats: Tensor | int, dim: int, output_size: int, out: Tensor) -> None:
    out.copy_(torch.repeat_interleave(self, repeats, dim))


@operator("aclnnRepeatInterleaveTensor", "tit")
def repeat_interleave_counts(repeats: Tensor, output_size: int, out: Tensor) -> None:
    out.copy_(torch.repeat_interleave(repeats))


@operator("aclnnRoll", "taat")
def roll(x: Tensor, shifts: list[int], dims: list[int], out: Tensor) -> None:
    out.copy_(torch.roll(x, shifts, dims))


@operator("aclnnFlip", "tat")
def flip(self: Tensor, dims: list[int], out: Tensor) -> None:
    out.copy_(torch.flip(self, dims))


@operator("aclnnTril", "tit")
def tril(self: Tensor, diagonal: int, out: Tensor) -> None:
    out.copy_(torch.tril(self, diagonal))


@operator("aclnnTriu", "tit")
def triu(self: Tensor, diagonal: int, out: Tensor) -> None:
    out.copy_(torch.triu(self, diagonal))


@operator("aclnnInplaceTril", "ti")
def tril_in_place(self_ref: Tensor, diagonal: int) -> None:
    self_ref.copy_(torch.tril(self_ref, diagonal))


@operator("aclnnInplaceTriu", "ti")
def triu_in_place(self_ref: Tensor, diagonal: int) -> None:
    self_ref.copy_(torch.triu(self_ref, diagonal))
