"""Faults of the samplers: filters, ties, the draw, special values.

B rows, V vocabulary, R ranks.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hal import philox
from hal.conformance.mutants.mutant import Arguments, Candidate, Mutant, after, before, each, reference, weaker
from hal.contract import OPS
from hal.ops.sampling import cleaned, counts, gumbel, rows

__all__ = ["MUTANTS"]

PROBS, SAMPLE = "top_k_top_p_probs", "top_k_top_p_sample"
SAMPLERS = (PROBS, SAMPLE)
PARAMETERS = ("temperature", "top_k", "top_p", "min_p")


def prefix(mass_BR: Tensor, p_B1: Tensor) -> Tensor:
    """Ranks that top-p keeps: those before which less than p lies."""
    return (mass_BR.cumsum(-1) - mass_BR < p_B1) | (p_B1 >= 1.0) | first(mass_BR)


def first(t_BR: Tensor) -> Tensor:
    return torch.arange(t_BR.shape[-1]) == 0


def same(t: Tensor) -> Tensor:
    return t


def plain(
    op: str,
    *,
    top_p: Callable[[Tensor, Tensor], Tensor] = prefix,
    k: Callable[[Tensor], Tensor] = same,
    ratio: Callable[[Tensor, Tensor], Tensor] = lambda score_BR, mass_BR: score_BR.exp(),
    ranks: Callable[[Tensor], Tensor] = same,
    scores: Callable[[Tensor], Tensor] = same,
    masses: Callable[[Tensor], Tensor] = same,
    noise: Callable[[Arguments, torch.dtype], Tensor] = lambda a, dtype: gumbel(a["seed"], a["logits"], dtype),
    draw: Callable[[Tensor, Tensor], Tensor] = lambda score_BV, noise_BV: (score_BV + noise_BV).argmax(-1),
    renormalise: bool = True,
) -> Candidate:
    """A sampler written once more, plainly, with places to go wrong in."""

    @functools.wraps(reference(op))
    def call(*args: Any, **kwargs: Any) -> Tensor:
        a = vars(OPS[op].bind(args, kwargs))
        logits = a["logits"]
        x_BV = cleaned(logits)
        token_BR = ranks(x_BV).sort(dim=-1, descending=True, stable=True).indices
        x_BR = x_BV.gather(-1, token_BR)
        best_B1 = x_BR[:, :1]
        score_BR = torch.where(x_BR == best_B1, 0.0, x_BR - best_B1)
        if a["temperature"] is not None:
            score_BR = score_BR / rows(a["temperature"], logits, x_BR.dtype).clamp(min=torch.finfo(x_BR.dtype).tiny)
        score_BR = scores(score_BR)
        keep_BR = (x_BR != -math.inf) & (torch.arange(x_BR.shape[1]) < k(counts(logits, a["temperature"], a["top_k"])))
        mass_BR = torch.where(keep_BR, score_BR, -math.inf).exp()
        mass_BR = mass_BR / mass_BR.sum(-1, keepdim=True)
        if a["top_p"] is not None:
            keep_BR = keep_BR & top_p(mass_BR, rows(a["top_p"], logits, x_BR.dtype))
        if a["min_p"] is not None:
            keep_BR = keep_BR & ((ratio(score_BR, mass_BR) >= rows(a["min_p"], logits, x_BR.dtype)) | first(x_BR))
        kept_BR = torch.where(keep_BR, score_BR, -math.inf)
        if op == SAMPLE:
            score_BV = torch.empty_like(kept_BR).scatter(-1, token_BR, kept_BR)
            return draw(score_BV, noise(a, score_BV.dtype))
        found_BR = masses(kept_BR.exp()) if renormalise else torch.where(keep_BR, mass_BR, 0.0)
        if renormalise:
            found_BR = found_BR / masses(found_BR.sum(-1, keepdim=True))
        return torch.empty_like(found_BR).scatter(-1, token_BR, found_BR).float()

    return call


def wrong(**how: Any) -> Callable[[str], Candidate]:
    return lambda op: plain(op, **how)


def given(change: Callable[[Arguments], Arguments]) -> Callable[[str], Candidate]:
    return lambda op: before(op, change)


def told(**changes: Any) -> Callable[[str], Candidate]:
    """Arguments that are not heeded."""
    return given(lambda a: changes)


# Filters


def p_before_k(a: Arguments) -> Arguments:
    """top-p takes its mass from all tokens, before top-k."""
    if a["top_p"] is None or a["top_k"] is None:
        return {}
    kept = reference(PROBS)(a["logits"], temperature=a["temperature"], top_p=a["top_p"]) > 0
    return {"logits": a["logits"].masked_fill(~kept, -math.inf), "top_p": None}


def temperature_last(a: Arguments) -> Arguments:
    """The filters look at the logits before they are divided."""
    if a["temperature"] is None:
        return {}
    kept = reference(PROBS)(a["logits"], **{name: a[name] for name in PARAMETERS[1:]}) > 0
    return {"logits": a["logits"].masked_fill(~kept, -math.inf)} | dict.fromkeys(PARAMETERS[1:])


def of_the_first_row(a: Arguments) -> Arguments:
    """All rows have the first one's parameters."""
    told = {name: a[name] for name in PARAMETERS if isinstance(a[name], Tensor) and a[name].numel()}
    return {name: value[0] if value.ndim else value for name, value in told.items()}


