"""The registry of simulated operators: which aclnn functions there are, with what arguments, computed by what."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from hal.errors import PluginError

__all__ = ["LETTERS", "OPERATORS", "Operator", "load", "operator"]

F = TypeVar("F", bound=Callable[..., None])

# One letter for each C argument of aclnnXxxGetWorkspaceSize before workspaceSize and executor, and what the
# function gets for it. What is a pointer in C may be null, and is None then.
LETTERS = {
    "t": "aclTensor: a CPU tensor that views the device memory",
    "l": "aclTensorList: a list of such",
    "k": "aclScalar: a number",
    "K": "aclScalarList: a list of numbers",
    "a": "aclIntArray, aclFloatArray or aclBoolArray: a list of numbers",
    "d": "double",
    "f": "float",
    "i": "int64_t or uint64_t",
    "j": "int32_t",
    "h": "int16_t",
    "y": "int8_t",
    "b": "bool",
    "s": "char *: a string",
    "T": "aclDataType: a torch dtype, None for one that torch has not",
}


@dataclass(frozen=True)
class Operator:
    """An aclnn operator: its C arguments by letter, their names, and the function that computes it."""

    name: str
    signature: str
    parameters: tuple[str, ...]
    function: Callable[..., None]


OPERATORS: dict[str, Operator] = {}


def operator(name: str, signature: str) -> Callable[[F], F]:
    """Register a function as the aclnn operator `name`, whose C arguments are those of `signature` (see LETTERS).

    The function writes into the tensors that are results. Its parameters' names are the names in traces and in
    constraints. Raises PluginError where name, signature and function do not fit together.
    """

    def register(function: F) -> F:
        parameters = tuple(inspect.signature(function).parameters)
        strange = sorted(set(signature) - set(LETTERS))
        if not name.startswith("aclnn") or not signature or strange:
            raise PluginError(
                f"operator {name!r} with signature {signature!r}: a name begins with aclnn and a signature is made of "
                f"{' '.join(LETTERS)}"
            )
        if len(parameters) != len(signature):
            raise PluginError(
                f"operator {name!r}: signature {signature!r} has {len(signature)} arguments, "
                f"{function.__qualname__} takes {len(parameters)}"
            )
        if name in OPERATORS:
            raise PluginError(f"operator {name!r} is registered twice; take one away")
        OPERATORS[name] = Operator(name, signature, parameters, function)
        return function

    return register


def load() -> dict[str, Operator]:
    """All operators, by name: imports every module of `aclnn`."""
    import_all("hal.backends.ascend.simulator.aclnn")
    return OPERATORS


def import_all(package: str) -> list[Any]:
    """The modules of a package, imported, by name."""
    found = importlib.import_module(package)
    names = sorted(module.name for module in pkgutil.iter_modules(found.__path__))
    return [importlib.import_module(f"{package}.{name}") for name in names]
