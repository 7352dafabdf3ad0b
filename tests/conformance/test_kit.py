"""The kit: one file that judges a machine which has Python and torch, and nothing else."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from bare import environment
from typer.testing import CliRunner

from hal.cli import app, kit_main
from hal.conformance import kit, kit_run, kit_wheels
from hal.conformance.archive import read_bundle
from hal.conformance.kit_wheels import Target
from hal.conformance.report import read_report
from hal.errors import ArgumentError, FileError

HERE = (f"3.{sys.version_info[1]}", platform.machine())
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A kit for this interpreter; pip brings the wheels, as for a user."""
    path = tmp_path_factory.mktemp("kit") / "hal-kit.pyz"
    kit.build(path, HERE[:1], HERE[1:])
    return path


@pytest.fixture(scope="module")
def bare(tmp_path_factory):
    """The Python of an environment with torch and its needs alone."""
    return environment(tmp_path_factory.mktemp("bare") / "venv")


def run(python, path, *arguments, cwd, **env):
    clean = {"PATH": os.defpath, "OMP_NUM_THREADS": "1", "TMPDIR": str(cwd)} | env
    command = [python, path, *arguments]
    return subprocess.run(command, cwd=cwd, env=clean, capture_output=True, text=True, timeout=300)


def test_the_bare_environment_has_torch_and_none_of_hals_needs(bare):
    code = "import importlib.util as u, torch; print([n for n in %r if u.find_spec(n)])"
    wanted = ["hal", "pydantic", "pydantic_core", "pluggy", "typer", "rich", "safetensors", "hypothesis", "numpy"]
    done = subprocess.run([bare, "-c", code % wanted], capture_output=True, text=True, check=True, cwd="/")
    assert done.stdout.strip() == "[]"


