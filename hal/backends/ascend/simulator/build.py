"""The libraries of the simulated CANN: built on first use from the sources here and tables read from the wheel.

They lie in a directory named by everything that they are made of, which appears whole or not at all.
"""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from hal.backends.ascend.simulator import settings, symbols, without_cuda
from hal.errors import ConfigError, FileError

__all__ = ["MACHINES", "Recipe", "build", "recipe", "slots"]

logger = logging.getLogger("hal")

MACHINES = ("x86_64", "aarch64")
_SOURCES = ("bridge.cpp", "capture.cpp", "objects.cpp", "options.cpp", "runtime.cpp")
_GENERATORS = ("build.py", "symbols.py", "without_cuda.py")
# Link symbols without effect in a simulation: the profiler's, and those that describe a legacy operator, whose launch
# fails by name. Every other one that no source provides fails by name itself.
_HARMLESS = (
    "Msprof",
    "aclCreateDataBuffer",
    "aclCreateTensorDesc",
    "aclDestroyDataBuffer",
    "aclDestroyTensorDesc",
    "aclGetTensorDesc",
    "aclSetTensor",
    "aclmdlFinalizeDump",
    "aclmdlInitDump",
    "aclmdlSetDump",
    "aclopCreate",
    "aclopDestroy",
    "aclopSet",
)


@dataclass(frozen=True)
class Recipe:
    """All that the libraries are made of.

    compiler_version: what the compiler says of itself. sources: text by file name. generators: text of the modules that
    make the other sources.
    """

    machine: str
    wheel: symbols.Wheel
    compiler: str
    compiler_version: str
    nm: str
    sources: dict[str, str]
    generators: tuple[str, ...]

    @property
    def target(self) -> Path:
        """Where they lie once they are built: another directory for another recipe."""
        texts = [*self.generators, *(part for item in sorted(self.sources.items()) for part in item)]
        parts = (self.machine, self.wheel.version, self.wheel.digest, self.compiler, self.compiler_version, *texts)
        key = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:20]
        return settings.cache_root() / f"{self.wheel.version}-{key}"


def recipe() -> Recipe:
    """What the libraries are to be made of here.

    Raises ConfigError without torch_npu or a compiler, and on a machine whose calling convention is not known.
    """
    machine = platform.machine()
    if platform.system() != "Linux" or machine not in MACHINES:
        raise ConfigError(
            f"the simulated CANN runs on Linux on {' and '.join(MACHINES)}, as torch_npu does; this is "
            f"{platform.system()} on {machine}"
        )
    wheel = symbols.find_wheel()
    compiler, nm = _tool(settings.compiler()), _tool("nm")
    version = _run([compiler, "--version"], "tell its version").partition("\n")[0]
    package = resources.files("hal.backends.ascend.simulator")
    generators = tuple((package / name).read_text(encoding="utf-8") for name in _GENERATORS)
    return Recipe(machine, wheel, compiler, version, nm, _read_sources(), generators)


def build() -> Path:
    """The directory that takes the place of CANN's (ASCEND_HOME_PATH), with the libraries in `lib64`.

    Raises what `recipe` raises, and FileError where the cache directory cannot be written.
    """
    wanted = recipe()
    target = wanted.target
    if target.is_dir():
        return target
    logger.info("building the simulated CANN for torch_npu %s in %s", wanted.wheel.version, target)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=".building-") as made:
            home = Path(made) / "home"
            _make(home, wanted)
            try:
                os.rename(home, target)
            except OSError:
                if not target.is_dir():  # else another process was faster, with the same content
                    raise
    except OSError as error:
        if isinstance(error, FileError):
            raise
        raise FileError(
            f"cannot build the simulated CANN in {str(target.parent)!r}: {error.strerror or error}; name a directory "
            f"that you may write to with {settings.CACHE}"
        ) from error
    return target


