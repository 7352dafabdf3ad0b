"""What this machine has, and what stands in the way of using it.

Versions, backends, devices, settings, numerics switches and vendor packages, gathered as data; nothing here
prints. Vendor packages are imported in processes of their own, with a timeout, so that a broken one can
neither crash nor hang the caller.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict

import hal
from hal import registry, settings
from hal.descriptor import DeviceDescriptor
from hal.errors import HalError
from hal.numerics import numerics

__all__ = [
    "Backend",
    "Conflict",
    "Diagnosis",
    "Package",
    "Problem",
    "Setting",
    "Versions",
    "examine",
    "probe",
]

# Lowest supported and lowest no longer supported versions, as in the distribution's requirements.
SUPPORTED = {"python": ("3.11", "3.13"), "torch": ("2.10", "2.14"), "transformers": ("5.0", "6.0")}

# Distribution name -> module to import. Two distributions bring the module triton: they exclude each other.
PACKAGES = {
    "torch_npu": "torch_npu",
    "triton": "triton",
    "triton-ascend": "triton",
    "flash-attn": "flash_attn",
    "flashinfer-python": "flashinfer",
    "transformers": "transformers",
    "vllm": "vllm",
    "torch_musa": "torch_musa",
    "torch_mlu": "torch_mlu",
    "torch_xla": "torch_xla",
    "intel_extension_for_pytorch": "intel_extension_for_pytorch",
}

_MARK = "hal-probe:"
_PROBE = "import json, {module} as m; print('\\n{mark}' + json.dumps(str(getattr(m, '__version__', ''))))"


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True)


class Versions(_Record):
    """What runs here."""

    hal: str
    torch: str
    python: str
    platform: str
    cuda: str | None
    hip: str | None


class Conflict(_Record):
    """Two things that do not go together, and what to do about it."""

    what: str
    found: str
    wanted: str
    remedy: str


class Backend(_Record):
    """A backend that loads; `implementations` counts what it registers, by operator."""

    name: str
    description: str
    device_types: tuple[str, ...]
    parameterised: bool
    implementations: dict[str, int]


class Problem(_Record):
    """A plug-in, device or setting that could not be used: the error's type and text."""

    where: str
    type: str
    message: str


class Setting(_Record):
    """One setting in force. source: use, environment, config file or default."""

    name: str
    variable: str
    value: str
    source: str


class Package(_Record):
    """A vendor package: absent, importable, broken (detail = the error's last line) or hanging."""

    name: str
    module: str
    status: Literal["absent", "ok", "broken", "timeout"]
    version: str | None = None
    detail: str | None = None


class Diagnosis(_Record):
    """All that `examine` found."""

    versions: Versions
    supported: dict[str, str]
    conflicts: tuple[Conflict, ...]
    backends: tuple[Backend, ...]
    problems: tuple[Problem, ...]
    devices: dict[str, tuple[DeviceDescriptor, ...]]
    settings: tuple[Setting, ...]
    unknown_settings: dict[str, str | None]
    numerics: dict[str, str]
    packages: tuple[Package, ...]

    @property
    def healthy(self) -> bool:
        """Nothing conflicts, nothing failed to load, no package is broken."""
        return not (self.conflicts or self.problems or any(p.status in ("broken", "timeout") for p in self.packages))

    def to_dict(self) -> dict[str, Any]:
        """JSON-able data; descriptors without their empty fields."""
        data = self.model_dump(mode="json", exclude={"devices"})
        data["devices"] = {name: [device.to_json() for device in found] for name, found in self.devices.items()}
        data["healthy"] = self.healthy
        return data


def examine(timeout_s: float = 60.0) -> Diagnosis:
    """Look at everything; initialises the devices that are present. `timeout_s` bounds each probe."""
    packages = probe(timeout_s=timeout_s)
    problems: list[Problem] = []
    in_force = _settings(problems)
    unusable = {p.name: p for p in packages if p.status in ("broken", "timeout")}
    backends, devices = _backends(problems, unusable)
    return Diagnosis(
        versions=Versions(
            hal=hal.__version__,
            torch=str(torch.__version__),
            python=platform.python_version(),
            platform=platform.platform(),
            cuda=torch.version.cuda,
            hip=torch.version.hip,
        ),
        supported={name: f">={low},<{high}" for name, (low, high) in SUPPORTED.items()},
        conflicts=tuple(_conflicts(packages)),
        backends=backends,
        problems=tuple(problems),
        devices=devices,
        settings=in_force,
        unknown_settings=settings.unknown_names(),
        numerics=numerics(),
        packages=packages,
    )


