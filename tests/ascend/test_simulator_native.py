"""The native side without torch_npu: calling conventions, and libraries built from a made-up wheel."""

from __future__ import annotations

import concurrent.futures
import ctypes
import os
import platform
import shutil
import signal
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from hal.backends.ascend.simulator import build as building
from hal.backends.ascend.simulator import launch, symbols
from hal.backends.ascend.simulator.build import build
from hal.backends.ascend.simulator.settings import SimulatorSettings
from hal.errors import ConfigError, FileError

DRIVER = Path(__file__).with_name("entry_driver.cpp")
CROSS = {"aarch64": ("aarch64-linux-gnu-g++", ("qemu-aarch64", "-L", "/usr/aarch64-linux-gnu"))}


def double(value):
    return struct.unpack("q", struct.pack("d", value))[0]


def run(*command, **options):
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, **options)
    assert done.returncode == 0, f"{command} exited with {done.returncode}\n{done.stdout}{done.stderr}"
    return done.stdout


@pytest.mark.parametrize("machine", building.MACHINES)
def test_every_argument_arrives_as_it_was_passed(machine, tmp_path):
    compiler, emulator = ("g++", ()) if machine == platform.machine() else CROSS.get(machine, ("", ()))
    if not shutil.which(compiler) or (emulator and not shutil.which(emulator[0])):
        pytest.skip(f"calling convention of {machine} not tested: needs {compiler or 'a compiler'} and qemu-user")
    sources = building._read_sources()
    names = ["aclnnMany", "aclnnUnknown"]
    sources |= {"names.cpp": building._names(names), "slots.S": building.slots(names, machine)}
    for name, text in sources.items():
        (tmp_path / name).write_text(text)
    program = tmp_path / "program"
    compiled = [str(tmp_path / name) for name in (*building._SOURCES, "names.cpp", "slots.S")]
    run(
        compiler, "-std=c++17", "-O1", "-rdynamic", "-pthread", "-I", tmp_path, DRIVER, *compiled, "-ldl", "-o", program
    )
    prepared, returned, executed, ran, unknown = run(*emulator, program).splitlines()

    handle = int(prepared.split()[3])
    tensor = [12, handle, 0, 0, 2, 5, 2, 2, 3, 3, 1, 6]
    assert handle and len(tensor) == tensor[0]
    text = [3, 6, int.from_bytes(b"layout", "little")]
    scalar = [4, 9, -9, 0]
    array = [4, 4, double(0.5), double(-2.0)]
    words = [
        *tensor, double(1.5), -(2**63), 1, *text, double(2.5), *scalar, -7, -8, -300,
        *(double(v) for v in (2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0)), double(9.5), *array, 0, 1234567890123,
    ]  # fmt: skip
    assert prepared == "prepare 0: " + " ".join(map(str, words))
    assert returned == "returned 0, workspace 0"
    assert (executed, ran) == ("execute 41", "ran 7")
    assert unknown.startswith("unknown 561000: simulated CANN: aclnnUnknown is not simulated")
    assert "look like: t i " in unknown


