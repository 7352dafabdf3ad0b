"""Settings: the only place where hal reads the environment.

Importing this module reads nothing. The raw values of the policy variables are compared on every call, so a change
of the environment or of `hal.use` takes effect at once; their typed form (`settings_model`) is made when they change.
"""

from __future__ import annotations

import difflib
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from hal.errors import ConfigError
from hal.locks import LOCK

if TYPE_CHECKING:
    from hal.settings_model import Settings

__all__ = ["NAMES", "current", "policy_key", "sources", "use"]

logger = logging.getLogger("hal")

# Each setting and its environment variable, HAL_ + upper case.
NAMES = ("backend", "impl", "fallback", "check", "sync", "invariant", "report", "config")
FLAGS = ("check", "invariant")
PREFIX = "HAL_"

_overrides: ContextVar[tuple[tuple[str, Any], ...]] = ContextVar("hal_overrides", default=())
_typed: dict[Any, Settings] = {}
_warned: set[str] = set()


# Read as the mapping that os.environ wraps: os.environ.get encodes and decodes on every call, which would cost
# more than the rest of a call's dispatch.
_environ: Any = vars(os.environ)["_data"]
_raw_get = _environ.get
_raw_names = tuple(os.environ.encodekey(PREFIX + name.upper()) for name in NAMES)


def policy_key() -> tuple[Any, ...]:
    """The raw values in force, cheap enough for every call; equal keys mean equal settings."""
    return (_overrides.get(), *map(_raw_get, _raw_names))


def foreign(name: str) -> str:
    """A variable that another program's set-up sets, such as a vendor's home folder; empty if it is not set."""
    return os.environ.get(name, "")


def names_of(prefix: str) -> list[str]:
    """The variables that are set and whose names begin so, in order."""
    return sorted(name for name in os.environ if name.startswith(prefix))


def inherited() -> dict[str, str]:
    """A copy of this process's environment, to start another process with."""
    return dict(os.environ)


def environment() -> dict[str, str]:
    """The HAL_* variables that are set and not empty, by setting name."""
    found = {name: os.environ.get(PREFIX + name.upper(), "") for name in NAMES}
    return {name: value for name, value in found.items() if value != ""}


def current() -> Settings:
    """The settings in force: `hal.use`, then environment, then config file, then defaults.

    Raises ConfigError for a value that means nothing. A HAL_* name that no setting has is warned about once.
    """
    key = policy_key()
    settings = _typed.get(key)
    if settings is None:
        with LOCK:
            from hal.settings_model import load

            warn_unknown()
            settings = load(dict(_overrides.get()))
            if len(_typed) > 256:
                _typed.clear()
            _typed[key] = settings
    return settings


def sources() -> dict[str, str]:
    """Where each setting's value comes from: "use", "environment", "config file" or "default"."""
    from hal.settings_model import config_values

    used, env, file = dict(_overrides.get()), environment(), config_values()
    return {
        name: "use" if name in used else "environment" if name in env else "config file" if name in file else "default"
        for name in NAMES
    }


@contextmanager
def use(
    *,
    backend: str | None = None,
    impl: str | Mapping[str, str] | None = None,
    fallback: str | None = None,
    check: bool | None = None,
    sync: str | None = None,
    invariant: bool | None = None,
) -> Iterator[None]:
    """Override settings within a block, in this context (thread or task) only.

    The values are those of the HAL_* variables. Raises ConfigError at once for one that means nothing. Inside a
    region compiled by torch.compile it is not supported: settings are read when an operator executes.
    """
    if isinstance(impl, Mapping):
        impl = ",".join(f"{op}={name}" for op, name in impl.items())
    given = {
        "backend": backend,
        "impl": impl,
        "fallback": fallback,
        "check": check,
        "sync": sync,
        "invariant": invariant,
    }
    for name, value in given.items():
        # Before a key is made of it: 1 equals True, and a list cannot be hashed.
        if value is not None and not isinstance(value, (str, bool) if name in FLAGS else str):
            from hal.settings_model import LEGAL

            raise config_error(name, value, LEGAL[name], "hal.use")
    merged = dict(_overrides.get()) | {name: value for name, value in given.items() if value is not None}
    token = _overrides.set(tuple(sorted(merged.items())))
    try:
        current()
        yield
    finally:
        _overrides.reset(token)


def unknown_names() -> dict[str, str | None]:
    """HAL_* variables that no setting has, each with the nearest known name if one is near."""
    known = [PREFIX + name.upper() for name in NAMES]
    strange = [name for name in names_of(PREFIX) if name not in known]
    return {name: next(iter(difflib.get_close_matches(name, known, n=1, cutoff=0.6)), None) for name in strange}


def warn_unknown() -> None:
    """Warn about unknown HAL_* variables, each once in a process."""
    for name, near in unknown_names().items():
        if name not in _warned:
            _warned.add(name)
            hint = f"; did you mean {near}?" if near else f"; the known ones are {_known()}"
            logger.warning("environment variable %s is not a setting of hal and has no effect%s", name, hint)


def _known() -> str:
    return ", ".join(PREFIX + name.upper() for name in NAMES)


def config_error(name: str, value: object, legal: str, source: str) -> ConfigError:
    """The error for a value that means nothing, worded alike for every source."""
    return ConfigError(f"{source} gives {name} = {value!r}, but it must be {legal}; correct it or leave it unset")
