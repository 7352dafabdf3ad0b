"""`hal devices`: the devices of this machine, and the data sheets of chips with the audit of their figures."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from hal.cli._console import console, line, print_json, table

if TYPE_CHECKING:
    from hal.descriptor import DeviceDescriptor


def devices(
    sheets: Annotated[bool, typer.Option("--sheets", help="List the chips that hal has data sheets of.")] = False,
    audit: Annotated[
        bool, typer.Option("--audit", help="Check every data sheet: each figure needs a source, a date and a class.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON: whole descriptors, or findings.")] = False,
) -> None:
    """List the devices that the installed backends see, with what is known about each.

    A figure that is not known is shown as –, never guessed. Exit status of --audit: 0 sound, 1 findings.

    Examples:

    - `hal devices`
    - `hal devices --json`
    - `hal devices --sheets`
    - `hal devices --audit`
    """
    if audit:
        _audit(as_json)
        return
    if sheets:
        from hal.descriptor import sheets as shipped

        found = [("", sheet) for sheet in shipped()]
    else:
        found = _present()
    if as_json:
        print_json([({"backend": backend} if backend else {}) | sheet.to_json() for backend, sheet in found])
        return
    rows = table()
    for column in ("device", "backend"):
        rows.add_column(column, no_wrap=True)
    for column in ("vendor", "name", "architecture"):
        rows.add_column(column, overflow="fold")
    for column in ("memory", "bandwidth", "bf16 peak"):
        rows.add_column(column, justify="right")
    rows.add_column("notes", overflow="fold")
    for backend, sheet in found:
        rows.add_row(*_row(backend, sheet))
    console().print(rows)


def _present() -> list[tuple[str, DeviceDescriptor]]:
    from hal import registry

    found = []
    for backend in registry.load_all():
        names = [f"{backend.name}:{kind}" for kind in _device_types()] if backend.parameterised else [backend.name]
        found += [(name, descriptor) for name in names for descriptor in registry.devices(name)]
    return found


def _device_types() -> list[str]:
    import torch

    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return ["cpu"] if accelerator is None else ["cpu", accelerator.type]


def _row(backend: str, sheet: DeviceDescriptor) -> list[str]:
    notes = [note for note, holds in (("simulated", sheet.simulated), ("planned", sheet.planned)) if holds]
    return [
        sheet.device or sheet.torch_device or "–",
        backend or "–",
        sheet.vendor,
        sheet.name,
        sheet.architecture or "–",
        _scaled(sheet.memory_bytes, 1e9, "GB"),
        _scaled(sheet.bandwidth, 1e9, "GB/s"),
        _scaled(sheet.peak("bf16"), 1e12, "TFLOP/s"),
        ", ".join(notes),
    ]


def _scaled(value: float | None, factor: float, unit: str) -> str:
    return "–" if value is None else f"{value / factor:,.4g} {unit}"


def _audit(as_json: bool) -> None:
    from hal.descriptor import audit, sheets

    findings = audit()
    # damaged sheets cannot be counted by loading them
    count = None if findings else len(sheets())
    if as_json:
        data: dict[str, Any] = {
            "sheets": count,
            "findings": [
                {"sheet": finding.sheet, "where": finding.where, "problem": finding.problem} for finding in findings
            ],
        }
        print_json(data)
    else:
        for finding in findings:
            line(str(finding), "red")
        sound = f"{count} data sheets, every figure has source, date and class"
        line(f"{len(findings)} findings" if findings else sound)
    raise typer.Exit(1 if findings else 0)
