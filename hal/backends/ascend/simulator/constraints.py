"""Documented constraints of the operators, as data: what a call must fulfil, who says so, and a check."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from hal.backends.ascend.simulator.operators import Operator, import_all
from hal.backends.ascend.simulator.settings import SimulatorSettings
from hal.backends.ascend.simulator.socs import SOCS
from hal.errors import PluginError

__all__ = ["A2", "A3", "A5", "P310", "Check", "Constraint", "bind", "load"]

Check = Callable[..., "str | None"]

P310, A2, A3, A5 = (
    frozenset(name for name, soc in SOCS.items() if soc.family == family) for family in ("310P", "A2", "A3", "950")
)


@dataclass(frozen=True)
class Constraint:
    """One rule for one operator or several.

    rule: what must hold, as a statement. page: the document page, or torch_npu function, that says so.
    enforced_by: `wheel` = torch_npu's own host code refuses; `document` = the page says it; `field` = seen on devices.
    check: takes some of the operator's parameters, by name; None if the rule holds, else what was found instead. Only
    rows of the wheel go without. values: the check reads values of tensors, so it runs when the call does, in a graph
    at each replay; the others run when the call is prepared. cann: versions for which it holds, such as ">=8.0,<9.0"
    ("" = all). socs: for which chips, by the names of socs.SOCS (None = all).
    """

    operator: str | tuple[str, ...]
    rule: str
    page: str
    enforced_by: Literal["wheel", "document", "field"]
    check: Check | None = None
    values: bool = False
    cann: str = ""
    socs: frozenset[str] | None = None

    def __post_init__(self) -> None:
        if self.check is None and self.enforced_by != "wheel":
            raise PluginError(f"constraint {self.rule!r} of {self.operators[0]} needs a check")
        strange = sorted((self.socs or frozenset()) - set(SOCS))
        if strange:
            raise PluginError(f"constraint {self.rule!r} names unknown chips {', '.join(strange)}")
        _clauses(self.cann)

    @property
    def operators(self) -> tuple[str, ...]:
        return (self.operator,) if isinstance(self.operator, str) else self.operator

    def holds_for(self, settings: SimulatorSettings) -> bool:
        """Whether the rule is one of the chip and the CANN version that are simulated."""
        version = _version(settings.cann)
        here = self.socs is None or settings.soc in {SOCS[name] for name in self.socs}
        return here and all(compare(version, bound) for compare, bound in _clauses(self.cann))

    def to_dict(self) -> dict[str, Any]:
        return {
            "operators": list(self.operators),
            "rule": self.rule,
            "page": self.page,
            "enforced_by": self.enforced_by,
            "cann": self.cann or None,
            "socs": None if self.socs is None else sorted(self.socs),
            "checked": self.check is not None,
            "values": self.values,
        }


_COMPARISONS: dict[str, Callable[[Any, Any], bool]] = {
    ">=": lambda a, b: a >= b,
    "<=": lambda a, b: a <= b,
    ">": lambda a, b: a > b,
    "<": lambda a, b: a < b,
    "==": lambda a, b: a == b,
}


def _clauses(text: str) -> list[tuple[Callable[[Any, Any], bool], tuple[int, ...]]]:
    found = []
    for clause in filter(None, (part.strip() for part in text.split(","))):
        match = re.fullmatch(r"(>=|<=|==|>|<)\s*(\d+\.\d+[A-Za-z0-9.]*)", clause)
        if match is None:
            raise PluginError(f"{clause!r} is no CANN version range; write clauses such as >=8.0,<9.0")
        found.append((_COMPARISONS[match[1]], _version(match[2])))
    return found


def _version(text: str) -> tuple[int, ...]:
    """A version as numbers that compare: 8.2.RC1 comes before 8.2."""
    parts = []
    for part in text.split("."):
        release = re.fullmatch(r"[A-Za-z]+(\d*)", part)
        digits = re.match(r"\d+", part)
        parts.append(int(release[1] or 0) - 1000 if release else int(digits[0]) if digits else 0)
    return (*parts, *[0] * (6 - len(parts)))


def load() -> tuple[Constraint, ...]:
    """All constraints: the ROWS of every module of `rules`, in order."""
    return tuple(row for module in import_all("hal.backends.ascend.simulator.rules") for row in module.ROWS)


def bind(
    rows: Iterable[Constraint], operators: Mapping[str, Operator], settings: SimulatorSettings
) -> dict[str, list[Callable[[Sequence[Any]], None]]]:
    """For each operator with rules for what is simulated, the checks to run on its decoded arguments.

    A check raises ValueError with the rule's text where the rule does not hold. Raises PluginError for a row whose
    check asks for a parameter that its operator has not.
    """
    bound: dict[str, list[Callable[[Sequence[Any]], None]]] = {}
    for row in rows:
        if row.check is None or not row.holds_for(settings):
            continue
        wanted = tuple(inspect.signature(row.check).parameters)
        for name in row.operators:
            operator = operators.get(name)
            if operator is None:
                continue
            strange = [parameter for parameter in wanted if parameter not in operator.parameters]
            if strange:
                raise PluginError(
                    f"constraint {row.rule!r} checks {', '.join(strange)}, but {name} has "
                    f"{', '.join(operator.parameters)}"
                )
            positions = tuple(operator.parameters.index(parameter) for parameter in wanted)
            bound.setdefault(name, []).append(_bound(row, row.check, positions))
    return bound


def _bound(row: Constraint, check: Check, positions: tuple[int, ...]) -> Callable[[Sequence[Any]], None]:
    def run(values: Sequence[Any]) -> None:
        found = check(*[values[position] for position in positions])
        if found is not None:
            raise ValueError(f"{row.rule}, but found {found} (page {row.page})")

    return run
