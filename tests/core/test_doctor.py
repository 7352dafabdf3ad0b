"""What `hal.doctor` gathers, and that a broken vendor package harms nobody."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch

import hal
from hal import doctor, hookspec
from hal.doctor import Package
from hal.numerics import numerics


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Installs a package with metadata into a folder that probes see."""

    def install(name, body, version="1.2.3"):
        (tmp_path / f"{name}.py").write_text(textwrap.dedent(body))
        info = tmp_path / f"{name}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        monkeypatch.syspath_prepend(str(tmp_path))

    return install


def only(name, timeout_s=20.0):
    (found,) = doctor.probe((name,), timeout_s)
    return found


def test_an_importable_package_is_reported_with_its_version(package):
    package("vendor_good", "print('chatter'); __version__ = 'other'")
    assert only("vendor_good") == Package(name="vendor_good", module="vendor_good", status="ok", version="1.2.3")


def test_a_package_that_raises_is_broken_and_says_why(package):
    package("vendor_raises", "raise ImportError('libvendor.so.7: cannot open shared object file')")
    found = only("vendor_raises")
    assert (found.status, found.version) == ("broken", "1.2.3")
    assert "libvendor.so.7" in found.detail


def test_a_package_that_crashes_the_interpreter_is_broken_and_this_process_lives(package):
    package("vendor_crashes", "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")
    found = only("vendor_crashes")
    assert (found.status, found.detail) == ("broken", "the import ended with signal SIGSEGV")


def test_a_package_that_exits_is_broken(package):
    package("vendor_exits", "import os; os._exit(0)")
    assert only("vendor_exits").status == "broken"


def test_a_package_that_hangs_is_ended_with_its_children(package, tmp_path):
    package(
        "vendor_hangs",
        f"""
        import subprocess, sys, time
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        open({str(tmp_path / "pid")!r}, "w").write(str(child.pid))
        time.sleep(60)
        """,
    )
    start = time.monotonic()
    found = only("vendor_hangs", timeout_s=3.0)
    assert time.monotonic() - start < 20
    assert found.status == "timeout"
    assert "3 s" in found.detail
    assert ended(int((tmp_path / "pid").read_text()))


def ended(pid):
    for _ in range(50):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return True
        if state == "Z":
            return True
        time.sleep(0.1)
    return False


def test_a_package_that_is_not_installed_starts_no_process(monkeypatch):
    monkeypatch.setattr(subprocess, "Popen", lambda *a, **k: pytest.fail("a process was started"))
    assert only("torch_npu_that_is_not_there").status == "absent"


@pytest.fixture(scope="module")
def diagnosis():
    return doctor.examine()


def test_the_diagnosis_has_versions_backends_devices_and_numerics(diagnosis):
    assert diagnosis.versions.hal == hal.__version__
    assert diagnosis.versions.torch == torch.__version__
    assert {"cpu", "portable"} <= {b.name for b in diagnosis.backends}
    assert next(b for b in diagnosis.backends if b.name == "cpu").implementations["rms_norm"] >= 1
    assert diagnosis.devices["cpu"][0].memory_bytes > 0
    assert diagnosis.numerics["float32_matmul_precision"] == torch.get_float32_matmul_precision()
    assert {p.name for p in diagnosis.packages} == set(doctor.PACKAGES)


def test_the_diagnosis_is_json(diagnosis):
    data = json.loads(json.dumps(diagnosis.to_dict()))
    assert data["devices"]["cpu"][0]["device"] == "cpu"
    assert data["healthy"] is diagnosis.healthy


def test_numerics_follow_the_switches():
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("high")
        torch.use_deterministic_algorithms(True, warn_only=True)
        told = numerics()
    finally:
        torch.set_float32_matmul_precision(before)
        torch.use_deterministic_algorithms(False)
    assert told["float32_matmul_precision"] == "high"
    assert (told["deterministic_algorithms"], told["deterministic_warn_only"]) == ("True", "True")


