"""The simulator's settings: what its variables in the environment mean.

`hal simulate ascend` puts its options into ASCEND_SIM_* variables, which the simulated CANN reads in the child.
"""

from __future__ import annotations

import difflib
import os
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from hal.backends.ascend.simulator.socs import ALIASES, SOCS, Soc
from hal.errors import ConfigError
from hal.settings import foreign, inherited, names_of

__all__ = [
    "PREFIX",
    "Numerics",
    "SimulatorSettings",
    "cache_root",
    "from_environment",
    "libraries",
    "process_environment",
]

PREFIX = "ASCEND_SIM_"
# Set by the launcher alone: where the libraries lie that this process should load.
LIBRARIES = PREFIX + "LIBRARIES"
CACHE = PREFIX + "CACHE"
DEFAULT_MEMORY = 4 * 2**30
MOST_DEVICES = 16

Numerics = Literal["exact", "perturbed"]

_UNITS = {"": 1, "B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_SWITCH = dict.fromkeys(("1", "true", "yes", "on"), True) | dict.fromkeys(("0", "false", "no", "off"), False)


@dataclass(frozen=True)
class SimulatorSettings:
    """What is simulated.

    soc: the chip. cann: the CANN version that is reported, which decides what torch_npu calls. devices: how many.
    memory: bytes of each. numerics: `exact` computes in float64 and rounds each result once; `perturbed` computes as
    a device may (float32, sums in another order, hf32 products where allowed, saturation where the chip saturates).
    strict: documented constraints are checked. trace: file to which each call is appended as one line of JSON.
    """

    soc: Soc = SOCS["910B3"]
    cann: str = "8.5.0"
    devices: int = 2
    memory: int = DEFAULT_MEMORY
    numerics: Numerics = "exact"
    strict: bool = True
    trace: Path | None = None

    @property
    def saturate(self) -> bool:
        """Whether results lose Inf and NaN."""
        return self.numerics == "perturbed" and self.soc.saturates

    @classmethod
    def parse(cls, texts: Mapping[str, str | None], shown: Callable[[str], str] = str) -> SimulatorSettings:
        """Settings from texts by field name; None and empty ones mean the default.

        shown: how a message names a setting. Raises ConfigError for a value that means nothing.
        """
        values: dict[str, Any] = {}
        for name, text in texts.items():
            if text:
                try:
                    values[name] = _PARSERS[name](text)
                except ValueError as error:
                    raise ConfigError(
                        f"{shown(name)} = {text!r}, but it must be {error}; correct it or leave it out"
                    ) from None
        return cls(**values)

    def texts(self) -> dict[str, str]:
        """The texts that `parse` makes these settings of."""
        return {
            "soc": self.soc.name,
            "cann": self.cann,
            "devices": str(self.devices),
            "memory": str(self.memory),
            "numerics": self.numerics,
            "strict": str(int(self.strict)),
            "trace": "" if self.trace is None else str(self.trace),
        }

    def __str__(self) -> str:
        return (
            f"simulated CANN {self.cann}: {self.devices} × {self.soc.name} with {self.memory / 2**30:g} GiB, "
            f"{self.numerics} numerics, constraints {'checked' if self.strict else 'not checked'}"
        )


def _soc(text: str) -> Soc:
    plain = text.removeprefix("Ascend")
    name = ALIASES.get(plain, plain)
    if name not in SOCS:
        near = difflib.get_close_matches(plain, [*SOCS, *ALIASES], n=1)
        hint = f" (did you mean {near[0]}?)" if near else ""
        raise ValueError(f"one of {', '.join(SOCS)} or {', '.join(ALIASES)}{hint}")
    return SOCS[name]


def _cann(text: str) -> str:
    if not re.fullmatch(r"\d+\.\d+(\.[A-Za-z0-9]+)*", text):
        raise ValueError("a version such as 8.5.0 or 8.2.RC1")
    return text


def _devices(text: str) -> int:
    if not text.isascii() or not text.isdecimal() or not 1 <= int(text) <= MOST_DEVICES:
        raise ValueError(f"a number from 1 to {MOST_DEVICES}")
    return int(text)


def _memory(text: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text)
    if match is None or match[2] not in _UNITS:
        raise ValueError("a size such as 512MiB or 4GiB (or a number of bytes)")
    size = int(float(match[1]) * _UNITS[match[2]])
    if not 2**20 <= size <= 2**40:
        raise ValueError("between 1MiB and 1TiB")
    return size


def _numerics(text: str) -> str:
    if text not in get_args(Numerics):
        raise ValueError(" or ".join(get_args(Numerics)))
    return text


def _strict(text: str) -> bool:
    if text.lower() not in _SWITCH:
        raise ValueError("1, true, yes, on or 0, false, no, off (any case)")
    return _SWITCH[text.lower()]


def _path(text: str) -> Path:
    # The program may change its directory, and its children start in others.
    return Path(text).absolute()


_PARSERS = {
    "soc": _soc,
    "cann": _cann,
    "devices": _devices,
    "memory": _memory,
    "numerics": _numerics,
    "strict": _strict,
    "trace": _path,
}


def from_environment() -> SimulatorSettings:
    """The settings of this process. Raises ConfigError for a name that no setting has or a value that means nothing."""
    known = {_variable(name): name for name in _PARSERS}
    strange = [name for name in names_of(PREFIX) if name not in (*known, LIBRARIES, CACHE)]
    if strange:
        raise ConfigError(
            f"{', '.join(strange)}: no setting of the simulated CANN has this name; the names are {', '.join(known)}, "
            f"{CACHE}. Correct it or unset it"
        )
    return SimulatorSettings.parse({name: foreign(variable) for variable, name in known.items()}, _variable)


def _variable(name: str) -> str:
    return PREFIX + name.upper()


def libraries() -> Path | None:
    """Where the libraries lie that this process was started with; None outside `hal simulate`."""
    text = foreign(LIBRARIES)
    return Path(text) if text else None


def cache_root() -> Path:
    """The directory under which libraries are kept: ASCEND_SIM_CACHE, else in the user's cache directory."""
    text = foreign(CACHE)
    if text:
        return _path(text)
    base = foreign("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "torch-hal" / "ascend-simulator"


def compiler() -> str:
    """The C++ compiler to ask for: CXX, else g++."""
    return foreign("CXX") or "g++"


def process_environment() -> dict[str, str]:
    """A copy of this process's environment, with its interpreter's directory first on the search path."""
    found = inherited()
    own = str(Path(sys.executable).parent)
    found["PATH"] = os.pathsep.join(filter(None, (own, found.get("PATH"))))
    return found
