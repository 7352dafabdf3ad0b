"""The published JSON schema of the report: current, and true of what hal writes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from made_reports import hostile, mixed, report, result

from hal.conformance.report import VERSION
from hal.conformance.report_schema import report_schema, schema_text

PUBLISHED = Path(__file__).resolve().parents[2] / "docs" / "report.schema.json"
KINDS = {"string": str, "object": dict, "array": list, "boolean": bool, "null": type(None)}
NOTES = {"title", "description", "default", "$schema", "$defs", "format"}


def fault(value, schema, root, at="the document"):
    """Where and why a value breaks a schema, or None. Knows the keywords that pydantic writes, and refuses others."""
    if "$ref" in schema:
        return fault(value, root["$defs"][schema["$ref"].rpartition("/")[2]], root, at)
    for word, told in sorted(schema.items(), key=lambda pair: pair[0] != "type"):
        if word == "type":
            number = isinstance(value, int | float) and not isinstance(value, bool)
            right = {"number": number, "integer": number and isinstance(value, int)}.get(told)
            if not (isinstance(value, KINDS[told]) if right is None else right):
                return f"{at}: {value!r} is no {told}"
        elif word == "enum" and value not in told:
            return f"{at}: {value!r} is none of {told}"
        elif word == "const" and value != told:
            return f"{at}: {value!r} is not {told!r}"
        elif word == "anyOf" and all(fault(value, one, root, at) for one in told):
            return f"{at}: {value!r} fits nothing"
        elif word == "required" and set(told) - set(value):
            return f"{at}: lacks {set(told) - set(value)}"
        elif word == "properties":
            for name in set(told) & set(value):
                if found := fault(value[name], told[name], root, f"{at}.{name}"):
                    return found
        elif word == "additionalProperties":
            for name in set(value) - set(schema.get("properties", {})):
                found = f"{at}: {name} is unknown" if told is False else fault(value[name], told, root, f"{at}.{name}")
                if found:
                    return found
        elif word == "items":
            for i, item in enumerate(value):
                if found := fault(item, told, root, f"{at}[{i}]"):
                    return found
        else:
            assert word in {*NOTES, "enum", "const", "anyOf", "required"}, f"the test knows no {word}"
    return None


def written(made):
    return json.loads(made.model_dump_json())


def test_the_published_schema_is_the_one_of_this_code():
    assert PUBLISHED.read_text() == schema_text(), "run `make docs` and commit docs/report.schema.json"


@pytest.mark.parametrize(
    "made",
    [mixed(), hostile(), report(), report(result(share=float("inf")), result(share=float("nan")), offers=())],
    ids=["mixed", "hostile", "empty", "infinite"],
)
def test_what_hal_writes_fits_the_schema(made):
    assert fault(written(made), report_schema(), report_schema()) is None


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (lambda d: d.update(version=VERSION + 1), "version"),
        (lambda d: d.update(format="other"), "format"),
        (lambda d: d.pop("results"), "results"),
        (lambda d: d.update(more=1), "more"),
        (lambda d: d["results"][0].update(status="fine"), "status"),
        (lambda d: d["results"][0].update(share="much"), "share"),
        (lambda d: d["offers"][0]["declares"].update(run_to_run="yes"), "run_to_run"),
    ],
)
def test_what_is_no_report_does_not_fit_the_schema(spoil, told):
    document = written(mixed())
    spoil(document)
    assert told in (fault(document, report_schema(), report_schema()) or "")
