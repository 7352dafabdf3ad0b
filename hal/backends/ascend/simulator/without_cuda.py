"""Lets torch_npu load beside a CUDA build of torch, by giving torch libraries that stand in for its two CUDA ones.

Both torch_npu and libc10_cuda register the settings of torch's memory allocator when they are loaded, and torch ends
the process at the second. Where no CPU build of a torch can be had, its CUDA build becomes one: the stand-ins have the
few symbols that torch's Python bindings name, count no device, and raise for all else. torch's own files stay as they
are; the loader takes the stand-ins because they are loaded first under the same names.
"""

from __future__ import annotations

from pathlib import Path

from hal.backends.ascend.simulator.symbols import Symbol, Wheel, read_symbols

__all__ = ["FOLDER", "preloaded", "sources"]

# By stand-in: the libraries whose symbols it has, itself and what it would bring with it.
_LIBRARIES = {"libc10_cuda.so": ("libc10_cuda.so",), "libtorch_cuda.so": ("libtorch_cuda.so", "libtorch_nvshmem.so")}
FOLDER = "without_cuda"  # below the built home

_BINDINGS = "libtorch_python.so"
_TYPE = "_ZTI"
# What is called without a device: the count of devices, and where the bindings leave a function for NCCL's watchdog.
_BODIES = {
    "_ZN3c104cuda12device_countEv": "return 0;",
    "_ZN4c10d15get_gil_checkerEv": "static void* checker; return reinterpret_cast<long>(&checker);",
}


def sources(wheel: Wheel, nm: str) -> dict[str, str]:
    """C++ of each stand-in by its library's name; empty where torch is no CUDA build."""
    torch = {path.name: path for path in wheel.torch_libraries}
    if not torch.keys() >= {*_LIBRARIES, _BINDINGS}:
        return {}
    wanted = {symbol.name for symbol in read_symbols(nm, torch[_BINDINGS], defined=False)}
    result = {}
    for name, parts in _LIBRARIES.items():
        defined = [symbol for part in parts if part in torch for symbol in read_symbols(nm, torch[part], defined=True)]
        result[name] = _source({symbol.name: symbol for symbol in defined if symbol.name in wanted})
    return result


def preloaded(home: Path) -> list[str]:
    """The stand-ins in a built home."""
    return sorted(str(path) for path in (home / FOLDER).glob("*.so"))


def _source(symbols: dict[str, Symbol]) -> str:
    rows = "".join(f"{_definition(symbols[name])}\n" for name in sorted(symbols))
    return (
        "#include <stdexcept>\n"
        '#define EXPORT __attribute__((visibility("default")))\n'
        "struct Type { const void* table; const char* name; const void* more[2]; };\n"
        'extern "C" {\n'
        "extern const void* const _ZTVN10__cxxabiv117__class_type_infoE[];\n"
        f"{rows}"
        "}\n"
    )


def _definition(symbol: Symbol) -> str:
    name = symbol.name
    if name.startswith(_TYPE):  # pybind11 looks types up by their names
        table = "_ZTVN10__cxxabiv117__class_type_infoE + 2"
        return f'EXPORT extern const Type {name} = {{{table}, "{name.removeprefix(_TYPE)}", {{}}}};'
    if symbol.kind in "TWi":
        body = _BODIES.get(name, f'throw std::runtime_error("no CUDA on the simulated CANN: {name}");')
        return f"EXPORT long {name}() {{ {body} }}"
    return f"EXPORT alignas(16) char {name}[{max(symbol.size, 1)}] = {{}};"
