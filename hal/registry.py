"""Which backends there are: discovery through entry points, loading on demand, validation at registration."""

from __future__ import annotations

import contextlib
import difflib
import importlib.metadata
import inspect
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pluggy
import torch

from hal import hookspec
from hal.capability import Implementation
from hal.contract import OPS, dtype_name
from hal.errors import ConfigError, PluginError
from hal.hookspec import Backend, Conflict, Tuner
from hal.locks import LOCK

if TYPE_CHECKING:
    from hal.descriptor import DeviceDescriptor

__all__ = [
    "GROUP",
    "PluginFailure",
    "backend",
    "backend_names",
    "cases",
    "conflicts",
    "devices",
    "failures",
    "implementations",
    "load_all",
    "register",
    "simulator",
    "software",
    "tuner",
    "unregister",
]

GROUP = "hal.backends"
PORTABLE = "portable"

_DTYPES = tuple(sorted({dtype_name(value) for value in vars(torch).values() if isinstance(value, torch.dtype)}))

logger = logging.getLogger("hal")


@dataclass(frozen=True)
class PluginFailure:
    """A plug-in that could not be used: its entry-point name, the exception's type and its text."""

    name: str
    type: str
    message: str


@dataclass
class _State:
    manager: pluggy.PluginManager
    entries: dict[str, importlib.metadata.EntryPoint] = field(default_factory=dict)
    backends: dict[str, Backend] = field(default_factory=dict)
    implementations: dict[str, dict[str, list[Implementation]]] = field(default_factory=dict)
    added: dict[str, list[Implementation]] = field(default_factory=dict)
    failures: dict[str, PluginFailure] = field(default_factory=dict)
    devices: dict[str, tuple[DeviceDescriptor, ...]] = field(default_factory=dict)
    tried: set[str] = field(default_factory=set)


_state: _State | None = None
_on_change: list[Callable[[], None]] = []


def on_change(callback: Callable[[], None]) -> None:
    """Call back whenever a plug-in was registered or unregistered by hand."""
    _on_change.append(callback)


def backend_names() -> list[str]:
    """Names of the backends that are installed, from entry-point names alone; nothing is imported."""
    with LOCK:
        state = _get()
        return sorted({name.partition(".")[0] for name in state.entries} | set(state.backends))


