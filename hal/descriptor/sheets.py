"""The data sheets that ship with hal, one JSON file a chip, and the audit of their figures."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from hal.descriptor.model import DeviceDescriptor
from hal.errors import FileError

# The conformance kit also runs under Python 3.10.
if sys.version_info >= (3, 11):
    from importlib.resources.abc import Traversable
else:
    from importlib.abc import Traversable

__all__ = ["Finding", "Sheet", "audit", "find", "read", "sheets"]

Sheet = DeviceDescriptor | Mapping[str, Any] | Path


@dataclass(frozen=True)
class Finding:
    """One fault of one data sheet: where in it, and what is wrong."""

    sheet: str
    where: str
    problem: str

    def __str__(self) -> str:
        return f"{self.sheet}: {self.where}: {self.problem}" if self.where else f"{self.sheet}: {self.problem}"


def read(file: Path | Traversable) -> DeviceDescriptor:
    """One data sheet; FileError, naming every fault, if it cannot be read or is none."""
    try:
        return DeviceDescriptor.model_validate(_load(file))
    except ValidationError as error:
        faults = "; ".join(str(finding) for finding in _findings(file.name, error))
        raise FileError(f"data sheet {file} is damaged: {faults}. Correct the file or remove it") from error


@cache
def sheets() -> tuple[DeviceDescriptor, ...]:
    """Every data sheet that ships with hal, ordered by vendor and name."""
    loaded = [read(file) for file in _shipped()]
    return tuple(sorted(loaded, key=lambda sheet: (sheet.vendor, sheet.name)))


def find(name: str, among: Iterable[DeviceDescriptor] | None = None) -> DeviceDescriptor | None:
    """The sheet of the chip called `name`, by name or alias (case, spaces and punctuation do not count)."""
    wanted = _plain(name)
    for sheet in sheets() if among is None else among:
        if wanted in (
            _plain(sheet.name),
            _plain(f"{sheet.vendor} {sheet.name}"),
            *map(_plain, sheet.aliases),
        ):
            return sheet
    return None


def audit(documents: Iterable[Sheet] | None = None) -> list[Finding]:
    """The faults of data sheets: descriptors, their JSON data, or files (None: all that ship).

    A fault is: an unreadable file, a figure without unit, source, date or class, an unknown unit, dtype or
    field, a name or alias that two chips share, a family without a sheet, one figure given twice, a sheet
    without any figure.
    """
    findings: list[Finding] = []
    sound: list[tuple[str, DeviceDescriptor]] = []
    for position, document in enumerate(_shipped() if documents is None else documents):
        label = _label(document, position)
        try:
            data = _load(document) if isinstance(document, Path | Traversable) else document
            sheet = data if isinstance(data, DeviceDescriptor) else DeviceDescriptor.model_validate(data)
        except FileError as error:
            findings.append(Finding(label, "", str(error)))
        except ValidationError as error:
            findings.extend(_findings(label, error))
        else:
            sound.append((label, sheet))
    for label, sheet in sound:
        findings.extend(Finding(label, where, problem) for where, problem in _contents(sheet))
    findings.extend(_relations(sound))
    return findings


def _shipped() -> list[Traversable]:
    folder = files("hal") / "data" / "chips"
    return sorted((f for f in folder.iterdir() if f.name.endswith(".json")), key=lambda f: f.name)


def _load(file: Path | Traversable) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise FileError(f"data sheet {file} cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise FileError(f"data sheet {file} is not JSON: {error}") from error


def _label(document: Sheet | Traversable, position: int) -> str:
    if isinstance(document, DeviceDescriptor):
        return document.name
    if isinstance(document, Mapping):
        return str(document.get("name", f"sheet {position}"))
    return document.name


def _findings(label: str, error: ValidationError) -> list[Finding]:
    return [
        Finding(label, ".".join(str(part) for part in fault["loc"]), fault["msg"].removeprefix("Value error, "))
        for fault in error.errors(include_url=False)
    ]


def _contents(sheet: DeviceDescriptor) -> Iterable[tuple[str, str]]:
    groups = dict(_figure_groups(sheet.model_dump(), ""))
    if not groups and sheet.family is None:
        yield "", "holds no figure at all"
    for where, figures in groups.items():
        if len(figures) > len({json.dumps(figure, sort_keys=True) for figure in figures}):
            yield where, "holds the same figure twice"


def _figure_groups(data: Any, where: str) -> Iterable[tuple[str, list[dict[str, Any]]]]:
    if isinstance(data, Mapping):
        for key, value in data.items():
            yield from _figure_groups(value, f"{where}.{key}" if where else str(key))
    elif isinstance(data, list | tuple) and data:
        if isinstance(data[0], Mapping) and "unit" in data[0]:
            yield where, list(data)
        else:
            for position, value in enumerate(data):
                yield from _figure_groups(value, f"{where}.{position}")


def _relations(sound: list[tuple[str, DeviceDescriptor]]) -> Iterable[Finding]:
    owners: dict[str, str] = {}
    for label, sheet in sound:
        for name in {_plain(sheet.name), *map(_plain, sheet.aliases)}:
            if name in owners:
                yield Finding(label, "name", f"{sheet.name} shares the name or alias {name!r} with {owners[name]}")
            owners.setdefault(name, label)
    names = {sheet.name for _, sheet in sound}
    for label, sheet in sound:
        if sheet.family is not None and sheet.family not in names:
            yield Finding(label, "family", f"there is no sheet of the family {sheet.family!r}")


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9+]", "", name.lower())
