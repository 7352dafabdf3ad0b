"""From logits to the distribution that a sampler draws from, and the draw itself.

Shape letters: B rows (sequences), V vocabulary, R ranks (the best R tokens in descending order). A trailing 1
(…_B1) broadcasts over the vocabulary.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from hal import philox
from hal.accuracy import Accumulator, Accuracy, growth
from hal.arithmetic import result, widen
from hal.op import Args, Cost, Meta, Traits, dtype_name, op
from hal.ops._sampling_checks import check_parameter_values, check_parameters, check_seed

__all__ = ["top_k_top_p_probs", "top_k_top_p_sample"]

Parameter = float | Tensor | None
Count = int | Tensor | None

PARAMETERS = ("temperature", "top_k", "top_p", "min_p")


class Filtered(NamedTuple):
    """What the filters leave of each row, in the order of tokens or of ranks.

    score_BV: (x − max)/temperature, the logarithm of the probability up to a constant of the row; the filters
    do not blank it. keep_BV: the tokens that have a probability. doubt_BV: the least of the distances by
    which top-p or min-p kept or dropped a token, as a probability: within rounding of 0 either answer is
    right.
    """

    score_BV: Tensor
    keep_BV: Tensor
    doubt_BV: Tensor


def cleaned(logits: Tensor) -> Tensor:
    """Logits in their compute dtype without NaN, which sorts last; a row with nothing finite is a certain
    token 0."""
    x_BV = widen(logits)
    x_BV = torch.where(x_BV.isnan(), float("-inf"), x_BV)
    lost_B1 = ~logits.isfinite().any(-1, keepdim=True)
    first_V = torch.arange(logits.shape[1], device=logits.device) == 0
    certain_V = torch.zeros_like(first_V, dtype=x_BV.dtype).masked_fill(~first_V, float("-inf"))
    return torch.where(lost_B1, certain_V, x_BV)


def rows(value: float | Tensor, logits: Tensor, dtype: torch.dtype) -> Tensor:
    """A parameter as (B, 1)."""
    if isinstance(value, Tensor):
        return value.to(dtype).expand(logits.shape[0])[:, None]
    return torch.full((logits.shape[0], 1), value, dtype=dtype, device=logits.device)


def counts(logits: Tensor, temperature: Parameter, top_k: Count) -> Tensor:
    """How many ranks top-k and temperature 0 leave each row, (B, 1): 1 … V."""
    vocabulary = logits.shape[1]
    k_B1 = rows(0 if top_k is None else top_k, logits, torch.int64)
    k_B1 = torch.where(k_B1 <= 0, vocabulary, k_B1.clamp(max=vocabulary))
    if temperature is None:
        return k_B1
    return torch.where(rows(temperature, logits, torch.float64) == 0.0, 1, k_B1)


def filter_ranked(
    ranked_BR: Tensor,
    logits: Tensor,
    temperature: Parameter,
    top_k: Count,
    top_p: Parameter,
    min_p: Parameter,
) -> Filtered:
    """The filters on cleaned logits in descending order (the best R of them suffice if no row keeps more)."""
    dtype = ranked_BR.dtype
    rank_R = torch.arange(ranked_BR.shape[1], device=logits.device)
    first_R = rank_R == 0
    best_B1 = ranked_BR[:, :1]
    # A logit of +inf takes all of the row; subtracting it from itself would give NaN.
    score_BR = torch.where(ranked_BR == best_B1, 0.0, ranked_BR - best_B1)
    if temperature is not None:
        # 0, and what rounds to it, must not divide 0 by 0; `counts` takes care of the true 0.
        score_BR = score_BR / rows(temperature, logits, dtype).clamp(min=torch.finfo(dtype).tiny)

    drawn_from_BR = (ranked_BR != float("-inf")) & (rank_R < counts(logits, temperature, top_k))
    keep_BR, doubt_BR = drawn_from_BR, torch.full_like(score_BR, float("inf"))
    if top_p is not None:
        mass_BR = torch.where(drawn_from_BR, score_BR, float("-inf")).exp()
        cumulative_BR = (mass_BR / mass_BR.sum(-1, keepdim=True)).cumsum(-1)
        before_BR = torch.nn.functional.pad(cumulative_BR[:, :-1], (1, 0))
        p_B1 = rows(top_p, logits, dtype)
        certain_BR = first_R | (p_B1 >= 1.0)
        keep_BR = keep_BR & (certain_BR | (before_BR < p_B1))
        doubt_BR = torch.where(certain_BR, doubt_BR, (before_BR - p_B1).abs())
    if min_p is not None:
        ratio_BR, least_B1 = score_BR.exp(), rows(min_p, logits, dtype)
        certain_BR = first_R | (least_B1 <= 0.0)
        keep_BR = keep_BR & (certain_BR | (ratio_BR >= least_B1))
        doubt_BR = torch.where(certain_BR, doubt_BR, torch.minimum(doubt_BR, (ratio_BR - least_B1).abs()))
    return Filtered(score_BR, keep_BR, torch.where(drawn_from_BR, doubt_BR, float("inf")))


def filtered(
    logits: Tensor,
    temperature: Parameter = None,
    top_k: Count = None,
    top_p: Parameter = None,
    min_p: Parameter = None,
) -> Filtered:
    """Scores and keep sets of `top_k_top_p_probs` in the order of tokens."""
    # Ranked before the division, which could make two logits equal that are not.
    ranked_BV, token_BV = torch.sort(cleaned(logits), dim=-1, descending=True, stable=True)
    by_rank = filter_ranked(ranked_BV, logits, temperature, top_k, top_p, min_p)
    return Filtered(*(torch.empty_like(t).scatter(-1, token_BV, t) for t in by_rank))


def gumbel(seed: int | Tensor, logits: Tensor, dtype: torch.dtype, token: Tensor | None = None) -> Tensor:
    """The Gumbel noise of a draw, −log(−log u), for all tokens or for those of `token` (B, R).

    u comes from Philox with the row's seed as key and the token as counter.
    """
    if token is None:
        token = torch.arange(logits.shape[1], device=logits.device)
    row_B = torch.arange(logits.shape[0], device=logits.device)
    seed_B = seed if isinstance(seed, Tensor) and seed.dim() == 1 else row_B + seed
    u = philox.to_uniform(philox.words(seed_B[:, None], token), dtype)
    return -torch.log(-torch.log(u))


def _pack(
    logits: Tensor,
    *,
    temperature: Parameter = None,
    top_k: Count = None,
    top_p: Parameter = None,
    min_p: Parameter = None,
) -> tuple[Any, ...]:
    values = (temperature, top_k, top_p, min_p)
    return logits, *map(_tensor_or_none, values), *map(_number_or_none, values)


def _sample_pack(
    logits: Tensor,
    seed: int | Tensor,
    *,
    temperature: Parameter = None,
    top_k: Count = None,
    top_p: Parameter = None,
    min_p: Parameter = None,
) -> tuple[Any, ...]:
    values = (seed, temperature, top_k, top_p, min_p)
    return logits, *map(_tensor_or_none, values), *map(_number_or_none, values)


def _tensor_or_none(value: Any) -> Tensor | None:
    return value if isinstance(value, Tensor) else None


def _number_or_none(value: Any) -> Any:
    return None if isinstance(value, Tensor) else value


def _validate(a: Args) -> None:
    check_parameters("top_k_top_p_probs", a)


def _sample_validate(a: Args) -> None:
    check_parameters("top_k_top_p_sample", a)
    check_seed("top_k_top_p_sample", a)


def _check_values(
    logits: Tensor,
    *,
    temperature: Parameter = None,
    top_k: Count = None,
    top_p: Parameter = None,
    min_p: Parameter = None,
) -> None:
    check_parameter_values("top_k_top_p_probs", temperature, top_p, min_p)


def _sample_check_values(
    logits: Tensor,
    seed: int | Tensor,
    *,
    temperature: Parameter = None,
    top_k: Count = None,
    top_p: Parameter = None,
    min_p: Parameter = None,
) -> None:
    check_parameter_values("top_k_top_p_sample", temperature, top_p, min_p)


def _meta(a: Args) -> tuple[Meta, ...]:
    return (Meta(tuple(a.logits.shape), torch.float32),)


def _sample_meta(a: Args) -> tuple[Meta, ...]:
    return (Meta((a.logits.shape[0],), torch.int64),)


def _traits(a: Args) -> Traits:
    features = {name for name in PARAMETERS if getattr(a, name) is not None}
    features |= {f"{name}_tensor" for name in PARAMETERS if isinstance(getattr(a, name), Tensor)}
    if isinstance(getattr(a, "seed", None), Tensor):
        features.add("seed_tensor")
    return Traits(
        dtype=dtype_name(a.logits.dtype),
        features=frozenset(features),
        dims={"rows": a.logits.shape[0], "vocabulary": a.logits.shape[1]},
    )


def _read_bytes(a: Args) -> int:
    parameters = (getattr(a, name, None) for name in ("seed", *PARAMETERS))
    return sum(t.numel() * t.element_size() for t in (a.logits, *parameters) if isinstance(t, Tensor))


def _cost(a: Args) -> Cost:
    # Per logit: subtract, scale, exponential, add, compare, divide; selecting needs no more than one
    # comparison each.
    return Cost(flops=6 * a.logits.numel(), bytes=_read_bytes(a) + 4 * a.logits.numel())


def _sample_cost(a: Args) -> Cost:
    # Philox is ten rounds of two multiplications and six other integer operations; then two logarithms and an
    # add.
    return Cost(flops=(6 + 80 + 3) * a.logits.numel(), bytes=_read_bytes(a) + 8 * a.logits.shape[0])


def _bound(a: Args, expected: tuple[Tensor, ...], acc: Accumulator) -> tuple[Tensor, ...]:
    score_BV = filtered(a.logits, a.temperature, a.top_k, a.top_p, a.min_p).score_BV
    share_BV = growth(a.logits.shape[1], acc) + 3 * acc.eps * (1 + score_BV.abs())
    # 0 · inf where the token has neither probability nor a finite score.
    return (torch.where(expected[0] > 0, expected[0] * share_BV, 0.0),)


def _exact(a: Args, expected: tuple[Tensor, ...]) -> tuple[Tensor | None, ...]:
    kept = filtered(a.logits, a.temperature, a.top_k, a.top_p, a.min_p)
    return (~kept.keep_BV & kept.doubt_BV.isinf(),)


PROBS_ACCURACY = Accuracy(
    rule="sampling",
    bound=_bound,
    exact=_exact,
    notes="Keep sets are exact: ranks come from the logits as stored. Only where the cumulative sum before a "
    "token lies within g(V) of p, or its ratio to the best within 2ε(1 + |score|) of min-p, may it go either "
    "way; the rest then renormalises. A kept probability is exp of a score with one subtraction and one "
    "division behind it, over a sum of V terms: Y·(g(V) + 3ε(1 + |x − max|/temperature)).",
)

SAMPLE_ACCURACY = Accuracy(
    rule="sampling",
    notes="u is exact. The score of a token is log p + Gumbel: an error of 2ε(1 + |log p|) from the "
    "logarithm of p, and, as the derivative of −log(−log u) in log u is 1/|log u|, of 2ε(1 + |Gumbel|) from "
    "the two logarithms. The drawn token must score within the sum of its own bound and that of the best "
    "one; g(V) is common to the row.",
)

_FEATURES = (*PARAMETERS, *(f"{name}_tensor" for name in PARAMETERS))
_SPLITS = {name: (f"{name}_value",) for name in PARAMETERS}
_TENSORS = "Tensor? temperature, Tensor? top_k, Tensor? top_p, Tensor? min_p"
_NUMBERS = "float? temperature_value, int? top_k_value, float? top_p_value, float? min_p_value"


@op(
    schema=f"Tensor logits, {_TENSORS}, {_NUMBERS}",
    results=("probs",),
    pack=_pack,
    validate=_validate,
    meta=_meta,
    traits=_traits,
    dims=("rows", "vocabulary"),
    cost=_cost,
    accuracy=PROBS_ACCURACY,
    features=_FEATURES,
    check_values=_check_values,
    splits=_SPLITS,
)
def top_k_top_p_probs(
    logits: Tensor,
    *,
    temperature: Parameter = None,
    top_k: Count = None,
    top_p: Parameter = None,
    min_p: Parameter = None,
) -> Tensor:
    """The probabilities that a sampler draws from, float32 (B, V); tokens that the filters drop have 0.

    In this order: logits are divided by ``temperature``; ``top_k`` keeps the k largest (ties to the lowest
    index); their softmax is taken; ``top_p`` keeps the shortest prefix in descending order whose sum is at
    least p, and never fewer than one token; ``min_p`` keeps tokens of at least min_p times the best one's
    probability (Nguyen et al. 2024); what is left is renormalised. None leaves a filter out, and so do k ≤ 0,
    k ≥ V, p = 1 and min_p = 0.

    logits: (B, V), any float, V ≥ 1. −inf and NaN have no probability; +inf takes all of its row. A row with
    no finite logit is certain of token 0. temperature ≥ 0, where 0 is argmax; top_p and min_p in 0 … 1.
    Each parameter is a number or a tensor, () or (B,): floating, top_k int32 or int64.

    Raises ShapeError, DtypeError, DeviceError and ArgumentError (values of tensors: for CPU tensors, and on
    devices under ``HAL_CHECK=1``).
    """
    kept = filtered(logits, temperature, top_k, top_p, min_p)
    mass_BV = torch.where(kept.keep_BV, kept.score_BV, float("-inf")).exp()
    return result(mass_BV / mass_BV.sum(-1, keepdim=True), torch.float32)


@op(
    schema=f"Tensor logits, Tensor? seed, {_TENSORS}, int? seed_value, {_NUMBERS}",
    results=("ids",),
    pack=_sample_pack,
    validate=_sample_validate,
    meta=_sample_meta,
    traits=_traits,
    dims=("rows", "vocabulary"),
    cost=_sample_cost,
    accuracy=SAMPLE_ACCURACY,
    features=(*_FEATURES, "seed_tensor"),
    check_values=_sample_check_values,
    splits=_SPLITS | {"seed": ("seed_value",)},
    volatile=("seed",),
)
def top_k_top_p_sample(
    logits: Tensor,
    seed: int | Tensor,
    *,
    temperature: Parameter = None,
    top_k: Count = None,
    top_p: Parameter = None,
    min_p: Parameter = None,
) -> Tensor:
    """One token per row, int64 (B,), drawn from `top_k_top_p_probs` of the same arguments.

    The draw is argmax over tokens v of log p_v + Gumbel_v, where Gumbel_v = −log(−log u_v) and
    u_v = ((word >> 9) + ½)·2⁻²³ of word 0 of Philox4x32-10 with the seed as key and v as counter. The same
    seed thus draws the same token on every backend, up to ties within rounding.

    seed: a number or an int64 tensor () gives row b the key seed + b; a tensor (B,) gives each row its own. A
    tensor is read on the device, so that a captured graph draws anew when it is rewritten. The rest is as in
    `top_k_top_p_probs`.
    """
    kept = filtered(logits, temperature, top_k, top_p, min_p)
    noise_BV = gumbel(seed, logits, kept.score_BV.dtype)
    return torch.where(kept.keep_BV, kept.score_BV + noise_BV, float("-inf")).argmax(-1)
