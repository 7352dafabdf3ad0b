"""The descriptor of a device: each figure has unit, source, date and class; unknown is empty, never a guess.

Figures that conflict stand side by side in one tuple; `pick` chooses where a program needs one of them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

__all__ = [
    "DTYPES",
    "FEATURES",
    "UNITS",
    "ComputeUnit",
    "DeviceDescriptor",
    "Figure",
    "Figures",
    "Link",
    "MemoryLevel",
    "Rate",
    "pick",
]

# Unit -> (dimension, factor to its base: bytes, operations, seconds, bit, watts, metres, hertz).
UNITS: Mapping[str, tuple[str, float]] = MappingProxyType(
    {
        "B": ("size", 1.0),
        "KB": ("size", 1e3),
        "MB": ("size", 1e6),
        "GB": ("size", 1e9),
        "KiB": ("size", 2.0**10),
        "MiB": ("size", 2.0**20),
        "GiB": ("size", 2.0**30),
        "B/s": ("bandwidth", 1.0),
        "GB/s": ("bandwidth", 1e9),
        "TB/s": ("bandwidth", 1e12),
        "FLOP/s": ("rate", 1.0),
        "GFLOP/s": ("rate", 1e9),
        "TFLOP/s": ("rate", 1e12),
        "TOP/s": ("rate", 1e12),
        "cycles": ("cycles", 1.0),
        "ns": ("time", 1e-9),
        "MHz": ("frequency", 1e6),
        "bit": ("bits", 1.0),
        "W": ("power", 1.0),
        "nm": ("length", 1e-9),
        "count": ("count", 1.0),
        "flag": ("flag", 1.0),
        "text": ("text", 1.0),
    }
)

# Names of peak rates. fp8 covers e4m3 and e5m2 at one rate; mx* are the OCP block formats, hif* Huawei's.
DTYPES = (
    "fp64", "fp32", "tf32", "bf16", "fp16", "fp8", "int8", "int4",
    "mxfp8", "mxfp6", "mxfp4", "nvfp4", "hif8", "hif4",
)  # fmt: skip

# Features and the dimension of their values.
FEATURES: Mapping[str, str] = MappingProxyType(
    {
        "matrix_units": "flag",
        "warpgroup_matrix": "flag",
        "bulk_copies": "flag",
        "graph_capture": "flag",
        "simt": "flag",
        "fp64": "flag",
        "bf16": "flag",
        "fp8": "flag",
        "fp8_e4m3fn": "flag",
        "fp8_e5m2": "flag",
        "int8": "flag",
        "hif4": "flag",
        "hf32": "flag",
        "inf_nan": "text",  # survive, or saturate: Inf becomes the largest finite number, NaN becomes 0
        "dies": "count",
        "use": "text",
        "comparable_to": "text",
        "released": "text",
    }
)

Kind = Literal["vendor", "measured", "press"]
_DATE = re.compile(r"\d{4}(-(0[1-9]|1[0-2])(-(0[1-9]|[12]\d|3[01]))?)?")


def _filled(text: str) -> str:
    if not text.strip():
        raise ValueError("must not be empty")
    return text


def _known_unit(unit: str) -> str:
    if unit not in UNITS:
        raise ValueError(f"unknown unit {unit!r}; known are {', '.join(UNITS)}")
    return unit


def _calendar(date: str) -> str:
    if not _DATE.fullmatch(date):
        raise ValueError(f"date {date!r} must read YYYY, YYYY-MM or YYYY-MM-DD")
    return date


def _known_dtype(dtype: str) -> str:
    if dtype not in DTYPES:
        raise ValueError(f"unknown rate {dtype!r}; known are {', '.join(DTYPES)}")
    return dtype


Text = Annotated[str, AfterValidator(_filled)]


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Figure(_Record):
    """One fact. `date` is the source's own, or (`dated="reading"`) when a source without one was read.

    kind: vendor (published by the maker), measured (read or timed on a device), press (anyone else's
    account).
    """

    value: bool | int | float | Text
    unit: Annotated[str, AfterValidator(_known_unit)]
    source: Text
    date: Annotated[str, AfterValidator(_calendar)]
    kind: Kind
    dated: Literal["source", "reading"] = "source"
    note: Text | None = None

    @model_validator(mode="after")
    def _value_fits_unit(self) -> Figure:
        expected = {"flag": (bool,), "text": (str,)}.get(self.unit, (int, float))
        if not isinstance(self.value, expected) or (isinstance(self.value, bool) and self.unit != "flag"):
            raise ValueError(f"value {self.value!r} does not fit unit {self.unit!r}")
        if isinstance(self.value, int | float) and self.value < 0:
            raise ValueError(f"value {self.value!r} is negative")
        return self

    @property
    def dimension(self) -> str:
        return UNITS[self.unit][0]

    @property
    def number(self) -> float:
        """The value in base units (bytes, bytes/s, FLOP/s, seconds …); TypeError for a text."""
        if isinstance(self.value, str):
            raise TypeError(f"{self.value!r} is a text, not a number")
        return float(self.value) * UNITS[self.unit][1]


Figures = tuple[Figure, ...]


def pick(figures: Figures, prefer: tuple[Kind, ...] = ("vendor", "measured", "press")) -> Figure | None:
    """The first figure of the most preferred class; None if nothing is known."""
    ranked = sorted(figures, key=lambda figure: prefer.index(figure.kind) if figure.kind in prefer else len(prefer))
    return ranked[0] if ranked else None


def _dimension(*allowed: str) -> AfterValidator:
    def check(figures: Figures) -> Figures:
        for figure in figures:
            if figure.dimension not in allowed:
                raise ValueError(f"unit {figure.unit!r} cannot measure this; wanted one of: {', '.join(allowed)}")
        return figures

    return AfterValidator(check)


Sizes = Annotated[Figures, _dimension("size")]
Bandwidths = Annotated[Figures, _dimension("bandwidth")]
Rates = Annotated[Figures, _dimension("rate")]
Latencies = Annotated[Figures, _dimension("cycles", "time")]
Counts = Annotated[Figures, _dimension("count")]
Bits = Annotated[Figures, _dimension("bits")]
Powers = Annotated[Figures, _dimension("power")]
Lengths = Annotated[Figures, _dimension("length")]
Texts = Annotated[Figures, _dimension("text")]


class ComputeUnit(_Record):
    """A kind of core: SMs, cube and vector cores, CPU cores. `per` names the unit that contains it."""

    name: Text
    count: Counts = ()
    per: Text | None = None


class MemoryLevel(_Record):
    """One memory level, with size and bandwidth of one instance: `per` device, or per the named unit."""

    name: Text
    per: Text = "device"
    technology: Texts = ()
    size: Sizes = ()
    bandwidth: Bandwidths = ()
    latency: Latencies = ()


class Link(_Record):
    """A connection to other devices or the host.

    The bandwidth is that of all the device's links together, in both directions where the figure's note
    says so.
    """

    name: Text
    bandwidth: Bandwidths = ()
    generation: Texts = ()


class Rate(_Record):
    """Peak arithmetic of one dtype: dense, and with the sparsity that the descriptor names.

    path: matrix units, vector units, or unknown to the source.
    """

    dtype: Annotated[str, AfterValidator(_known_dtype)]
    path: Literal["matrix", "vector"] | None = None
    dense: Rates = ()
    sparse: Rates = ()


class DeviceDescriptor(_Record):
    """A chip, or one live device. `aliases` are names under which torch or a compiler reports it.

    torch_device: torch's device type. device: "cuda:0" for a live device, None for a data sheet. family:
    name of the sheet whose figures hold for the whole family. simulated: no hardware stands behind the
    device.
    """

    vendor: Text
    name: Text
    aliases: tuple[Text, ...] = ()
    family: Text | None = None
    architecture: Text | None = None
    torch_device: Text | None = None
    flavour: Literal["nvidia", "hip", "cuda-like"] | None = None
    device: Text | None = None
    simulated: bool = False
    planned: bool = False

    compute: tuple[ComputeUnit, ...] = ()
    memory: tuple[MemoryLevel, ...] = ()
    links: tuple[Link, ...] = ()
    rates: tuple[Rate, ...] = ()
    sparsity: Texts = ()

    warp: Counts = ()
    vector: Bits = ()
    registers_per_thread: Counts = ()
    resident_warps: Counts = ()
    alignment: Sizes = ()
    burst: Sizes = ()

    features: dict[Text, Figures] = Field(default_factory=dict)
    power: Powers = ()
    process: Lengths = ()
    notes: tuple[Text, ...] = ()

    @model_validator(mode="after")
    def _names_are_unique(self) -> DeviceDescriptor:
        keys: tuple[tuple[str, list[Any]], ...] = (
            ("compute unit", [unit.name for unit in self.compute]),
            ("memory level", [level.name for level in self.memory]),
            ("link", [link.name for link in self.links]),
            ("rate", [(rate.dtype, rate.path) for rate in self.rates]),
        )
        for what, names in keys:
            if double := {name for name in names if names.count(name) > 1}:
                raise ValueError(f"{what} named twice: {', '.join(map(str, sorted(double, key=str)))}")
        return self

    @model_validator(mode="after")
    def _features_are_known(self) -> DeviceDescriptor:
        for name, figures in self.features.items():
            if name not in FEATURES:
                raise ValueError(f"unknown feature {name!r}; known are {', '.join(FEATURES)}")
            if wrong := [figure.unit for figure in figures if figure.dimension != FEATURES[name]]:
                raise ValueError(f"feature {name!r} is a {FEATURES[name]}, not a {wrong[0]}")
        return self

    def peak(self, dtype: str, *, sparse: bool = False) -> float | None:
        """Peak FLOP/s (or integer operations/s) of `dtype`, matrix units first; None if unknown."""
        known = [
            figure.number
            for rate in self.rates
            if rate.dtype == dtype and (figure := pick(rate.sparse if sparse else rate.dense)) is not None
        ]
        return max(known, default=None)

    def level(self, name: str) -> MemoryLevel | None:
        """The memory level called `name`, such as "device" or "L2"."""
        return next((level for level in self.memory if level.name == name), None)

    def units(self, name: str) -> int | None:
        """How many compute units of that name the device has; None if unknown."""
        figure = next((pick(unit.count) for unit in self.compute if unit.name == name), None)
        return None if figure is None else int(figure.number)

    @property
    def memory_bytes(self) -> float | None:
        """Size of the device's memory; what the live device says counts more than the sheet."""
        level = self.level("device")
        figure = None if level is None else pick(level.size, ("measured", "vendor", "press"))
        return None if figure is None else figure.number

    @property
    def bandwidth(self) -> float | None:
        """Peak bytes/s of the device's memory; None if unknown."""
        level = self.level("device")
        figure = None if level is None else pick(level.bandwidth)
        return None if figure is None else figure.number

    def feature(self, name: str) -> bool | int | float | str | None:
        """The value of a feature; None if unknown."""
        figure = pick(self.features.get(name, ()), ("measured", "vendor", "press"))
        return None if figure is None else figure.value

    def to_json(self) -> dict[str, Any]:
        """JSON-able data without the empty fields, as a data sheet is written."""
        return self.model_dump(mode="json", exclude_defaults=True)
