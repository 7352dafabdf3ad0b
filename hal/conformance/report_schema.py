"""The JSON schema of the report, made from its models; docs/report.schema.json is what it says."""

from __future__ import annotations

import json
from typing import Any

from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import core_schema

from hal.conformance.report import VERSION, Report

__all__ = ["report_schema", "schema_text"]

_DIALECT = "https://json-schema.org/draft/2020-12/schema"


class _Schema(GenerateJsonSchema):
    def float_schema(self, schema: core_schema.FloatSchema) -> JsonSchemaValue:
        # as reports are written: JSON has no such numbers
        return {"anyOf": [{"type": "number"}, {"enum": ["NaN", "Infinity", "-Infinity"]}]}


def report_schema() -> dict[str, Any]:
    """The schema of the reports that this hal writes."""
    found = Report.model_json_schema(mode="serialization", schema_generator=_Schema)
    found["properties"]["version"] = {"const": VERSION, "title": "Version"}
    return {"$schema": _DIALECT, **found, "title": f"hal conformance report, version {VERSION}"}


def schema_text() -> str:
    """The schema as the published file holds it."""
    return json.dumps(report_schema(), indent=1, ensure_ascii=False, sort_keys=True) + "\n"
