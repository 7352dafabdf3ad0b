"""The typed form of the settings and their sources. Loaded on first use: pydantic is slow to import."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ValidationError, field_validator
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

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


class Settings(BaseSettings):
    """All settings in force.

    backend: which backend serves calls. impl: forced implementation by operator. fallback: what may stand in for a
    native implementation. check: read tensor values on devices too (lengths, ids). sync: what a synchronisation
    with the device does. invariant: demand batch-invariant implementations. report: file for the dispatch report
    at exit. config: TOML file with settings.
    """

    model_config = SettingsConfigDict(
        env_prefix=settings.PREFIX,
        case_sensitive=False,
        env_ignore_empty=True,
        frozen=True,
        extra="forbid",
        env_parse_none_str=None,
    )

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

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return init_settings, _Environment(settings_cls), _ConfigFile(settings_cls)


class _Values(PydanticBaseSettingsSource):
    """A source that is a plain mapping."""

    def values(self) -> dict[str, Any]:
        raise NotImplementedError

    def get_field_value(self, field: Any, field_name: str) -> tuple[Any, str, bool]:
        return self.values().get(field_name), field_name, False

    def __call__(self) -> dict[str, Any]:
        return self.values()


class _Environment(_Values):
    """HAL_* as `settings` reads them: exact names, empty means unset."""

    def values(self) -> dict[str, Any]:
        return dict(settings.environment())


class _ConfigFile(_Values):
    def values(self) -> dict[str, Any]:
        return config_values()


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
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise FileError(
            f"HAL_CONFIG names {str(path)!r}, which cannot be read ({error}); correct the path or unset it"
        ) from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"config file {str(path)!r} is not TOML ({error})") from error
    strange = sorted(set(values) - set(LEGAL))
    if strange:
        raise ConfigError(
            f"config file {str(path)!r} has {', '.join(strange)}, but the settings are {', '.join(LEGAL)}"
        )
    return values


def load(overrides: dict[str, Any]) -> Settings:
    """Settings from overrides, environment, config file and defaults, in this order."""
    try:
        return Settings(**overrides)
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0]) if first["loc"] else "?"
        source = {"use": "hal.use", "environment": "the environment", "config file": "the config file"}.get(
            settings.sources().get(name, ""), "a default"
        )
        shown = name if source == "hal.use" else settings.PREFIX + name.upper()
        raise settings.config_error(shown, first.get("input"), LEGAL.get(name, "a known setting"), source) from None
