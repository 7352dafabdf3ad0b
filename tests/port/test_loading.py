"""Models that cannot be read: each a typed error that says what to do. And one that can, end to end."""

from __future__ import annotations

import json
import sys

import pytest
import torch
from typer.testing import CliRunner

from hal.cli import app
from hal.errors import ArgumentError, FileError, UnsupportedError
from hal.port import generation, loading


def generate(*arguments):
    return CliRunner().invoke(app, ["generate", *map(str, arguments)])


def test_a_path_that_does_not_exist_is_named(tmp_path):
    with pytest.raises(FileError, match=r"no-such-model.*nothing is downloaded"):
        loading.load(tmp_path / "no-such-model", torch.float32)


def test_a_file_that_is_no_gguf_is_refused(tmp_path):
    path = tmp_path / "weights.gguf"
    path.write_bytes(b"not a model at all")
    with pytest.raises(FileError, match="not a GGUF file"):
        loading.load(path, torch.float32)


def test_a_gguf_file_cut_short_is_refused(tmp_path):
    path = tmp_path / "cut.gguf"
    path.write_bytes(b"GGUF\x03\x00\x00\x00")
    with pytest.raises(FileError, match="cannot be read as a model"):
        loading.load(path, torch.float32)


def test_a_directory_without_a_model_is_refused(tmp_path):
    with pytest.raises(FileError, match=r"neither config\.json nor a GGUF file"):
        loading.load(tmp_path, torch.float32)


def test_a_directory_with_a_damaged_configuration_is_refused(tmp_path):
    (tmp_path / "config.json").write_text("{ not json")
    with pytest.raises(FileError, match="cannot be read as a model"):
        loading.load(tmp_path, torch.float32)


def test_several_gguf_files_must_be_told_apart(tmp_path):
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
    with pytest.raises(FileError, match="2 GGUF files: name one"):
        loading.load(tmp_path, torch.float32)


def test_a_file_without_permission_is_refused(tmp_path, monkeypatch):
    path = tmp_path / "secret.gguf"
    path.write_bytes(b"GGUF")

    def refuse(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(type(path), "open", refuse)
    with pytest.raises(FileError, match="Permission denied"):
        loading.load(path, torch.float32)


def test_without_transformers_the_error_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(UnsupportedError, match=r"torch-hal\[transformers\]"):
        loading.load(tmp_path, torch.float32)


def test_without_gguf_the_error_says_what_to_install(tmp_path, monkeypatch):
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF")
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(UnsupportedError, match="package gguf"):
        loading.load(path, torch.float32)


def test_a_directory_is_loaded_and_continued(folder):
    model, tokenizer = loading.load(folder, torch.float32)
    found = generation.generate(model, tokenizer, "one", 6)
    assert found.prompt_tokens == 3
    assert 1 <= len(found.token_ids) <= 6
    assert found.report["calls"] == []


def test_a_prompt_longer_than_the_model_is_refused(folder):
    model, tokenizer = loading.load(folder, torch.float32)
    with pytest.raises(ArgumentError, match="128 positions"):
        generation.generate(model, tokenizer, "x" * 125, 6)


def test_an_empty_prompt_is_refused(folder):
    model, tokenizer = loading.load(folder, torch.float32)
    with pytest.raises(ArgumentError, match="empty"):
        generation.generate(model, tokenizer, "", 6)


def test_the_command_prints_text_rates_and_what_ran(folder):
    result = generate("--model", folder, "one", "--max-new-tokens", 5)
    assert result.exit_code == 0, result.output
    assert "tokens/s" in result.output
    assert "LlamaRMSNorm: rms_norm (weight after rounding)" in result.output
    assert "cpu/" in result.output
    assert "of the arithmetic" in result.output


def test_the_command_gives_the_same_tokens_with_and_without_hal(folder):
    runs = [json.loads(generate("--model", folder, "one", "--json", *extra).stdout) for extra in ((), ("--no-hal",))]
    assert runs[0]["token_ids"] == runs[1]["token_ids"]
    assert {call["op"] for call in runs[0]["report"]["calls"]} >= {
        "linear",
        "rms_norm",
        "attention",
        "rotary_embedding",
    }
    assert runs[0]["shares"]["flops"] > 0.9
    assert runs[1]["report"]["calls"] == []


def test_the_backend_is_chosen_by_option_and_by_environment(folder, monkeypatch):
    arguments = ("--model", folder, "on", "--max-new-tokens", 3, "--json")
    by_option = json.loads(generate(*arguments, "--backend", "portable:cpu").stdout)
    monkeypatch.setenv("HAL_BACKEND", "portable:cpu")
    by_environment = json.loads(generate(*arguments).stdout)
    for found in (by_option, by_environment):
        assert {call["backend"] for call in found["report"]["calls"]} == {"portable:cpu"}


def test_the_command_reports_an_unreadable_model_in_one_line(tmp_path):
    result = generate("--model", tmp_path / "none.gguf", "hello")
    assert result.exit_code == 2
    assert "does not exist" in result.stderr
    assert "Traceback" not in result.output
