"""Recipes that hypothesis drew from each family's strategy, kept as ids in a data file.

An id spells out its recipe, so a drawn case is the same on every machine, with or without hypothesis and whatever
its version; `python -m hal.conformance.cases.drawn` draws the file anew.
"""

from __future__ import annotations

import itertools
import json
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hal.conformance.case import Case, decode, make
from hal.errors import FileError

if TYPE_CHECKING:
    from hal.conformance.cases._family import Family

__all__ = ["QUICK", "cases", "draw", "write"]

FULL = 60
QUICK = 8
FILE = "drawn.json"


def cases(op: str) -> list[Case]:
    """The drawn cases of an op; the first QUICK of them belong to the quick suite."""
    found = []
    for i, recipe in enumerate(_recipes().get(op, ())):
        dtype, _, text = recipe.partition("/")
        params = decode(text)
        tags = {"drawn"} | ({"strided"} if "layout" in params else set())
        found.append(make(op, dtype, params, tags, "quick" if i < QUICK else "full"))
    return found


@lru_cache(maxsize=1)
def _recipes() -> dict[str, list[str]]:
    try:
        text = (resources.files("hal.conformance") / "data" / FILE).read_text("utf-8")
        found: dict[str, list[str]] = json.loads(text)
    except (OSError, ValueError) as error:
        raise FileError(f"hal/conformance/data/{FILE} cannot be read: {error}; reinstall torch-hal") from error
    return found


def draw(op: str, count: int = FULL, seed: int = 0) -> list[str]:
    """`count` different recipes `dtype/recipe`, the same for one op, count, seed and version of hypothesis."""
    import random

    from hypothesis import HealthCheck, Phase, Verbosity, given, settings
    from hypothesis import seed as seeded
    from hypothesis import strategies as st

    from hal.conformance.cases import family
    from hal.conformance.cases._family import DTYPES

    found: dict[str, None] = {}
    of = family(op)
    # A stable seed of the name: hash() differs from process to process.
    stable = random.Random(f"{op}/{seed}").getrandbits(32)

    @seeded(stable)
    @settings(
        max_examples=8 * count,
        database=None,
        phases=[Phase.generate],
        verbosity=Verbosity.quiet,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(st.sampled_from(DTYPES), of.strategy())
    def collect(dtype: str, params: dict[str, Any]) -> None:
        case = of.case(dtype, "drawn", **params)
        found.setdefault(case.id.split("/", 1)[1].rpartition("~")[0])

    collect()
    # Generation starts with the simplest examples; a stride spreads the choice over all that was drawn.
    ids = list(found)
    order = list(range(len(ids)))
    random.Random(stable).shuffle(order)
    shuffled = (ids[i] for i in order)
    return list(itertools.islice((text for text in shuffled if _proves(of, text)), count))


def _proves(of: Family, text: str) -> bool:
    """Whether a recipe makes a case that zeros or a shuffled result would fail (R6)."""
    from hal.conformance.subject import Subject

    dtype, _, recipe = text.partition("/")
    params: dict[str, Any] = dict(decode(recipe))
    return Subject(of.case(dtype, "drawn", **params)).vacuous() is None


def write(path: Path, count: int = FULL, seed: int = 0) -> int:
    """Draw recipes for every op and write them to `path`; how many there are."""
    from hal.conformance.cases import families

    drawn = {op: draw(op, count, seed) for op in sorted(families())}
    text = json.dumps(drawn, indent=0, ensure_ascii=True) + "\n"
    temporary = path.with_suffix(".tmp")
    try:
        temporary.write_text(text, "utf-8")
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise FileError(f"{path} cannot be written: {error}; name a place that can be") from error
    return sum(map(len, drawn.values()))


if __name__ == "__main__":
    write(Path(__file__).parents[1] / "data" / FILE)