def no_k_is_one(a: Arguments) -> Arguments:
    """A k of 0 or less keeps one token."""
    k = a["top_k"]
    return {} if k is None else {"top_k": k.clamp(min=1) if isinstance(k, Tensor) else max(k, 1)}


def zero_is_no_temperature(a: Arguments) -> Arguments:
    t = a["temperature"]
    if t is None:
        return {}
    return {"temperature": torch.where(t == 0, 1.0, t) if isinstance(t, Tensor) else t or 1.0}


def dropped_by_a_float32_sum(mass_BR: Tensor, p_B1: Tensor) -> Tensor:
    """A p of 1 drops the tokens before which a float32 sum is 1."""
    sums_BR = mass_BR.float().cumsum(-1).to(mass_BR.dtype)
    before_BR = torch.nn.functional.pad(sums_BR[:, :-1], (1, 0))
    return torch.where(p_B1 >= 1.0, before_BR < 1.0, prefix(mass_BR, p_B1)) | first(mass_BR)


def off(name: str) -> Callable[[str, float], Candidate]:
    """A parameter that is off by a share."""
    return lambda op, s: before(op, lambda a: {} if a[name] is None else {name: a[name] * (1 - s)})


# Ties


def highest_first(x_BV: Tensor) -> Tensor:
    """Ranks by value, then by falling index: the place of each token in the order wanted, from the best down."""
    order_BR = x_BV.flip(-1).sort(dim=-1, descending=True, stable=True).indices
    token_BR = x_BV.shape[-1] - 1 - order_BR
    return torch.empty_like(token_BR).scatter(-1, token_BR, torch.arange(x_BV.shape[-1], 0, -1).expand_as(token_BR))


def all_that_tie(op: str) -> Candidate:
    """top-k keeps all tokens that equal the k-th."""

    def change(a: Arguments) -> Arguments:
        x_BV, vocabulary = cleaned(a["logits"]), a["logits"].shape[1]
        if a["top_k"] is None or not x_BV.numel():
            return {}
        k_B1 = counts(a["logits"], a["temperature"], a["top_k"])
        least_B1 = x_BV.sort(dim=-1, descending=True).values.gather(-1, k_B1 - 1)
        return {"logits": a["logits"].masked_fill(x_BV < least_B1, -math.inf), "top_k": vocabulary}

    return before(op, change)


# The draw


def seeds(a: Arguments) -> Tensor:
    """The key of each row."""
    row_B, seed = torch.arange(a["logits"].shape[0]), a["seed"]
    found: Tensor = seed if isinstance(seed, Tensor) and seed.ndim else row_B + seed
    return found