def probe(names: tuple[str, ...] = tuple(PACKAGES), timeout_s: float = 60.0) -> tuple[Package, ...]:
    """Import each installed package in a process of its own; one that is not installed costs nothing."""
    with ThreadPoolExecutor(max_workers=2) as pool:
        return tuple(pool.map(_probe, names, [timeout_s] * len(names)))


def _probe(name: str, timeout_s: float) -> Package:
    module = PACKAGES.get(name, name)
    version = _version(name)
    if version is None and (name in PACKAGES or importlib.util.find_spec(module) is None):
        return Package(name=name, module=module, status="absent")
    command = [sys.executable, "-c", _PROBE.format(module=module, mark=_MARK)]
    child = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, errors="replace", start_new_session=True,
    )  # fmt: skip
    try:
        out, err = child.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        _end(child)
        return Package(
            name=name,
            module=module,
            status="timeout",
            version=version,
            detail=f"import took more than {timeout_s:g} s",
        )
    said = [line.removeprefix(_MARK) for line in out.splitlines() if line.startswith(_MARK)]
    if child.returncode == 0 and said:
        return Package(name=name, module=module, status="ok", version=version or json.loads(said[-1]) or None)
    return Package(
        name=name, module=module, status="broken", version=version, detail=_last_words(child.returncode, err)
    )


def _end(child: subprocess.Popen[str]) -> None:
    # The package may have started children of its own; they share the session.
    try:
        os.killpg(child.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        child.kill()
    child.communicate()


def _last_words(status: int, err: str) -> str:
    if status < 0:
        names = {member.value: member.name for member in signal.Signals}
        return f"the import ended with signal {names.get(-status, -status)}"
    lines = [line.strip() for line in err.splitlines() if line.strip()]
    return lines[-1] if lines else f"the import ended with status {status}"


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _conflicts(packages: tuple[Package, ...]) -> Iterator[Conflict]:
    found = {"python": platform.python_version(), "torch": str(torch.__version__)}
    found |= {p.name: p.version for p in packages if p.version is not None}
    for name, (low, high) in SUPPORTED.items():
        version = found.get(name)
        if version is not None and not _numbers(low) <= _numbers(version) < _numbers(high):
            yield Conflict(
                what=f"hal {hal.__version__} and {name}", found=f"{name} {version}",
                wanted=f">={low},<{high}",
                remedy=f"install a {name} in that range",
            )  # fmt: skip
    for told in registry.conflicts():
        yield Conflict(**dataclasses.asdict(told))
    if "triton" in found and "triton-ascend" in found:
        yield Conflict(
            what="triton and triton-ascend", found="both", wanted="one of them: they write the same module",
            remedy="uninstall both, then install the one for this machine",
        )  # fmt: skip


def _numbers(version: str) -> tuple[int, ...]:
    """The release part: (2, 13, 0) of "2.13.0rc1+cpu"."""
    release = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, release.group().split("."))) if release else ()


def _settings(problems: list[Problem]) -> tuple[Setting, ...]:
    try:
        values, sources = settings.current(), settings.sources()
    except HalError as error:
        problems.append(_problem("settings", error))
        return ()
    return tuple(
        Setting(
            name=name, variable=settings.PREFIX + name.upper(), source=sources[name],
            value="" if (value := getattr(values, name)) is None else str(value),
        )
        for name in settings.NAMES
    )  # fmt: skip


def _backends(
    problems: list[Problem], unusable: dict[str, Package]
) -> tuple[tuple[Backend, ...], dict[str, tuple[DeviceDescriptor, ...]]]:
    backends: list[Backend] = []
    devices: dict[str, tuple[DeviceDescriptor, ...]] = {}
    for found in registry.load_all():
        counts = {op: len(registry.implementations(found.name, op)) for op in sorted(hal.ops.__all__)}
        backends.append(
            Backend(
                name=found.name, description=found.description, device_types=tuple(found.device_types),
                parameterised=found.parameterised, implementations={op: n for op, n in counts.items() if n},
            )
        )  # fmt: skip
        stuck = [name for name in found.packages if name in unusable]
        if stuck:  # importing it here could take this process along
            told = "; ".join(f"{name}: {unusable[name].detail}" for name in stuck)
            problems.append(Problem(where=f"devices of {found.name}", type="ImportError", message=told))
            continue
        try:
            devices[found.name] = tuple(registry.devices(found.name))
        except Exception as error:  # a vendor's runtime may fail in any way; the rest must still be told
            problems.append(_problem(f"devices of {found.name}", error))
    problems += [Problem(where=f"plug-in {f.name}", type=f.type, message=f.message) for f in registry.failures()]
    return tuple(backends), devices


def _problem(where: str, error: Exception) -> Problem:
    return Problem(where=where, type=type(error).__name__, message=str(error))
