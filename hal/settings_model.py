"""The typed form of the settings and their sources. Loaded on first use: pydantic is slow to import."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError, field_validator

from hal import settings
from hal.errors import ConfigError, FileError

__all__ = ["Settings", "config_values", "load"]

_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"0", "false", "no", "off"})


def _flag(value: Any) -> Any:
    if isinstance(value, str):
        if value.lower() in _TRUE:
            return True
        if value.lower() in _FALSE:
            return False
        raise ValueError("not a boolean")
    if not isinstance(value, bool):
        raise ValueError("not a boolean")
    return value


Flag = Annotated[bool, BeforeValidator(_flag)]

LEGAL = {
    "backend": "auto, cpu, portable:<torch device> or the name of a backend plug-in",
    "impl": "op=implementation pairs separated by commas, such as attention=aten,rms_norm=reference",
    "fallback": "error, portable or cpu",
    "sync": "allow, warn or error",
    "check": "1, true, yes, on or 0, false, no, off (any case)",
    "invariant": "1, true, yes, on or 0, false, no, off (any case)",
    "report": "a path",
    "config": "a path",
}


class Settings(BaseModel):
    """All settings in force.

    backend: which backend serves calls. impl: forced implementation by operator. fallback: what may stand in for a
    native implementation. check: read tensor values on devices too (lengths, ids). sync: what a synchronisation
    with the device does. invariant: demand batch-invariant implementations. report: file for the dispatch report
    at exit. config: TOML file with settings.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    backend: str = "auto"
    impl: str = ""
    fallback: Literal["error", "portable", "cpu"] = "error"
    check: Flag = False
    sync: Literal["allow", "warn", "error"] = "allow"
    invariant: Flag = False
    report: Path | None = None
    config: Path | None = None

    @field_validator("impl")
    @classmethod
    def _pairs(cls, value: str) -> str:
        parse_pairs(value)
        return value

    @property
    def implementations(self) -> dict[str, str]:
        """Forced implementation by operator name."""
        return parse_pairs(self.impl)


def parse_pairs(text: str) -> dict[str, str]:
    """{"attention": "aten"} from "attention=aten"."""
    pairs: dict[str, str] = {}
    for part in filter(None, (p.strip() for p in text.split(","))):
        op, sep, name = part.partition("=")
        if not sep or not op.strip() or not name.strip():
            raise ValueError(f"{part!r} is not of the form op=implementation")
        pairs[op.strip()] = name.strip()
    return pairs


def config_path() -> Path | None:
    """The TOML file that HAL_CONFIG names, or none."""
    text = settings.environment().get("config")
    return Path(text) if text else None


def config_values() -> dict[str, Any]:
    """Settings from the config file. Raises FileError if it cannot be read, ConfigError if it holds unknown names."""
    path = config_path()
    if path is None:
        return {}
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise FileError(
            f"HAL_CONFIG names {str(path)!r}, which cannot be read ({error}); correct the path or unset it"
        ) from error
    values = _toml(text, path)
    strange = sorted(set(values) - set(LEGAL))
    if strange:
        raise ConfigError(
            f"config file {str(path)!r} has {', '.join(strange)}, but the settings are {', '.join(LEGAL)}"
        )
    return values


def _toml(text: str, path: Path) -> dict[str, Any]:
    # The conformance kit also runs under Python 3.10, which reads no TOML.
    if sys.version_info >= (3, 11):
        import tomllib

        try:
            return tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise ConfigError(f"config file {str(path)!r} is not TOML ({error})") from error
    else:
        raise ConfigError(
            f"HAL_CONFIG names {str(path)!r}, but a config file needs Python 3.11 or later; "
            "unset it and set the HAL_* variables instead"
        )


def load(overrides: dict[str, Any]) -> Settings:
    """Settings from overrides, environment, config file and defaults, in this order."""
    try:
        return Settings(**(config_values() | settings.environment() | overrides))
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0]) if first["loc"] else "?"
        source = {"use": "hal.use", "environment": "the environment", "config file": "the config file"}.get(
            settings.sources().get(name, ""), "a default"
        )
        shown = name if source == "hal.use" else settings.PREFIX + name.upper()
        raise settings.config_error(shown, first.get("input"), LEGAL.get(name, "a known setting"), source) from None
