"""A case: an op, a dtype and a recipe, from which bit-identical inputs follow on every machine."""

from __future__ import annotations

import contextlib
import hashlib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from hal.errors import ArgumentError

if TYPE_CHECKING:
    import torch

    from hal.conformance.inputs import Inputs

Suite = Literal["quick", "full"]
Scalar = str | int | float | bool | None
Param = Scalar | list[Scalar]
TAGS = frozenset(
    {"grid", "edge", "drawn", "captured", "special", "poison", "strided", "empty", "bad-input", "gradient", "plugin"}
)
_WORDS: dict[str, Scalar] = {"none": None, "yes": True, "no": False}


@dataclass(frozen=True)
class Case:
    """One question to put to an implementation.

    The id spells out the recipe, so that `find(id)` gives the case back without any list; the seed and the
    check digits after `~` follow from the rest of the id.
    """

    op: str
    id: str
    dtype: str
    params: Mapping[str, Param] = field(hash=False)
    seed: int
    tags: frozenset[str]
    suite: Suite = "quick"

    def build(self, device: str | torch.device = "cpu") -> Inputs:
        """The inputs on `device`, bit-identical for one id on every machine, Python and torch in range."""
        from hal.conformance.cases import family

        return family(self.op).build(self, device)

    @property
    def gradient(self) -> bool:
        """Whether the gradients are judged, rather than the results."""
        return self.params.get("grad") is True

    @property
    def bad_input(self) -> bool:
        """Whether the call must raise a typed error."""
        return "bad-input" in self.tags


def make(op: str, dtype: str, params: Mapping[str, Param], tags: Iterable[str], suite: Suite = "quick") -> Case:
    """The case of a recipe; `params` holds what differs from the family's defaults."""
    body = f"{op}/{dtype}/{encode(params)}"
    digest = hashlib.blake2b(body.encode(), digest_size=8).hexdigest()
    known = frozenset(tags)
    if known - TAGS:
        raise ArgumentError(f"unknown case tags {sorted(known - TAGS)}; known are {sorted(TAGS)}")
    # 63 bits: seeds are int64 on the way through torch.
    return Case(op, f"{body}~{digest[:4]}", dtype, dict(params), int(digest, 16) >> 1, known, suite)


def cases(op: str | None = None, suite: Suite = "quick", backend: str | None = None) -> list[Case]:
    """All cases of a suite, of one op or of all; `full` contains `quick`. Plug-ins' own cases come last."""
    from hal.conformance.cases import collect

    return collect(op, suite, backend)


def find(case_id: str) -> Case:
    """The case that an id names, whether or not a suite lists it. Raises ArgumentError for a damaged id."""
    from hal.conformance.cases import families, listed

    known = listed(case_id)
    if known is not None:
        return known
    head, tilde, digits = case_id.rpartition("~")
    parts = head.split("/", 2)
    if not tilde or len(parts) != 3:
        raise ArgumentError(f"{case_id!r} is no case id: expected op/dtype/recipe~check, as reports print it")
    op, dtype, text = parts
    if op not in families():
        raise ArgumentError(f"case id names the op {op!r}; ops with cases are {', '.join(sorted(families()))}")
    found = make(op, dtype, decode(text), {"bad-input"} if "bad=" in text else {"drawn"}, "full")
    if found.id != case_id:
        raise ArgumentError(
            f"case id {case_id!r} is damaged: its recipe has check digits {found.id[-4:]}, not {digits}; "
            "copy it whole from the report"
        )
    return found


def encode(params: Mapping[str, Param]) -> str:
    """A recipe as printable, shell-safe text: `T=7,F=576,window=:3:none`."""
    if not params:
        return "plain"
    return ",".join(f"{key}={_encode(value)}" for key, value in params.items())


def decode(text: str) -> dict[str, Param]:
    """The inverse of `encode`."""
    if text == "plain":
        return {}
    params: dict[str, Param] = {}
    for item in text.split(","):
        key, equals, value = item.partition("=")
        if not key or not equals or not value:
            raise ArgumentError(f"recipe {text!r} has the entry {item!r}; expected key=value")
        params[key] = _decode(value)
    return params


def _encode(value: Param) -> str:
    if isinstance(value, list | tuple):
        return "".join(":" + _encode(item) for item in value) or "empty"
    for word, meaning in _WORDS.items():
        if value is meaning:
            return word
    if isinstance(value, float) and math.isfinite(value):
        return repr(value)
    if isinstance(value, int):
        return str(value)
    if isinstance(value, str) and isinstance(_decode(value), str) and not set(value) & set(" ,=~/:'\"$&;|<>*?()[]"):
        return value
    raise ArgumentError(f"{value!r} cannot stand in a case id: plain words, numbers, None and flat lists can")


def _decode(text: str) -> Param:
    if text == "empty":
        return []
    if text.startswith(":"):
        items = [_decode(item) for item in text[1:].split(":")]
        return [item for item in items if not isinstance(item, list)]
    if text in _WORDS:
        return _WORDS[text]
    if not text.lstrip("-")[:1].isdigit():
        return text
    for number in (int, float):
        with contextlib.suppress(ValueError):
            return number(text)
    raise ArgumentError(f"{text!r} in a case id is neither a number nor a word")
