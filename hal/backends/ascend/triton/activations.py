"""silu_and_mul and gelu_and_mul by the kernels of hal.kernels.activations."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from hal.backends.ascend.triton import launch
from hal.op import empty

__all__ = ["gelu_and_mul", "silu_and_mul"]


def _gated(name: str, x: Tensor, *numbers: float | None, **constants: Any) -> Tensor:
    features = x.shape[-1] // 2
    y = empty((*x.shape[:-1], features), dtype=x.dtype, device=x.device)
    if not y.numel():
        return y
    x_TF = launch.matrix(x)
    rows = x_TF.shape[0]
    blocks = launch.tile(min(features, launch.TILE))  # rows are cut freely: nothing is summed along them
    del blocks["WHOLE"]
    tiles = -(-rows // blocks["BLOCK_R"]) * -(-features // blocks["BLOCK_F"])
    launch.run(name, tiles, x.device, x_TF, y, rows, features, x_TF.stride(0), *numbers, **constants, **blocks)
    return y


def silu_and_mul(x: Tensor, *, limit: float | None = None, alpha: float = 1.0, up_offset: float = 0.0) -> Tensor:
    return _gated(
        "activations.silu_and_mul_kernel", x, None if limit is None else float(limit), float(alpha), float(up_offset)
    )


def gelu_and_mul(x: Tensor, *, approximate: str = "none") -> Tensor:
    return _gated("activations.gelu_and_mul_kernel", x, TANH=approximate == "tanh")
