"""What the page of operators on Ascend says is called is what torch_npu was recorded to call (simulated)."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from hal.backends.ascend import mapping
from hal.backends.ascend.chips import A2, A3, A5, P310
from hal.backends.ascend.simulator import constraints

TRACES = Path(__file__).resolve().parents[1] / "ascend" / "npu" / "traces"
# The page is about CANN 8.5.0.
TARGETS = {A2: "910B3 CANN 8.5.0", A3: "910_9391 CANN 8.5.0", A5: "950PR CANN 8.5.0", P310: "310P3 CANN 8.5.0"}


def recorded(op: str, name: str, architecture: str) -> set[str]:
    """The operators of CANN that an implementation called on a chip, in all recorded calls of it."""
    found: set[str] = set()
    for entries in json.loads((TRACES / f"{op}.json").read_text()).values():
        for entry in entries:
            if TARGETS[architecture] in entry["on"] and entry["events"][0] == name:
                found.update(re.findall(r"aclnn\w+", " ".join(entry["events"])))
    return found


def routes() -> list[tuple[str, str, str]]:
    by_name = {(i.op, i.name): i for op, _ in mapping.ROUTES for i in mapping.implementations(op)}
    return [(op, name, chip) for op, name in mapping.ROUTES for chip in mapping.chips(by_name[op, name])]


def test_each_native_implementation_but_tritons_has_a_route_and_no_other_has():
    native = {(i.op, i.name) for i in mapping.IMPLEMENTATIONS if i.kind == "native" and i.name != "triton"}
    assert set(mapping.ROUTES) == native


@pytest.mark.parametrize(("op", "name", "chip"), routes())
def test_what_a_route_names_was_called_on_that_chip(op, name, chip):
    wanted = {step.on(chip) for step in mapping.ROUTES[op, name] if step.role == "forward"}
    assert wanted <= recorded(op, name, chip)


@pytest.mark.parametrize(("op", "name", "chip"), routes())
def test_an_operator_with_rules_that_was_called_is_in_the_route(op, name, chip):
    ruled = {name for row in constraints.load() for name in row.operators}
    assert recorded(op, name, chip) & ruled <= {step.on(chip) for step in mapping.ROUTES[op, name]}
