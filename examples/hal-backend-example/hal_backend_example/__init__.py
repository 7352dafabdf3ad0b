"""A backend with one operator of its own. F is the feature axis."""

from __future__ import annotations

import torch
from torch import Tensor

from hal.capability import Declares, Implementation, Supports
from hal.hookspec import Backend, hookimpl
from hal.op import empty


def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    weight_offset: float = 0.0,
    round_before_weight: bool = False,
) -> Tensor:
    """The operator's public signature, exactly; `Supports` keeps away what is not handled here."""
    x_F = x.float()
    # an eps of 0 counts as the smallest normal number, so that a row of zeros stays one
    y_F = x_F * torch.rsqrt(x_F.square().mean(-1, keepdim=True) + max(eps, torch.finfo(torch.float32).tiny))
    if weight is not None:
        y_F = y_F * weight.float()
    out = empty(x.shape, dtype=x.dtype, device=x.device)
    return out.copy_(y_F)


@hookimpl
def hal_backend() -> Backend:
    return Backend(name="example", device_types=("cpu",), description="shows how a backend is written")


@hookimpl
def hal_implementations(backend: str) -> list[Implementation]:
    return [
        Implementation(
            op="rms_norm",
            name="example",
            forward=rms_norm,
            supports=Supports(
                dtypes=frozenset({"float32", "bfloat16", "float16"}),
                features=frozenset({"weight", "mixed_weight_dtype"}),
            ),
            declares=Declares(run_to_run=True),
        )
    ]