def ask(script, **environment):
    clean = {k: v for k, v in os.environ.items() if not k.startswith("HAL_")}
    done = subprocess.run(
        [sys.executable, "-c", "import json; from hal import doctor, hookspec; doctor.PACKAGES.clear()\n" + script],
        capture_output=True, text=True, env=clean | environment, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


TELL = "print(json.dumps(doctor.examine().to_dict()))"


def test_settings_come_with_their_source(tmp_path):
    (tmp_path / "hal.toml").write_text('fallback = "portable"\n')
    told = ask(TELL, HAL_CHECK="1", HAL_CONFIG=str(tmp_path / "hal.toml"), HAL_BACKNED="cpu")
    found = {s["name"]: (s["value"], s["source"]) for s in told["settings"]}
    assert found["check"] == ("True", "environment")
    assert found["fallback"] == ("portable", "config file")
    assert found["backend"] == ("auto", "default")
    assert told["unknown_settings"] == {"HAL_BACKNED": "HAL_BACKEND"}


def test_a_setting_that_means_nothing_is_a_problem_not_a_crash():
    told = ask(TELL, HAL_FALLBACK="maybe")
    assert told["healthy"] is False
    assert [(p["where"], p["type"]) for p in told["problems"]] == [("settings", "ConfigError")]
    assert told["backends"]


def test_a_plug_in_that_fails_is_a_problem_with_its_reason(tmp_path):
    (tmp_path / "broken_plugin.py").write_text("raise ImportError('no libvendor')\n")
    info = tmp_path / "broken_plugin-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: broken-plugin\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[hal.backends]\nbrokenhw = broken_plugin\n")
    told = ask(TELL, PYTHONPATH=str(tmp_path))
    assert [(p["where"], p["type"], p["message"]) for p in told["problems"]] == [
        ("plug-in brokenhw", "ImportError", "no libvendor")
    ]
    assert told["healthy"] is False


def installed(**versions):
    return tuple(Package(name=n.replace("-", "_"), module=n, status="ok", version=v) for n, v in versions.items())


def conflicts(monkeypatch, packages, torch_version="2.13.0+cpu", cuda=None):
    monkeypatch.setattr(torch, "__version__", torch_version)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    return [(c.what, c.found) for c in doctor._conflicts(packages)]


def test_no_conflict_is_invented(monkeypatch):
    assert conflicts(monkeypatch, installed(torch_npu="2.13.0.post1", transformers="5.24.0")) == []


@pytest.mark.parametrize("version", ["2.9.1", "2.14.0", "1.13.0+cu117", "3.0.0"])
def test_a_torch_out_of_range_is_a_conflict(monkeypatch, version):
    assert conflicts(monkeypatch, (), version) == [(f"hal {hal.__version__} and torch", f"torch {version}")]


@pytest.mark.parametrize("version", ["2.10.0", "2.13.1+cu130", "2.12.0.dev20260101"])
def test_a_torch_in_range_is_none(monkeypatch, version):
    assert conflicts(monkeypatch, (), version) == []


def test_what_plug_ins_find_is_a_conflict(monkeypatch):
    told = hookspec.Conflict("a and b", "a 1, b 2", "b 1", "install b 1")
    monkeypatch.setattr(doctor.registry, "conflicts", lambda: [told])
    assert conflicts(monkeypatch, ()) == [("a and b", "a 1, b 2")]


def test_devices_are_not_asked_for_where_their_package_is_broken(monkeypatch):
    backend = hookspec.Backend("chip", ("chip",), packages=("torch_chip",))
    monkeypatch.setattr(doctor.registry, "load_all", lambda: [backend])
    monkeypatch.setattr(doctor.registry, "implementations", lambda name, op: [])
    monkeypatch.setattr(doctor.registry, "devices", lambda name: pytest.fail("its module would have been imported"))
    problems = []
    bad = Package(name="torch_chip", module="torch_chip", status="broken", detail="no libchip.so")
    _, devices = doctor._backends(problems, {"torch_chip": bad})
    assert devices == {}
    assert [(p.where, p.message) for p in problems] == [("devices of chip", "torch_chip: no libchip.so")]


def test_two_tritons_exclude_each_other(monkeypatch):
    both = (
        *installed(triton="3.5.0"),
        Package(name="triton-ascend", module="triton", status="ok", version="3.2.0"),
    )
    assert conflicts(monkeypatch, both) == [("triton and triton-ascend", "both")]
