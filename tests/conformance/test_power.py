"""The quick suite rejects implementations that break one convention each, in every dtype where that shows."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from faulty import after, before, reference
from torch import Tensor

from hal.conformance.case import Case, cases
from hal.conformance.judge import judge

DTYPES = ("float64", "float32", "bfloat16", "float16")
HALVES = ("bfloat16", "float16")
SHARED = ("attention", "attention_varlen", "paged_attention")
SAMPLERS = ("top_k_top_p_probs", "top_k_top_p_sample")
CACHES = ("paged_attention", "gather_kv_cache", "write_kv_cache")

Arguments = dict[str, Any]
Fault = Callable[[str], Callable[..., Any]]


def told(**changes: Any) -> Fault:
    """Arguments that are not heeded."""
    return lambda op: before(op, lambda a: changes)


def given(change: Callable[[Arguments], Arguments]) -> Fault:
    """Arguments that are taken for others."""
    return lambda op: before(op, change)


def found(change: Callable[[Any, Arguments], Any]) -> Fault:
    """Results that are spoilt."""
    return lambda op: after(op, change)


def with_lse(change: Callable[[Tensor, Tensor, Arguments], tuple[Tensor, Tensor]]) -> Fault:
    """Attention's results, spoilt where there is an lse."""
    return found(lambda r, a: change(*r, a) if isinstance(r, tuple) else r)


def zero_unbounded(a: Arguments) -> Arguments:
    return {"window": a["window"] and tuple(count or None for count in a["window"])}


def right_unbounded(a: Arguments) -> Arguments:
    return {"window": a["window"] and (a["window"][0], None)}


def of_v(a: Arguments) -> Arguments:
    v = a["v_cache"] if "v_cache" in a else a["v"]
    return {"scale": v.shape[-1] ** -0.5 if a["scale"] is None else a["scale"]}


def capped_sinks(a: Arguments) -> Arguments:
    cap, sinks = a["softcap"], a["sinks"]
    return {} if cap is None or sinks is None else {"sinks": cap * torch.tanh(sinks / cap)}


def exponentials_overflow(o: Tensor, lse: Tensor, a: Arguments) -> tuple[Tensor, Tensor]:
    """No maximum is taken out, of the scores or of the sinks."""
    lost = lse.exp().isinf()
    heads = lost.transpose(1, 2) if o.ndim == 4 else lost
    return o.masked_fill(heads[..., None], math.nan), lse.masked_fill(lost, math.inf)


def floor_masks(a: Arguments) -> Arguments:
    mask = a["mask"]
    return {} if mask is None or mask.dtype is torch.bool else {"mask": mask.masked_fill(mask < -1e4, -math.inf)}


def bias_stops_causal(a: Arguments) -> Arguments:
    return {"causal": a["causal"] and (a["mask"] is None or a["mask"].dtype is torch.bool)}


def last_key_lost(a: Arguments) -> Arguments:
    return {name: a[name][:, :-1] for name in ("k", "v")} if a["k"].shape[1] > 4096 else {}


def scale_of_first_head(a: Arguments) -> Arguments:
    return {name: a[name][0] for name in ("k_scale", "v_scale") if a[name] is not None and a[name].ndim}


def ties_away_from_zero(a: Arguments) -> Arguments:
    return {"k": a["k"].double() * (1 + 2.0**-30)} if a["k_cache"].dtype.itemsize == 1 else {}


def one_by_one_backwards(k_caches: list[Tensor], v_caches: list[Tensor], src: Tensor, dst: Tensor) -> None:
    for cache in (*k_caches, *v_caches):
        for s, d in reversed(list(zip(src.tolist(), dst.tolist(), strict=True))):
            cache[d] = cache[s].clone()


def last_id_of_lost_rows(ids: Tensor, a: Arguments) -> Tensor:
    return torch.where(a["logits"].isfinite().any(-1), ids, a["logits"].shape[1] - 1)


def ties_to_the_highest(op: str) -> Callable[..., Any]:
    @functools.wraps(reference(op))
    def call(logits: Tensor, *args: Any, **kwargs: Any) -> Any:
        nudge = torch.arange(logits.shape[1]) * 2.0**-40
        return reference(op)(logits.double() + nudge, *args, **kwargs)

    return call


def filtered_in_another_order(a: Arguments) -> Arguments:
    """top-p takes its mass from all tokens, before top-k."""
    if a["top_p"] is None or a["top_k"] is None:
        return {}
    kept = reference("top_k_top_p_probs")(a["logits"], temperature=a["temperature"], top_p=a["top_p"]) > 0
    return {"logits": a["logits"].masked_fill(~kept, -math.inf), "top_p": None}


