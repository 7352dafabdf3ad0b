"""Normalisations: y = x / rms(x) · gamma, where rms(x) = sqrt(mean(x²) + epsilon) over the dimensions of gamma."""

from __future__ import annotations

from torch import Tensor

from hal.backends.ascend.simulator import numerics
from hal.backends.ascend.simulator.operators import operator

__all__: list[str] = []


def _last(gamma: Tensor) -> list[int]:
    return list(range(-gamma.dim(), 0))


def _scale(values: Tensor, gamma: Tensor, epsilon: float) -> Tensor:
    """1 / rms, with the dimensions of gamma kept as 1."""
    return (numerics.mean(values * values, _last(gamma), keepdim=True) + epsilon).rsqrt()


def _per_gamma(values: Tensor, gamma: Tensor) -> Tensor:
    """The sum over all that is not gamma's, in gamma's shape."""
    leading = list(range(values.dim() - gamma.dim()))
    return numerics.total(values, leading) if leading else values


@operator("aclnnRmsNorm", "ttdtt")
def rms_norm(x: Tensor, gamma: Tensor, epsilon: float, y: Tensor, rstd: Tensor) -> None:
    values = numerics.wide(x)
    scale = _scale(values, gamma, epsilon)
    numerics.store(y, values * scale * numerics.wide(gamma))
    numerics.store(rstd, scale.reshape(rstd.shape))


@operator("aclnnGemmaRmsNorm", "ttdtt")
def gemma_rms_norm(x: Tensor, gamma: Tensor, epsilon: float, y: Tensor, rstd: Tensor) -> None:
    values = numerics.wide(x)
    scale = _scale(values, gamma, epsilon)
    numerics.store(y, values * scale * (1 + numerics.wide(gamma)))
    numerics.store(rstd, scale.reshape(rstd.shape))


@operator("aclnnRmsNormGrad", "tttttt")
def rms_norm_grad(dy: Tensor, x: Tensor, rstd: Tensor, gamma: Tensor, dx: Tensor, dgamma: Tensor) -> None:
    values, upstream = numerics.wide(x), numerics.wide(dy)
    inner = [1] * gamma.dim()
    scale = numerics.wide(rstd).reshape(*x.shape[: x.dim() - gamma.dim()], *inner)
    normal = values * scale
    weighted = upstream * numerics.wide(gamma)
    mean = numerics.mean(weighted * normal, _last(gamma), keepdim=True)
    numerics.store(dx, scale * (weighted - normal * mean))
    numerics.store(dgamma, _per_gamma(upstream * normal, gamma))


def _add(x1: Tensor, x2: Tensor, x: Tensor) -> Tensor:
    """The sum that is stored in x, and what the norm goes on with: the unrounded sum."""
    values = numerics.wide(x1) + numerics.wide(x2)
    numerics.store(x, values)
    return values


@operator("aclnnAddRmsNorm", "tttdttt")
def add_rms_norm(x1: Tensor, x2: Tensor, gamma: Tensor, epsilon: float, y: Tensor, rstd: Tensor, x: Tensor) -> None:
    values = _add(x1, x2, x)
    scale = _scale(values, gamma, epsilon)
    numerics.store(y, values * scale * numerics.wide(gamma))
    numerics.store(rstd, scale.reshape(rstd.shape))


@operator("aclnnInplaceAddRmsNorm", "tttdt")
def inplace_add_rms_norm(x1: Tensor, x2: Tensor, gamma: Tensor, epsilon: float, rstd: Tensor) -> None:
    """The normalised sum replaces x1, the sum itself x2."""
    values = numerics.wide(x1) + numerics.wide(x2)
    scale = _scale(values, gamma, epsilon)
    numerics.store(x2, values)
    numerics.store(x1, values * scale * numerics.wide(gamma))
    numerics.store(rstd, scale.reshape(rstd.shape))


@operator("aclnnLayerNorm", "tattdttt")
def layer_norm(
    input: Tensor,
    normalized_shape: list[int],
    weight: Tensor | None,
    bias: Tensor | None,
    epsilon: float,
    out: Tensor,
    mean_out: Tensor | None,
    rstd_out: Tensor | None,
) -> None:
    dims = list(range(-len(normalized_shape), 0))
    values = numerics.wide(input)
    mean = numerics.mean(values, dims, keepdim=True)
    centred = values - mean
    scale = (numerics.mean(centred * centred, dims, keepdim=True) + epsilon).rsqrt()
    result = centred * scale
    if weight is not None:
        result = result * numerics.wide(weight)
    if bias is not None:
        result = result + numerics.wide(bias)
    numerics.store(out, result)
    if mean_out is not None:
        numerics.store(mean_out, mean.reshape(mean_out.shape))
    if rstd_out is not None:
        numerics.store(rstd_out, scale.reshape(rstd_out.shape))


@operator("aclnnLayerNormBackward", "ttattttattt")
def layer_norm_backward(
    grad_out: Tensor,
    input: Tensor,
    normalized_shape: list[int],
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    output_mask: list[bool],
    grad_input: Tensor | None,
    grad_weight: Tensor | None,
    grad_bias: Tensor | None,
) -> None:
    rank = len(normalized_shape)
    dims, leading = list(range(-rank, 0)), list(range(input.dim() - rank))
    kept = (*input.shape[: input.dim() - rank], *[1] * rank)
    upstream, scale = numerics.wide(grad_out), numerics.wide(rstd).reshape(kept)
    normal = (numerics.wide(input) - numerics.wide(mean).reshape(kept)) * scale
    weighted = upstream if weight is None else upstream * numerics.wide(weight)
    wanted = dict(zip(("input", "weight", "bias"), output_mask, strict=True))
    if wanted["input"] and grad_input is not None:
        flat = numerics.mean(weighted, dims, keepdim=True)
        slope = numerics.mean(weighted * normal, dims, keepdim=True)
        numerics.store(grad_input, scale * (weighted - flat - normal * slope))
    for name, out, values in (("weight", grad_weight, upstream * normal), ("bias", grad_bias, upstream)):
        if wanted[name] and out is not None:
            summed = numerics.total(values, leading) if leading else values
            numerics.store(out, summed.reshape(out.shape))
