"""The space of recipes that fuzzing draws from: each operator's parameters, and what the contract lets stand together.

A recipe starts from the family's own strategy; options that the listed cases use, layouts, poisons, edge sizes and bad
input are laid over it. Parameters that are added to a family are drawn as soon as a listed case uses them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from hal.conformance.case import Case
from hal.conformance.cases import family, gradients
from hal.conformance.cases._family import POISONS
from hal.conformance.cases._pages import CODES
from hal.conformance.inputs import LAYOUTS
from hal.errors import UnsupportedError

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

    from hal.conformance.cases._family import Family

__all__ = ["hypothesis_version", "space"]

Recipe = dict[str, Any]

# A failure shrinks towards the first of them.
DTYPES = ("float32", "bfloat16", "float16", "float64")
LARGEST = 4200
"""The largest size that is taken over from a listed case: above it a case takes seconds."""

EDGES: dict[str, tuple[int, ...]] = {
    "T": (0, 1, 2, 33),
    "F": (1, 2, 3, 128, 1023),
    "I": (0, 1, 2, 513),
    "O": (0, 1, 129),
    "B": (0, 1, 2, 5),
    "S": (0, 1, 2, 31),
    "L": (0, 1, 2, 65),
    "D": (1, 2, 3, 16, 65, 128, 576),
    "E": (1, 3, 64, 576),
    "V": (1, 2, 1000),
    "P": (1, 3, 128),
    "spare": (0, 1, 5),
}
"""Sizes laid over a recipe, by parameter."""

SHAPELESS = frozenset({
    "causal", "lse", "softcap", "scale", "spread", "weight_offset", "round_before_weight", "round_residual", "eps",
    "interleaved", "alpha", "up_offset", "limit", "smoothing", "z", "reduction", "t", "m", "x", "window",
})  # fmt: skip
"""Parameters that bad input is drawn with: its damage is done to tensors of the shapes that the listed case has."""


def space(op: str) -> SearchStrategy[Case]:
    """Cases of an operator: every dtype, sizes, strides, options, special values and bad input.

    Some recipes are listed already, and some bad input is good in some dtype; who draws leaves those out.
    """
    from hypothesis import strategies as st

    of = family(op)
    seen, bad = _seen(op), _bad(op)
    base = of.strategy()

    @st.composite
    def case(draw: Any) -> Case:
        dtype = draw(st.sampled_from(DTYPES))
        if bad and draw(st.integers(0, 7)) == 7:
            recipe = dict(draw(st.sampled_from(bad)))
            free = sorted(set(seen) & SHAPELESS - set(recipe))
            recipe |= draw(_some(free, seen, 2))
            mend(op, recipe, of)
            return of.case(dtype, "edge", "bad-input", **recipe)
        recipe = dict(draw(base))
        recipe |= draw(_some(sorted(seen), seen, 4))
        mend(op, recipe, of)
        if op in gradients.QUICK and draw(st.integers(0, 3)) == 3 and _differentiable(recipe):
            recipe["grad"] = True
        return of.case(dtype, "drawn", **recipe)

    return case()


def hypothesis_version() -> str:
    """The version of hypothesis; UnsupportedError where it is not installed."""
    try:
        import hypothesis
    except ImportError as error:
        raise UnsupportedError(
            "fuzzing draws with hypothesis, which is not installed: pip install hypothesis, or run the listed cases "
            "with 'hal conformance run'."
        ) from error
    return str(hypothesis.__version__)


def _differentiable(recipe: Recipe) -> bool:
    """Whether a recipe has gradients to speak of."""
    odd = recipe.get("special") or recipe.get("spoilt") or recipe.get("x") in ("special", "corners", "odd")
    return not odd and gradients.speaks(recipe)


def _some(names: list[str], values: dict[str, list[Any]], most: int) -> SearchStrategy[Recipe]:
    """Up to `most` parameters with a value each."""
    from hypothesis import strategies as st

    if not names:
        return st.just({})
    entry = st.sampled_from(names).flatmap(lambda name: st.tuples(st.just(name), st.sampled_from(values[name])))
    return st.lists(entry, max_size=most).map(dict)


@lru_cache(maxsize=64)
def _seen(op: str) -> dict[str, list[Any]]:
    """The values of each parameter that listed cases use, the default and edge sizes among them."""
    of = family(op)
    defaults = of._defaults()
    found: dict[str, list[Any]] = {name: [value] for name, value in defaults.items()}
    for case in of.grid():
        if not case.bad_input:
            for name, value in case.params.items():
                if value not in found[name] and _size(value) <= LARGEST:
                    found[name].append(value)
    for name, sizes in EDGES.items():
        if name in found and not isinstance(defaults[name], bool | float | str):
            found[name] += [size for size in sizes if size not in found[name]]
    found["layout"], found["poison"] = list(LAYOUTS), ["auto", *POISONS]
    for name in ("bad", "captured"):
        del found[name]
    # of equal values of two types (0, False) the first stands for both
    return {name: values for name, values in found.items() if len(values) > 1}


def _size(value: Any) -> float:
    if isinstance(value, list):
        return sum(_size(item) for item in value)
    return abs(value) if isinstance(value, int | float) else 0


@lru_cache(maxsize=64)
def _bad(op: str) -> list[Recipe]:
    """The recipes of the listed bad input."""
    return [dict(case.params) for case in family(op).grid() if case.bad_input]


def mend(op: str, recipe: Recipe, of: Family) -> None:
    """Change what cannot stand together in a recipe of `op` to something that can."""
    for rule in MENDS.get(op, ()):
        rule(recipe, {**of._defaults(), **recipe})


def _heads(recipe: Recipe, p: Recipe) -> None:
    """Query heads are a multiple of the kv heads."""
    recipe["H"] = p["K"] * max(1, p["H"] // p["K"])


def _lengths(recipe: Recipe, p: Recipe) -> None:
    """As many lengths of keys as of queries."""
    if p["k"] is not None:
        n = min(len(p["q"]), len(p["k"]))
        recipe["q"], recipe["k"] = p["q"][:n], p["k"][:n]


def _mask(recipe: Recipe, p: Recipe) -> None:
    """A NaN needs an element to stand in, and stands alone; masks with dead rows need an axis of rows."""
    if not p["B"] or not p["S"] or not p["L"] or p["expand_kv"]:
        recipe["special"] = recipe["spoilt"] = False
    if p["special"]:
        recipe["spoilt"] = False
    if len(p["mask_shape"]) < 2 and p["mask"] in ("dead", "lowest"):
        recipe["mask"] = "bool"


def _codes(scale: str) -> Callable[[Recipe, Recipe], None]:
    """Scales belong to codes; int8 needs one."""

    def rule(recipe: Recipe, p: Recipe) -> None:
        if p["cache"] not in CODES:
            recipe[scale] = None
        elif p["cache"] == "int8" and p[scale] is None:
            recipe[scale] = "one"

    return rule


def _written(recipe: Recipe, p: Recipe) -> None:
    """No more slots than tokens or than places in the cache."""
    if p["n"] is not None:
        recipe["n"] = min(p["n"], p["T"], p["N"] * p["P"])
    if p["x"] == "ties" and (p["cache"] not in CODES or p["scale"] != "power"):
        recipe["x"] = "normal"


def _rotated(recipe: Recipe, p: Recipe) -> None:
    """An even number of dims to rotate, no more than there are."""
    if p["R"] is None:
        recipe["D"] = max(2, p["D"] // 2 * 2)
    else:
        recipe["R"] = max(2, min(p["R"], p["D"]) // 2 * 2)
        recipe["D"] = max(p["D"], recipe["R"])


def _axis(recipe: Recipe, p: Recipe) -> None:
    """An axis that there is."""
    rank = len(p["shape"])
    recipe["dim"] = max(-rank, min(rank - 1, p["dim"]))


def _blocks(recipe: Recipe, p: Recipe) -> None:
    """Blocks enough for the pairs."""
    recipe["N"] = max(7, p["N"])


def _classes(recipe: Recipe, p: Recipe) -> None:
    """Targets are drawn from the classes."""
    recipe["V"] = max(1, p["V"])


def _vocabulary(recipe: Recipe, p: Recipe) -> None:
    """Sparse logits have two tokens."""
    recipe["V"] = max(2 if p["x"] == "sparse" else 1, p["V"])


def _statistics(recipe: Recipe, p: Recipe) -> None:
    """Squares of subnormals are 0 in float32, where statistics are taken: without eps the norm is lost."""
    if p["x"] == "subnormal" and p["eps"] == 0.0:
        recipe["x"] = "normal"


MENDS: dict[str, tuple[Callable[[Recipe, Recipe], None], ...]] = {
    "rms_norm": (_statistics,),
    "add_rms_norm": (_statistics,),
    "layer_norm": (_statistics,),
    "attention": (_heads, _mask),
    "attention_varlen": (_heads, _lengths),
    "paged_attention": (_heads, _lengths, _codes("kv_scale")),
    "write_kv_cache": (_written, _codes("scale")),
    "gather_kv_cache": (_codes("scale"),),
    "copy_kv_blocks": (_blocks,),
    "rotary_embedding": (_rotated,),
    "softmax": (_axis,),
    "cross_entropy": (_classes,),
    "top_k_top_p_probs": (_vocabulary,),
    "top_k_top_p_sample": (_vocabulary,),
}
