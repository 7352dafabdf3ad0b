"""The switches of torch and of its devices that change results, read for reports."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["numerics"]


def numerics() -> dict[str, str]:
    """The switches that change results, by name; those of devices that this torch lacks are left out."""
    asked: dict[str, Callable[[], Any]] = {
        "float32_matmul_precision": torch.get_float32_matmul_precision,
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled,
        "deterministic_warn_only": torch.is_deterministic_algorithms_warn_only_enabled,
        "default_dtype": torch.get_default_dtype,
        "cpu_capability": torch.backends.cpu.get_cpu_capability,
        "mkldnn": torch.backends.mkldnn.is_available,
        "flush_denormal": lambda: float(torch.tensor(2.0**-149) * torch.ones(())) == 0.0,
        "threads": torch.get_num_threads,
    }
    if torch.version.cuda is not None or torch.version.hip is not None:
        matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
        asked |= {
            "cuda.matmul.allow_tf32": lambda: matmul.allow_tf32,
            "cuda.matmul.allow_fp16_reduced_precision_reduction": lambda: matmul.allow_fp16_reduced_precision_reduction,
            "cuda.matmul.allow_bf16_reduced_precision_reduction": lambda: matmul.allow_bf16_reduced_precision_reduction,
            "cudnn.allow_tf32": lambda: cudnn.allow_tf32,
            "cudnn.deterministic": lambda: cudnn.deterministic,
            "cudnn.benchmark": lambda: cudnn.benchmark,
        }
    npu = getattr(torch, "npu", None)
    if npu is not None:
        asked |= {
            "npu.matmul.allow_hf32": lambda: npu.matmul.allow_hf32,
            "npu.conv.allow_hf32": lambda: npu.conv.allow_hf32,
            "npu.inf_nan_survive": lambda: npu.utils.is_support_inf_nan(),
        }
    return {name: _said(ask) for name, ask in asked.items()}


def _said(ask: Callable[[], Any]) -> str:
    # torch refuses to answer where its old and its new precision switches were mixed.
    try:
        return str(ask()).removeprefix("torch.")
    except (RuntimeError, AttributeError) as error:
        return f"unknown ({str(error).splitlines()[0]})"
