"""The state of a run on disk: each result as one line, written through, so that a killed run goes on where it stopped.

The first line says what the run is. A last line that a crash cut short is dropped and judged again; any other damage,
and a state of another run, is refused.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import IO, TYPE_CHECKING, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from hal.conformance.environment import environment
from hal.conformance.report import Request, Result, Target
from hal.conformance.site import settings_in_force
from hal.errors import FileError

if TYPE_CHECKING:
    from hal.conformance.runner import Plan

__all__ = ["State"]

VERSION = 1
_START = b'{"format":"hal-conformance-state"'


class _Head(BaseModel):
    """What results of one run have in common; results of another head must not be mixed with them."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    format: Literal["hal-conformance-state"] = "hal-conformance-state"
    version: int = VERSION
    hal: str
    commit: str | None
    torch: str
    software: dict[str, str] = {}
    python: str
    request: Request
    target: Target
    numerics: dict[str, str]
    settings: dict[str, str]
    work: str
    sources: str

    def differences(self, other: _Head) -> list[str]:
        """The first things that differ, in words."""
        words = {"work": "the cases to judge", "sources": "the source files of hal or of the backend"}
        found = []
        for name in type(self).model_fields:
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine == theirs:
                continue
            if name in words:
                found.append(words[name])
                continue
            if isinstance(mine, BaseModel):
                pairs = {key: (getattr(mine, key), getattr(theirs, key)) for key in type(mine).model_fields}
            elif isinstance(mine, dict):
                pairs = {key: (mine.get(key), theirs.get(key)) for key in (*mine, *theirs)}
            else:
                pairs = {name: (mine, theirs)}
            found += [f"{key} ({a} there, {b} now)" for key, (a, b) in pairs.items() if a != b]
        return found


class State:
    """The results that are on disk already, and the file that takes the others. Use as a context manager."""

    def __init__(self, path: Path, what: Plan) -> None:
        """Open or create the state of `what` at `path`; FileError if it is damaged, in use or another run's."""
        self.path = path
        self.results: list[Result] = []
        self._planned = {(piece.case, name) for piece in what.work for name in piece.implementations}
        head = _head(what)
        try:
            self._file: IO[bytes] = path.open("a+b")
        except OSError as error:
            raise self._error("it cannot be opened", error.strerror or str(error)) from error
        try:
            self._lock()
            whole = self._read(head)
            self._file.truncate(whole)
            if not whole:
                self._append(head.model_dump_json())
        except OSError as error:
            self._file.close()
            raise self._error("it cannot be used", error.strerror or str(error)) from error
        except FileError:
            self._file.close()
            raise

    def keep(self, result: Result) -> None:
        """Append a result; when this returns it is on disk."""
        try:
            self._append(result.model_dump_json())
        except OSError as error:
            raise self._error("a result cannot be written", error.strerror or str(error)) from error
        self.results.append(result)

    def discard(self) -> None:
        """Remove the file: the run is whole and reported."""
        self._file.close()
        self.path.unlink(missing_ok=True)

    def __enter__(self) -> State:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def _append(self, text: str) -> None:
        self._file.write(text.encode() + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())

    def _read(self, head: _Head) -> int:
        """Take over the results of an earlier run; the length of the whole lines."""
        self._file.seek(0)
        whole, seen = 0, set()
        for number, line in enumerate(self._file, 1):
            if not line.endswith(b"\n"):
                if number == 1 and line[: len(_START)] != _START[: len(line)]:
                    raise self._error("it is no state of a run", "it has another beginning")
                break  # cut short by a crash
            try:
                if number == 1:
                    self._compare(_Head.model_validate_json(line), head)
                else:
                    result = Result.model_validate_json(line)
                    key = (result.case, result.implementation)
                    if key not in self._planned or key in seen:
                        raise self._error(f"line {number} holds a result that does not belong there", result.case)
                    seen.add(key)
                    self.results.append(result)
            except ValidationError as error:
                first = error.errors()[0]
                place = ".".join(str(part) for part in first["loc"])
                raise self._error(f"line {number} is damaged", f"{place or 'it'}: {first['msg']}") from error
            whole += len(line)
        return whole

    def _compare(self, there: _Head, now: _Head) -> None:
        if there.version > VERSION:
            raise self._error(f"it has version {there.version}", f"this hal reads up to {VERSION}; upgrade torch-hal")
        different = there.differences(now)
        if different:
            raise self._error("it is the state of another run", "; ".join(different[:4]))

    def _lock(self) -> None:
        if sys.platform == "win32":
            return
        import fcntl

        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise self._error("it is in use", "another run is writing it") from error

    def _error(self, what: str, why: str) -> FileError:
        return FileError(
            f"cannot resume from {str(self.path)!r}: {what}: {why}. Repeat the command line that wrote it, in the same "
            "environment, or name a file that does not exist to begin anew"
        )


def _head(what: Plan) -> _Head:
    now = environment(settings_in_force())
    work = "\n".join(f"{piece.case} {' '.join(piece.implementations)}" for piece in what.work)
    return _Head(
        hal=now.hal,
        commit=now.git_commit,
        torch=now.torch,
        software=now.software,
        python=now.python,
        request=what.request,
        target=what.site.target,
        numerics=now.numerics,
        settings=now.settings,
        work=_digest(work.encode()),
        sources=_digest(*_sources(what)),
    )


def _sources(what: Plan) -> Iterator[bytes]:
    """The Python files of hal and of the packages whose implementations are judged: with others, other results."""
    judged = {(piece.case.partition("/")[0], name) for piece in what.work for name in piece.implementations}
    modules = (getattr(what.site.implementation(*pair).forward, "__module__", "hal") for pair in judged)
    for name in sorted({"hal"} | {str(module).partition(".")[0] for module in modules}):
        place = getattr(sys.modules.get(name), "__file__", None)
        if place is None:
            continue
        file = Path(place)
        files = sorted(file.parent.rglob("*.py")) if file.name == "__init__.py" else [file]
        for found in files:
            yield str(found.relative_to(file.parent)).encode()
            yield found.read_bytes()


def _digest(*parts: bytes) -> str:
    made = hashlib.blake2b(digest_size=16)
    for part in parts:
        made.update(len(part).to_bytes(8, "big") + part)
    return made.hexdigest()
