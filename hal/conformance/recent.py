"""The last few of things that are dear to make."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from typing import Generic, TypeVar

__all__ = ["Recent"]

T = TypeVar("T")


class Recent(Generic[T]):
    """Keeps the last `size` things that it was asked for."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._held: OrderedDict[Hashable, T] = OrderedDict()

    def get(self, key: Hashable, make: Callable[[], T]) -> T:
        """The thing of that key, made if it is not kept."""
        if key in self._held:
            self._held.move_to_end(key)
            return self._held[key]
        made = self._held[key] = make()
        self._drop(self._size)
        return made

    @contextlib.contextmanager
    def keeping(self, size: int) -> Iterator[None]:
        """Keep more within the block."""
        before, self._size = self._size, size
        try:
            yield
        finally:
            self._size = before
            self._drop(before)

    def _drop(self, size: int) -> None:
        while len(self._held) > size:
            self._held.popitem(last=False)
