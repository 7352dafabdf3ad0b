"""`hal simulate`: dispatch to a backend's simulator, options, and what it says when it cannot start."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import types
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hal import registry
from hal.backends.ascend.simulator import build, command, launch
from hal.backends.ascend.simulator.settings import SimulatorSettings
from hal.backends.ascend.simulator.socs import SOCS
from hal.cli import app
from hal.errors import ArgumentError, ConfigError, FileError
from hal.hookspec import Backend, hookimpl


def hal(*arguments):
    return CliRunner().invoke(app, ["simulate", *arguments])


@pytest.fixture
def started(monkeypatch):
    """Collects what would be started instead of starting it."""
    found = []
    monkeypatch.setattr(launch, "execute", lambda settings, command: found.append((settings, list(command))))
    for name in list(os.environ):
        if name.startswith("ASCEND_SIM_"):
            monkeypatch.delenv(name)
    return found


def test_the_program_and_its_options_come_after_the_simulators(started):
    done = hal("ascend", "--soc", "310P3", "--no-strict", "--", "python", "x.py", "--soc", "other", "--help")
    assert done.exit_code == 0, done.output
    ((settings, program),) = started
    assert program == ["python", "x.py", "--soc", "other", "--help"]
    assert settings == SimulatorSettings(soc=SOCS["310P3"], strict=False)


def test_every_option_sets_its_field(started, tmp_path):
    options = {"--soc": "A3", "--cann": "9.0.0", "--devices": "4", "--memory": "1GiB", "--numerics": "perturbed"}
    flat = [part for pair in options.items() for part in pair]
    assert hal("ascend", *flat, "--no-strict", "--trace", str(tmp_path / "t"), "--", "x").exit_code == 0
    assert started[0][0] == SimulatorSettings(SOCS["910_9391"], "9.0.0", 4, 2**30, "perturbed", False, tmp_path / "t")


def test_what_is_left_out_comes_from_the_environment(started, monkeypatch):
    monkeypatch.setenv("ASCEND_SIM_DEVICES", "3")
    monkeypatch.setenv("ASCEND_SIM_STRICT", "0")
    assert hal("ascend", "--devices", "5", "--", "x").exit_code == 0
    assert started[0][0] == SimulatorSettings(devices=5, strict=False)


def test_an_empty_option_is_as_one_left_out(started, monkeypatch):
    monkeypatch.setenv("ASCEND_SIM_DEVICES", "3")
    assert hal("ascend", "--devices", "", "--trace", "", "--", "x").exit_code == 0
    assert started[0][0] == SimulatorSettings(devices=3)


def test_what_starts_says_that_it_is_simulated(started):
    assert "simulated CANN 8.5.0: 2 × Ascend910B3" in hal("ascend", "--", "x").output


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("asend", "--", "x"), "did you mean 'ascend'"),
        (("cpu", "--", "x"), "backend 'cpu' has no simulator"),
        (("ascend",), "no command was given"),
        (("ascend", "--soc", "H100", "--", "x"), "--soc = 'H100', but it must be one of 310P3"),
        (("ascend", "--devices", "0", "--", "x"), "--devices = '0'"),
        (("ascend", "--json", "--", "x"), "--constraints"),
        (("ascend", "--constraints", "--", "x"), "runs nothing"),
        (("ascend", "--no-such", "--", "x"), "No such option"),
        ((), "Missing argument 'BACKEND'"),
    ],
)
def test_what_cannot_be_run_exits_2_with_the_reason(started, arguments, told):
    done = hal(*arguments)
    assert done.exit_code == 2
    assert told in " ".join(done.output.replace("│", " ").split())
    assert not started


def test_help_is_the_simulators_own():
    done = hal("ascend", "--help")
    assert done.exit_code == 0
    assert "--numerics" in done.output


def test_constraints_are_printed_as_text_and_as_json():
    lines = hal("ascend", "--constraints").output.splitlines()
    rows = json.loads(hal("ascend", "--constraints", "--json").output)
    assert len(lines) == len(rows) > 0
    for line, row in zip(lines, rows, strict=True):
        assert row["enforced_by"] in ("wheel", "document", "field")
        assert all(row[part] in line for part in ("rule", "page"))
        assert all(name in line for name in row["operators"])


def test_any_plug_in_can_bring_a_simulator():
    asked = []
    plugin = types.SimpleNamespace(
        hal_backend=hookimpl(lambda: Backend("toy", ("toy",))),
        hal_simulator=hookimpl(
            lambda backend: (lambda arguments: asked.append(arguments) or 5) if backend == "toy" else None
        ),
    )
    registry.register(plugin, "toy")
    try:
        assert hal("toy", "-x", "--", "y").exit_code == 5
    finally:
        registry.unregister("toy")
    assert asked == [["-x", "--", "y"]]


@pytest.fixture
def home(tmp_path, monkeypatch):
    """Stands for built libraries."""
    monkeypatch.setattr(launch, "build", lambda: tmp_path / "home")
    return tmp_path / "home"


def test_the_environment_is_that_of_a_cann(home, monkeypatch):
    monkeypatch.setenv("LD_LIBRARY_PATH", "/mine")
    monkeypatch.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    monkeypatch.delenv("TASK_QUEUE_ENABLE", raising=False)
    found = launch.environment(SimulatorSettings(devices=3))
    assert found["LD_LIBRARY_PATH"] == f"{home}/lib64:/mine"
    assert found["ASCEND_HOME_PATH"] == str(home)
    assert found["ASCEND_OPP_PATH"] == f"{home}/opp"
    assert found["ASCEND_SIM_DEVICES"] == "3"
    assert found["TASK_QUEUE_ENABLE"] == "0"
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD" not in found
    assert shutil.which("python", path=found["PATH"]) == str(Path(sys.executable).parent / "python")
    monkeypatch.setenv("TASK_QUEUE_ENABLE", "1")
    assert launch.environment(SimulatorSettings())["TASK_QUEUE_ENABLE"] == "1"


def test_a_program_that_does_not_exist_is_named(home):
    with pytest.raises(ArgumentError, match="'no-such-program' is no program"):
        launch.execute(SimulatorSettings(), ["no-such-program"])


def test_a_program_that_does_not_exist_leaves_the_trace_that_was(home, tmp_path):
    trace = tmp_path / "trace"
    trace.write_text("precious")
    with pytest.raises(ArgumentError):
        launch.execute(SimulatorSettings(trace=trace), ["no-such-program"])
    assert trace.read_text() == "precious"


def test_children_find_the_same_cache_from_another_directory(home, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ASCEND_SIM_CACHE", "mine")
    assert launch.environment(SimulatorSettings())["ASCEND_SIM_CACHE"] == str(tmp_path / "mine")


def test_a_trace_that_cannot_be_written_stops_before_anything_is_built(monkeypatch, tmp_path):
    monkeypatch.setattr(launch, "build", lambda: pytest.fail("built"))
    with pytest.raises(FileError, match="nowhere"):
        launch.execute(SimulatorSettings(trace=tmp_path / "nowhere" / "trace"), ["python"])


def test_the_command_starts_where_torch_would_load_a_package_that_cannot_load(tmp_path):
    """As in an environment with torch_npu and without CANN."""
    info = tmp_path / "brokenhw-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: brokenhw\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[torch.backends]\nbrokenhw = broken_package:load\n")
    run = [sys.executable, "-c", "from _hal_main import main; main()"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)])}
    environment.pop("TORCH_DEVICE_BACKEND_AUTOLOAD", None)
    helped = subprocess.run([*run, "simulate", "--help"], env=environment, capture_output=True, text=True, timeout=120)
    assert helped.returncode == 0, helped.stderr
    other = subprocess.run([*run, "ops"], env=environment, capture_output=True, text=True, timeout=120)
    assert other.returncode != 0 and "broken_package" in other.stderr


def test_no_torch_npu_is_told_with_exit_status_2(started, monkeypatch):
    def none():
        raise ConfigError("torch_npu is not installed here")

    monkeypatch.setattr(launch, "execute", lambda settings, program: build.recipe())
    monkeypatch.setattr(build.symbols, "find_wheel", none)
    done = hal("ascend", "--", "x")
    assert done.exit_code == 2
    assert "ConfigError: torch_npu is not installed here" in done.output


def test_options_of_the_command_are_the_settings():
    import inspect

    names = set(inspect.signature(command.simulate).parameters)
    assert set(SimulatorSettings.__dataclass_fields__) <= names
