"""Gradient cases: recipes of the other families with `grad=yes`, a few in the quick suite, the whole grids in full."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from hal.conformance.case import Case
from hal.conformance.cases._family import DTYPES

__all__ = ["EMPTY", "QUICK", "cases", "speaks"]

Recipe = dict[str, Any]

# In every dtype. Each has something of its own to get wrong: see the tests of planted faults.
QUICK: dict[str, tuple[Recipe, ...]] = {
    "linear": ({"T": 7, "I": 177, "O": 150, "bias": "same"}, {"lead": [2, 3], "I": 40, "O": 24, "bias": "float32"}),
    "rms_norm": (
        {"T": 7, "F": 576},
        {"lead": [2, 3], "F": 320, "weight_offset": 1.0, "round_before_weight": True},
        {"T": 5, "F": 257, "weight": "float32", "x": "tiny", "eps": 1e-5},
        {"T": 5, "F": 70, "weight": None, "layout": "sliced"},
        {"T": 5, "F": 90, "weight": None, "x": "tiny"},
    ),
    "add_rms_norm": (
        {"T": 7, "F": 320},
        {"T": 5, "F": 257, "weight": "float32", "round_residual": False, "round_before_weight": True},
        {"T": 4, "F": 300, "x": "tiny", "residual": "tiny", "weight": None},
        {"T": 5, "F": 96, "weight_offset": 1.0},
    ),
    "layer_norm": (
        {"T": 7, "F": 576},
        {"lead": [2, 3], "F": 257, "weight": "float32", "bias": "float32"},
        {"T": 5, "F": 300, "x": "mean50", "bias": None},
        {"T": 6, "F": 70, "weight": None, "layout": "transposed"},
        {"T": 5, "F": 90, "bias": None, "x": "tiny", "eps": 1e-6},
    ),
    "silu_and_mul": (
        {"T": 7, "F": 173, "spread": 2.0},
        {"T": 7, "F": 173, "spread": 7.0, "limit": 7.0, "alpha": 1.702, "up_offset": 1.0},
        {"T": 6, "F": 70, "spread": 8.0, "layout": "gapped"},
    ),
    "gelu_and_mul": (
        {"T": 7, "F": 173, "spread": 2.0},
        {"T": 7, "F": 173, "spread": 2.0, "approximate": "tanh"},
        {"T": 6, "F": 70, "spread": 6.0, "approximate": "tanh", "layout": "stepped"},
    ),
    "softmax": (
        {"shape": [7, 333]},
        {"shape": [6, 45, 7], "dim": 1},
        {"shape": [9, 100], "holes": True, "dead": True},
    ),
    "rotary_embedding": (
        {"H": 7, "K": 1},
        {"H": 3, "K": 3, "D": 80, "R": 32, "interleaved": True},
        {"lead": [1], "H": 5, "K": 2, "D": 64},
        {"H": 3, "K": None, "D": 96},
    ),
    "attention": (
        {"B": 2, "S": 17, "L": 17, "H": 4, "K": 2, "D": 40, "causal": True},
        {"S": 13, "L": 6, "H": 2, "K": 1, "D": 32, "causal": True, "lse": True},  # rows that see nothing
        {"S": 9, "L": 24, "H": 4, "K": 2, "D": 72, "window": [5, 3], "softcap": 1.5, "lse": True},
        {"S": 9, "L": 12, "H": 6, "K": 2, "D": 32, "E": 24, "sinks": "same", "scale": 0.3, "lse": True},
        {"B": 2, "S": 6, "L": 23, "H": 4, "K": 2, "D": 32, "mask": "columns"},
        {"B": 2, "S": 6, "L": 8, "H": 4, "K": 2, "D": 32, "mask": "holes", "mask_shape": "oHSL"},
        {"B": 2, "S": 6, "L": 8, "H": 4, "K": 2, "D": 32, "mask": "bias32", "mask_shape": "SL", "sinks": "float32"},
        {"B": 2, "S": 9, "L": 24, "H": 4, "K": 2, "D": 32, "window": [16, 0], "softcap": 1.5, "mask": "bias"},
    ),
    "attention_varlen": (
        {"q": [5, 1, 13], "H": 4, "K": 2, "D": 40, "causal": True},
        {"q": [3, 0, 6], "k": [5, 4, 6], "q_tail": 2, "k_tail": 2, "H": 2, "K": 1, "causal": True, "lse": True},
        {"q": [9, 2], "k": [4, 6], "H": 2, "K": 1, "D": 72, "causal": True},  # rows that see nothing
        {"q": [3, 4], "k": [9, 12], "H": 6, "K": 2, "sinks": "same", "softcap": 2.0, "window": [5, 2], "lse": True},
        {"q": [6, 5], "k": [9, 12], "H": 2, "K": 1, "D": 32, "window": [0, 4], "scale": 0.4, "lse": True},
    ),
    "cross_entropy": (
        {"T": 9, "V": 177},
        {"T": 9, "V": 177, "reduction": "each", "layout": "sliced"},
        {"T": 9, "V": 177, "reduction": "sum", "smoothing": 0.2, "z": 0.01},
        {"T": 6, "V": 40, "holes": True, "reduction": "each"},
        {"T": 4, "V": 33, "ignored": "all"},
    ),
}

# In every dtype too: a backward pass over nothing.
EMPTY: dict[str, Recipe] = {
    "linear": {"T": 0, "I": 40, "O": 24, "bias": "same"},
    "rms_norm": {"T": 0, "F": 128},
    "add_rms_norm": {"T": 0, "F": 128},
    "layer_norm": {"T": 0, "F": 128},
    "silu_and_mul": {"T": 0},
    "gelu_and_mul": {"T": 0},
    "softmax": {"shape": [0, 9]},
    "rotary_embedding": {"lead": [0]},
    "attention": {"S": 0, "L": 9},
    "attention_varlen": {"q": [0], "k": [0]},
    "cross_entropy": {"T": 0},
}


def cases(op: str) -> Iterator[Case]:
    """The gradient cases of an op; none for one without gradients."""
    from hal.conformance.cases import family

    if op not in QUICK:
        return
    of = family(op)
    for recipe in QUICK[op]:
        for dtype in DTYPES:
            yield of.case(dtype, *_tags(recipe), **recipe, grad=True)
    for dtype in DTYPES:
        yield of.case(dtype, "gradient", "empty", **EMPTY[op], grad=True)
    for case in of.grid():
        if not case.tags & {"special", "bad-input"} and speaks(case.params):
            yield of.case(case.dtype, *case.tags, "gradient", suite="full", **(dict(case.params) | {"grad": True}))


def speaks(params: Mapping[str, Any]) -> bool:
    """Whether a case of results says something of gradients: not where these vanish, or have no digits left.

    A probability of 1, a sink that takes all mass and a norm of one feature have no gradient to speak of; beside a
    bias of the lowest number scores are rounded away.
    """
    spread = params.get("spread", 1.0)
    flat = params.get("F") == 1 or bool(params.get("loud")) or (isinstance(spread, float) and spread > 20)
    return not flat and params.get("mask") not in ("lowest", "floor", "low")


def _tags(recipe: Recipe) -> set[str]:
    return {"gradient"} | ({"strided"} if "layout" in recipe else set())
