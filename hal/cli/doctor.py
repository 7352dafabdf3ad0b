"""`hal doctor`: what this machine has, and what stands in the way."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from hal.cli._console import console, line, print_json, table

if TYPE_CHECKING:
    from hal.doctor import Diagnosis


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Report devices, versions and their conflicts, numerics switches, settings and plug-ins that failed to load.

    Vendor packages are tried in processes of their own, so that a broken one does no harm here.
    Exit status: 0 nothing stands in the way, 1 something does.

    Examples:

    - `hal doctor`
    - `hal doctor --json > doctor.json`
    """
    from hal.doctor import examine

    found = examine()
    if as_json:
        print_json(found.to_dict())
    else:
        _print(found)
    raise typer.Exit(0 if found.healthy else 1)


def _print(found: Diagnosis) -> None:
    versions = _rows("versions")
    for name, value in found.versions.model_dump().items():
        versions.add_row(name, value or "–", f"supported: {found.supported[name]}" if name in found.supported else "")
    console().print(versions)

    backends = _rows("backends")
    for backend in found.backends:
        served = "any torch device" if backend.parameterised else ", ".join(backend.device_types)
        count = sum(backend.implementations.values())
        backends.add_row(backend.name, served, f"implementations: {count}, operators: {len(backend.implementations)}")
    console().print(backends)

    devices = _rows("devices")
    for name, descriptors in found.devices.items():
        for descriptor in descriptors:
            device = descriptor.device or descriptor.torch_device or "–"
            simulated = " (simulated)" if descriptor.simulated else ""
            devices.add_row(device, descriptor.name + simulated, f"through {name}")
    console().print(devices)

    settings = _rows("settings")
    for setting in found.settings:
        settings.add_row(setting.variable, setting.value or "–", setting.source)
    for name, near in found.unknown_settings.items():
        settings.add_row(name, "no setting of hal", f"did you mean {near}?" if near else "", style="yellow")
    console().print(settings)

    numerics = _rows("numerics")
    for name, value in found.numerics.items():
        numerics.add_row(name, value)
    console().print(numerics)

    packages = _rows("vendor packages")
    for package in found.packages:
        bad = package.status in ("broken", "timeout")
        packages.add_row(
            package.name,
            package.version or "–",
            package.status + (f": {package.detail}" if package.detail else ""),
            style="red" if bad else "dim" if package.status == "absent" else "",
        )
    console().print(packages)

    for conflict in found.conflicts:
        line(f"conflict: {conflict.what}: found {conflict.found}, wanted {conflict.wanted}; {conflict.remedy}", "red")
    for problem in found.problems:
        line(f"problem: {problem.where}: {problem.type}: {problem.message}", "red")
    line("nothing stands in the way" if found.healthy else "something stands in the way, see above", "bold")


def _rows(title: str) -> Table:
    rows = table(title)
    rows.show_header = False
    for _ in range(3):
        rows.add_column(overflow="fold")
    return rows
