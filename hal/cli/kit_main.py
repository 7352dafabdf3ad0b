"""The first thing that runs in a kit: this file is its `__main__.py`.

Until the kit has unpacked itself it may import nothing but the standard library, and it must be readable for every
Python 3, so that an old one gets a sentence instead of a traceback.
"""

from __future__ import annotations

import argparse
import atexit
import importlib.util
import json
import os
import platform
import re
import shutil
import sys
import tempfile
import time
import zipfile
from pathlib import Path

LOWEST = (3, 10)
COULD_NOT_RUN = 2
_WHEEL = re.compile(r"wheels/[^/]+?-(?P<python>cp3\d+)-(?P<abi>[^-]+)-(?P<platform>[^-/]+)\.whl")


def main() -> int:
    """Unpack, judge, write the results; the exit status is the worst of the reports'."""
    if sys.version_info < LOWEST:
        return refuse(f"this kit needs Python 3.10 or later, and this is {platform.python_version()}")
    arguments = parser().parse_args(_words(sys.argv[1:]))
    if importlib.util.find_spec("torch") is None:
        return refuse(f"this kit needs a Python that has torch 2.10 or later, and {sys.executable} has none")
    kit = zipfile.ZipFile(sys.argv[0])
    built = json.loads(kit.read("kit.json"))
    chosen = wheels(kit.namelist())
    if chosen is None:
        return refuse(
            f"this kit was built for CPython {', '.join(built['pythons'])} on Linux with glibc and "
            f"{', '.join(built['machines'])}, and this is {platform.python_implementation()} "
            f"{platform.python_version()} on {platform.system()} {platform.machine()}; build one with "
            "'hal conformance kit --python … --machine …'"
        )
    unpack(kit, chosen)
    return judge(arguments, built)


def parser() -> argparse.ArgumentParser:
    """The kit's options, named as those of `hal conformance run`."""
    found = argparse.ArgumentParser(
        prog="hal-kit.pyz",
        description="Judge this machine's backends with hal's conformance suite and write one file to send back.",
        epilog="A report's repeat command works here with 'python hal-kit.pyz' in the place of 'hal'. "
        "Exit status: 0 all good, 1 failures, 2 could not run, or not all of it.",
    )
    found.add_argument(
        "--backend", action="append", metavar="NAME", help="such as portable:npu; default: all there are"
    )
    found.add_argument("--suite", choices=("quick", "full"), default="quick")
    found.add_argument("--op", action="append", default=[], metavar="OP", help="only this operator")
    found.add_argument("--impl", action="append", default=[], metavar="IMPL", help="only this implementation")
    found.add_argument("--case", action="append", default=[], metavar="ID", help="only this case, of any suite")
    found.add_argument("--minutes", type=float, default=9.5, metavar="N", help="stop judging after this long (9.5)")
    found.add_argument("--workers", type=int, metavar="N", help="processes that judge; default: by device")
    found.add_argument("-o", "--output", type=Path, default=Path("hal-results.zip"), metavar="PATH")
    return found


def wheels(names: list[str]) -> list[str] | None:
    """The wheels inside the kit that fit this interpreter; None if it has none."""
    if (
        sys.implementation.name != "cpython"
        or not sys.platform.startswith("linux")
        or platform.libc_ver()[0] != "glibc"
    ):
        return None
    here = f"cp3{sys.version_info[1]}"
    fitting: list[str] = []
    for name in names:
        found = _WHEEL.fullmatch(name)
        if found is None or not found["platform"].endswith(f"_{platform.machine()}"):
            continue
        if found["python"] == found["abi"] == here or (
            found["abi"] == "abi3" and int(found["python"][3:]) <= sys.version_info[1]
        ):
            fitting.append(name)
    return fitting if any("pydantic_core" in name for name in fitting) else None


def unpack(kit: zipfile.ZipFile, chosen: list[str]) -> None:
    """Put hal and its needs into a temporary folder, at the head of the path, until this process ends."""
    folder = tempfile.mkdtemp(prefix="hal-kit-")
    owner = os.getpid()

    def clean() -> None:
        if os.getpid() == owner:
            shutil.rmtree(folder, ignore_errors=True)

    atexit.register(clean)
    for name in kit.namelist():
        if name.startswith("site/"):
            kit.extract(name, folder)
    site = os.path.join(folder, "site")
    for name in chosen:
        with kit.open(name) as stream, zipfile.ZipFile(stream) as wheel:
            wheel.extractall(site)
    # in the place of the kit itself, so that its processes find everything as files
    sys.path[0] = site


def judge(arguments: argparse.Namespace, built: dict[str, object]) -> int:
    """Judge every backend in turn, each for its part of the time that is left."""
    began = time.monotonic()
    try:
        import pydantic_core  # noqa: F401 - compiled: says early whether such files may run here
    except ImportError as error:
        return refuse(
            f"the kit's compiled files cannot be loaded from {sys.path[0]} ({error}); if that file system allows no "
            "programs, set TMPDIR to a folder on one that does"
        )
    from hal import files
    from hal.conformance import kit_run
    from hal.conformance.overview import counted, verdict
    from hal.errors import HalError

    wish = kit_run.Wish(
        arguments.suite, tuple(arguments.op), tuple(arguments.impl), tuple(arguments.case), arguments.workers
    )
    outcomes = []
    try:
        files.check_writable(arguments.output)
        backends = arguments.backend or kit_run.backends()
        say(f"hal {built['hal']} judges {', '.join(backends)}")
        for position, backend in enumerate(backends):
            left = arguments.minutes * 60 - (time.monotonic() - began)
            share = left / (len(backends) - position)
            outcome = kit_run.judge(backend, wish, share, built, say)
            outcomes.append(outcome)
            report = outcome.report
            told = outcome.problem or ""
            if report is not None:
                told = f"{verdict(report)[1]} ({counted(dict(report.counts))})"
            print(f"{backend}: {told}", flush=True)
            for result in report.bad if report is not None and wish.cases else ():
                print("\n".join(f"  {why}" for why in result.why))
    except KeyboardInterrupt:
        say("interrupted; writing what there is")
    except HalError as error:
        return refuse(f"{type(error).__name__}: {error}")
    try:
        missed = kit_run.write_results(outcomes, arguments.output, built, diagnosis())
    except HalError as error:
        return refuse(f"{type(error).__name__}: {error}")
    if missed:
        print(f"left out, for want of room: {', '.join(missed)}")
    print(f"wrote {arguments.output}, {arguments.output.stat().st_size:,} bytes: send this file back")
    statuses = [outcome.exit_status() for outcome in outcomes]
    if 1 in statuses:
        return 1
    return max(statuses) if len(statuses) == len(backends) else COULD_NOT_RUN


def diagnosis() -> str | None:
    """What the machine has, as `hal doctor --json` says it; it must not cost the results."""
    try:
        from hal.doctor import examine

        return examine(timeout_s=20.0).model_dump_json(indent=1)
    except Exception as error:
        say(f"no diagnosis: {type(error).__name__}: {error}")
        return None


def say(text: str) -> None:
    """A line of progress."""
    print(text, file=sys.stderr, flush=True)


def refuse(text: str) -> int:
    """One line on why nothing can run."""
    say(text)
    return COULD_NOT_RUN


def _words(words: list[str]) -> list[str]:
    """The words after 'conformance run', which a repeat command has."""
    return words[2:] if words[:2] == ["conformance", "run"] else words


if __name__ == "__main__":
    sys.exit(main())
