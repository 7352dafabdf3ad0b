"""Files that hal writes: checked before work starts, written whole or not at all."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

from hal.errors import FileError

__all__ = ["check_writable", "write_whole"]


def _error(path: Path, asked: str, reason: str) -> FileError:
    return FileError(
        f"cannot {asked} {str(path)!r}: {reason}. It must be a file in an existing directory that you may write to; "
        "create the directory or name another path"
    )


def _is_plain(path: Path) -> bool:
    """False for pipes and devices (/dev/stdout), which are written through, never replaced."""
    try:
        return stat.S_ISREG(path.stat().st_mode)
    except FileNotFoundError:
        return True


def check_writable(path: Path) -> None:
    """Raise FileError unless a file could be written at `path` now; leaves nothing behind."""
    target = path.resolve()
    try:
        if target.is_dir():
            raise _error(path, "write", "it is a directory")
        if not target.parent.is_dir():
            raise _error(path, "write", f"there is no directory {str(target.parent)!r}")
        if target.exists() and not os.access(target, os.W_OK):
            raise _error(path, "write", "the file is there and is not writable")
        if _is_plain(target):
            with tempfile.NamedTemporaryFile(dir=target.parent, prefix=f".{target.name[:80]}."):
                pass
    except OSError as error:
        if isinstance(error, FileError):
            raise
        raise _error(path, "write", error.strerror or str(error)) from error


def write_whole(path: Path, content: str | bytes) -> None:
    """Write to `path` through a temporary file beside it, so that a reader sees the old file or the new one.

    Text is written as UTF-8.
    """
    target = path.resolve()
    data = content.encode() if isinstance(content, str) else content
    temporary: str | None = None
    try:
        if not _is_plain(target):
            target.write_bytes(data)
            return
        handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name[:80]}.", suffix=".tmp")
        with os.fdopen(handle, "wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        os.chmod(temporary, _mode(target))
        os.replace(temporary, target)
        temporary = None
    except OSError as error:
        raise _error(path, "write", error.strerror or str(error)) from error
    finally:
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)


def _mode(target: Path) -> int:
    """The mode of the file that is replaced, else what the process's umask gives a new file."""
    try:
        return stat.S_IMODE(target.stat().st_mode)
    except FileNotFoundError:
        mask = os.umask(0)
        os.umask(mask)
        return 0o666 & ~mask
