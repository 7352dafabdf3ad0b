"""Descriptors of devices that are present: what they answer, beside the figures of their data sheets."""

from __future__ import annotations

import datetime
import os
import platform
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeVar

import torch

from hal.descriptor.flavour import cuda_flavour
from hal.descriptor.model import ComputeUnit, DeviceDescriptor, Figure, Figures, Link, MemoryLevel, Rate
from hal.descriptor.sheets import find
from hal.errors import DeviceError

__all__ = ["describe", "is_simulated"]

_VENDOR_IDS = {
    "GenuineIntel": "Intel",
    "AuthenticAMD": "AMD",
    "0x41": "Arm",
    "0x48": "HiSilicon",
    "0xc0": "Ampere",
}
R = TypeVar("R", ComputeUnit, MemoryLevel, Link, Rate)

_SIMD_BITS = {"AVX512": 512, "AVX2": 256, "SVE256": 256}


def describe(device: str | torch.device | int = "cpu") -> DeviceDescriptor:
    """The descriptor of a live device; what it reports comes first, then the figures of its data sheet.

    This is the first thing that may initialise a device's runtime. Raises DeviceError for a device type
    that torch does not know, one that is not available, or an index that does not exist.
    """
    where = _present(device)
    if where.type == "cpu":
        return _cpu()
    live = {"cuda": _cuda, "npu": _npu}.get(where.type, _other)(where)
    sheet = find(live.name)
    return live if sheet is None else _merge(live, sheet)


def _present(device: str | torch.device | int) -> torch.device:
    try:
        where = torch.device(device)
    except RuntimeError as error:
        raise DeviceError(
            f"{device!r} is no device that this torch knows ({str(error).splitlines()[0]}); give a torch device "
            "such as 'cpu' or 'cuda:0', and import the package that registers a device of its own first"
        ) from error
    if where.type == "cpu":
        return torch.device("cpu")
    module = _module(where.type)
    if module is None or not module.is_available():
        raise DeviceError(f"{where} was asked for, but torch sees no available {where.type} device here")
    count = getattr(module, "device_count", lambda: 1)()
    index = where.index if where.index is not None else getattr(module, "current_device", lambda: 0)()
    if not 0 <= index < count:
        raise DeviceError(f"{where} was asked for; torch sees {count} {where.type} device(s), 0 to {count - 1}")
    return torch.device(where.type, index)


def _module(device_type: str) -> Any:
    try:
        return torch.get_device_module(device_type)
    except RuntimeError:
        return None


