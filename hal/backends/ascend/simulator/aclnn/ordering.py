"""Orders along one dimension: sorts, the best k, running sums and extremes, places in sorted sequences, counts."""

from __future__ import annotations

import torch
from torch import Tensor

from hal.backends.ascend.simulator import numerics
from hal.backends.ascend.simulator.operators import operator

Number = int | float | bool


@operator("aclnnSort", "tbibtt")
def sort(self: Tensor, stable: bool, dim: int, descending: bool, values_out: Tensor, indices_out: Tensor) -> None:
    values, indices = torch.sort(self, stable=True, dim=dim, descending=descending)
    values_out.copy_(values)
    indices_out.copy_(indices)


@operator("aclnnTopk", "tiibbtt")
def topk(self: Tensor, k: int, dim: int, largest: bool, sorted: bool, values_out: Tensor, indices_out: Tensor) -> None:
    values, indices = torch.topk(self, k, dim, largest, sorted)
    values_out.copy_(values)
    indices_out.copy_(indices)


@operator("aclnnTopkV2", "tiibbitt")
def topk_v2(
    self: Tensor,
    k: int,
    dim: int,
    largest: bool,
    sorted: bool,
    sort_policy: int,
    values_out: Tensor,
    indices_out: Tensor,
) -> None:
    topk(self, k, dim, largest, sorted, values_out, indices_out)


@operator("aclnnKthvalue", "tiibtt")
def kthvalue(self: Tensor, k: int, dim: int, keepdim: bool, values_out: Tensor, indices_out: Tensor) -> None:
    values, indices = torch.kthvalue(self, k, dim, keepdim)
    values_out.copy_(values)
    indices_out.copy_(indices)


@operator("aclnnCumsum", "tiTt")
def cumsum(self: Tensor, dim: int, dtype: torch.dtype, out: Tensor) -> None:
    addends = numerics.wide(self) if self.is_floating_point() else self.to(out.dtype)
    numerics.store(out, addends.cumsum(dim))


@operator("aclnnCumprod", "tkTt")
def cumprod(input: Tensor, dim: int, dtype: torch.dtype, out: Tensor) -> None:
    factors = numerics.wide(input) if input.is_floating_point() else input.to(out.dtype)
    numerics.store(out, factors.cumprod(int(dim)))


@operator("aclnnCummax", "titt")
def cummax(self: Tensor, dim: int, values_out: Tensor, indices_out: Tensor) -> None:
    values, indices = torch.cummax(self, dim)
    values_out.copy_(values)
    indices_out.copy_(indices)


@operator("aclnnCummin", "titt")
def cummin(self: Tensor, dim: int, values_out: Tensor, indices_out: Tensor) -> None:
    values, indices = torch.cummin(self, dim)
    values_out.copy_(values)
    indices_out.copy_(indices)


@operator("aclnnSearchSorted", "ttbbtt")
@operator("aclnnSearchSorteds", "tkbbtt")
def search_sorted(
    sorted_sequence: Tensor, self: Tensor | Number, out_int32: bool, right: bool, sorter: Tensor | None, out: Tensor
) -> None:
    values = self if isinstance(self, Tensor) else torch.tensor(self, dtype=sorted_sequence.dtype)
    found = torch.searchsorted(
        sorted_sequence.contiguous(), values.contiguous(), out_int32=out_int32, right=right, sorter=sorter
    )
    out.copy_(found)


@operator("aclnnBucketize", "ttbbt")
def bucketize(self: Tensor, boundaries: Tensor, out_int32: bool, right: bool, out: Tensor) -> None:
    out.copy_(torch.bucketize(self, boundaries, out_int32=out_int32, right=right))


@operator("aclnnBincount", "ttit")
def bincount(self: Tensor, weights: Tensor | None, minlength: int, out: Tensor) -> None:
    out.copy_(torch.bincount(self, weights, minlength))


@operator("aclnnHistc", "tikkt")
def histc(self: Tensor, bins: int, min: Number, max: Number, out: Tensor) -> None:
    out.copy_(torch.histc(self.float(), bins, min, max))