def noise_of(
    key: Callable[[Arguments], Tensor] = seeds,
    word: int = 0,
    uniform: Callable[[Tensor, torch.dtype], Tensor] = philox.to_uniform,
    rounded: Callable[[Tensor], Tensor] = same,
    gumbel: Callable[[Tensor], Tensor] = lambda u: -torch.log(-torch.log(u)),
) -> Callable[[Arguments, torch.dtype], Tensor]:
    """The noise written once more, with places to go wrong in."""

    def noise(a: Arguments, dtype: torch.dtype) -> Tensor:
        token_V = torch.arange(a["logits"].shape[1])
        return rounded(gumbel(uniform(philox.words(key(a)[:, None], token_V, word), dtype)))

    return noise


def one_key(a: Arguments) -> Tensor:
    """One seed for all rows is not counted up."""
    seed = a["seed"]
    return seeds(a) if isinstance(seed, Tensor) and seed.ndim else torch.full((a["logits"].shape[0],), int(seed))


def by_rank(op: str) -> Candidate:
    """The counter of the noise is the token's rank."""

    def noise(a: Arguments, dtype: torch.dtype) -> Tensor:
        noise_BR = gumbel(a["seed"], a["logits"], dtype)
        order_BR = cleaned(a["logits"]).sort(dim=-1, descending=True, stable=True).indices
        return torch.empty_like(noise_BR).scatter(-1, order_BR, noise_BR)

    return plain(op, noise=noise)


def inverse_cdf(a: Arguments) -> Tensor:
    p_BV: Tensor = reference(PROBS)(a["logits"], **{name: a[name] for name in PARAMETERS})
    u_B1 = philox.to_uniform(philox.words(seeds(a)[:, None], torch.zeros(1, dtype=torch.int64)))
    found: Tensor = (p_BV.cumsum(-1) < u_B1).sum(-1).clamp(max=p_BV.shape[1] - 1)
    return found


def to_bfloat16(t: Tensor) -> Tensor:
    return t.bfloat16().to(t.dtype)


def without_the_half(word: Tensor, dtype: torch.dtype) -> Tensor:
    return (word >> 9).to(dtype) * 2.0**-23


def of_24_bits(word: Tensor, dtype: torch.dtype) -> Tensor:
    return (((word >> 8).double() + 0.5) * 2.0**-24).to(dtype)


# Special values


def lost(a: Arguments) -> Tensor:
    """Rows without a finite logit, (B, 1)."""
    finite: Tensor = a["logits"].isfinite().any(-1, keepdim=True)
    return ~finite


def logits(change: Callable[[Tensor], Tensor]) -> Callable[[str], Candidate]:
    return given(lambda a: {"logits": change(a["logits"])})