class _Reader:
    """Makes figures read from one source, today; a missing answer gives no figure."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.date = datetime.date.today().isoformat()

    def __call__(self, value: Any, unit: str, note: str | None = None) -> Figures:
        if value is None or value == "" or value == 0:
            return ()
        return (Figure(value=value, unit=unit, source=self.source, date=self.date, kind="measured", note=note),)

    def flag(self, value: bool | None) -> Figures:
        if value is None:
            return ()
        return (Figure(value=value, unit="flag", source=self.source, date=self.date, kind="measured"),)


def _cuda(where: torch.device) -> DeviceDescriptor:
    props = torch.cuda.get_device_properties(where)
    read = _Reader(f"torch.cuda.get_device_properties, torch {torch.__version__}")

    def ask(name: str) -> Any:
        return getattr(props, name, None)

    flavour = cuda_flavour(props.name)
    warp, threads = ask("warp_size"), ask("max_threads_per_multi_processor")
    registers = ask("regs_per_multiprocessor")
    bus = ask("memory_bus_width")
    hip_name = str(ask("gcnArchName") or "").partition(":")[0]
    return DeviceDescriptor(
        vendor=_vendor(props.name, flavour),
        name=props.name,
        architecture=hip_name if flavour == "hip" and hip_name else f"sm_{props.major}{props.minor}",
        torch_device="cuda",
        flavour=flavour,
        device=str(where),
        compute=(ComputeUnit(name="SM", count=read(ask("multi_processor_count"), "count")),),
        memory=(
            MemoryLevel(
                name="device", size=read(ask("total_memory"), "B"),
                technology=read(f"{bus}-bit bus" if bus else None, "text"),
            ),
            MemoryLevel(name="L2", size=read(ask("L2_cache_size"), "B")),
            MemoryLevel(
                name="L1",
                per="SM",
                size=read(ask("shared_memory_per_multiprocessor"), "B", "usable as shared memory"),
            ),
            MemoryLevel(name="registers", per="SM", size=read(registers * 4 if registers else None, "B")),
        ),
        warp=read(warp, "count"),
        resident_warps=read(threads // warp if threads and warp else None, "count", "an SM"),
        features={"bf16": read.flag(_bf16_on(where))},
    )  # fmt: skip


def _bf16_on(where: torch.device) -> bool | None:
    with torch.cuda.device(where):
        try:
            return bool(torch.cuda.is_bf16_supported(including_emulation=False))
        except (RuntimeError, TypeError):
            return None


def _vendor(name: str, flavour: str) -> str:
    if flavour == "nvidia":
        return "NVIDIA"
    sheet = find(name)
    return sheet.vendor if sheet is not None else name.split()[0] if name.split() else "unknown"


def _npu(where: torch.device) -> DeviceDescriptor:
    module = _module("npu")
    # CANN answers only who has a context. That of the current device does: to visit another one here would leave
    # torch_npu without a default stream there, which a later backward pass aborts on.
    module.set_device(module.current_device())
    props = module.get_device_properties(where.index)
    name = module.get_device_name(where.index)
    read = _Reader("torch.npu.get_device_properties")
    soc = _answer(module, "get_soc_version")
    return DeviceDescriptor(
        vendor="Huawei",
        name=name,
        torch_device="npu",
        device=str(where),
        simulated=is_simulated(where.type),
        compute=tuple(
            ComputeUnit(name=unit, count=read(getattr(props, key, None), "count"))
            for unit, key in (("cube core", "cube_core_num"), ("vector core", "vector_core_num"))
        ),
        memory=(
            MemoryLevel(name="device", size=read(getattr(props, "total_memory", None), "B")),
            MemoryLevel(name="L2", size=read(getattr(props, "L2_cache_size", None), "B")),
        ),
        # SoC versions below 220 are 310P and older, which have no bf16.
        features={} if soc is None else {"bf16": read.flag(soc >= 220)},
        notes=() if soc is None else (f"SoC version {soc}",),
    )


def _other(where: torch.device) -> DeviceDescriptor:
    """Any other device type of torch: the few questions that most device modules answer."""
    module = _module(where.type)
    read = _Reader(f"torch.{where.type}")
    props = _answer(module, "get_device_properties", where.index)
    name = _answer(module, "get_device_name", where.index) or getattr(props, "name", None) or where.type
    sheet = find(str(name))
    total = getattr(props, "total_memory", None) or _answer(module, "recommended_max_memory")
    return DeviceDescriptor(
        vendor=sheet.vendor if sheet else str(getattr(props, "vendor", None) or getattr(module, "vendor", "unknown")),
        name=str(name),
        torch_device=where.type,
        device=str(where),
        simulated=is_simulated(where.type),
        memory=(MemoryLevel(name="device", size=read(total, "B")),),
    )


def _answer(module: Any, question: str, *arguments: Any) -> Any:
    ask = getattr(module, question, None)
    if ask is None:
        return None
    try:
        return ask(*arguments)
    except (RuntimeError, NotImplementedError, TypeError):
        return None


def is_simulated(device_type: str) -> bool:
    """Whether no hardware stands behind the devices of this type, as their module in torch says; starts nothing."""
    return getattr(_module(device_type), "simulated", False) is True


def _cpu() -> DeviceDescriptor:
    info = _cpuinfo()
    flags = set(info.get("flags", info.get("Features", "")).split())
    proc, system = _Reader("/proc/cpuinfo"), _Reader("operating system")
    capability = torch.backends.cpu.get_cpu_capability()
    features = {
        "matrix_units": proc.flag(any(flag.startswith("amx") for flag in flags) if flags else None),
        "bf16": proc.flag("avx512_bf16" in flags or "bf16" in flags if flags else None),
    }
    return DeviceDescriptor(
        vendor=_VENDOR_IDS.get(info.get("vendor_id", info.get("CPU implementer", "")), "unknown"),
        name=info.get("model name") or platform.processor() or platform.machine() or "cpu",
        architecture=platform.machine() or None,
        torch_device="cpu",
        device="cpu",
        compute=(
            ComputeUnit(name="core", count=_Reader("/sys/devices/system/cpu")(_physical_cores(), "count")),
            ComputeUnit(name="hardware thread", count=system(_usable_threads(), "count", "usable by this process")),
        ),
        memory=(MemoryLevel(name="device", size=system(_memory(), "B")), *_caches()),
        vector=_Reader("torch.backends.cpu.get_cpu_capability")(_SIMD_BITS.get(capability), "bit", capability),
        features={name: figures for name, figures in features.items() if figures},
    )


def _cpuinfo() -> dict[str, str]:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return {}
    lines = (line.partition(":") for line in text.split("\n\n")[0].splitlines())
    return {key.strip(): value.strip() for key, _, value in lines}


def _physical_cores() -> int | None:
    found = set()
    for core in Path("/sys/devices/system/cpu").glob("cpu[0-9]*/topology"):
        package, number = _text(core / "physical_package_id"), _text(core / "core_id")
        if package is not None and number is not None:
            found.add((package, number))
    return len(found) or None


def _usable_threads() -> int | None:
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity is not None else os.cpu_count()


def _memory() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return None


def _caches() -> Iterable[MemoryLevel]:
    read = _Reader("/sys/devices/system/cpu/cpu0/cache")
    for index in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        level, kind, size = (_text(index / name) for name in ("level", "type", "size"))
        if level is None or size is None or kind == "Instruction" or not size.endswith(("K", "M")):
            continue
        sharers = _text(index / "shared_cpu_list")
        factor = 2**10 if size.endswith("K") else 2**20
        yield MemoryLevel(
            name=f"L{level}",
            per="core",
            size=read(int(size[:-1]) * factor, "B", f"shared by threads {sharers}"),
        )


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8").strip() or None
    except OSError:
        return None


def _merge(live: DeviceDescriptor, sheet: DeviceDescriptor) -> DeviceDescriptor:
    """The live descriptor with the sheet's figures after its own."""
    family = find(sheet.family) if sheet.family is not None else None
    if family is not None:
        sheet = _merge(sheet, family)
    update: dict[str, Any] = {
        "vendor": sheet.vendor,
        "aliases": live.aliases or sheet.aliases,
        "family": live.family or sheet.family,
        "architecture": live.architecture or sheet.architecture,
        "flavour": live.flavour or sheet.flavour,
        "notes": (*live.notes, *(note for note in sheet.notes if note not in live.notes)),
        "compute": _join(live.compute, sheet.compute, "name"),
        "memory": _join(live.memory, sheet.memory, "name"),
        "links": _join(live.links, sheet.links, "name"),
        "rates": _join(live.rates, sheet.rates, "dtype", "path"),
        "features": {
            name: _union(live.features.get(name, ()), sheet.features.get(name, ()))
            for name in (*live.features, *(name for name in sheet.features if name not in live.features))
        },
    }
    for name in (
        "sparsity", "warp", "vector", "registers_per_thread", "resident_warps",
        "alignment", "burst", "power", "process",
    ):  # fmt: skip
        update[name] = _union(getattr(live, name), getattr(sheet, name))
    return live.model_copy(update=update)


def _union(first: Figures, second: Figures) -> Figures:
    return (*first, *(figure for figure in second if figure not in first))


def _join(first: tuple[R, ...], second: tuple[R, ...], *key: str) -> tuple[R, ...]:
    """The records of both, figures of one and the same record side by side."""
    others: dict[tuple[Any, ...], R] = {tuple(getattr(record, part) for part in key): record for record in second}
    joined: list[R] = []
    for record in first:
        other = others.pop(tuple(getattr(record, part) for part in key), None)
        joined.append(record if other is None else _side_by_side(record, other))
    joined.extend(others.values())
    return tuple(joined)


def _side_by_side(record: R, other: R) -> R:
    both = {
        field: _union(value, getattr(other, field))
        for field in type(record).model_fields
        if isinstance(value := getattr(record, field), tuple)
    }
    return record.model_copy(update=both)
