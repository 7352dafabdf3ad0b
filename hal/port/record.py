"""What a port changed in a model, what it left alone and why, and the way back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from types import MethodType, TracebackType
from typing import Any

from torch import nn

from hal.errors import ArgumentError

__all__ = ["Applied", "Changes", "Left", "Replaced"]


@dataclass(frozen=True)
class Replaced:
    """A module that now computes with hal's operators."""

    path: str
    module: str
    ops: tuple[str, ...]
    how: str = ""


@dataclass(frozen=True)
class Left:
    """A module that computes as it did before."""

    path: str
    module: str
    why: str


@dataclass
class Changes:
    """Changes to a model, each with its undoing."""

    replaced: list[Replaced] = field(default_factory=list)
    left: list[Left] = field(default_factory=list)
    active: bool = True
    _forwards: list[tuple[nn.Module, MethodType]] = field(default_factory=list)
    _undo: list[Callable[[], None]] = field(default_factory=list)

    def replace_forward(
        self, path: str, module: nn.Module, forward: Callable[..., Any], ops: tuple[str, ...], how: str = ""
    ) -> None:
        """Give this one instance another forward; its class stays as it is."""
        # Pickles name a method: under the class's own name, a loaded copy has the class's forward again.
        forward.__name__ = "forward"
        method = MethodType(forward, module)
        module.forward = method
        self._forwards.append((module, method))
        self.replaced.append(Replaced(path, type(module).__name__, ops, how))

    def leave(self, path: str, module: nn.Module, why: str) -> None:
        self.left.append(Left(path, type(module).__name__, why))

    def on_undo(self, step: Callable[[], None]) -> None:
        self._undo.append(step)

    def undo(self) -> None:
        """Take everything back. Raises ArgumentError, and changes nothing, where something was put on top."""
        for module, method in self._forwards:
            if module.__dict__.get("forward") is not method:
                raise ArgumentError(
                    f"cannot undo: the forward of a {type(module).__name__} was replaced again after hal replaced it; "
                    "remove what was put on top (hooks of accelerate, another port) first"
                )
        for module, _ in self._forwards:
            del module.__dict__["forward"]
        self._forwards.clear()
        while self._undo:
            self._undo.pop()()
        self.active = False


class Applied:
    """A model that runs through hal, until `undo()` or the end of a `with` block.

    `replaced` and `left` list what changed and what did not, with the reason; `str()` gives a summary.
    """

    def __init__(self, model: nn.Module, changes: Changes) -> None:
        self.model = model
        self._changes = changes

    @property
    def active(self) -> bool:
        """Whether the model still runs through hal."""
        return self._changes.active

    @property
    def replaced(self) -> tuple[Replaced, ...]:
        return tuple(self._changes.replaced)

    @property
    def left(self) -> tuple[Left, ...]:
        return tuple(self._changes.left)

    def undo(self) -> None:
        """Give the model back as it was. A second call does nothing."""
        if self.active:
            self._changes.undo()

    def __enter__(self) -> Applied:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.undo()

    def to_dict(self) -> dict[str, Any]:
        """The lists as JSON-able data."""
        return {
            "model": type(self.model).__name__,
            "replaced": [asdict(item) for item in self.replaced],
            "left": [asdict(item) for item in self.left],
        }

    def __str__(self) -> str:
        through = [item for item in self.replaced if item.ops]
        lines = [f"{type(self.model).__name__}: {len(through)} modules run through hal, {len(self.left)} do not"]
        runs = Counter((item.module, item.ops, item.how) for item in through)
        for (module, ops, how), count in runs.items():
            lines.append(f"  {count:4} x {module}: {', '.join(ops)}" + (f" ({how})" if how else ""))
        besides = Counter((item.module, item.how) for item in self.replaced if not item.ops)
        if besides:
            lines.append("changed for the sake of the others:")
        for (module, how), count in besides.items():
            lines.append(f"  {count:4} x {module}: {how}")
        stays = Counter((item.module, item.why) for item in self.left)
        if stays:
            lines.append("left as they are:")
        for (module, why), count in stays.items():
            lines.append(f"  {count:4} x {module}: {why}")
        return "\n".join(lines)
