"""What the installed torch_npu needs from CANN, read from its libraries: link symbols, and operators by name.

Nothing here is a list of one version: another wheel gives other tables.
"""

from __future__ import annotations

import mmap
import re
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from hal.backends.ascend.software import release_of
from hal.errors import ConfigError, FileError

__all__ = ["LIBRARIES", "Symbol", "Wheel", "find_wheel", "needed", "operators", "read_symbols"]

# The libraries of CANN that torch_npu's own libraries name, beside libascendcl and libopapi.
LIBRARIES = ("hccl", "acl_op_compiler", "ge_runner", "graph", "acl_tdt_channel")

# libatb is a product of its own: without it torch_npu does without its operators.
_APART = ("libop_plugin_atb.so",)
_SYSTEM = ("libc.so.6", "libm.so.6", "libstdc++.so.6", "libgcc_s.so.1", "libpthread.so.0", "libdl.so.2", "librt.so.1")


@dataclass(frozen=True)
class Symbol:
    """A dynamic symbol: mangled name, nm's letter for its kind, size in bytes (0 where it is not known)."""

    name: str
    kind: str
    size: int


@dataclass(frozen=True)
class Wheel:
    """The installed torch_npu: version, its libraries, those of torch, and a digest of what was installed."""

    version: str
    libraries: tuple[Path, ...]
    torch_libraries: tuple[Path, ...]
    digest: str

    @property
    def main(self) -> Path:
        """The library that calls the operators."""
        return next(path for path in self.libraries if path.name == "libtorch_npu.so")


def find_wheel() -> Wheel:
    """The torch_npu of this environment, without importing it.

    Raises ConfigError where it is not installed, not whole, or made for another torch.
    """
    try:
        npu, torch = metadata.distribution("torch_npu"), metadata.distribution("torch")
    except metadata.PackageNotFoundError as error:
        raise ConfigError(
            f"the simulated CANN runs the real torch_npu, but {error.name} is not installed here; install the pair, "
            "such as torch==2.13.0 and torch_npu==2.13.0"
        ) from None
    if release_of(npu.version) != release_of(torch.version):
        raise ConfigError(
            f"torch_npu {npu.version} and torch {torch.version} are installed, but torch_npu wants the torch of its "
            f"own version; install torch=={release_of(npu.version)} or torch_npu=={release_of(torch.version)}"
        )
    where = Path(str(npu.locate_file("torch_npu")))
    libraries = (
        *sorted(path for path in (where / "lib").glob("*.so") if path.name not in _APART),
        *sorted(where.glob("_C*.so")),
    )
    if not any(path.name == "libtorch_npu.so" for path in libraries):
        raise ConfigError(
            f"torch_npu {npu.version} is installed, but {where}/lib has no libtorch_npu.so; install it again"
        )
    torch_libraries = tuple(sorted(Path(str(torch.locate_file("torch/lib"))).glob("*.so*")))
    installed = "".join(f"{path.name} {path.stat().st_size} " for path in (*libraries, *torch_libraries))
    digest = installed + (npu.read_text("RECORD") or "")
    return Wheel(npu.version, libraries, torch_libraries, digest)


def operators(wheel: Wheel) -> list[str]:
    """Names of the aclnn operators that torch_npu looks up, sorted."""
    with (
        wheel.main.open("rb") as stream,
        mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as content,
    ):
        found = {match[1].decode() for match in re.finditer(rb"\0(aclnn[A-Z]\w*)(?=\0)", content)}
    return sorted({name.removesuffix("GetWorkspaceSize") for name in found})


def needed(wheel: Wheel, nm: str, provided: Iterable[Path] = ()) -> list[str]:
    """Symbols that torch_npu's libraries leave to be found at load time and that neither torch nor the system has."""
    wanted: set[str] = set()
    for path in wheel.libraries:
        wanted |= _symbols(nm, path, defined=False)
    for path in (*wheel.libraries, *wheel.torch_libraries, *_system_libraries(), *provided):
        wanted -= _symbols(nm, path, defined=True)
    return sorted(name for name in wanted if not name.startswith(("Py", "_Py")))


def _system_libraries() -> list[Path]:
    """The C and C++ libraries that this process has loaded, and their siblings."""
    found = set()
    for line in Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines():
        path = Path(line.rpartition(" ")[2])
        if path.name.startswith(("libc.so", "libc-", "libstdc++", "ld-linux")):
            found.add(path)
            found |= {path.parent / name for name in _SYSTEM}
    return sorted(path for path in found if path.exists())


def read_symbols(nm: str, path: Path, defined: bool) -> list[Symbol]:
    """The dynamic symbols that a library defines, or those that it leaves undefined."""
    command = [nm, "-D", "--defined-only" if defined else "--undefined-only", "--format=posix", str(path)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise FileError(f"nm cannot read {str(path)!r}: {result.stderr.strip()}; install torch and torch_npu again")
    rows = (line.split() for line in result.stdout.splitlines())
    return [
        Symbol(row[0].partition("@")[0], row[1], int(row[3], 16) if len(row) > 3 else 0) for row in rows if len(row) > 1
    ]


def _symbols(nm: str, path: Path, defined: bool) -> set[str]:
    # Weak ones may stay unresolved.
    return {symbol.name for symbol in read_symbols(nm, path, defined) if defined or symbol.kind == "U"}
