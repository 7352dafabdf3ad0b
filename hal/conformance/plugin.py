"""The pytest plug-in: what `pytest --pyargs hal.conformance` will judge, and its header and summary.

Its options are declared in the top-level module _hal_pytest, which loads this one when they are used.
"""

from __future__ import annotations

from collections import Counter
from functools import cache
from typing import Any

import pytest
import torch

from hal.conformance import runner
from hal.conformance.environment import environment
from hal.conformance.report import Result, worst
from hal.conformance.site import Site, settings_in_force
from hal.errors import ArgumentError, HalError
from hal.settings import current

RESULT = pytest.StashKey[Result]()


@cache
def plan_for(
    backend: str | None,
    suite: str | None,
    ops: tuple[str, ...],
    implementations: tuple[str, ...],
    cases: tuple[str, ...],
) -> runner.Plan:
    """The plan of the options; a usage error, in pytest's sense, for what cannot be run."""
    try:
        if suite not in (None, "quick", "full"):
            raise ArgumentError(f"--hal-suite={suite}: the suites are quick and full.")
        site = Site.of(backend or current().backend)
        return runner.plan(site, "full" if suite == "full" else "quick", ops, implementations, cases)
    except HalError as error:
        raise pytest.UsageError(f"{type(error).__name__}: {error}") from error


def plan_of(config: pytest.Config) -> runner.Plan:
    """The plan that this pytest run's options ask for."""
    many = [tuple(config.getoption(name) or ()) for name in ("hal_op", "hal_impl", "hal_case")]
    return plan_for(config.getoption("hal_backend"), config.getoption("hal_suite"), *many)


def pytest_configure(config: pytest.Config) -> None:
    """Refuse what cannot be run before anything is collected; share the cores out among pytest-xdist's workers."""
    plan_of(config)
    workers = getattr(config, "workerinput", {}).get("workercount", 1)
    torch.set_num_threads(max(1, torch.get_num_threads() // workers))


def pytest_report_header(config: pytest.Config) -> list[str]:
    what = plan_of(config)
    target, found = what.site.target, environment(settings_in_force(), what.site.plugin_failures())
    commit = f", commit {found.git_commit[:12]}{' (changed)' if found.git_dirty else ''}" if found.git_commit else ""
    lines = [
        f"hal: {found.hal}{commit}, torch {found.torch}, suite {what.request.suite}, {what.size} judgements",
        f"hal target: backend {target.backend} on {target.device}, {target.descriptor or 'unknown device'}"
        + (", SIMULATED: shows that conventions agree, not how a chip computes" if target.simulated else ""),
        "hal settings: " + _pairs(found.settings),
        "hal numerics: " + _pairs(found.numerics),
    ]
    if what.missing:
        lines.append(f"hal: no implementation of {', '.join(what.missing)}")
    return lines + [f"hal: plug-in left out: {failure}" for failure in found.plugin_failures]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Any:
    report = yield
    result = item.stash.get(RESULT, None)
    if result is not None and report.when == "call":
        # user_properties travel between processes under pytest-xdist; report attributes need not
        report.user_properties.append(("hal", result.model_dump(mode="json")))
    return report


def pytest_terminal_summary(terminalreporter: Any) -> None:
    results = [
        Result.model_validate(value)
        for reports in terminalreporter.stats.values()
        for report in reports
        for name, value in getattr(report, "user_properties", ())
        if name == "hal"
    ]
    if not results:
        return
    by_implementation: dict[str, list[Result]] = {}
    for result in results:
        by_implementation.setdefault(result.implementation, []).append(result)
    terminalreporter.section("hal conformance")
    for name, members in sorted(by_implementation.items()):
        share = worst(member.share for member in members)
        counted = Counter(member.status for member in members)
        told = ", ".join(f"{count} {status}" for status, count in sorted(counted.items()))
        terminalreporter.line(f"{name}: {told}; worst share of the budget {'–' if share is None else f'{share:.3f}'}")


def _pairs(values: dict[str, str]) -> str:
    return ", ".join(f"{name}={value or 'none'}" for name, value in values.items())
