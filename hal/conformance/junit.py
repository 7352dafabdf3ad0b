"""A report as JUnit XML: a suite per op, a test case per case and implementation.

Failed and mistrusted are failures; unsupported, skipped and waived are skipped, never passed.
"""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from collections import defaultdict
from pathlib import Path

from hal.conformance.report import BAD, Report, Result
from hal.files import write_whole

# XML 1.0 has no place for these, even escaped.
_ILLEGAL = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def to_junit(report: Report) -> str:
    """The report as a JUnit document."""
    by_op: dict[str, list[Result]] = defaultdict(list)
    for result in report.results:
        by_op[result.op].append(result)
    root = ET.Element("testsuites", _totals(report.results, "hal conformance"))
    for op, results in by_op.items():
        suite = ET.SubElement(root, "testsuite", _totals(results, op) | {"timestamp": report.started})
        properties = ET.SubElement(suite, "properties")
        for name, value in _properties(report).items():
            ET.SubElement(properties, "property", {"name": name, "value": _clean(value)})
        for result in results:
            _add_case(suite, report, result)
    errors = [("waiver", problem) for problem in report.waiver_problems]
    if not report.complete:
        errors.append(("interrupted", f"interrupted after {len(report.results)} of {report.planned} results"))
    if errors:
        root.set("errors", str(len(errors)))
        totals = {"tests": str(len(errors)), "failures": "0", "errors": str(len(errors)), "skipped": "0"}
        suite = ET.SubElement(root, "testsuite", {"name": "run", "time": "0.000"} | totals)
        for kind, message in errors:
            case = ET.SubElement(suite, "testcase", {"classname": "run", "name": "whole run", "time": "0.000"})
            ET.SubElement(case, "error", {"message": _clean(message), "type": kind})
    ET.indent(root)
    return f'<?xml version="1.0" encoding="utf-8"?>\n{ET.tostring(root, encoding="unicode")}\n'


def write_junit(report: Report, path: Path) -> None:
    """Write the report as JUnit XML, whole or not at all."""
    write_whole(path, to_junit(report))


def _add_case(suite: ET.Element, report: Report, result: Result) -> None:
    target = report.target
    case = ET.SubElement(
        suite,
        "testcase",
        {
            "classname": _clean(f"{target.backend}.{result.implementation}.{result.op}"),
            "name": _clean(f"{result.case} [{result.implementation}]"),
            "time": f"{result.seconds:.3f}",
        },
    )
    reasons = "; ".join(result.why)
    if result.status in BAD:
        failure = ET.SubElement(case, "failure", {"message": _clean(reasons), "type": result.status})
        failure.text = _clean("\n".join((*result.why, f"repeat: {result.repeat}")))
    elif result.status != "passed":
        ET.SubElement(case, "skipped", {"message": _clean(f"{result.status}: {reasons}"), "type": result.status})


def _totals(results: list[Result] | tuple[Result, ...], name: str) -> dict[str, str]:
    bad = sum(result.status in BAD for result in results)
    good = sum(result.status == "passed" for result in results)
    return {
        "name": name,
        "tests": str(len(results)),
        "failures": str(bad),
        "errors": "0",
        "skipped": str(len(results) - bad - good),
        "time": f"{sum(result.seconds for result in results):.3f}",
    }


def _properties(report: Report) -> dict[str, str]:
    environment, target = report.environment, report.target
    values = {
        "backend": target.backend,
        "device": target.device,
        "descriptor": target.descriptor or "unknown",
        "simulated": str(target.simulated).lower(),
        "hal": environment.hal,
        "git_commit": environment.git_commit or "unknown",
        "torch": environment.torch,
        **environment.software,
        "python": environment.python,
        "platform": environment.platform,
        "suite": report.request.suite,
    }
    return values | {f"numerics.{key}": value for key, value in environment.numerics.items()}


def _clean(text: str) -> str:
    return _ILLEGAL.sub("\ufffd", text)