def backend(name: str) -> Backend:
    """The backend `name`, imported if need be.

    Raises ConfigError if no plug-in has this name, PluginError if the one that has it failed.
    """
    with LOCK:
        state = _get()
        _load(state, name)
        found = state.backends.get(name)
        if found is not None:
            return found
        failure = state.failures.get(name)
        if failure is not None:
            raise PluginError(
                f"backend {name!r} was asked for, but its plug-in failed: {failure.type}: {failure.message}; "
                "mend or uninstall it (`hal doctor` lists plug-in failures)",
                plugin=name,
            )
        near = difflib.get_close_matches(name, backend_names(), n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigError(
            f"backend {name!r} is not installed; there are auto, {', '.join(_shown(n) for n in backend_names())}{hint}"
        )


def implementations(name: str, op: str) -> list[Implementation]:
    """What backend `name` and its extensions register for an operator, preferred ones first."""
    with LOCK:
        backend(name)
        return _get().implementations.get(name, {}).get(op, [])


def devices(name: str) -> tuple[DeviceDescriptor, ...]:
    """Descriptors of the devices present for backend `name` (or `portable:<device type>`)."""
    with LOCK:
        state = _get()
        if name not in state.devices:
            backend(name.partition(":")[0])
            found = _call_each(state, "hal_devices", backend=name)
            state.devices[name] = tuple(d for _, given in found for d in given or ())
        return state.devices[name]


def cases(op: str) -> list[Any]:
    """Conformance cases that loaded plug-ins add for an operator."""
    with LOCK:
        return [case for _, given in _call_each(_get(), "hal_cases", op=op) for case in given or ()]


def simulator(name: str) -> Callable[[Sequence[str]], int]:
    """The command line of the simulator of backend `name`'s devices.

    Raises ConfigError if no plug-in has this name or the backend has no simulator.
    """
    with LOCK:
        command: Callable[[Sequence[str]], int] | None = _given(name, "hal_simulator")
    if command is None:
        raise ConfigError(
            f"backend {name!r} has no simulator of its devices; `hal simulate` is for backends that bring one"
        )
    return command


def tuner(name: str) -> Tuner | None:
    """How backend `name` tries and keeps its tactics; None if it has nothing to tune."""
    with LOCK:
        found: Tuner | None = _given(name, "hal_tuner")
    return found


def _given(name: str, hook: str) -> Any:
    """What the first plug-in that answers gives for backend `name`; None if none does."""
    backend(name)
    return next((given for _, given in _call_each(_get(), hook, backend=name) if given is not None), None)


def conflicts() -> list[Conflict]:
    """What loaded plug-ins find installed that does not go together."""
    with LOCK:
        return [conflict for _, given in _call_each(_get(), "hal_conflicts") for conflict in given or ()]


def software() -> dict[str, str]:
    """Versions of what the backends' devices run on, where it is here: vendors' packages, and what plug-ins tell.

    Asks every backend, since one may run on another's device type, as `portable` does; but asks for no
    implementations, so that a backend which nobody uses touches no device.
    """
    with LOCK:
        state, found = _get(), dict[str, str]()
        plugins = {name: plugin for name, plugin in state.manager.list_name_plugin() if plugin is not None}
        for name, entry in state.entries.items():
            if name not in state.tried and "." not in name:
                with contextlib.suppress(Exception, SystemExit):  # told where the backend is asked for
                    plugins[name] = entry.load()
        for name, plugin in plugins.items():
            found |= _software_of(name, plugin)
        return found


def load_all() -> list[Backend]:
    """Every backend that loads; those that do not are in `failures()`."""
    with LOCK:
        state = _get()
        for name in backend_names():
            _load(state, name)
        return [state.backends[name] for name in sorted(state.backends)]


def failures() -> list[PluginFailure]:
    """Plug-ins that failed so far, whether at import or at validation."""
    with LOCK:
        return [f for _, f in sorted(_get().failures.items())]


def register(plugin: Any, name: str) -> None:
    """Register a plug-in object by hand (`name` or `backend.extra`, as for an entry point).

    Raises PluginError if it is not valid.
    """
    with LOCK:
        state = _get()
        owner = name.partition(".")[0]
        if owner != name:
            _load(state, owner)
        _add(state, name, plugin)
    _changed()


def unregister(name: str) -> None:
    """Take a plug-in away again."""
    with LOCK:
        _remove(_get(), name)
    _changed()


def _changed() -> None:
    for callback in _on_change:
        callback()


def _get() -> _State:
    global _state
    if _state is None:
        manager = pluggy.PluginManager(hookspec.PROJECT)
        manager.add_hookspecs(hookspec)
        state = _State(manager)
        _discover(state)
        _state = state
    return _state


def _discover(state: _State) -> None:
    seen: dict[str, importlib.metadata.EntryPoint] = {}
    for entry in importlib.metadata.entry_points(group=GROUP):
        other = seen.get(entry.name)
        if other is None:
            seen[entry.name] = entry
        elif other.value != entry.value:
            ours = [e for e in (other, entry) if _distribution(e) == "torch-hal"]
            text = (
                f"two plug-ins are named {entry.name!r}: {other.value} of {_distribution(other)} and {entry.value} of "
                f"{_distribution(entry)}; uninstall one"
            )
            _fail(state, entry.name if not ours else f"{entry.name}@{_distribution(entry)}", PluginError(text))
            if ours:
                seen[entry.name] = ours[0]
    state.entries = {name: entry for name, entry in seen.items() if name not in state.failures}


def _load(state: _State, name: str) -> None:
    """Import the plug-ins of one backend: the backend's own first, then its extensions."""
    wanted = [e for e in state.entries.values() if e.name == name or e.name.startswith(f"{name}.")]
    for entry in sorted(wanted, key=lambda e: (len(e.name), e.name)):
        if entry.name in state.tried:
            continue
        state.tried.add(entry.name)
        try:
            plugin = entry.load()
            if plugin is None:
                raise PluginError(f"entry point {entry.name!r} ({entry.value}) gives None, not a plug-in module")
            _add(state, entry.name, plugin)
        except (Exception, SystemExit) as error:  # whatever it is, it must not hide the others
            _fail(state, entry.name, error)


def _add(state: _State, name: str, plugin: Any) -> None:
    if state.manager.has_plugin(name):
        raise PluginError(f"a plug-in named {name!r} is registered already; give the other another name", plugin=name)
    owner = name.partition(".")[0]
    try:
        state.manager.register(plugin, name=name)
        state.manager.check_pending()
    except (ValueError, pluggy.PluginValidationError) as error:
        if state.manager.has_plugin(name):
            state.manager.unregister(name=name)
        raise PluginError(f"plug-in {name!r} does not fit the plug-in contract: {error}", plugin=name) from error
    try:
        brought = _call_one(state, name, "hal_backend")
        if owner == name:
            _check_backend(name, brought)
        elif brought is not None:
            raise PluginError(f"plug-in {name!r} extends {owner!r} and may not bring a backend of its own", plugin=name)
        existing = [i for by_op in state.implementations.get(owner, {}).values() for i in by_op]
        added = list(_call_one(state, name, "hal_implementations", backend=owner) or ())
        for implementation in added:
            _check_implementation(name, implementation, existing)
            existing.append(implementation)
    except Exception:
        state.manager.unregister(name=name)
        raise
    if owner == name:
        state.backends[name] = brought
    state.added[name] = added
    table: dict[str, list[Implementation]] = {}
    for implementation in existing:
        table.setdefault(implementation.op, []).append(implementation)
    for found in table.values():
        found.sort(key=lambda i: (i.kind != "native", -i.priority))
    state.implementations[owner] = table
    state.failures.pop(name, None)
    state.devices.clear()


def _remove(state: _State, name: str) -> None:
    if not state.manager.has_plugin(name):
        return
    owner = name.partition(".")[0]
    gone = {id(i) for i in state.added.pop(name, ())}
    state.manager.unregister(name=name)
    if owner == name:
        state.backends.pop(name, None)
        state.implementations.pop(name, None)
    else:
        for found in state.implementations.get(owner, {}).values():
            found[:] = [i for i in found if id(i) not in gone]
    state.devices.clear()


def _check_backend(name: str, brought: Any) -> None:
    if not isinstance(brought, Backend):
        raise PluginError(
            f"plug-in {name!r} gives {type(brought).__name__} from hal_backend(), but it must give a Backend; "
            f"a plug-in that extends another backend is named `backend.extra`",
            plugin=name,
        )
    if brought.name != name:
        raise PluginError(
            f"plug-in {name!r} brings a backend named {brought.name!r}; entry-point and backend names must be equal",
            plugin=name,
        )
    if not brought.parameterised and not brought.device_types:
        raise PluginError(f"plug-in {name!r} serves no torch device type; name at least one", plugin=name)


def _check_implementation(plugin: str, implementation: Any, existing: Iterable[Implementation]) -> None:
    def wrong(text: str) -> PluginError:
        return PluginError(f"plug-in {plugin!r}: {text}", plugin=plugin)

    if not isinstance(implementation, Implementation):
        raise wrong(f"hal_implementations() gives {type(implementation).__name__}, not Implementation")
    op = OPS.get(implementation.op)
    label = f"{implementation.op}:{implementation.name}"
    if op is None:
        raise wrong(f"{label} implements an operator that hal does not have; there are {', '.join(sorted(OPS))}")
    if not implementation.name or set(implementation.name) & set(",= :"):
        raise wrong(f"{label}: a name must be non-empty, without commas, colons, spaces or equals signs")
    if any(i.op == implementation.op and i.name == implementation.name for i in existing):
        raise wrong(f"{label} is registered already; choose another name")
    expected = _shape(op.signature)
    for role, function in (("forward", implementation.forward), ("train", implementation.train)):
        if function is not None and _shape(inspect.signature(function)) != expected:
            raise wrong(
                f"{label}: {role} has the signature {inspect.signature(function)}, but it must be {op.signature}"
            )
    if implementation.backward is not None and not op.grad:
        raise wrong(f"{label} brings a backward, but the operator has no gradient")
    supports = implementation.supports
    for what, named, known in (
        ("features", supports.features or (), op.features),
        ("limits", supports.limits, op.dims),
        ("dtypes", supports.dtypes or (), _DTYPES),
    ):
        strange = sorted(set(named) - set(known))
        if strange:
            raise wrong(f"{label} names unknown {what} {', '.join(strange)}; there are {', '.join(known) or 'none'}")


def _shape(signature: inspect.Signature) -> list[tuple[str, Any, Any]]:
    return [(p.name, p.kind, p.default) for p in signature.parameters.values()]


def _call_one(state: _State, plugin: str, hook: str, **kwargs: Any) -> Any:
    for implementation in getattr(state.manager.hook, hook).get_hookimpls():
        if implementation.plugin_name == plugin:
            return implementation.function(*(kwargs[name] for name in implementation.argnames))
    return None


def _call_each(state: _State, hook: str, **kwargs: Any) -> list[tuple[str, Any]]:
    names = [name for name, plugin in state.manager.list_name_plugin() if plugin is not None]
    return [(name, _call_one(state, name, hook, **kwargs)) for name in names]


def _software_of(name: str, plugin: Any) -> dict[str, str]:
    found: dict[str, str] = {}
    try:
        brought = plugin.hal_backend() if hasattr(plugin, "hal_backend") else None
        for package in brought.packages if brought is not None else ():
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                found[package] = importlib.metadata.version(package)
        return found | dict(plugin.hal_software() if hasattr(plugin, "hal_software") else {})
    except Exception as error:  # a version that cannot be told must not cost a run its results
        return found | {name: f"unknown ({type(error).__name__}: {error})"}


def _fail(state: _State, name: str, error: BaseException) -> None:
    state.failures[name] = PluginFailure(name, type(error).__name__, str(error))
    logger.warning("plug-in %s cannot be used: %s: %s", name, type(error).__name__, error)


def _distribution(entry: importlib.metadata.EntryPoint) -> str:
    return entry.dist.name if entry.dist is not None else "an unknown distribution"


def _shown(name: str) -> str:
    return f"{PORTABLE}:<torch device>" if name == PORTABLE else name
