"""The golden traces: what the adapter asks of CANN, on each chip and version, is what was reviewed."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest

golden = runpy.run_path(str(Path(__file__).with_name("golden.py")))
FOLDER = golden["FOLDER"]


def reviewed(target):
    """The traces of one target, out of the files."""
    found = {}
    for file in sorted(FOLDER.glob("*.json")):
        for name, alike in json.loads(file.read_text(encoding="utf-8")).items():
            for entry in alike:
                if target in entry["on"]:
                    found[name] = entry["events"]
    return found


@pytest.mark.parametrize(("soc", "cann"), golden["TARGETS"])
def test_each_call_is_made_as_it_was_reviewed(soc, cann):
    expected, found = reviewed(f"{soc} CANN {cann}"), golden["simulated"](soc, cann)
    assert sorted(found) == sorted(expected)
    assert len(found) > 30
    for name, events in found.items():
        assert events == expected[name], f"{name} on {soc}: review it, then regenerate as golden.py says"


def test_there_is_a_file_for_each_operator_with_an_implementation_on_ascend():
    from hal import registry
    from hal.contract import OPS

    expected = {op for op in OPS if registry.implementations("ascend", op)}
    assert {file.stem for file in FOLDER.glob("*.json")} == expected
