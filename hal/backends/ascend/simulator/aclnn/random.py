"""Random numbers: each call draws from a generator of its own, made of the seed and offset that torch_npu hands over.

The streams are this simulator's: no device draws the same numbers, and none promises to.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hal.backends.ascend.simulator import numerics
from hal.backends.ascend.simulator.operators import operator

Number = int | float | bool

_ODD = 0x9E3779B97F4A7C15  # 2^64 over the golden ratio: spreads neighbouring offsets


def _generator(seed: int, offset: int) -> torch.Generator:
    return torch.Generator().manual_seed((seed ^ offset * _ODD) & (2**63 - 1))


def _uniform(shape: torch.Size | list[int], seed: int, offset: int) -> Tensor:
    return torch.rand(shape, dtype=torch.float64, generator=_generator(seed, offset))


def _normal(shape: torch.Size, seed: int, offset: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=_generator(seed, offset))


@operator("aclnnInplaceNormal", "tffii")
def normal(self_ref: Tensor, mean: float, std: float, seed: int, offset: int) -> None:
    numerics.store(self_ref, _normal(self_ref.shape, seed, offset) * std + mean)


@operator("aclnnNormalTensorFloat", "tfiit")
@operator("aclnnNormalFloatTensor", "ftiit")
@operator("aclnnNormalTensorTensor", "ttiit")
@operator("aclnnNormalFloatFloat", "ffiit")
def normal_of(mean: Tensor | float, std: Tensor | float, seed: int, offset: int, out: Tensor) -> None:
    numerics.store(out, _normal(out.shape, seed, offset) * std + mean)


@operator("aclnnInplaceUniform", "tddii")
def uniform(self_ref: Tensor, low: float, high: float, seed: int, offset: int) -> None:
    drawn = _uniform(self_ref.shape, seed, offset) * (high - low) + low
    # A number just below the upper end must not round to it.
    top = torch.nextafter(torch.tensor(high, dtype=torch.float32), torch.tensor(low, dtype=torch.float32))
    rounded = drawn.to(self_ref.dtype)
    below = torch.finfo(self_ref.dtype).eps * max(abs(high), abs(low)) / 2
    numerics.store(self_ref, torch.where(rounded >= high, min(top.item(), high - below), drawn))


@operator("aclnnInplaceRandom", "tiiii")
def random(self_ref: Tensor, low: int, high: int, seed: int, offset: int) -> None:
    drawn = torch.randint(low, high, self_ref.shape, dtype=torch.int64, generator=_generator(seed, offset))
    numerics.store(self_ref, drawn)


# In a graph, seed and offset lie on the device, where each replay finds others; `offset` counts within the graph.
@operator("aclnnInplaceNormalTensor", "tfftti")
def normal_in_graph(
    self_ref: Tensor, mean: float, std: float, seed_tensor: Tensor, offset_tensor: Tensor, offset: int
) -> None:
    normal(self_ref, mean, std, int(seed_tensor), int(offset_tensor) + offset)


@operator("aclnnInplaceUniformTensor", "tddtti")
def uniform_in_graph(
    self_ref: Tensor, low: float, high: float, seed_tensor: Tensor, offset_tensor: Tensor, offset: int
) -> None:
    uniform(self_ref, low, high, int(seed_tensor), int(offset_tensor) + offset)


@operator("aclnnInplaceRandomTensor", "tiitti")
def random_in_graph(
    self_ref: Tensor, low: int, high: int, seed_tensor: Tensor, offset_tensor: Tensor, offset: int
) -> None:
    random(self_ref, low, high, int(seed_tensor), int(offset_tensor) + offset)


@operator("aclnnInplaceBernoulli", "tkii")
@operator("aclnnInplaceBernoulliTensor", "ttii")
def bernoulli(self_ref: Tensor, prob: Tensor | float, seed: int, offset: int) -> None:
    self_ref.copy_(_uniform(self_ref.shape, seed, offset) < prob)


@operator("aclnnRandperm", "iiit")
def randperm(n: int, seed: int, offset: int, out: Tensor) -> None:
    out.copy_(torch.randperm(n, generator=_generator(seed, offset)))


@operator("aclnnMultinomial", "tibiit")
def multinomial(self: Tensor, num_samples: int, replacement: bool, seed: int, offset: int, out: Tensor) -> None:
    out.copy_(torch.multinomial(self.double(), num_samples, replacement, generator=_generator(seed, offset)))


@operator("aclnnSimThreadExponential", "tidii")
def exponential(self_ref: Tensor, count: int, lambd: float, seed: int, offset: int) -> None:
    numerics.store(self_ref, -torch.log1p(-_uniform(self_ref.shape, seed, offset)) / lambd)


@operator("aclnnDropoutGenMask", "adiit")
def dropout_mask(shape: list[int], prob: float, seed: int, offset: int, out: Tensor) -> None:
    """One bit for each element, lowest first; set: the element is kept. `prob` is that of a loss."""
    kept = _uniform(shape, seed, offset).flatten() >= prob
    bits = torch.zeros(out.numel() * 8, dtype=torch.uint8)
    bits[: kept.numel()] = kept
    out.copy_((bits.view(-1, 8) << torch.arange(8, dtype=torch.uint8)).sum(-1).to(torch.uint8).view(out.shape))


@operator("aclnnDropoutGenMaskV2", "adiiTt")
def dropout_mask_v2(shape: list[int], prob: float, seed: int, offset: int, dtype: torch.dtype, out: Tensor) -> None:
    dropout_mask(shape, prob, seed, offset, out)


@operator("aclnnDropoutDoMask", "ttdt")
def dropout(self: Tensor, mask: Tensor, prob: float, out: Tensor) -> None:
    bits = (mask.flatten()[:, None] >> torch.arange(8, dtype=torch.uint8)) & 1
    kept = bits.flatten()[: self.numel()].view(self.shape).bool()
    numerics.store(out, torch.where(kept, numerics.wide(self) / (1 - prob), 0.0))
