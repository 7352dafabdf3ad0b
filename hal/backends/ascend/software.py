"""What must be installed for an Ascend device, and which versions go together: torch, torch_npu and CANN.

Nothing here imports torch_npu: it looks at what is installed, so that it can tell why an import would fail.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.resources
import json
import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from hal import settings
from hal.hookspec import Conflict

__all__ = [
    "NO_NPU",
    "Release",
    "cann_version",
    "compatible",
    "conflicts",
    "missing",
    "present",
    "release_of",
    "releases",
    "releases_for",
    "tables",
    "without_cann",
]

NO_NPU = (
    "torch_npu and CANN are installed, but torch_npu sees no NPU. 'npu-smi info' must list one (driver and firmware), "
    "and ASCEND_RT_VISIBLE_DEVICES must not hide it"
)

_SET_UP = (
    "run 'source /usr/local/Ascend/cann/set_env.sh' first (before CANN 8.5: ascend-toolkit/set_env.sh; or wherever "
    "CANN was installed); on a machine without a device: 'hal simulate ascend -- COMMAND'"
)
_INSTALL_INFO = "ascend_*_install.info"


class Release(NamedTuple):
    """A wheel of torch_npu, the torch that it was built for, and the CANN it goes with (its leading numbers)."""

    torch_npu: str
    torch: str
    cann: str
    product: str


@lru_cache(maxsize=1)
def tables() -> tuple[dict[str, Any], ...]:
    """The vendor's tables with their sources, as they are kept."""
    text = (importlib.resources.files("hal") / "data" / "ascend" / "versions.json").read_text()
    return tuple(json.loads(text)["tables"])


@lru_cache(maxsize=1)
def releases() -> tuple[Release, ...]:
    """The rows of the vendor's tables, the newest first."""
    rows = (Release(**row) for table in tables() for row in table["rows"])
    return tuple(sorted(rows, key=lambda row: (_numbers(row.torch), _post(row.torch_npu)), reverse=True))


def compatible(product: str) -> tuple[str, ...]:
    """The lines of CANN (8.5, …) that the vendor calls compatible with a product of torch_npu, beside its own."""
    told = next(table["compatible"] for table in tables() if "compatible" in table)
    return tuple(told["cann"]) if any(_belongs(product, line) for line in told["products"]) else ()


def release_of(version: str) -> str:
    """The release that a version of torch or torch_npu belongs to: 2.10.0 of "2.10.0+cpu" and "2.10.0.post6"."""
    match = re.match(r"\d+\.\d+\.\d+", version)
    return match[0] if match else version


def releases_for(torch_version: str) -> tuple[Release, ...]:
    """The rows for a torch, whatever its build ("2.10.0+cpu")."""
    return tuple(row for row in releases() if row.torch == release_of(torch_version))


def cann_version(home: str) -> str | None:
    """The version of the CANN toolkit whose set_env.sh set ASCEND_HOME_PATH to `home`; None if there is none.

    Read as torch_npu's own collect_env does: from the toolkit's install record.
    """
    if not home:
        return None
    for record in sorted(Path(home).resolve().glob(f"*/{_INSTALL_INFO}")) or sorted(
        Path(home).resolve().glob(_INSTALL_INFO)
    ):
        told = re.search(r"^version=(\S+)", record.read_text(errors="replace"), re.MULTILINE)
        if told:
            return told.group(1)
    return None


def missing(torch_version: str, torch_npu: str | None, cann: str | None, simulated: bool = False) -> str | None:
    """Why there can be no Ascend device here, and the next step; None if the software is there."""
    if torch_npu is None:
        wanted = next(iter(releases_for(torch_version)), None)
        pair = (
            f"pip install torch_npu=={wanted.torch_npu} (for torch {wanted.torch}, with CANN {wanted.cann})"
            if wanted is not None
            else f"install the torch_npu that was built for torch {release_of(torch_version)}"
        )
        return (
            f"torch_npu is not installed. On a machine with an Ascend device: {pair}; on any other: "
            "'hal simulate ascend -- COMMAND' runs torch_npu on a simulated device"
        )
    if cann is None and not simulated:
        return (
            "torch_npu is installed, but CANN is not to be found: ASCEND_HOME_PATH names no toolkit. "
            f"{_SET_UP[0].upper()}{_SET_UP[1:]}"
        )
    return None


