"""The pytest plug-in: what `pytest --pyargs hal.conformance` will judge, and its header and summary.

Its options are declared in the top-level module _hal_pytest, which loads this one when they are used.
"""

from __future__ import annotations

from collections import Counter
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from hal.conformance import runner
from hal.conformance.environment import environment
from hal.conformance.report import Report, Result, stack, worst
from hal.conformance.shards import Shard
from hal.conformance.site import Site, settings_in_force
from hal.conformance.waivers import Waiver, apply, read_waivers, waive
from hal.errors import ArgumentError, HalError
from hal.settings import current

RESULT = pytest.StashKey[Result]()
PROBLEMS = pytest.StashKey[tuple[str, ...]]()


@cache
def plan_for(
    backend: str | None,
    suite: str | None,
    ops: tuple[str, ...],
    implementations: tuple[str, ...],
    cases: tuple[str, ...],
    shard: str | None = None,
    devices: str | None = None,
    worker: int | None = None,
) -> runner.Plan:
    """The plan of the options; a usage error, in pytest's sense, for what cannot be run.

    devices: names with commas between them. worker: the number of pytest-xdist's worker, which takes device
    `worker` modulo their number; None outside of workers.
    """
    try:
        if suite not in (None, "quick", "full"):
            raise ArgumentError(f"--hal-suite={suite}: the suites are quick and full.")
        site = Site.of(backend or current().backend)
        named = [name.strip() for name in (devices or "").split(",") if name.strip()]
        if worker is not None and not named:
            named = site.devices()
        if named and (worker is not None or devices):
            for name in named:
                Site.of(site.target.backend, name)
            site = Site.of(site.target.backend, named[(worker or 0) % len(named)])
        share = None if shard is None else Shard.parse(shard)
        return runner.plan(site, "full" if suite == "full" else "quick", ops, implementations, cases, share)
    except HalError as error:
        raise pytest.UsageError(f"{type(error).__name__}: {error}") from error


def plan_of(config: pytest.Config) -> runner.Plan:
    """The plan that this pytest run's options ask for."""
    many = [tuple(config.getoption(name) or ()) for name in ("hal_op", "hal_impl", "hal_case")]
    worker = getattr(config, "workerinput", {}).get("workerid")
    return plan_for(
        config.getoption("hal_backend"),
        config.getoption("hal_suite"),
        *many,
        config.getoption("hal_shard"),
        config.getoption("hal_device"),
        None if worker is None else int(worker.removeprefix("gw")),
    )


@cache
def waivers_of(config: pytest.Config) -> tuple[Waiver, ...]:
    """The waivers of the file that --hal-waivers names."""
    path = config.getoption("hal_waivers")
    try:
        return () if path is None else read_waivers(Path(path))
    except HalError as error:
        raise pytest.UsageError(f"{type(error).__name__}: {error}") from error


def waived(config: pytest.Config, result: Result) -> Result:
    """The result, waived if it fails and a waiver covers it."""
    return waive(result, waivers_of(config), plan_of(config).site.target.backend, datetime.now(UTC).date())


def pytest_configure(config: pytest.Config) -> None:
    """Refuse what cannot be run before anything is collected; share the cores out among pytest-xdist's workers."""
    plan_of(config)
    waivers_of(config)
    workers = getattr(config, "workerinput", {}).get("workercount", 1)
    torch.set_num_threads(max(1, torch.get_num_threads() // workers))


def pytest_report_header(config: pytest.Config) -> list[str]:
    what = plan_of(config)
    target, found = what.site.target, environment(settings_in_force(), what.site.plugin_failures())
    commit = f", commit {found.git_commit[:12]}{' (changed)' if found.git_dirty else ''}" if found.git_commit else ""
    lines = [
        f"hal: {found.hal}{commit}, {stack(found)}, suite {what.request.suite}, {what.size} judgements",
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


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """A waiver that is over or not needed fails the run (decided where all results come together)."""
    if hasattr(session.config, "workerinput") or not waivers_of(session.config):
        return
    what, results = plan_of(session.config), _results(session.config)
    report = Report(
        started="",
        seconds=0.0,
        complete=len(results) == what.size,
        planned=what.size,
        request=what.request,
        target=what.site.target,
        environment=environment(settings_in_force(), what.site.plugin_failures()),
        results=results,
    )
    problems = apply(report, waivers_of(session.config), datetime.now(UTC).date()).waiver_problems
    session.config.stash[PROBLEMS] = problems
    if problems and session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def _results(config: pytest.Config) -> tuple[Result, ...]:
    """Those that the reports, also of other processes, brought here."""
    reporter: Any = config.pluginmanager.get_plugin("terminalreporter")
    return tuple(
        Result.model_validate(value)
        for reports in ([] if reporter is None else reporter.stats.values())
        for report in reports
        for name, value in getattr(report, "user_properties", ())
        if name == "hal"
    )


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    results = _results(config)
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
    devices = Counter(str(result.device) for result in results)
    if len(devices) > 1:
        terminalreporter.line("devices: " + ", ".join(f"{count} on {name}" for name, count in sorted(devices.items())))
    for problem in config.stash.get(PROBLEMS, ()):
        terminalreporter.line(f"WAIVER {problem}", red=True)


def _pairs(values: dict[str, str]) -> str:
    return ", ".join(f"{name}={value or 'none'}" for name, value in values.items())
