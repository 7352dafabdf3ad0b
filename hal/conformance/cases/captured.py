"""Calls of a real model (SmolLM2-135M-Instruct, bfloat16), recorded by `python -m hal.bench.capture --model PATH`."""

from __future__ import annotations

import json
from functools import lru_cache
from importlib import resources
from typing import Any

import torch
from torch import Tensor

from hal.conformance.case import Case, make
from hal.conformance.inputs import Draft
from hal.errors import ArgumentError, FileError

__all__ = ["cases", "draft"]

RECORDED = torch.bfloat16
DTYPES = {"bfloat16": "quick", "float32": "quick", "float16": "full"}


def cases(op: str) -> list[Case]:
    """The recorded calls of an op, in the dtype of the record and in others."""
    found = []
    for call in _calls().values():
        if call["op"] == op:
            for dtype, suite in DTYPES.items():
                found.append(
                    make(op, dtype, {"captured": call["name"]}, {"captured"}, "quick" if suite == "quick" else "full")
                )
    return found


def draft(name: str, dtype: torch.dtype) -> Draft:
    """The recorded call `name` with the model's tensors in `dtype`; tables and indices keep their own."""
    call = _calls().get(name)
    if call is None:
        raise ArgumentError(f"no call {name!r} is recorded; there are {', '.join(_calls())}")
    tensors = _tensors()
    args: dict[str, Any] = {}
    layouts: dict[str, str] = {}
    for parameter, value in call["arguments"].items():
        if not isinstance(value, dict):
            args[parameter] = tuple(value) if isinstance(value, list) else value
            continue
        t: Tensor = tensors[f"{name}.{parameter}"]
        args[parameter] = t.to(dtype) if t.dtype is RECORDED else t
        layouts[parameter] = value["layout"]
    return Draft(args, layouts=layouts)


@lru_cache(maxsize=1)
def _calls() -> dict[str, dict[str, Any]]:
    try:
        text = _file("captured.json").decode()
        return {call["name"]: call for call in json.loads(text)["calls"]}
    except (ValueError, KeyError, TypeError) as error:
        raise FileError(f"hal/conformance/data/captured.json is damaged: {error}; reinstall torch-hal") from error


@lru_cache(maxsize=1)
def _tensors() -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        return load(_file("captured.safetensors"))
    except SafetensorError as error:
        raise FileError(
            f"hal/conformance/data/captured.safetensors is damaged: {error}; reinstall torch-hal"
        ) from error


def _file(name: str) -> bytes:
    try:
        return (resources.files("hal.conformance") / "data" / name).read_bytes()
    except OSError as error:
        raise FileError(f"hal/conformance/data/{name} cannot be read: {error}; reinstall torch-hal") from error
