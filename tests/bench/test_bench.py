"""`hal bench` on the CPU: every workload of the smoke suite, its JSON, and what it says of peers that differ."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from typer.testing import CliRunner

from hal.bench import comparison, peers, workload
from hal.bench.comparison import COPY, compare
from hal.bench.workload import Maker, workloads
from hal.cli import app
from hal.contract import OPS

CPU = torch.device("cpu")


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["bench", *arguments])


def test_the_smoke_suite_times_hal_beside_torch_and_a_copy(tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    done = run("--suite", "smoke", "--dtype", "float32", "--against", "torch", "--json", str(path))
    assert done.exit_code == 0, done.output
    document = json.loads(path.read_text())
    assert (document["format"], document["left_out"]) == ("hal-bench", {})
    names = [w.name for w in workloads("smoke")]
    assert list(dict.fromkeys(row["workload"] for row in document["rows"])) == names
    for name in names:
        rows = [row for row in document["rows"] if row["workload"] == name]
        assert rows[0]["candidate"].startswith("hal/") and rows[-1]["candidate"] == COPY
        for row in rows:
            assert 0 < row["low_us"] <= row["device_us"] <= row["high_us"] and row["bytes"] > 0
            if row["candidate"] == "torch":
                assert row["difference"] is None or row["difference"] < 1e-5


@pytest.mark.parametrize("suite", workload.SUITES)
def test_every_workload_is_a_call_that_its_operator_takes(suite: str) -> None:
    with FakeTensorMode():
        for found in workloads(suite):
            arguments = found.make(Maker.of(CPU, torch.bfloat16, 0))
            found.op.validate(found.op.bind((), arguments))
            assert found.cost(arguments).bytes > 0


def test_a_peer_that_computes_something_else_is_told_by_its_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparison, "peer", lambda name, op: lambda x: x * 0)
    (softmax,) = [w for w in workloads("smoke") if w.op.name == "softmax"]
    rows = compare(softmax, CPU, torch.float32, (None,), ("wrong",), None)
    assert [row.difference for row in rows if row.candidate == "wrong"] == [1.0]


@pytest.mark.parametrize(("name", "op"), [("torch", op) for op in peers._TORCH])
def test_a_peer_takes_the_arguments_of_the_workloads(name: str, op: str) -> None:
    found = next(w for w in workloads("smoke") if w.op.name == op and not w.backward)
    arguments = found.make(Maker.of(CPU, torch.float32, 0))
    function = peers.peer(name, op)
    assert function is not None
    function(**arguments)


def test_a_peer_without_such_an_operator_or_package_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    assert peers.peer("torch", "paged_attention") is None
    monkeypatch.setitem(peers.PEERS, "liger", ("hal_no_such_module", peers._liger))
    assert peers.peer("liger", "rms_norm") is None


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--against", "torch,nobody"], "no peer is named nobody"),
        (["--suite", "huge"], "there are smoke, core"),
        (["--dtype", "int8"], "there are bfloat16, float16, float32"),
        (["--suite", "smoke", "--match", "nothing like it"], "no workload is left"),
        (["--device", "hal_no_such_device"], "--device hal_no_such_device"),
    ],
)
def test_what_means_nothing_is_refused(arguments: list[str], said: str) -> None:
    done = run(*arguments)
    assert done.exit_code == 2
    assert said in " ".join(done.output.split())


def test_backward_is_counted_as_more_than_forward() -> None:
    forward, backward = (w for w in workloads("smoke") if w.op is OPS["rms_norm"])
    arguments = forward.make(Maker.of(CPU, torch.float32, 0))
    assert backward.backward and backward.cost(arguments).bytes > forward.cost(arguments).bytes