@pytest.fixture
def wheel(tmp_path, monkeypatch):
    """A made-up torch_npu 9.9.9 beside a torch 9.9.9, all that metadata finds; returns its libtorch_npu.so."""
    site = tmp_path / "site"
    for name, version in (("torch", "9.9.9+cpu"), ("torch_npu", "9.9.9.post1")):
        info = site / f"{name}-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        (info / "RECORD").write_text(f"{name}/lib/x.so,,\n")
        (site / name / "lib").mkdir(parents=True)
    source = tmp_path / "library.cpp"
    source.write_text(
        'extern "C" int aclrtFutureThing(); extern "C" int aclInit(const char*);\n'
        'extern "C" const char* names() { return "aclnnAdd\\0aclnnAddGetWorkspaceSize\\0aclnnNew\\0not_aclnnOther"; }\n'
        'extern "C" int use() { return aclrtFutureThing() + aclInit(nullptr); }\n'
    )
    library = site / "torch_npu" / "lib" / "libtorch_npu.so"
    run("g++", "-shared", "-fPIC", source, "-o", library)
    monkeypatch.setattr(sys, "path", [str(site)])
    monkeypatch.setenv("ASCEND_SIM_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("CXX", raising=False)
    return library


def test_tables_come_from_the_wheel(wheel):
    found = symbols.find_wheel()
    assert found.version == "9.9.9.post1"
    assert symbols.operators(found) == ["aclnnAdd", "aclnnNew"]
    assert symbols.needed(found, "nm") == ["aclInit", "aclrtFutureThing"]


def test_libraries_are_built_once_and_have_what_the_wheel_needs(wheel, tmp_path):
    home = build()
    assert sorted(path.name for path in (home / "lib64").iterdir()) == sorted(
        f"lib{name}.so" for name in ("ascendcl", "opapi", *symbols.LIBRARIES)
    )
    operators = ctypes.CDLL(str(home / "lib64" / "libopapi.so"))
    for name in ("aclnnAdd", "aclnnAddGetWorkspaceSize", "aclnnNew", "aclCreateTensor"):
        assert getattr(operators, name)
    runtime = ctypes.CDLL(str(home / "lib64" / "libascendcl.so"))
    runtime.aclGetRecentErrMsg.restype = ctypes.c_char_p
    assert runtime.aclrtFutureThing() != 0
    assert b"aclrtFutureThing" in runtime.aclGetRecentErrMsg()
    stamp = (home / "lib64" / "libopapi.so").stat().st_mtime_ns
    assert build() == home
    assert (home / "lib64" / "libopapi.so").stat().st_mtime_ns == stamp
    assert list((tmp_path / "cache").iterdir()) == [home]


def test_a_cuda_build_of_torch_is_loaded_without_its_cuda_libraries(wheel, tmp_path, monkeypatch):
    """Made-up libraries with the real ones' names: each CUDA one ends the process that loads it."""
    torch = tmp_path / "site" / "torch" / "lib"
    end = "#include <cstdlib>\n__attribute__((constructor)) static void end() { abort(); }\n"
    sources = {
        "c10_cuda": end + "namespace c10::cuda { signed char device_count() { return 8; } long state[9] = {1}; }",
        "torch_nvshmem": "namespace nvshmem { bool there() { return true; } }",
        "torch_cuda": end + "namespace c10d { void start() {} struct Group { virtual ~Group(); }; Group::~Group() {} }",
        "torch_python": (
            "#include <stdexcept>\n#include <string>\n#include <typeinfo>\n"
            "namespace c10::cuda { signed char device_count(); extern long state[9]; }\n"
            "namespace nvshmem { bool there(); }\n"
            "namespace c10d { void start(); struct Group { virtual ~Group(); }; }\n"
            'extern "C" int count() { return c10::cuda::device_count() + c10::cuda::state[0]; }\n'
            'extern "C" const char* type() { return typeid(c10d::Group).name(); }\n'
            "template <typename F> const char* message(F f) {\n"
            "    static std::string text;\n"
            '    try { f(); text = "none"; } catch (const std::runtime_error& error) { text = error.what(); }\n'
            "    return text.c_str();\n"
            "}\n"
            'extern "C" const char* start() { return message(c10d::start); }\n'
            'extern "C" const char* there() { return message(nvshmem::there); }\n'
        ),
    }
    for name, text in sources.items():
        (torch / f"{name}.cpp").write_text(text)
        needs = [f"-l{other}" for other in ("torch_cuda", "torch_nvshmem", "c10_cuda") if name == "torch_python"]
        options = ["-shared", "-fPIC", f"-Wl,-soname,lib{name}.so", "-Wl,-rpath,$ORIGIN", f"-L{torch}"]
        run("g++", *options, torch / f"{name}.cpp", *needs, "-o", torch / f"lib{name}.so")
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    variables = launch.environment(SimulatorSettings())
    code = (
        f"import ctypes; bindings = ctypes.CDLL({str(torch / 'libtorch_python.so')!r}); print(bindings.count())\n"
        "for name in ('type', 'start', 'there'):\n"
        "    function = getattr(bindings, name); function.restype = ctypes.c_char_p; print(function().decode())"
    )
    count, kind, *refused = run(sys.executable, "-c", code, env=variables).splitlines()
    assert (count, kind) == ("0", "N4c10d5GroupE")
    assert refused == [f"no CUDA on the simulated CANN: {name}" for name in ("_ZN4c10d5startEv", "_ZN7nvshmem5thereEv")]
    variables.pop("LD_PRELOAD")
    ended = subprocess.run([sys.executable, "-c", code], env=variables, capture_output=True)
    assert ended.returncode == -signal.SIGABRT


def test_another_wheel_source_or_compiler_gives_other_libraries(wheel, monkeypatch):
    targets = [building.recipe().target]
    assert building.recipe().target == targets[0]
    sources = building._read_sources()
    monkeypatch.setattr(building, "_read_sources", lambda: sources)
    sources["runtime.cpp"] += "// changed\n"
    targets.append(building.recipe().target)
    wheel.write_bytes(wheel.read_bytes() + b"\0aclnnNewest\0")
    targets.append(building.recipe().target)
    monkeypatch.setenv("CXX", "gcc")
    targets.append(building.recipe().target)
    assert len(set(targets)) == 4


def test_processes_that_build_at_once_end_with_the_same_whole_libraries(wheel, tmp_path):
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        homes = {job.result() for job in [pool.submit(build) for _ in range(2)]}
    assert len(homes) == 1
    assert list((tmp_path / "cache").iterdir()) == list(homes)


def test_a_failed_build_leaves_nothing(wheel, tmp_path, monkeypatch):
    sources = building._read_sources()
    sources["objects.cpp"] = "no C++"
    monkeypatch.setattr(building, "_read_sources", lambda: sources)
    with pytest.raises(ConfigError, match=r"failed to compile objects\.cpp: .*error"):
        build()
    assert not list((tmp_path / "cache").iterdir())


def test_without_a_compiler_the_error_says_what_to_install(wheel, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ConfigError, match=r"needs 'no-such-compiler'.*install a C\+\+ compiler"):
        build()


def test_a_cache_that_cannot_be_written_is_named(wheel, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ASCEND_SIM_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(FileError, match="ASCEND_SIM_CACHE"):
        build()


def test_another_machine_is_refused(wheel, monkeypatch):
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    with pytest.raises(ConfigError, match=r"x86_64 and aarch64.*riscv64"):
        build()


def test_without_torch_npu_the_error_says_what_to_install(wheel):
    shutil.rmtree(next(wheel.parents[2].glob("torch_npu-*.dist-info")))
    with pytest.raises(ConfigError, match=r"torch_npu is not installed here; install the pair"):
        symbols.find_wheel()


def test_a_torch_npu_for_another_torch_is_refused(wheel):
    info = next(wheel.parents[2].glob("torch-*.dist-info"))
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 9.9.8\n")
    with pytest.raises(ConfigError, match=r"torch_npu 9\.9\.9\.post1 and torch 9\.9\.8.*install torch==9\.9\.9"):
        symbols.find_wheel()


def test_a_torch_npu_that_needs_functions_torch_has_not_is_refused(wheel, tmp_path):
    source = tmp_path / "library.cpp"
    source.write_text(source.read_text() + 'namespace at { void gone(); }\nextern "C" void more() { at::gone(); }\n')
    run("g++", "-shared", "-fPIC", source, "-o", wheel)
    with pytest.raises(ConfigError, match=r"needs 1 functions that the installed torch has not, such as _ZN2at4goneEv"):
        build()


def test_a_torch_npu_that_is_not_whole_is_refused(wheel):
    os.unlink(wheel)
    with pytest.raises(ConfigError, match="install it again"):
        symbols.find_wheel()
