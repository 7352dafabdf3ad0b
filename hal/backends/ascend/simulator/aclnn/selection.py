"""Results whose size depends on values: what is not zero, what a mask leaves, what there is without repetitions.

The caller makes room for the most there can be; the operator fills the start of it and tells the shape.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hal.backends.ascend.simulator import runtime
from hal.backends.ascend.simulator.operators import operator

NO_DIM = 1000  # torch_npu's dim of unique_consecutive over all elements


def _answer(out: Tensor, value: Tensor) -> None:
    """`value` as the result `out`: at its start, and with its shape."""
    bridge = runtime.attached()
    assert bridge is not None  # an operator runs within it
    out.view(-1)[: value.numel()].copy_(value.reshape(-1))
    bridge.set_shape(out, value.shape)


@operator("aclnnNonzero", "tt")
def nonzero(self: Tensor, out: Tensor) -> None:
    _answer(out, self.nonzero())


@operator("aclnnNonzeroV2", "tt")
def nonzero_by_dim(self: Tensor, out: Tensor) -> None:
    _answer(out, self.nonzero().t())


@operator("aclnnMaskedSelect", "ttt")
def masked_select(self: Tensor, mask: Tensor, out: Tensor) -> None:
    _answer(out, self.masked_select(mask.bool()))


@operator("aclnnUnique", "tbbtt")
def unique(self: Tensor, sorted: bool, return_inverse: bool, value_out: Tensor, inverse_out: Tensor) -> None:
    values, inverse = torch.unique(self, return_inverse=True)
    _answer(value_out, values)
    if return_inverse:
        inverse_out.copy_(inverse)


@operator("aclnnUnique2", "tbbbttt")
def unique_counted(
    self: Tensor,
    sorted: bool,
    return_inverse: bool,
    return_counts: bool,
    value_out: Tensor,
    inverse_out: Tensor,
    counts_out: Tensor,
) -> None:
    values, inverse, counts = torch.unique(self, return_inverse=True, return_counts=True)
    _answer(value_out, values)
    if return_inverse or return_counts:
        inverse_out.copy_(inverse)
    if return_counts:
        _answer(counts_out, counts)


@operator("aclnnUniqueConsecutive", "tbbittt")
def unique_consecutive(
    self: Tensor,
    return_inverse: bool,
    return_counts: bool,
    dim: int,
    value_out: Tensor,
    inverse_out: Tensor,
    counts_out: Tensor,
) -> None:
    along = None if dim == NO_DIM else dim
    values, inverse, counts = torch.unique_consecutive(self, return_inverse=True, return_counts=True, dim=along)
    _answer(value_out, values)
    if return_inverse:
        inverse_out.copy_(inverse)
    if return_counts:
        _answer(counts_out, counts)


@operator("aclnnUniqueDim", "tbbittt")
def unique_dim(
    self: Tensor,
    sorted: bool,
    return_inverse: bool,
    dim: int,
    value_out: Tensor,
    inverse_out: Tensor,
    counts_out: Tensor,
) -> None:
    values, inverse, counts = torch.unique(self, return_inverse=True, return_counts=True, dim=dim)
    _answer(value_out, values)
    if return_inverse:
        inverse_out.copy_(inverse)
    _answer(counts_out, counts)
