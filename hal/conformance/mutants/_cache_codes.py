"""Faults of what a paged KV cache holds: quantised codes, their scales, NaN and infinity."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from hal.conformance.mutants._cache_changes import READERS, Change, finite, given
from hal.conformance.mutants.mutant import Arguments, Candidate, Mutant, before, each, weaker

__all__ = ["MUTANTS"]

FP8 = torch.float8_e4m3fn
QUANTISED = (*READERS, "write_kv_cache")


def scale_of_first_head(a: Arguments) -> Arguments:
    return {name: a[name][0] for name in ("k_scale", "v_scale") if a[name] is not None and a[name].ndim}


def scales_swapped(a: Arguments) -> Arguments:
    return {"k_scale": a["v_scale"], "v_scale": a["k_scale"]}


def v_has_the_scale_of_k(a: Arguments) -> Arguments:
    return {"v_scale": a["k_scale"]}


def no_scale(a: Arguments) -> Arguments:
    return {name: torch.ones_like(a[name]) for name in ("k_scale", "v_scale") if a[name] is not None}


def scale_in_16_bits(a: Arguments) -> Arguments:
    return {name: a[name].bfloat16().float() for name in ("k_scale", "v_scale") if a[name] is not None}


def scale_off(op: str, strength: float) -> Candidate:
    def change(a: Arguments) -> Arguments:
        names = ("k_scale", "v_scale")
        return {name: a[name].double() * (1 + strength) for name in names if a[name] is not None}

    return before(op, change)


def codes_as(read: Callable[[Tensor], Tensor], dtype: torch.dtype) -> Change:
    """Codes of one dtype, decoded as something else (float32), times their scale."""

    def change(a: Arguments) -> Arguments:
        if a["k_cache"].dtype is not dtype:
            return {}
        out = a["q"].dtype if "q" in a else a["out_dtype"]
        wide = torch.float64 if out is torch.float64 else torch.float32
        found: Arguments = {}
        for name in ("k", "v"):
            by, values = a[f"{name}_scale"], read(a[f"{name}_cache"].contiguous()).to(wide)
            found[f"{name}_cache"] = values if by is None else values * (by if by.ndim == 0 else by[:, None]).to(wide)
            found[f"{name}_scale"] = None
        return found

    return change


def subnormals_flushed(codes: Tensor) -> Tensor:
    values = codes.float()
    return values.masked_fill(values.abs() < 2.0**-6, 0.0)


def quantising(ratio: Callable[[Tensor, torch.dtype], Tensor]) -> Callable[[str], Candidate]:
    """value / scale, changed before it becomes a code."""

    def change(a: Arguments) -> Arguments:
        to = a["k_cache"].dtype
        if to.itemsize > 1:
            return {}
        found: Arguments = {}
        for name in ("k", "v"):
            by = a[f"{name}_scale"]
            x = a[name].double() if a[name].dtype is torch.float64 else a[name].float()
            by = torch.ones((), dtype=x.dtype) if by is None else by.to(x.dtype)
            found[name] = ratio(x / (by if by.ndim == 0 else by[:, None]), to)
            found[f"{name}_scale"] = torch.ones(())
        return found

    return given(change)


def for_int8(change: Callable[[Tensor], Tensor]) -> Callable[[str], Candidate]:
    return quantising(lambda ratio, to: change(ratio) if to is torch.int8 else ratio)


def for_fp8(change: Callable[[Tensor], Tensor]) -> Callable[[str], Candidate]:
    return quantising(lambda ratio, to: change(ratio) if to is FP8 else ratio)


def truncated_fp8(ratio: Tensor) -> Tensor:
    """Toward zero, to 3 bits behind the leading one."""
    exponent = torch.frexp(ratio).exponent
    ulp = exponent.clamp(min=-5) - 4
    found = torch.ldexp(torch.ldexp(ratio, -ulp).trunc(), ulp)
    return torch.where(ratio.isfinite(), found, ratio)


def floats_only(change: Callable[[Tensor], Tensor]) -> Callable[[str], Candidate]:
    """k and v changed on their way into a cache of floats."""
    return given(lambda a: {n: change(a[n]) for n in ("k", "v")} if a["k_cache"].element_size() > 1 else {})


MUTANTS: list[Mutant] = [
    # quantisation
    *each(QUANTISED, "all heads have the first one's scale", "quantisation", given(scale_of_first_head)),
    *each(QUANTISED, "k and v swap their scales", "quantisation", given(scales_swapped)),
    *each(QUANTISED, "v has the scale of k", "quantisation", given(v_has_the_scale_of_k)),
    *each(QUANTISED, "codes have no scale", "quantisation", given(no_scale)),
    *each(QUANTISED, "the scale is rounded to bfloat16", "quantisation", given(scale_in_16_bits)),
    *weaker(QUANTISED, "scales are off", "quantisation", scale_off, 2.0**-8),
    *each(READERS, "int8 codes are read as unsigned", "quantisation",
          given(codes_as(lambda t: t.view(torch.uint8).float(), torch.int8))),
    *each(READERS, "fp8 codes are read as e5m2", "quantisation",
          given(codes_as(lambda t: t.view(torch.float8_e5m2).float(), FP8))),
    *each(READERS, "small fp8 codes are flushed to 0", "quantisation", given(codes_as(subnormals_flushed, FP8))),
    *each("write_kv_cache", "int8 codes are truncated", "quantisation", for_int8(torch.trunc)),
    *each("write_kv_cache", "int8 ties go away from zero", "quantisation",
          for_int8(lambda r: r.sign() * (r.abs() + 0.5).floor())),
    *each("write_kv_cache", "int8 ties go up", "quantisation", for_int8(lambda r: (r + 0.5).floor())),
    *each("write_kv_cache", "the lowest int8 code is -127", "quantisation", for_int8(lambda r: r.clamp(min=-127))),
    *each("write_kv_cache", "int8 codes wrap around", "quantisation",
          for_int8(lambda r: torch.where(r.isfinite(), (r.round() + 128) % 256 - 128, r))),
    *each("write_kv_cache", "int8 codes are rounded to bfloat16 first", "quantisation",
          for_int8(lambda r: r.bfloat16().to(r.dtype))),
    *each("write_kv_cache", "fp8 codes are truncated", "quantisation", for_fp8(truncated_fp8)),
    *each("write_kv_cache", "fp8 codes are rounded to bfloat16 first", "quantisation",
          for_fp8(lambda r: r.bfloat16().to(r.dtype))),
    *each("write_kv_cache", "fp8 overflows to NaN", "quantisation",
          for_fp8(lambda r: r.masked_fill((r.abs() >= 464) & r.isfinite(), math.nan))),
    *each("write_kv_cache", "the largest fp8 code is 240", "quantisation", for_fp8(lambda r: r.clamp(-240, 240))),
    *each("write_kv_cache", "small fp8 codes are flushed to 0", "quantisation",
          for_fp8(lambda r: r.masked_fill(r.abs() < 2.0**-6, 0.0))),
    # special values
    *each("write_kv_cache", "NaN becomes 0 in a cache of floats", "special values",
          floats_only(lambda x: x.masked_fill(x.isnan(), 0.0))),
    *each("write_kv_cache", "infinity becomes the largest float", "special values",
          floats_only(finite)),
    *each("write_kv_cache", "NaN becomes the lowest int8 code", "special values",
          for_int8(lambda r: r.masked_fill(r.isnan(), -math.inf))),
    *each("write_kv_cache", "infinity becomes 0 in int8", "special values",
          for_int8(lambda r: r.masked_fill(r.isinf(), 0.0))),
    *each("write_kv_cache", "NaN becomes 0 in fp8", "special values", for_fp8(lambda r: r.masked_fill(r.isnan(), 0.0))),
    *each("write_kv_cache", "infinity becomes NaN in fp8", "special values",
          for_fp8(lambda r: r.masked_fill(r.isinf(), math.nan))),
]  # fmt: skip
