"""Recording a model's calls, and the cases that replay them."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import hal
from hal.conformance import capture
from hal.conformance.cases import captured, families
from hal.errors import ArgumentError, FileError


def model(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    y = hal.ops.rms_norm(x, weight[0], eps=1e-5)
    return hal.ops.linear(y, weight)


def recorded() -> capture.Recorder:
    weight = torch.arange(40.0 * 8).reshape(40, 8).bfloat16()
    recorder = capture.Recorder()
    with recorder:
        for layer in range(5):
            model(torch.full((2, 3, 8), float(layer)).bfloat16().transpose(0, 1), weight)
    return recorder


def test_one_call_of_each_kind_is_kept_from_the_later_half(tmp_path: Path) -> None:
    capture.write(recorded(), tmp_path, "a model")
    listed = json.loads((tmp_path / "captured.json").read_text())
    assert listed["source"] == "a model"
    assert [call["name"] for call in listed["calls"]] == ["rms_norm-0", "linear-0"]
    norm = listed["calls"][0]["arguments"]
    assert norm["eps"] == 1e-5
    assert norm["x"] == {"layout": "swapped"}
    tensors = load_file(tmp_path / "captured.safetensors")
    assert torch.equal(tensors["rms_norm-0.x"], torch.full((3, 2, 8), 3.0).bfloat16())
    assert tensors["linear-0.weight"].shape == (16, 8)  # few rows of a large weight


def test_a_record_that_is_too_large_is_refused_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capture, "LARGEST", 100)
    with pytest.raises(ArgumentError, match=r"take \d+ bytes, more than 100; record a shorter run"):
        capture.write(recorded(), tmp_path, "a model")
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written_is_a_file_error(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="cannot be written"):
        capture.write(recorded(), tmp_path / "missing", "a model")


def test_the_record_is_small_and_covers_what_a_model_runs() -> None:
    folder = resources.files("hal.conformance") / "data"
    size = sum(len((folder / name).read_bytes()) for name in ("captured.json", "captured.safetensors"))
    assert size <= capture.LARGEST
    covered = {op for op in families() if captured.cases(op)}
    assert covered >= {
        "rms_norm",
        "add_rms_norm",
        "linear",
        "rotary_embedding",
        "attention",
        "silu_and_mul",
        "cross_entropy",
        "top_k_top_p_probs",
        "top_k_top_p_sample",
    }


def test_a_captured_case_holds_the_models_own_values() -> None:
    case = next(case for case in captured.cases("linear") if case.dtype == "bfloat16")
    folder = resources.files("hal.conformance") / "data"
    tensors = load_file(str(folder / "captured.safetensors"))
    assert torch.equal(case.build().args["weight"], tensors["linear-0.weight"])


def test_an_unknown_call_is_an_error() -> None:
    with pytest.raises(ArgumentError, match=r"no call 'linear-99' is recorded; there are rms_norm-0"):
        captured.draft("linear-99", torch.float32)
