"""The side-by-side benchmark as a command."""

from __future__ import annotations

import json

import torch

from hal.bench.model import compare as compare_models
from hal.bench.model import main, table


def test_the_figures_are_written_as_json(folder, tmp_path, capsys):
    path = tmp_path / "figures.json"
    threads = torch.get_num_threads()
    status = main(["--model", str(folder), "--tokens", "6", "--rounds", "2", "--threads", "1", "--json", str(path)])
    torch.set_num_threads(threads)
    found = json.loads(path.read_text())
    assert found["equal_tokens"] == [True, True, True]
    assert found["hal_error"] <= found["error_allowed"]
    assert found["flops_share"] > 0.9
    assert found["threads"] == 1
    assert status == (0 if found["speedup"] >= 1 else 1)
    assert "untouched (SDPA)" in capsys.readouterr().out


def test_a_model_that_differs_is_reported(folder, monkeypatch):
    from hal.port import interface

    attention = interface.attention
    monkeypatch.setattr(interface, "attention", lambda *args, **rest: 1.01 * attention(*args, **rest))
    found = compare_models(folder, tokens=6, rounds=0)
    assert not found.within_rules
    assert found.hal_error > 10 * found.error_allowed
    assert "allowed" in table(found)


def test_an_unreadable_model_ends_with_status_two(tmp_path, capsys):
    assert main(["--model", str(tmp_path / "none")]) == 2
    assert "does not exist" in capsys.readouterr().err


def test_a_report_that_cannot_be_written_ends_before_the_run(folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("hal.bench.model.compare", None)
    path = tmp_path / "no" / "such" / "folder.json"
    assert main(["--model", str(folder), "--tokens", "3", "--rounds", "0", "--json", str(path)]) == 2
    assert "folder.json" in capsys.readouterr().err
