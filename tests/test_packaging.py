"""What is packed is whole: data files, typing marker, no tests, and it works where only it is installed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """(sdist, wheel); the wheel is built from the sdist."""
    out = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", out, ROOT)
    return next(out.glob("*.tar.gz")), next(out.glob("*.whl"))


@pytest.fixture(scope="module")
def installed(built, tmp_path_factory):
    """The bin folder of an environment with the wheel; this one lends it torch and the other packages."""
    home = tmp_path_factory.mktemp("venv")
    venv.create(home, with_pip=False, symlinks=True)
    binaries = home / "bin"
    ask = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site = Path(run(binaries / "python", "-c", ask).strip())
    # A path line lends the packages, but not this environment's own editable install of hal.
    (site / "lent.pth").write_text(sysconfig.get_path("purelib") + "\n")
    run(
        *(sys.executable, "-m", "pip", "--python", binaries / "python", "install"),
        *("--quiet", "--no-deps", "--no-index", "--force-reinstall", built[1]),
    )
    return binaries


def run(*command, cwd=None, **env):
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("HAL_", "PYTEST_"))}
    done = subprocess.run(command, cwd=cwd, env=clean | env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, f"{command} exited with {done.returncode}\n{done.stdout}{done.stderr}"
    return done.stdout


def package_files():
    listed = run("git", "ls-files", "--cached", "--others", "--exclude-standard", "hal", cwd=ROOT)
    return {name for name in listed.splitlines() if (ROOT / name).is_file()}


def test_wheel_holds_every_file_of_the_package_and_nothing_else(built):
    names = zipfile.ZipFile(built[1]).namelist()
    packed = {name for name in names if ".dist-info/" not in name}
    assert packed == package_files() | {"_hal_main.py", "_hal_pytest.py"}
    assert "hal/py.typed" in packed
    assert any(name.startswith("hal/data/") and name.endswith(".json") for name in packed)
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)


def test_sdist_holds_the_package_once(built):
    with tarfile.open(built[0]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert package_files() <= names
    assert not [name for name in names if name.startswith(("ops/", "backends/", "conformance/"))]


def test_entry_points_name_modules_that_exist(installed):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    targets = [
        *project["scripts"].values(),
        *(target for group in project["entry-points"].values() for target in group.values()),
    ]
    code = "import sys, pkgutil\nfor target in sys.argv[1:]: pkgutil.resolve_name(target)"
    run(installed / "python", "-c", code, *targets, cwd="/")


def test_the_installed_wheel_is_the_one_that_runs(installed):
    where = run(installed / "python", "-c", "import hal; print(hal.__file__)", cwd="/").strip()
    assert Path(where).is_relative_to(installed.parent)


def test_installed_wheel_answers_and_verifies_an_op(installed, tmp_path):
    assert "conformance" in run(installed / "hal", "--help", cwd=tmp_path)
    report = tmp_path / "report.json"
    run(
        *(installed / "hal", "conformance", "run", "--op", "rms_norm", "--json", report),
        cwd=tmp_path,
        HAL_BACKEND="cpu",
        OMP_NUM_THREADS="1",
    )
    assert json.loads(report.read_text())["results"]


def test_root_links_lead_into_the_package():
    for name in ("ops", "backends", "conformance"):
        link = ROOT / name
        assert link.is_symlink()
        assert os.readlink(link) == f"hal/{name}"


def test_the_example_backend_in_an_environment_of_its_own(installed):
    example = ROOT / "examples" / "hal-backend-example"
    pip = (sys.executable, "-m", "pip", "--python", installed / "python", "install", "--quiet", "--no-deps")
    run(*pip, "--no-index", "--no-build-isolation", example)
    told = run(installed / "python", "-m", "pytest", "-q", "-p", "no:cacheprovider", ".", cwd=example / "tests")
    assert "3 passed" in told
    assert "example" in run(installed / "hal", "ops")
