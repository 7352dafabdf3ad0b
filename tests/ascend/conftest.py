"""Tests in npu/ need torch_npu and run on the simulated CANN: only when they are named (see `make ascend`)."""

from __future__ import annotations

from pathlib import Path

NPU = Path(__file__).parent / "npu"


def pytest_ignore_collect(collection_path, config):
    if collection_path != NPU:
        return None
    named = ((config.invocation_params.dir / argument.partition("::")[0]).resolve() for argument in config.args)
    return None if any(path == NPU or NPU in path.parents for path in named) else True
