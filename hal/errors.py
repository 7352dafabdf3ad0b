"""Every error hal raises: one class per cause, each also a builtin, so that plain `except ValueError` works."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = [
    "ArgumentError",
    "BundleError",
    "CaptureError",
    "ConfigError",
    "DeviceError",
    "DtypeError",
    "FileError",
    "HalError",
    "PluginError",
    "ShapeError",
    "SyncError",
    "TransformError",
    "UnsupportedError",
]


class HalError(Exception):
    """Base of all errors of hal. The message says what was asked, what is supported and what to do."""


class ConfigError(HalError, ValueError):
    """A setting (environment variable, config file, `hal.use`) has a value that means nothing."""


class ArgumentError(HalError, ValueError):
    """An operator's argument has a value that the contract does not allow."""


class ShapeError(ArgumentError):
    """An operator's tensor has the wrong rank or shape."""


class DtypeError(HalError, TypeError):
    """An operator's tensor has a dtype that the contract does not allow."""


class DeviceError(HalError, ValueError):
    """Tensors live on different devices, or on one that the chosen backend does not serve."""


class UnsupportedError(HalError, NotImplementedError):
    """No implementation accepts the request; `rejections` holds every candidate's reasons."""

    def __init__(self, message: str, rejections: Mapping[str, tuple[str, ...]] | None = None) -> None:
        super().__init__(message)
        self.rejections: dict[str, tuple[str, ...]] = dict(rejections or {})

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (str(self), self.rejections)


class CaptureError(HalError, RuntimeError):
    """The call needs the host (a synchronisation, a data-dependent step) inside a graph capture."""


class SyncError(HalError, RuntimeError):
    """The call would synchronise with the device while HAL_SYNC=error."""


class TransformError(HalError, NotImplementedError):
    """A torch transform (double backward, forward AD, vmap, torch.func, DTensor) that the operators do not support."""


class FileError(HalError, OSError):
    """A file cannot be read or written, or does not hold what it should."""


class BundleError(HalError, ValueError):
    """A file is no bundle of a conformance run, is damaged, or is of a newer version than this hal reads."""


class PluginError(HalError, RuntimeError):
    """A plug-in is broken; `plugin` is its name."""

    def __init__(self, message: str, plugin: str = "") -> None:
        super().__init__(message)
        self.plugin = plugin

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (str(self), self.plugin)
