"""The kit: hal in one file that judges a machine where nothing may be installed and no network is at hand.

A zipapp with hal, its pure Python needs, and the compiled ones (pydantic-core, safetensors) as wheels for several
Pythons and processors. It needs a Python and a torch of the machine and nothing else. When it starts, it unpacks
itself into a temporary folder, with the wheels that fit; see `hal/cli/kit_main.py`.
"""

from __future__ import annotations

import importlib.metadata
import io
import json
import re
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

import hal
from hal.conformance.environment import environment
from hal.conformance.kit_wheels import Target, wheels
from hal.errors import ArgumentError, FileError
from hal.files import check_writable, write_whole

if TYPE_CHECKING:
    from importlib.abc import Traversable

__all__ = ["MACHINES", "PYTHONS", "Kit", "build"]

FORMAT = "hal-kit"
VERSION = 1
PYTHONS = ("3.10", "3.11", "3.12")
MACHINES = ("x86_64", "aarch64")
PURE = ("pluggy", "pydantic", "annotated-types", "typing-extensions", "typing-inspection")
COMPILED = ("pydantic-core", "safetensors")
# What runs in a kit is the conformance suite: typer and rich, which hal's own commands need, are not there.
_LEFT_OUT = ("hal/cli/", "hal/bench/", "hal/port/")
_MAIN = "cli/kit_main.py"
_GROUP = "hal.backends"


@dataclass(frozen=True)
class Kit:
    """A kit that was written: bytes, and what it runs on."""

    path: Path
    size: int
    pythons: tuple[str, ...]
    machines: tuple[str, ...]
    wheels: tuple[str, ...]


def build(
    path: Path,
    pythons: Sequence[str] = PYTHONS,
    machines: Sequence[str] = MACHINES,
    wheel_folder: Path | None = None,
) -> Kit:
    """Write a kit to `path`, whole or not at all; the same bytes for the same hal and the same packages.

    pythons, machines: what it must run on. wheel_folder: where the compiled packages' wheels lie; None brings them
    with pip. ArgumentError for a Python or processor that hal's needs do not serve, FileError for a wheel that is
    not to be had or a file that cannot be written.
    """
    targets = [Target(python, machine) for python in dict.fromkeys(pythons) for machine in dict.fromkeys(machines)]
    if not targets:
        raise ArgumentError(
            "a kit needs at least one Python and one machine; leave --python and --machine out for all."
        )
    check_writable(path)
    versions = {name: _distribution(name).version for name in (*PURE, *COMPILED)}
    for name in PURE:
        _check_python(name, targets)
    found = wheels({name: versions[name] for name in COMPILED}, targets, wheel_folder)
    manifest = {
        "format": FORMAT,
        "version": VERSION,
        "hal": hal.__version__,
        **_commit(),
        "pythons": list(dict.fromkeys(pythons)),
        "machines": list(dict.fromkeys(machines)),
        "packages": versions,
    }
    members = {"__main__.py": (resources.files("hal") / _MAIN).read_bytes()}
    members["kit.json"] = (json.dumps(manifest, indent=1, sort_keys=True) + "\n").encode()
    members |= {f"site/{name}": data for name, data in (*_hal(), *_pure())}
    members |= {f"wheels/{name}": data for name, data in found.items()}
    data = _packed(members)
    write_whole(path, data)
    return Kit(path, len(data), tuple(dict.fromkeys(pythons)), tuple(dict.fromkeys(machines)), tuple(sorted(found)))


def _hal() -> Iterator[tuple[str, bytes]]:
    for name, file in _walk(resources.files("hal"), PurePosixPath("hal")):
        if not name.startswith(_LEFT_OUT):
            yield name, file.read_bytes()
    # Entry points are found through the metadata of a distribution, so the kit brings one.
    folder = f"torch_hal-{hal.__version__}.dist-info"
    entries = [entry for entry in _distribution("torch-hal").entry_points if entry.group == _GROUP]
    lines = [f"[{_GROUP}]", *sorted(f"{entry.name} = {entry.value}" for entry in entries)]
    yield f"{folder}/METADATA", f"Metadata-Version: 2.1\nName: torch-hal\nVersion: {hal.__version__}\n".encode()
    yield f"{folder}/entry_points.txt", ("\n".join(lines) + "\n").encode()


def _pure() -> Iterator[tuple[str, bytes]]:
    for name in PURE:
        for file in _distribution(name).files or ():
            inside = not file.is_absolute() and ".." not in file.parts
            wanted = file.suffix != ".pyc" and file.name not in ("RECORD", "INSTALLER", "REQUESTED", "direct_url.json")
            if inside and wanted:
                try:
                    yield file.as_posix(), file.read_binary()
                except OSError as error:
                    raise FileError(
                        f"the kit needs {file} of {name}, which cannot be read: {error}; reinstall {name}"
                    ) from error


def _walk(folder: Traversable, at: PurePosixPath) -> Iterator[tuple[str, Traversable]]:
    for entry in folder.iterdir():
        if entry.is_dir():
            if entry.name != "__pycache__":
                yield from _walk(entry, at / entry.name)
        elif not entry.name.endswith((".pyc", ".tmp")):
            yield str(at / entry.name), entry


def _distribution(name: str) -> importlib.metadata.Distribution:
    try:
        return importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        raise FileError(
            f"the kit carries {name}, which is not installed here; install torch-hal with its needs"
        ) from None


def _check_python(name: str, targets: Iterable[Target]) -> None:
    """ArgumentError for a Python that the installed version of a pure package does not serve."""
    asked = re.search(r">=\s*(\d+)\.(\d+)", _distribution(name).metadata["Requires-Python"] or "")
    lowest = (int(asked[1]), int(asked[2])) if asked else (0, 0)
    for target in targets:
        if target.version < lowest:
            raise ArgumentError(
                f"a kit for Python {target.python} was asked for, but {name} {_distribution(name).version} needs "
                f"{lowest[0]}.{lowest[1]}; leave that Python out, or install an older {name} here."
            )


def _commit() -> dict[str, str | bool | None]:
    here = environment({})
    return {"git_commit": here.git_commit, "git_dirty": here.git_dirty}


def _packed(members: dict[str, bytes]) -> bytes:
    """The zipapp, with a fixed order and date, so that equal contents give equal bytes."""
    buffer = io.BytesIO()
    buffer.write(b"#!/usr/bin/env python3\n")
    with zipfile.ZipFile(buffer, "a") as archive:
        for name in sorted(members):
            info = zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0))
            info.external_attr = 0o644 << 16
            # a wheel is packed already
            info.compress_type = zipfile.ZIP_STORED if name.endswith(".whl") else zipfile.ZIP_DEFLATED
            archive.writestr(info, members[name], compresslevel=9)
    return buffer.getvalue()
