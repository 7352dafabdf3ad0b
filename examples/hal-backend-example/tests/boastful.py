"""The example's kernel under false claims: it says that it offsets the weight, and it does not."""

from __future__ import annotations

from dataclasses import replace

import hal_backend_example as example
from torch import Tensor

from hal.capability import Implementation
from hal.hookspec import hookimpl


def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    weight_offset: float = 0.0,
    round_before_weight: bool = False,
) -> Tensor:
    return example.rms_norm(x, weight, eps)


@hookimpl
def hal_implementations(backend: str) -> list[Implementation]:
    (honest,) = example.hal_implementations(backend)
    supports = honest.supports
    claimed = replace(supports, features=supports.features | {"weight_offset"})
    return [replace(honest, name="boastful", forward=rms_norm, supports=claimed)]