def without_cann(torch_npu: str | None, cann: str | None, home: str, simulated: bool) -> Iterator[Conflict]:
    """torch_npu where no CANN is set up. home: ASCEND_HOME_PATH; its libraries count where it has no install record."""
    if torch_npu is None or cann is not None or simulated or (home and (Path(home) / "lib64/libascendcl.so").exists()):
        return
    yield Conflict(
        what="torch_npu and CANN",
        found=f"torch_npu {torch_npu}, and ASCEND_HOME_PATH = {home!r} names no CANN",
        wanted="CANN set up in this shell",
        remedy=_SET_UP,
    )


def conflicts(versions: Mapping[str, str], cann: str | None) -> Iterator[Conflict]:
    """What does not go together. versions: those of torch and, where it is installed, torch_npu."""
    torch_npu, torch_version = versions.get("torch_npu"), versions["torch"].partition("+")[0]
    if torch_npu is None:
        return
    built_for = release_of(torch_npu)
    if built_for != release_of(torch_version):
        fitting = [row.torch_npu for row in releases_for(torch_version)]
        yield Conflict(
            what="torch and torch_npu",
            found=f"torch {torch_version}, torch_npu {torch_npu}",
            wanted="torch_npu built for this torch",
            remedy=f"pip install torch=={built_for}, or torch_npu {' or '.join(fitting) or release_of(torch_version)}",
        )
    if torch.version.cuda is not None:
        yield Conflict(
            what="torch and torch_npu",
            found=f"torch built for CUDA {torch.version.cuda}",
            wanted="a CPU build of torch",
            remedy="keep one environment for CUDA and another for Ascend",
        )
    row = _nearest(torch_npu)
    if cann is None or row is None:
        return
    listed = row.torch_npu == _public(torch_npu)
    # Of a wheel between two that the table has, only the line of CANN is known: 9.1 of 9.1.0.
    wanted = row.cann if listed else ".".join(row.cann.split(".")[:2])
    others = compatible(row.product)
    if any(_belongs(cann, line) for line in (wanted, *others)):
        return
    yield Conflict(
        what="torch_npu and CANN",
        found=f"torch_npu {torch_npu}, CANN {cann}",
        wanted=f"CANN {wanted}" + ("" if listed else f", as for torch_npu {row.torch_npu}, the nearest whose is known"),
        remedy=f"install CANN {wanted}" + (f"; the vendor names {', '.join(others)} as compatible" if others else ""),
    )


def _belongs(version: str, line: str) -> bool:
    return (version + ".").startswith(line + ".")


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


def _public(version: str) -> str:
    """The version without what a build of one's own appends: 2.13.0 of "2.13.0+gitabc"."""
    return version.partition("+")[0]


def _nearest(torch_npu: str) -> Release | None:
    """The row of a wheel, else that of the last one before it of the same torch, else of the first one after it."""
    rows = sorted(releases_for(torch_npu), key=lambda row: _post(row.torch_npu))
    before = [row for row in rows if _post(row.torch_npu) <= _post(torch_npu)]
    return before[-1] if before else rows[0] if rows else None


def _post(version: str) -> int:
    match = re.search(r"post(\d+)", version)
    return int(match[1]) if match else 0


def present() -> tuple[dict[str, str], str | None]:
    """The versions of torch and torch_npu, and of CANN (None if no toolkit is set up)."""
    found = {"torch": str(torch.__version__)}
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        found["torch_npu"] = importlib.metadata.version("torch_npu")
    return found, cann_version(settings.foreign("ASCEND_HOME_PATH"))