MUTANTS: list[Mutant] = [
    # filters
    *each(SAMPLERS, "top-k is ignored", "filters", told(top_k=None)),
    *each(SAMPLERS, "top-p is ignored", "filters", told(top_p=None)),
    *each(SAMPLERS, "min-p is ignored", "filters", told(min_p=None)),
    *each(SAMPLERS, "temperature is ignored", "filters", told(temperature=None)),
    *each(SAMPLERS, "one token more than k is kept", "filters", wrong(k=lambda k: k + 1)),
    *each(SAMPLERS, "one token less than k is kept", "filters", wrong(k=lambda k: (k - 1).clamp(min=1))),
    *each(SAMPLERS, "a k of 0 keeps one token", "filters", given(no_k_is_one)),
    *each(SAMPLERS, "a temperature of 0 is none", "filters", given(zero_is_no_temperature)),
    *each(SAMPLERS, "the token that crosses p is dropped", "filters",
          wrong(top_p=lambda mass, p: (mass.cumsum(-1) <= p) | (p >= 1.0) | first(mass))),
    *each(SAMPLERS, "one token past p is kept", "filters",
          wrong(top_p=lambda mass, p: torch.nn.functional.pad(prefix(mass, p)[:, :-1], (1, 0), value=True))),
    *each(SAMPLERS, "a p of 0 keeps nothing", "filters",
          wrong(top_p=lambda mass, p: (mass.cumsum(-1) - mass < p) | (p >= 1.0))),
    *each(SAMPLERS, "a p of 1 drops what a float32 sum does not see", "filters", wrong(top_p=dropped_by_a_float32_sum)),
    *each(SAMPLERS, "top-p comes before top-k", "filters", given(p_before_k)),
    *each(SAMPLERS, "temperature comes after the filters", "filters", given(temperature_last)),
    *each(SAMPLERS, "min-p is a probability", "filters", wrong(ratio=lambda score, mass: mass)),
    *each(SAMPLERS, "all rows have the first one's parameters", "filters", given(of_the_first_row)),
    *each(PROBS, "what is left is not renormalised", "filters", wrong(renormalise=False)),
    *weaker(SAMPLERS, "temperature is off", "filters", off("temperature"), 2.0**-8),
    *weaker(SAMPLERS, "p is off", "filters", off("top_p"), 2.0**-4),
    *weaker(SAMPLERS, "min-p is off", "filters", off("min_p"), 2.0**-2),
    # ties
    *each(SAMPLERS, "ties go to the highest index", "ties", wrong(ranks=highest_first)),
    *each(SAMPLERS, "all tokens that equal the k-th are kept", "ties", all_that_tie),
    *each(SAMPLERS, "logits that round to one bfloat16 tie", "ties", wrong(ranks=Tensor.bfloat16),
          invisible={"bfloat16": "every bfloat16 is its own rounding, so that no two logits tie that did not before"}),
    # draw
    *each(SAMPLE, "the likeliest token is taken", "draw", wrong(draw=lambda score, noise: score.argmax(-1))),
    *each(SAMPLE, "the seed is ignored", "draw", told(seed=0)),
    *each(SAMPLE, "one seed gives all rows the same noise", "draw", wrong(noise=noise_of(key=one_key))),
    *each(SAMPLE, "seeds have 32 bits", "draw", wrong(noise=noise_of(key=lambda a: seeds(a) & 0xFFFFFFFF))),
    *each(SAMPLE, "the noise is that of another word", "draw", wrong(noise=noise_of(word=1))),
    *each(SAMPLE, "the noise counts ranks", "draw", by_rank),
    *each(SAMPLE, "the noise is exponential", "draw", wrong(noise=noise_of(gumbel=lambda u: -torch.log(u)))),
    *each(SAMPLE, "uniform numbers start at 0", "draw", wrong(noise=noise_of(uniform=without_the_half))),
    *each(SAMPLE, "uniform numbers have 24 bits", "draw", wrong(noise=noise_of(uniform=of_24_bits))),
    *each(SAMPLE, "the noise is rounded to bfloat16", "draw", wrong(noise=noise_of(rounded=to_bfloat16))),
    *each(SAMPLE, "scores are rounded to bfloat16", "draw", wrong(scores=to_bfloat16)),
    *each(SAMPLE, "one uniform number per row picks from the running sum", "draw",
          lambda op: after(op, lambda ids, a: inverse_cdf(a))),
    *weaker(SAMPLE, "scores are off", "draw", lambda op, s: plain(op, scores=lambda score: score * (1 + s)), 2.0**-8),
    # special values
    *each(SAMPLERS, "NaN sorts first", "special values", logits(lambda x: x.masked_fill(x.isnan(), math.inf))),
    *each(SAMPLERS, "infinity is dropped", "special values",
          logits(lambda x: x.masked_fill(x == math.inf, -math.inf))),
    *each(PROBS, "NaN makes its row NaN", "special values",
          lambda op: after(op, lambda p, a: p.masked_fill(a["logits"].isnan().any(-1, keepdim=True), math.nan))),
    *each(PROBS, "a row without finite logits is even", "special values",
          lambda op: after(op, lambda p, a: torch.where(lost(a) & (a["logits"] != math.inf).all(-1, keepdim=True),
                                                        1 / p.shape[1], p))),
    *each(SAMPLE, "a row without finite logits gives the last id", "special values",
          lambda op: after(op, lambda ids, a: torch.where(lost(a)[:, 0], a["logits"].shape[1] - 1, ids))),
    # precision
    *each(PROBS, "scores are rounded to bfloat16", "precision", wrong(scores=to_bfloat16)),
    *each(PROBS, "exponentials are rounded to bfloat16", "precision", wrong(masses=to_bfloat16)),
]  # fmt: skip
