"""Tables of cos and sin for rotary embedding, with the context extensions that published models use.

Every formula here follows the paper named beside it; key names are those of Hugging Face configurations.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hal.errors import ArgumentError

__all__ = ["rotary_cache"]

Scaling = Mapping[str, Any]
# (angles per position in float64, what multiplies cos and sin)
Frequencies = tuple[Tensor, float]


def rotary_cache(
    max_pos: int, rotary_dim: int, *, base: float = 10000.0, scaling: Scaling | None = None
) -> tuple[Tensor, Tensor]:
    """The tables of cos and sin that ``rotary_embedding`` takes, each float32 (max_pos, rotary_dim / 2).

    Row p is of the angles p · frequency, computed in float64; cos and sin are rounded once. On the CPU.
    Frequencies are base^(−2i / rotary_dim), changed by ``scaling``, a mapping in the form that Hugging Face
    configurations use, with ``rope_type`` (or ``type``):

    - ``"default"``, or None: unchanged.
    - ``"linear"``: ``factor``.
    - ``"dynamic"`` (NTK): ``factor``, ``max_position_embeddings``; the base grows when max_pos exceeds the
      latter.
    - ``"llama3"``: ``factor``, ``low_freq_factor``, ``high_freq_factor``,
      ``original_max_position_embeddings``.
    - ``"yarn"``: ``factor`` and ``original_max_position_embeddings``; optional ``attention_factor``,
      ``mscale``, ``mscale_all_dim``, ``beta_fast`` (32), ``beta_slow`` (1), ``truncate`` (True).
    - ``"longrope"``: ``short_factor``, ``long_factor`` (rotary_dim / 2 numbers each),
      ``original_max_position_embeddings``; optional ``factor`` and ``attention_factor``. The long factors
      hold when max_pos exceeds the original length.

    ``factor`` may be left out of yarn and longrope if ``max_position_embeddings`` is there: it is their
    ratio to the original length. The attention factors of yarn and longrope multiply cos and sin. Other
    keys (``rope_theta``, …) are ignored: base is an argument.

    Raises ArgumentError for a missing key, an unknown type or a number out of range.
    """
    if isinstance(max_pos, bool) or not isinstance(max_pos, int) or max_pos < 0:
        raise ArgumentError(f"rotary_cache: max_pos is {max_pos!r}; it must be an integer of at least 0")
    if not isinstance(rotary_dim, int) or rotary_dim < 2 or rotary_dim % 2:
        raise ArgumentError(f"rotary_cache: rotary_dim is {rotary_dim!r}; it must be an even integer of at least 2")
    if not 1 < _number(base) < math.inf:
        raise ArgumentError(f"rotary_cache: base is {base!r}; it must be a number greater than 1")
    base = _number(base)
    frequency, factor = _frequencies(max_pos, rotary_dim, base, scaling)
    angle = torch.arange(max_pos, dtype=torch.float64, device="cpu")[:, None] * frequency
    return (angle.cos() * factor).float(), (angle.sin() * factor).float()


def _frequencies(max_pos: int, dim: int, base: float, scaling: Scaling | None) -> Frequencies:
    if scaling is None:
        return _default(dim, base), 1.0
    if not isinstance(scaling, Mapping):
        raise ArgumentError(
            f"rotary_cache: scaling is {scaling!r}; it must be None or a mapping with 'rope_type', as in a "
            "model's configuration"
        )
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if not isinstance(kind, str) or kind not in _SCALINGS:
        raise ArgumentError(f"rotary_cache: rope_type is {kind!r}; supported are {', '.join(sorted(_SCALINGS))}")
    return _SCALINGS[kind](scaling, max_pos, dim, base)


def _default(dim: int, base: float) -> Tensor:
    return 1.0 / base ** (torch.arange(0, dim, 2, dtype=torch.float64, device="cpu") / dim)


def _required(scaling: Scaling, kind: str, *keys: str) -> list[float]:
    missing = [key for key in keys if scaling.get(key) is None]
    if missing:
        raise ArgumentError(
            f"rotary_cache: rope_type {kind!r} needs {', '.join(keys)}; {', '.join(missing)} is missing in scaling"
        )
    return [_positive(kind, key, scaling[key]) for key in keys]


def _number(value: Any) -> float:
    """The value as a float, NaN for what is no number."""
    try:
        return math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # the last of a tensor of several elements
        return math.nan


def _positive(kind: str, key: str, value: Any) -> float:
    number = _number(value)
    if not (math.isfinite(number) and number > 0):
        raise ArgumentError(f"rotary_cache: {key} of rope_type {kind!r} is {value!r}; it must be a positive number")
    return number


def _optional(scaling: Scaling, kind: str, key: str, default: float | None = None) -> float | None:
    """A number that may be left out; published configurations also write 0 for that."""
    value = scaling.get(key)
    return default if value is None or _number(value) == 0 else _positive(kind, key, value)


def _stretch(scaling: Scaling, kind: str, original: float) -> float:
    """The factor of yarn and longrope: given, or the ratio of the model's length to its original one."""
    if scaling.get("factor") is not None:
        return _positive(kind, "factor", scaling["factor"])
    if scaling.get("max_position_embeddings") is None:
        raise ArgumentError(
            f"rotary_cache: rope_type {kind!r} needs factor or max_position_embeddings in scaling; neither is there"
        )
    return _positive(kind, "max_position_embeddings", scaling["max_position_embeddings"]) / original