def test_the_kit_judges_where_there_is_nothing_but_torch(built, bare, tmp_path):
    done = run(bare, built, "--op", "softmax", "--op", "rms_norm", "--workers", "1", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "send this file back" in done.stdout
    results = tmp_path / "hal-results.zip"
    assert results.stat().st_size < kit_run.LIMIT
    with zipfile.ZipFile(results) as archive:
        archive.extractall(tmp_path / "results")
    assert {path.name for path in (tmp_path / "results").iterdir()} == {
        "cpu.json", "cpu.hal", "portable-cpu.json", "portable-cpu.hal", "report.html", "report.md", "doctor.json",
        "about.json",
    }  # fmt: skip
    native, portable = (read_report(tmp_path / "results" / f"{name}.json") for name in ("cpu", "portable-cpu"))
    assert {found.op for found in native.results} == {"softmax", "rms_norm"}
    assert native.exit_status() == portable.exit_status() == 0
    # the recorded calls of a model are safetensors: the compiled reader came along
    assert any("captured" in found.tags for found in native.results)
    assert read_bundle(tmp_path / "results" / "cpu.hal").manifest.target.backend == "cpu"
    assert json.loads((tmp_path / "results" / "about.json").read_text())["left_out"] == []


def test_it_leaves_nothing_behind_but_the_results(built, bare, tmp_path):
    done = run(bare, built, "--backend", "cpu", "--op", "copy_kv_blocks", "-o", "out.zip", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["out.zip"]


def test_a_reports_repeat_command_works_with_the_kit_in_the_place_of_hal(built, bare, tmp_path):
    from hal.conformance.case import cases

    case = cases("softmax")[0].id
    words = ("conformance", "run", "--case", case, "--backend", "cpu", "--impl", "reference")
    done = run(bare, built, *words, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed" in done.stdout


def test_a_time_that_is_over_ends_the_run_with_a_report(built, bare, tmp_path):
    done = run(bare, built, "--backend", "cpu", "--minutes", "0.05", cwd=tmp_path)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "Interrupted after" in done.stdout
    with zipfile.ZipFile(tmp_path / "hal-results.zip") as archive:
        assert json.loads(archive.read("cpu.json"))["complete"] is False


def test_a_backend_that_is_not_there_is_told_and_costs_no_other(built, bare, tmp_path):
    words = ("--backend", "nosuch", "--backend", "cpu", "--op", "copy_kv_blocks")
    done = run(bare, built, *words, cwd=tmp_path)
    assert done.returncode == 2
    assert "nosuch: ConfigError" in done.stdout
    assert "cpu: Every judged case passed" in done.stdout


def test_a_python_without_torch_is_told_so(built, tmp_path):
    import venv

    venv.create(tmp_path / "empty", with_pip=False, symlinks=True)
    done = run(tmp_path / "empty" / "bin" / "python", built, cwd=tmp_path)
    assert done.returncode == 2
    assert "needs a Python that has torch" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_kit_for_other_pythons_says_what_it_is_for(tmp_path, bare, monkeypatch):
    other = "3.12" if HERE[0] != "3.12" else "3.11"
    monkeypatch.setattr(kit, "wheels", lambda *_: {f"pydantic_core-1-cp{other.replace('.', '')}-x-linux_y.whl": b""})
    kit.build(tmp_path / "k.pyz", (other,))
    done = run(bare, tmp_path / "k.pyz", cwd=tmp_path)
    assert done.returncode == 2
    assert f"built for CPython {other}" in done.stderr
    assert "hal conformance kit --python" in done.stderr


def test_equal_sources_give_an_equal_kit(built, tmp_path):
    again = tmp_path / "again.pyz"
    folder = tmp_path / "wheels"
    folder.mkdir()
    with zipfile.ZipFile(built) as archive:
        for name in archive.namelist():
            if name.startswith("wheels/"):
                (folder / Path(name).name).write_bytes(archive.read(name))
    kit.build(again, HERE[:1], HERE[1:], folder)
    assert again.read_bytes() == built.read_bytes()


def test_it_carries_hal_without_what_needs_more(built):
    names = zipfile.ZipFile(built).namelist()
    packages = {name.split("/")[1].partition("-")[0] for name in names if name.startswith("site/")}
    assert packages == {
        "hal", "pluggy", "pydantic", "annotated_types", "typing_extensions", "typing_extensions.py",
        "typing_inspection", "torch_hal",
    }  # fmt: skip
    assert "site/hal/conformance/data/report.css" in names
    assert not [name for name in names if name.endswith(".pyc") or "/cli/" in name]


@pytest.mark.parametrize(
    ("wheel", "taken"),
    [
        ("pydantic_core-2.1-cp311-cp311-manylinux_2_17_x86_64.manylinux2014_x86_64.whl", True),
        ("pydantic_core-2.1-cp310-abi3-manylinux2014_x86_64.whl", True),
        ("pydantic_core-2.1-cp312-abi3-manylinux2014_x86_64.whl", False),
        ("pydantic_core-2.1-cp310-cp310-manylinux2014_x86_64.whl", False),
        ("pydantic_core-2.1-cp311-cp311-manylinux2014_aarch64.whl", False),
        ("pydantic_core-2.1-cp311-cp311-musllinux_1_1_x86_64.whl", False),
        ("pydantic_core-2.1-cp311-cp311-win_amd64.whl", False),
        ("pydantic_core-2.2-cp311-cp311-manylinux2014_x86_64.whl", False),
        ("pydantic-2.1-py3-none-any.whl", False),
        ("pydantic_core-2.1.tar.gz", False),
    ],
)
def test_which_wheel_fits_a_target(wheel, taken):
    assert Target("3.11", "x86_64").takes(wheel, "pydantic-core", "2.1") is taken


def test_a_wheel_that_is_not_to_be_had_is_named_with_what_to_do(tmp_path):
    with pytest.raises(FileError, match=r"pydantic-core .* for CPython 3\.11 on riscv64.*--wheels"):
        kit.build(tmp_path / "k.pyz", ("3.11",), ("riscv64",), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_what_pip_says_is_told(tmp_path, monkeypatch):
    said = subprocess.CompletedProcess([], 1, "", "WARNING: x\nERROR: No matching distribution found\n")
    monkeypatch.setattr(kit_wheels.subprocess, "run", lambda *_, **__: said)
    with pytest.raises(FileError, match="No matching distribution found"):
        kit.build(tmp_path / "k.pyz")


@pytest.mark.parametrize(
    ("python", "machine", "told"),
    [("3", "x86_64", "no Python version"), ("3.11; rm", "x86_64", "no Python"), ("3.11", "x/../y", "no processor")],
)
def test_a_target_that_means_nothing_is_refused(tmp_path, python, machine, told):
    with pytest.raises(ArgumentError, match=told):
        kit.build(tmp_path / "k.pyz", (python,), (machine,))


def test_a_python_that_a_carried_package_no_longer_serves_is_refused(tmp_path):
    with pytest.raises(ArgumentError, match=r"Python 3\.7 was asked for, but"):
        kit.build(tmp_path / "k.pyz", ("3.7",))


def test_the_command_writes_a_kit_and_refuses_in_a_sentence(built, tmp_path):
    folder = tmp_path / "no"
    done = CliRunner().invoke(app, ["conformance", "kit", "-o", str(tmp_path / "k.pyz"), "--wheels", str(folder)])
    assert done.exit_code == 2
    assert "cannot look for wheels" in done.output


def test_what_is_too_large_to_send_is_left_out_last_things_first(tmp_path, monkeypatch):
    monkeypatch.setattr(kit_run, "LIMIT", 30_000)
    outcome = kit_run.Outcome("cpu", bundle=os.urandom(40_000), problem="none")
    left = kit_run.write_results([outcome], tmp_path / "r.zip", {}, '{"doctor": 1}')
    assert left == ["cpu.hal"]
    with zipfile.ZipFile(tmp_path / "r.zip") as archive:
        assert archive.namelist() == ["doctor.json", "about.json"]
        assert json.loads(archive.read("about.json"))["left_out"] == ["cpu.hal"]


def test_the_front_of_a_kit_needs_only_the_standard_library():
    code = f"import runpy, sys; runpy.run_path({kit_main.__file__!r}); print(sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True, check=True)
    assert "torch" not in done.stdout
    assert "hal" not in eval(done.stdout)


@pytest.mark.slow
def test_what_a_kit_runs_is_written_for_python_3_10(tmp_path):
    code = (
        "import sys, hal.conformance.kit_run, hal.doctor, hal.backends.cpu, hal.backends.portable\n"
        "from hal.conformance.case import cases\n"
        "from hal.conformance.site import Site\n"
        "cases(), Site.of('cpu'), Site.of('portable:cpu'), hal.descriptor.sheets()\n"
        "print(*[m.__file__ for n, m in sys.modules.items() if n.split('.')[0] == 'hal'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    files = [*done.stdout.split(), kit_main.__file__]
    assert len(files) > 80
    options = ("--python-version", "3.10", "--follow-imports", "silent", "--cache-dir", str(tmp_path))
    checked = subprocess.run([sys.executable, "-m", "mypy", *options, *files], capture_output=True, text=True, cwd=ROOT)
    assert checked.returncode == 0, checked.stdout


@pytest.mark.slow
def test_the_usual_kit_serves_three_pythons_on_two_processors(tmp_path):
    made = kit.build(tmp_path / "hal-kit.pyz")
    assert len(made.wheels) == 3 * 2 + 2  # safetensors' wheel serves every Python
    assert made.size == (tmp_path / "hal-kit.pyz").stat().st_size < 20_000_000