FAULTS: list[tuple[tuple[str, ...], str, Fault, tuple[str, ...]]] = [
    (SHARED, "a window count of 0 is unbounded", given(zero_unbounded), DTYPES),
    (SHARED, "the window has no right side", given(right_unbounded), DTYPES),
    (SHARED, "a given scale is ignored", told(scale=None), DTYPES),
    (SHARED, "the scale is that of v's width", given(of_v), DTYPES),
    (SHARED, "sinks are capped", given(capped_sinks), DTYPES),
    (SHARED, "exponentials overflow", with_lse(exponentials_overflow), DTYPES),
    (SHARED, "lse has a finite floor", with_lse(lambda o, lse, a: (o, lse.clamp(min=-1e30))), DTYPES),
    (SHARED, "a row without keys loses its sink", with_lse(
        lambda o, lse, a: (o, lse.masked_fill((o == 0).all(-1) if o.ndim == 3 else (o == 0).all(-1).transpose(1, 2),
                                              -math.inf))
    ), DTYPES),
    (("attention",), "a low bias masks", given(floor_masks), DTYPES),
    (("attention",), "a bias ends causality", given(bias_stops_causal), DTYPES),
    (("attention",), "one key of 8,193 is lost", given(last_key_lost), DTYPES),
    (("paged_attention",), "it is always causal", told(causal=True), DTYPES),
    (("paged_attention",), "softcap is dropped", told(softcap=None), DTYPES),
    (("rms_norm", "add_rms_norm", "layer_norm"), "eps is 1e-5 at least",
     given(lambda a: {"eps": max(a["eps"], 1e-5)}), DTYPES),
    (("rms_norm", "add_rms_norm"), "the offset scales without a weight", given(
        lambda a: {"weight": torch.ones(a["x"].shape[-1])} if a["weight"] is None and a["weight_offset"] else {}
    ), DTYPES),
    (("silu_and_mul",), "the limit swallows NaN", given(
        lambda a: {"x": a["x"].masked_fill(a["x"].isnan(), a["limit"])} if a["limit"] is not None else {}
    ), DTYPES),
    (("silu_and_mul",), "the gate's exponential overflows", found(
        lambda y, a: y.masked_fill(a["x"].chunk(2, -1)[0].float().exp().isinf(), math.nan)
    ), ("float32", *HALVES)),
    (("softmax",), "NaN becomes 0", found(lambda y, a: y.nan_to_num(0.0)), DTYPES),
    (("rotary_embedding",), "positions have 8 bits", given(
        lambda a: {"positions": a["positions"].bfloat16().long().clamp(max=a["cos"].shape[0] - 1)}
    ), DTYPES),
    (("rotary_embedding",), "all batches have the first one's positions", given(
        lambda a: {"positions": a["positions"][:1].expand(a["positions"].shape)} if a["positions"].ndim > 1 else {}
    ), DTYPES),
    (("merge_attention",), "a piece without its other is returned itself", found(
        lambda r, a: (a["out_a"], r[1]) if bool((a["lse_b"] == -math.inf).all()) else r
    ), DTYPES),
    (("cross_entropy",), "a mean over nothing is NaN", found(
        lambda y, a: y if a["reduction"] != "mean" or bool((a["target"] != a["ignore_index"]).any()) else y * math.nan
    ), DTYPES),
    (("copy_kv_blocks",), "pairs are copied one by one, the last first", lambda op: one_by_one_backwards, DTYPES),
    (CACHES, "all heads have the first one's scale", given(scale_of_first_head), DTYPES),
    (("write_kv_cache",), "ties go away from zero", given(ties_away_from_zero), DTYPES),
    (("write_kv_cache",), "NaN becomes the lowest code",
     given(lambda a: {"k": a["k"].masked_fill(a["k"].isnan(), -math.inf)}), DTYPES),
    (("write_kv_cache",), "infinity becomes NaN",
     given(lambda a: {"k": a["k"].masked_fill(a["k"].isinf(), math.nan)}), DTYPES),
    (("write_kv_cache",), "slots have 8 bits", given(
        lambda a: {"slot_mapping": torch.where(a["slot_mapping"] < 0, -1, a["slot_mapping"] % 256)}
    ), DTYPES),
    (SAMPLERS, "top-k is ignored", told(top_k=None), DTYPES),
    (SAMPLERS, "top-p is ignored", told(top_p=None), DTYPES),
    (SAMPLERS, "min-p is ignored", told(min_p=None), DTYPES),
    (SAMPLERS, "top-p comes before top-k", given(filtered_in_another_order), DTYPES),
    (SAMPLERS, "ties go to the highest index", ties_to_the_highest, DTYPES),
    (SAMPLERS, "NaN sorts first",
     given(lambda a: {"logits": a["logits"].masked_fill(a["logits"].isnan(), math.inf)}), DTYPES),
    (("top_k_top_p_probs",), "top-p of 1 drops what a float32 sum does not see", given(
        lambda a: {"top_p": 1 - 2.0**-40 if a["top_p"] == 1.0 else a["top_p"]}
    ), DTYPES),
    (("top_k_top_p_sample",), "a row without finite logits gives the last id", found(last_id_of_lost_rows), DTYPES),
    (SAMPLERS, "temperature is ignored", told(temperature=None), DTYPES),
]  # fmt: skip

KEPT = [(op, what, fault, dtype) for ops, what, fault, dtypes in FAULTS for op in ops for dtype in dtypes]


@functools.cache
def quick(op: str, dtype: str) -> tuple[Case, ...]:
    # The newest cases first: most of these faults were seen by none of the others.
    return tuple(
        case for case in reversed(cases(op)) if case.dtype == dtype and not case.bad_input and not case.gradient
    )


@pytest.mark.parametrize(
    ("op", "what", "fault", "dtype"), KEPT, ids=[f"{op}-{dtype}-{what}" for op, what, _, dtype in KEPT]
)
def test_the_quick_suite_rejects(op: str, what: str, fault: Fault, dtype: str) -> None:
    wrong = fault(op)
    assert any(judge(case, wrong).status == "failed" for case in quick(op, dtype)), f"{op} passes although {what}"
