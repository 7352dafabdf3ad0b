"""Reads and writes at places that other tensors name."""

from __future__ import annotations

import torch
from torch import Tensor

from hal.backends.ascend.simulator import numerics
from hal.backends.ascend.simulator.operators import operator

Number = int | float | bool

# What aclnnScatter and its kin call the reductions, and what torch calls them.
REDUCTIONS = {1: "sum", 2: "prod", 3: "amax", 4: "amin", 5: "mean"}
NOT_REDUCED = 0


def _present(indices: list[Tensor | None]) -> list[Tensor | None]:
    """The indices with None for a dim that none names: torch_npu writes an absent one as an empty tensor."""
    return [None if i is None or i.shape == (0,) else i if i.dtype is torch.bool else i.long() for i in indices]


@operator("aclnnIndex", "tlt")
def index(self: Tensor, indices: list[Tensor | None], out: Tensor) -> None:
    if out.numel():
        out.copy_(torch.ops.aten.index.Tensor(self, _present(indices)))


@operator("aclnnIndexPutImpl", "tltbb")
def index_put(self_ref: Tensor, indices: list[Tensor | None], values: Tensor, accumulate: bool, unsafe: bool) -> None:
    if not values.numel():
        return
    exact = numerics.wide(self_ref) if accumulate else self_ref
    written = torch.ops.aten.index_put(exact, _present(indices), values.to(exact.dtype), accumulate)
    numerics.store(self_ref, written)


@operator("aclnnIndexSelect", "titt")
def index_select(self: Tensor, dim: int, index: Tensor, out: Tensor) -> None:
    out.copy_(self.index_select(dim, index) if self.ndim else self)


@operator("aclnnIndexAdd", "tittkt")
def index_add(self: Tensor, dim: int, index: Tensor, source: Tensor, alpha: Number, out: Tensor) -> None:
    wide = numerics.wide(self)
    numerics.store(out, wide.index_add(dim, index, numerics.wide(source).to(wide.dtype), alpha=alpha))


@operator("aclnnIndexCopy", "tittt")
def index_copy(self: Tensor, dim: int, index: Tensor, source: Tensor, out_ref: Tensor) -> None:
    out_ref.copy_(self.index_copy(dim, index.long(), source))


@operator("aclnnInplaceIndexCopy", "titt")
def index_copy_in_place(self_ref: Tensor, dim: int, index: Tensor, source: Tensor) -> None:
    self_ref.copy_(self_ref.index_copy(dim, index.long(), source))


@operator("aclnnIndexFill", "titkt")
@operator("aclnnIndexFillTensor", "takkt")
def index_fill(self: Tensor, dim: int, index: Tensor, value: Number, out: Tensor) -> None:
    out.copy_(self.index_fill(dim, index.long(), value))


@operator("aclnnGather", "titt")
def gather(self: Tensor, dim: int, index: Tensor, out: Tensor) -> None:
    out.copy_(self.gather(dim, index.long()))


@operator("aclnnTake", "ttt")
def take(self: Tensor, index: Tensor, out: Tensor) -> None:
    out.copy_(self.take(index.long()))


@operator("aclnnEmbedding", "ttt")
def embedding(weight: Tensor, indices: Tensor, out: Tensor) -> None:
    out.copy_(weight[indices.long()])


@operator("aclnnEmbeddingDenseBackward", "ttiibt")
def embedding_gradient(
    grad: Tensor, indices: Tensor, num_weights: int, padding_idx: int, scale_grad_by_freq: bool, out: Tensor
) -> None:
    wide = numerics.wide(grad)
    value = torch.ops.aten.embedding_dense_backward(wide, indices.long(), num_weights, padding_idx, scale_grad_by_freq)
    numerics.store(out, value)


@operator("aclnnInplaceMaskedScatter", "ttt")
def masked_scatter(self_ref: Tensor, mask: Tensor, source: Tensor) -> None:
    self_ref.masked_scatter_(mask.bool(), source)


@operator("aclnnInplacePut", "tttb")
def put(self_ref: Tensor, index: Tensor, source: Tensor, accumulate: bool) -> None:
    exact = numerics.wide(self_ref) if accumulate else self_ref
    numerics.store(self_ref, exact.put(index.long(), source.to(exact.dtype), accumulate))


@operator("aclnnUnfoldGrad", "taiiit")
def unfold_gradient(grad_out: Tensor, input_sizes: list[int], dim: int, size: int, step: int, grad_in: Tensor) -> None:
    value = torch.ops.aten.unfold_backward(numerics.wide(grad_out), input_sizes, dim, size, step)
    numerics.store(grad_in, value)


def _scattered(
    self: Tensor, dim: int, index: Tensor, src: Tensor | Number, reduction: int, include_self: bool = True
) -> Tensor:
    if reduction == NOT_REDUCED:
        result: Tensor = self.scatter(dim, index.long(), src)
        return result
    wide = numerics.wide(self)
    values = numerics.wide(src) if isinstance(src, Tensor) else torch.full(index.shape, src, dtype=wide.dtype)
    how = REDUCTIONS[reduction]
    return wide.scatter_reduce(dim, index.long(), values.to(wide.dtype), how, include_self=include_self)


@operator("aclnnScatter", "tittit")
@operator("aclnnScatterValue", "titkit")
def scatter(self: Tensor, dim: int, index: Tensor, src: Tensor | Number, reduction: int, out: Tensor) -> None:
    numerics.store(out, _scattered(self, dim, index, src, reduction))


@operator("aclnnInplaceScatter", "titti")
@operator("aclnnInplaceScatterValue", "titki")
def scatter_in_place(self_ref: Tensor, dim: int, index: Tensor, src: Tensor | Number, reduction: int) -> None:
    numerics.store(self_ref, _scattered(self_ref, dim, index, src, reduction))


@operator("aclnnScatterAdd", "tittt")
def scatter_add(self: Tensor, dim: int, index: Tensor, src: Tensor, out: Tensor) -> None:
    numerics.store(out, _scattered(self, dim, index, src, 1))


@operator("aclnnScatterReduce", "tittibt")
def scatter_reduce(
    self: Tensor, dim: int, index: Tensor, src: Tensor, reduce: int, include_self: bool, out: Tensor
) -> None:
    numerics.store(out, _scattered(self, dim, index, src, reduce, include_self))


@operator("aclnnInplaceScatterReduce", "tittib")
def scatter_reduce_in_place(
    self_ref: Tensor, dim: int, index: Tensor, src: Tensor, reduce: int, include_self: bool
) -> None:
    numerics.store(self_ref, _scattered(self_ref, dim, index, src, reduce, include_self))
