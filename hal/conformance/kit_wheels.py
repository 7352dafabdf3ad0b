"""The compiled packages of a kit: wheels for other Pythons and processors, from a folder or through pip."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from hal.errors import ArgumentError, FileError

__all__ = ["Target", "wheels"]

# glibc 2.17 and later: every Linux that has a torch of today.
_PLATFORM = "manylinux2014"
_NAME = re.compile(
    r"(?P<name>[^-]+)-(?P<version>[^-]+)(-\d[^-]*)?-(?P<python>[^-]+)-(?P<abi>[^-]+)-(?P<platform>[^-]+)\.whl"
)


@dataclass(frozen=True)
class Target:
    """A CPython (`3.11`) on a Linux processor (`aarch64`)."""

    python: str
    machine: str

    def __post_init__(self) -> None:
        if not re.fullmatch(r"3\.\d{1,2}", self.python):
            raise ArgumentError(f"{self.python!r} is no Python version; write one as 3.10, 3.11 or 3.12.")
        if not re.fullmatch(r"[a-z0-9_]+", self.machine):
            raise ArgumentError(f"{self.machine!r} is no processor's name; write one as x86_64 or aarch64.")

    @property
    def version(self) -> tuple[int, int]:
        return 3, int(self.python.partition(".")[2])

    @property
    def tag(self) -> str:
        return f"cp3{self.version[1]}"

    def takes(self, wheel: str, name: str, version: str) -> bool:
        """Whether a wheel, by its file name, is that package for this target."""
        found = _NAME.fullmatch(wheel)
        if found is None or _plain(found["name"]) != _plain(name) or found["version"] != version:
            return False
        platforms = found["platform"].split(".")
        if not any(p.startswith("manylinux") and p.endswith(f"_{self.machine}") for p in platforms):
            return False
        if found["abi"] == "abi3":
            return any(p.startswith("cp3") and int(p[3:]) <= self.version[1] for p in found["python"].split("."))
        return self.tag in found["python"].split(".") and found["abi"] == self.tag


def wheels(packages: Mapping[str, str], targets: Iterable[Target], folder: Path | None = None) -> dict[str, bytes]:
    """A wheel of each package (name: version) for each target, by file name.

    From `folder`; None asks pip to download them. FileError for one that is not to be had.
    """
    found: dict[str, bytes] = {}
    with tempfile.TemporaryDirectory(prefix="hal-wheels-") as temporary:
        where = Path(temporary) if folder is None else folder
        for target in targets:
            for name, version in packages.items():
                wheel = _pick(where, name, version, target)
                told = f"{where} has none"
                if wheel is None and folder is None:
                    told = _download(where, name, version, target)
                    wheel = _pick(where, name, version, target)
                if wheel is None:
                    raise FileError(
                        f"the kit needs a wheel of {name} {version} for CPython {target.python} on {target.machine}: "
                        f"{told}. Name a folder that has it with --wheels, or ask for less with --python and --machine"
                    )
                found[wheel.name] = wheel.read_bytes()
    return found


def _pick(folder: Path, name: str, version: str, target: Target) -> Path | None:
    try:
        files = sorted(folder.iterdir())
    except OSError as error:
        raise FileError(f"cannot look for wheels in {str(folder)!r}: {error}; name a folder with --wheels") from error
    return next((file for file in files if target.takes(file.name, name, version)), None)


def _download(folder: Path, name: str, version: str, target: Target) -> str:
    """Ask pip; what it said where that did not help."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += [
        "--only-binary=:all:",
        "--dest",
        str(folder),
        "--implementation",
        "cp",
        "--python-version",
        target.python,
    ]
    command += ["--platform", f"{_PLATFORM}_{target.machine}", f"{name}=={version}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"pip could not bring it ({error})"
    said = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or done.stderr.splitlines()
    return f"pip could not bring it ({said[-1].strip() if said else f'exit status {done.returncode}'})"


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