def _no_scaling(scaling: Scaling, max_pos: int, dim: int, base: float) -> Frequencies:
    return _default(dim, base), 1.0


def _linear(scaling: Scaling, max_pos: int, dim: int, base: float) -> Frequencies:
    """Position interpolation, Chen et al. 2023."""
    (factor,) = _required(scaling, "linear", "factor")
    return _default(dim, base) / factor, 1.0


def _dynamic(scaling: Scaling, max_pos: int, dim: int, base: float) -> Frequencies:
    """Dynamic NTK-aware scaling (bloc97, emozilla 2023)."""
    factor, trained = _required(scaling, "dynamic", "factor", "max_position_embeddings")
    if dim == 2:
        raise ArgumentError(
            "rotary_cache: rope_type 'dynamic' raises base to dim / (dim − 2); rotary_dim must be at least 4"
        )
    length = max(max_pos, trained)
    try:
        grown = base * (factor * length / trained - (factor - 1)) ** (dim / (dim - 2))
    except OverflowError:
        grown = math.inf
    if not 1 < grown < math.inf:
        raise ArgumentError(
            f"rotary_cache: factor {factor} at max_pos {max_pos} makes base {grown}; it must stay a finite number "
            "greater than 1"
        )
    return _default(dim, grown), 1.0


def _llama3(scaling: Scaling, max_pos: int, dim: int, base: float) -> Frequencies:
    """Llama 3.1: long waves are interpolated, short ones kept, those between blended."""
    factor, low, high, original = _required(
        scaling, "llama3", "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"
    )
    if not low < high:
        raise ArgumentError(
            f"rotary_cache: low_freq_factor is {low} and high_freq_factor {high}; the first must be the smaller"
        )
    frequency = _default(dim, base)
    turns = original * frequency / (2 * math.pi)
    blend = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - blend) * frequency / factor + blend * frequency, 1.0


def _yarn(scaling: Scaling, max_pos: int, dim: int, base: float) -> Frequencies:
    """YaRN, Peng et al. 2023; mscale as in DeepSeek-V3, truncate as in gpt-oss."""
    (original,) = _required(scaling, "yarn", "original_max_position_embeddings")
    factor = _stretch(scaling, "yarn", original)
    fast, slow = _optional(scaling, "yarn", "beta_fast", 32), _optional(scaling, "yarn", "beta_slow", 1)
    assert fast is not None and slow is not None
    truncate = scaling.get("truncate", True)
    if not isinstance(truncate, bool):
        raise ArgumentError(f"rotary_cache: truncate of rope_type 'yarn' is {truncate!r}; it must be True or False")

    def dim_of(turns: float) -> float:
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base))

    low, high = dim_of(fast), dim_of(slow)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001  # the published code's guard: a step instead of a division by zero
    index = torch.arange(dim // 2, dtype=torch.float64, device="cpu")
    keep = 1 - ((index - low) / (high - low)).clamp(0.0, 1.0)
    frequency = _default(dim, base)
    return frequency / factor * (1 - keep) + frequency * keep, _yarn_attention_factor(scaling, factor)


def _yarn_attention_factor(scaling: Scaling, factor: float) -> float:
    if scaling.get("attention_factor") is not None:
        return _positive("yarn", "attention_factor", scaling["attention_factor"])

    def mscale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    some, all_dims = _optional(scaling, "yarn", "mscale"), _optional(scaling, "yarn", "mscale_all_dim")
    if some is not None and all_dims is not None:
        return mscale(some) / mscale(all_dims)
    return mscale(1.0)


def _longrope(scaling: Scaling, max_pos: int, dim: int, base: float) -> Frequencies:
    """LongRoPE, Ding et al. 2024; attention factor as in Phi-3."""
    (original,) = _required(scaling, "longrope", "original_max_position_embeddings")
    factors = [_per_dim(scaling, key, dim // 2) for key in ("short_factor", "long_factor")]
    if scaling.get("attention_factor") is not None:
        attention_factor = _positive("longrope", "attention_factor", scaling["attention_factor"])
    else:
        stretch = _stretch(scaling, "longrope", original)
        if original <= 1:
            raise ArgumentError(
                f"rotary_cache: original_max_position_embeddings is {original}; longrope divides by its "
                "logarithm, so it must be greater than 1, or attention_factor given"
            )
        attention_factor = 1.0 if stretch <= 1 else math.sqrt(1 + math.log(stretch) / math.log(original))
    return _default(dim, base) / factors[max_pos > original], attention_factor


def _per_dim(scaling: Scaling, key: str, count: int) -> Tensor:
    values = scaling.get(key)
    if not isinstance(values, Sequence) or len(values) != count:
        what = f"{len(values)} numbers" if isinstance(values, Sequence) else repr(values)
        raise ArgumentError(
            f"rotary_cache: {key} of rope_type 'longrope' is {what}; it must be rotary_dim / 2 = {count} numbers"
        )
    return torch.tensor([_positive("longrope", key, v) for v in values], dtype=torch.float64, device="cpu")


_SCALINGS: dict[str, Callable[[Scaling, int, int, float], Frequencies]] = {
    "default": _no_scaling,
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}
