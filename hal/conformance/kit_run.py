"""What a kit does where it lands: judge every backend of the machine, within a time, into one file to send back."""

from __future__ import annotations

import io
import json
import signal
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from hal import registry, selection
from hal.conformance import record, runner
from hal.conformance.archive import write_bundle
from hal.conformance.case import Suite
from hal.conformance.html import to_html
from hal.conformance.markdown import to_markdown
from hal.conformance.report import Report, Result
from hal.conformance.site import Site
from hal.conformance.workers import cores
from hal.errors import HalError
from hal.files import write_whole

__all__ = ["LIMIT", "Outcome", "Wish", "backends", "judge", "write_results"]

FORMAT = "hal-kit-results"
VERSION = 1
LIMIT = 20_000_000
"""Bytes of the file to send back."""
_EVERY_S = 10.0

Say = Callable[[str], None]


@dataclass(frozen=True)
class Wish:
    """What to judge; empty means everything. workers None chooses by device."""

    suite: Suite = "quick"
    ops: tuple[str, ...] = ()
    implementations: tuple[str, ...] = ()
    cases: tuple[str, ...] = ()
    workers: int | None = None


@dataclass(frozen=True)
class Outcome:
    """How one backend did: its report and its bundle, or why there is none."""

    backend: str
    report: Report | None = None
    bundle: bytes | None = None
    problem: str | None = None

    def exit_status(self) -> int:
        """As a report's; 2 where there is none."""
        return 2 if self.report is None else self.report.exit_status()


def backends() -> list[str]:
    """What a machine should be judged on: native backends of its accelerator, `portable` on it, then the CPU."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return ["cpu", f"{registry.PORTABLE}:cpu"]
    native = selection.auto_backend(accelerator)
    return list(dict.fromkeys([native, f"{registry.PORTABLE}:{accelerator.type}", "cpu"]))


def judge(backend: str, wish: Wish, seconds: float, built: Mapping[str, Any], say: Say) -> Outcome:
    """Judge one backend for at most about `seconds`; what is not judged by then makes the report incomplete.

    built: the kit's manifest, for the commit that its hal is of. Never raises for what the backend does.
    """
    try:
        site = Site.of(backend)
        what = runner.plan(site, wish.suite, wish.ops, wish.implementations, wish.cases)
    except HalError as error:
        return Outcome(backend, problem=f"{type(error).__name__}: {error}")
    workers = _workers(site) if wish.workers is None else wish.workers
    say(f"{backend} on {site.target.device}, {site.target.descriptor or 'unknown device'}: {what.size} judgements")
    until = time.monotonic() + seconds
    try:
        with _ended_after(seconds):
            report = runner.run(what, workers, _progress(say, backend))
    except HalError as error:  # the processes that judge could not start
        return Outcome(backend, problem=f"{type(error).__name__}: {error}")
    commit = {name: built.get(name) for name in ("git_commit", "git_dirty")}
    report = report.model_copy(update={"environment": report.environment.model_copy(update=commit)})
    return Outcome(backend, report, _bundle(site, report, workers, until - time.monotonic(), say))


def write_results(
    outcomes: Sequence[Outcome], path: Path, built: Mapping[str, Any], diagnosis: str | None
) -> list[str]:
    """Write everything into one zip of at most LIMIT bytes; the names that did not fit.

    A report in JSON and a bundle for each backend, one HTML page and one Markdown text for all, and what the machine
    is (`doctor.json`). Reports go in first, so that they are the last to be left out.
    """
    reports = [outcome.report for outcome in outcomes if outcome.report is not None]
    entries: dict[str, bytes] = {}
    for outcome in outcomes:
        if outcome.report is not None:
            entries[f"{_file(outcome.backend)}.json"] = (outcome.report.model_dump_json(indent=1) + "\n").encode()
    if diagnosis is not None:
        entries["doctor.json"] = diagnosis.encode()
    if reports:
        entries["report.html"] = to_html(reports).encode()
        entries["report.md"] = to_markdown(reports).encode()
    for outcome in outcomes:
        if outcome.bundle is not None:
            entries[f"{_file(outcome.backend)}.hal"] = outcome.bundle
    taken, left = _fitting(entries)
    about = {
        "format": FORMAT,
        "version": VERSION,
        "kit": dict(built),
        "backends": {outcome.backend: outcome.problem or "judged" for outcome in outcomes},
        "left_out": left,
    }
    taken["about.json"] = (json.dumps(about, indent=1) + "\n").encode()
    write_whole(path, _zip(taken))
    return left


def _workers(site: Site) -> int:
    """Never in this process: a crash or a hanging kernel must not take the report along."""
    if site.target.device != "cpu":
        return 1
    return cores()


def _progress(say: Say, backend: str) -> runner.Progress:
    bad, last = 0, time.monotonic()

    def step(result: Result, done: int, planned: int) -> None:
        nonlocal bad, last
        if done == planned:
            # from here on the report is only written down, which an alarm must not cut short
            signal.setitimer(signal.ITIMER_REAL, 0)
        bad += result.status in ("failed", "mistrusted")
        if time.monotonic() - last > _EVERY_S:
            last = time.monotonic()
            say(f"{backend}: {done} of {planned}, {bad} bad, at {result.op}")

    return step


@contextmanager
def _ended_after(seconds: float) -> Iterator[None]:
    """KeyboardInterrupt after that time, which a run takes as its early end."""

    def ring(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 0.1))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _bundle(site: Site, report: Report, workers: int, seconds: float, say: Say) -> bytes | None:
    """The run as a bundle, where the time that is left allows it; the report says all but the digests."""
    try:
        with _ended_after(seconds), tempfile.TemporaryDirectory(prefix="hal-kit-") as folder:
            path = Path(folder) / "run.hal"
            write_bundle(record.bundled(site, report, workers), path)
            return path.read_bytes()
    except (KeyboardInterrupt, HalError, OSError) as error:
        say(f"{report.target.backend}: no bundle ({str(error) or 'no time left'}); the report is whole without it")
        return None


def _fitting(entries: Mapping[str, bytes]) -> tuple[dict[str, bytes], list[str]]:
    taken: dict[str, bytes] = {}
    left: list[str] = []
    size = 10_000  # about.json and the archive's own directory
    for name, data in entries.items():
        packed = len(_zip({name: data}))
        if size + packed > LIMIT:
            left.append(name)
        else:
            size += packed
            taken[name] = data
    return taken, left


def _zip(members: Mapping[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for name, data in members.items():
            archive.writestr(zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0)), data, zipfile.ZIP_DEFLATED)
    return buffer.getvalue()


def _file(backend: str) -> str:
    return "".join(c if c.isalnum() or c in "-_" else "-" for c in backend)
