"""The CPU backend: the references themselves, and ATen's fused operators where they conform."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from hal.backends.cpu import (
    aten_activations,
    aten_attention,
    aten_cross_entropy,
    aten_kv,
    aten_linear,
    aten_norms,
    aten_rotary,
    aten_sampling,
    aten_softmax,
    reference,
)
from hal.capability import Implementation
from hal.hookspec import Backend, hookimpl

if TYPE_CHECKING:
    from hal.descriptor import DeviceDescriptor

IMPLEMENTATIONS: tuple[Implementation, ...] = (
    *aten_activations.IMPLEMENTATIONS,
    *aten_attention.IMPLEMENTATIONS,
    *aten_cross_entropy.IMPLEMENTATIONS,
    *aten_kv.IMPLEMENTATIONS,
    *aten_linear.IMPLEMENTATIONS,
    *aten_norms.IMPLEMENTATIONS,
    *aten_rotary.IMPLEMENTATIONS,
    *aten_sampling.IMPLEMENTATIONS,
    *aten_softmax.IMPLEMENTATIONS,
    *reference.IMPLEMENTATIONS,
)


@hookimpl
def hal_backend() -> Backend:
    return Backend("cpu", ("cpu",), "references, and ATen's fused operators where they conform")


@hookimpl
def hal_devices(backend: str) -> Sequence[DeviceDescriptor]:
    from hal.descriptor import describe  # pydantic models of the data sheets: only who asks for devices pays

    return [describe(torch.device("cpu"))] if backend == "cpu" else []


@hookimpl
def hal_implementations(backend: str) -> Sequence[Implementation]:
    return IMPLEMENTATIONS if backend == "cpu" else []
