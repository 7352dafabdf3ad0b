"""The example package is a backend like any other: installed, found by name, chosen, verified."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "hal-backend-example"


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    target = tmp_path_factory.mktemp("site")
    options = ["--quiet", "--no-deps", "--no-index", "--no-build-isolation", "--target", target]
    subprocess.run([sys.executable, "-m", "pip", "install", *options, EXAMPLE], check=True, timeout=120)
    return target


def run(site, *command, code=0):
    env = {name: value for name, value in os.environ.items() if not name.startswith("HAL_")}
    env |= {"PYTHONPATH": str(site), "OMP_NUM_THREADS": "1", "COLUMNS": "110"}
    hal = [sys.executable, "-m", "hal.cli", *command]
    done = subprocess.run(hal, cwd=site, env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout


def implementations(site, op):
    entries = {entry["name"]: entry for entry in json.loads(run(site, "ops", "--json"))}
    return {
        backend: [implementation["name"] for implementation in found]
        for backend, found in entries[op]["implementations"].items()
    }


def test_a_backend_is_found_by_its_entry_point(site):
    assert implementations(site, "rms_norm")["example"] == ["example"]


def test_an_extension_adds_to_another_backend_without_taking_over(site):
    found = implementations(site, "softmax")["cpu"]
    assert "example" in found
    assert found[0] != "example"


@pytest.mark.parametrize(
    "request_", [("--backend", "example", "--op", "rms_norm"), ("--backend", "cpu", "--op", "softmax")]
)
def test_it_passes_conformance(site, request_, tmp_path):
    report = tmp_path / "report.json"
    run(site, "conformance", "run", *request_, "--impl", "example", "--json", str(report))
    statuses = [result["status"] for result in json.loads(report.read_text())["results"]]
    assert statuses.count("passed") > 10