def _tool(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        raise ConfigError(
            f"the simulated CANN is built on first use and needs {name!r}, which is not on the search path; install "
            "a C++ compiler and its binary tools (Debian: g++, which brings binutils), or name one with CXX"
        )
    return found


def _read_sources() -> dict[str, str]:
    folder = resources.files("hal.backends.ascend.simulator") / "native"
    return {
        item.name: item.read_text(encoding="utf-8")
        for item in sorted(folder.iterdir(), key=lambda item: item.name)
        if item.name.endswith((".cpp", ".h", ".S"))
    }


def _make(home: Path, wanted: Recipe) -> None:
    compiler, wheel = wanted.compiler, wanted.wheel
    source, libraries = home / "src", home / "lib64"
    # torch_npu looks for these folders before it believes in a CANN.
    for folder in (source, libraries, home / "runtime", home / "compiler", home / "opp"):
        folder.mkdir(parents=True)
    for name, text in wanted.sources.items():
        (source / name).write_text(text, encoding="utf-8")
    names = symbols.operators(wheel)
    if not names:
        raise ConfigError(f"torch_npu {wheel.version} names no aclnn operator in {wheel.main}; install it again")
    (source / "names.cpp").write_text(_names(names), encoding="utf-8")
    (source / "slots.S").write_text(slots(names, wanted.machine), encoding="utf-8")

    flags = ["-std=c++17", "-O2", "-Wall", "-Wextra", "-Werror", "-fPIC", "-fvisibility=hidden", "-I", str(source)]
    objects = [_compile(compiler, flags, source / name) for name in (*_SOURCES, "names.cpp")]
    runtime = libraries / "libascendcl.so"
    # Once without the rest, to see what is missing, then whole.
    _link(compiler, runtime, objects)
    rest = symbols.needed(wheel, wanted.nm, [runtime])
    # CANN's own are plain C (ge's apart): what is mangled is torch's, and a stub would hide that the two do not fit.
    strange = [name for name in rest if name.startswith("_Z") and not name.startswith(("_ZN2ge", "_ZNK2ge"))]
    if strange:
        raise ConfigError(
            f"torch_npu {wheel.version} needs {len(strange)} functions that the installed torch has not, such as "
            f"{strange[0]}; install the torch that this torch_npu is made for"
        )
    (source / "rest.cpp").write_text(_rest(rest), encoding="utf-8")
    _link(compiler, runtime, [*objects, _compile(compiler, flags, source / "rest.cpp")])
    _link(compiler, libraries / "libopapi.so", [_compile(compiler, flags, source / "slots.S")], runtime)
    for name in symbols.LIBRARIES:
        _link(compiler, libraries / f"lib{name}.so", [], runtime)
    for name, text in without_cuda.sources(wheel, wanted.nm).items():
        made = source / name.replace(".so", ".cpp")
        made.write_text(text, encoding="utf-8")
        target = home / without_cuda.FOLDER / name
        target.parent.mkdir(exist_ok=True)
        _link(compiler, target, [_compile(compiler, flags, made)])


def _names(names: list[str]) -> str:
    rows = "".join(f'    "{name}",\n' for name in names)
    return (
        '#include "simulator.h"\n'
        f'extern "C" const int sim_operator_total = {len(names)};\n'
        f'extern "C" const char* const sim_operator_names[] = {{\n{rows}}};\n'
    )


def slots(names: list[str], machine: str) -> str:
    """The entry points of libopapi.so in assembly: two an operator, numbered in the order of `names`."""
    rows = "".join(
        f"    slot {name}GetWorkspaceSize, {2 * number}\n    slot {name}, {2 * number + 1}\n"
        for number, name in enumerate(names)
    )
    kind = "%progbits" if machine == "aarch64" else "@progbits"
    return f'#include "enter_{machine}.S"\n{rows}    .section .note.GNU-stack, "", {kind}\n'


def _rest(names: list[str]) -> str:
    rows = "".join(
        f"EXPORT long {name}() {{ return 0; }}\n"
        if name.startswith(_HARMLESS)
        else f'EXPORT long {name}() {{ return sim_not_simulated("{name}"); }}\n'
        for name in names
    )
    return f'#include "simulator.h"\nEXPORT long sim_not_simulated(const char* name);\n{rows}'


def _compile(compiler: str, flags: list[str], source: Path) -> Path:
    target = source.with_suffix(".o")
    _run([compiler, *flags, "-c", str(source), "-o", str(target)], f"compile {source.name}")
    return target


def _link(compiler: str, target: Path, objects: list[Path], *libraries: Path) -> None:
    options = ["-shared", "-pthread", "-Wl,--no-as-needed", f"-Wl,-soname,{target.name}", "-Wl,-rpath,$ORIGIN"]
    inputs = [str(path) for path in (*objects, *libraries)]
    _run([compiler, *options, *inputs, "-ldl", "-o", str(target)], f"link {target.name}")


def _run(command: list[str], what: str) -> str:
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise ConfigError(
            f"the simulated CANN cannot be built: {command[0]} failed to {what}: {result.stderr.strip()[-2000:]}. "
            "It needs a C++17 compiler; name another one with CXX"
        )
    return result.stdout
