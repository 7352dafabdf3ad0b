"""Sums, means, products, extremes and norms along dimensions."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from hal.backends.ascend.simulator import numerics
from hal.backends.ascend.simulator.aclnn._values import all_dims, real
from hal.backends.ascend.simulator.operators import operator


@operator("aclnnReduceSum", "tabTt")
def reduce_sum(self: Tensor, dims: list[int], keep_dims: bool, dtype: torch.dtype, out: Tensor) -> None:
    dims = all_dims(self, dims)
    if out.is_floating_point():
        numerics.store(out, numerics.total(real(self), dims, keep_dims))
    else:
        out.copy_(self.to(out.dtype).sum(dims, keepdim=keep_dims))


@operator("aclnnReduceNansum", "tabTt")
def reduce_nansum(self: Tensor, dim: list[int], keep_dim: bool, dtype: torch.dtype, out: Tensor) -> None:
    known = torch.where(self.isnan(), torch.zeros_like(self), self)
    numerics.store(out, numerics.total(real(known), all_dims(self, dim), keep_dim))


@operator("aclnnMean", "tabTt")
def mean(self: Tensor, dim: list[int], keep_dim: bool, dtype: torch.dtype, out: Tensor) -> None:
    numerics.store(out, numerics.mean(real(self), all_dims(self, dim), keep_dim))


@operator("aclnnProd", "tTt")
def prod(self: Tensor, dtype: torch.dtype, out: Tensor) -> None:
    numerics.store(out, numerics.wide(self).prod())


@operator("aclnnProdDim", "tibTt")
def prod_dim(self: Tensor, dim: int, keep_dim: bool, dtype: torch.dtype, out: Tensor) -> None:
    numerics.store(out, numerics.wide(self).prod(dim, keepdim=keep_dim))


@operator("aclnnMax", "tt")
def largest(self: Tensor, out: Tensor) -> None:
    out.copy_(self.max().reshape(out.shape))


@operator("aclnnMin", "tt")
def smallest(self: Tensor, out: Tensor) -> None:
    out.copy_(self.min().reshape(out.shape))


@operator("aclnnMaxDim", "tibtt")
def max_dim(self: Tensor, dim: int, keepdim: bool, out: Tensor, indices: Tensor) -> None:
    _both(self.max(dim, keepdim), out, indices)


@operator("aclnnMinDim", "tibtt")
def min_dim(self: Tensor, dim: int, keepdim: bool, out: Tensor, indices: Tensor) -> None:
    _both(self.min(dim, keepdim), out, indices)


@operator("aclnnMedian", "tt")
def median(self: Tensor, values_out: Tensor) -> None:
    values_out.copy_(self.median())


@operator("aclnnMedianDim", "tibtt")
def median_dim(self: Tensor, dim: int, keep_dim: bool, values_out: Tensor, indices_out: Tensor) -> None:
    _both(self.median(dim, keep_dim), values_out, indices_out)


def _both(found: tuple[Tensor, Tensor], values: Tensor, indices: Tensor) -> None:
    values.copy_(found[0])
    indices.copy_(found[1])


@operator("aclnnAmax", "tabt")
def amax(self: Tensor, dim: list[int], keep_dim: bool, out: Tensor) -> None:
    out.copy_(self.amax(all_dims(self, dim), keep_dim))


@operator("aclnnAmin", "tabt")
def amin(self: Tensor, dim: list[int], keep_dim: bool, out: Tensor) -> None:
    out.copy_(self.amin(all_dims(self, dim), keep_dim))


@operator("aclnnAminmax", "tabtt")
def aminmax(self: Tensor, dim: list[int], keep_dim: bool, min_out: Tensor, max_out: Tensor) -> None:
    min_out.copy_(self.amin(all_dims(self, dim), keep_dim))
    max_out.copy_(self.amax(all_dims(self, dim), keep_dim))


@operator("aclnnArgMax", "tibt")
def argmax(self: Tensor, dim: int, keepdim: bool, out: Tensor) -> None:
    out.copy_(self.argmax(dim, keepdim))


@operator("aclnnArgMin", "tibt")
def argmin(self: Tensor, dim: int, keepdim: bool, out: Tensor) -> None:
    out.copy_(self.argmin(dim, keepdim))


@operator("aclnnAll", "tabt")
def every(self: Tensor, dim: list[int], keepdim: bool, out: Tensor) -> None:
    # torch's own reduces to uint8 for uint8, as the chip does.
    out.copy_(self.bool().all(all_dims(self, dim), keepdim))


@operator("aclnnAny", "tabt")
def some(self: Tensor, dim: list[int], keepdim: bool, out: Tensor) -> None:
    out.copy_(self.bool().any(all_dims(self, dim), keepdim))


@operator("aclnnLogSumExp", "tabt")
def logsumexp(self: Tensor, dim: list[int], keep_dim: bool, out: Tensor) -> None:
    x, dims = real(self), all_dims(self, dim)
    peak = x.amax(dims, keepdim=True)
    peak = torch.where(peak.isfinite(), peak, 0.0)
    value = numerics.total((x - peak).exp(), dims, keepdim=True).log() + peak
    numerics.store(out, value.reshape(out.shape))


@operator("aclnnNorm", "tkabt")
def norm(self: Tensor, p: float, dim: list[int], keepdim: bool, out: Tensor) -> None:
    _vector_norm(self, p, dim, keepdim, out)


@operator("aclnnLinalgVectorNorm", "tkabTt")
def vector_norm(self: Tensor, ord: float, dims: list[int], keep_dims: bool, dtype: torch.dtype, out: Tensor) -> None:
    _vector_norm(self, ord, dims, keep_dims, out)


def _vector_norm(self: Tensor, order: float, dims: list[int], keepdim: bool, out: Tensor) -> None:
    value = torch.linalg.vector_norm(real(self), order, all_dims(self, dims), keepdim)
    numerics.store(out, value)


def _variance(self: Tensor, dims: list[int], correction: int, keepdim: bool) -> Tensor:
    return torch.var(real(self), all_dims(self, dims), correction=correction, keepdim=keepdim)


@operator("aclnnVarCorrection", "taibt")
def var(self: Tensor, dim: list[int], correction: int, keepdim: bool, out: Tensor) -> None:
    numerics.store(out, _variance(self, dim, correction, keepdim))


@operator("aclnnStd", "taibt")
def std(self: Tensor, dim: list[int], correction: int, keepdim: bool, out: Tensor) -> None:
    numerics.store(out, _variance(self, dim, correction, keepdim).sqrt())


def _define_moments(name: str, root: Callable[[Tensor], Tensor]) -> None:
    @operator(name, "taibtt")
    def moments(
        self: Tensor, dim: list[int], correction: int, keepdim: bool, spread_out: Tensor, mean_out: Tensor
    ) -> None:
        numerics.store(spread_out, root(_variance(self, dim, correction, keepdim)))
        numerics.store(mean_out, numerics.mean(real(self), all_dims(self, dim), keepdim))


_define_moments("aclnnVarMean", lambda variance: variance)
_define_moments("aclnnStdMeanCorrection", torch.sqrt)


@operator("aclnnTrace", "tt")
def trace(self: Tensor, out: Tensor) -> None:
    diagonal = self.diagonal()
    numerics.store(out, numerics.total(real(diagonal), [0]) if out.is_floating_point() else diagonal.sum())


@operator("aclnnCdist", "ttfit")
def cdist(x1: Tensor, x2: Tensor, p: float, compute_mode: int, out: Tensor) -> None:
    numerics.store(out, torch.cdist(numerics.wide(x1), numerics.wide(x2), p))
