"""`hal doctor`: what this machine has, and what stands in the way."""

from __future__ import annotations

from typing import Annotated

import typer


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Report devices, versions and their conflicts, numerics switches, settings and plug-ins that failed to load.

    Vendor packages are tried in processes of their own, so that a broken one does no harm here.

    Examples:

    - `hal doctor`
    - `hal doctor --json > doctor.json`
    """
