"""`hal ops`: the operators and who implements them."""

from __future__ import annotations

import inspect
from typing import Annotated, Any

import typer

from hal import registry
from hal.cli._console import console, line, print_json, table


def ops(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON: schemas and declarations too.")] = False,
) -> None:
    """List the operators, the arguments that get gradients, and the implementations that each backend has of them.

    Examples:

    - `hal ops`
    - `hal ops --json | jq '.[].name'`
    """
    entries = [_entry(name) for name in _names()]
    if as_json:
        print_json(entries)
        return
    rows = table()
    for column in ("operator", "gradients", "implementations"):
        rows.add_column(column, overflow="fold")
    for entry in entries:
        having = "; ".join(
            f"{backend}: {', '.join(implementation['name'] for implementation in found)}"
            for backend, found in entry["implementations"].items()
        )
        rows.add_row(entry["name"], ", ".join(entry["gradients"]) or "none", having or "none")
    console().print(rows)
    for failure in registry.failures():
        line(f"plug-in {failure.name} is left out: {failure.type}: {failure.message}", "yellow", stderr=True)


def _names() -> list[str]:
    from hal.op import OPS

    return sorted(OPS)


def _entry(name: str) -> dict[str, Any]:
    from hal.op import OPS

    op = OPS[name]
    found = {backend.name: registry.implementations(backend.name, name) for backend in registry.load_all()}
    return {
        "name": name,
        "summary": (inspect.getdoc(op.reference) or "").partition("\n")[0],
        "signature": f"{name}{op.signature}",
        "torch_op": f"hal::{op.torch_name}",
        "schema": op.schema,
        "gradients": list(op.grad),
        "features": list(op.features),
        "accuracy": op.accuracy.rule,
        "implementations": {
            backend: [
                {
                    "name": implementation.name,
                    "kind": implementation.kind,
                    "priority": implementation.priority,
                    "supports": implementation.supports.to_dict(),
                    "declares": implementation.declares.to_dict(),
                    "native_backward": implementation.backward is not None,
                }
                for implementation in implementations
            ]
            for backend, implementations in found.items()
            if implementations
        },
    }
