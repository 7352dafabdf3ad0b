"""Triton-Ascend implementations of the norms, the gated activations, softmax and rotary_embedding.

They stand behind torch_npu's own operators (a lower priority) and serve where those refuse, or where they are asked
for: HAL_IMPL='rms_norm=triton'. The kernels are hal.kernels', compiled by triton-ascend, which takes the place of the
package triton and so excludes it. Importing this module imports neither; without triton-ascend each request is
rejected with that reason.

Compiled for 910B and 950 down to planned HIVM, and judged under the interpreter, simulated; never run on a device.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

from hal.backends.ascend import simulator
from hal.backends.ascend.chips import FLOATS, WITH_BF16
from hal.backends.ascend.triton.activations import gelu_and_mul, silu_and_mul
from hal.backends.ascend.triton.norms import add_rms_norm, layer_norm, rms_norm
from hal.backends.ascend.triton.rotary import rotary_embedding
from hal.backends.ascend.triton.softmax import softmax
from hal.capability import Declares, Implementation, Limit, Supports
from hal.op import Args

__all__ = ["IMPLEMENTATIONS", "missing"]

PRIORITY = 5  # below torch_npu's 10


@cache
def missing() -> str | None:
    """Why the kernels cannot be compiled here; None where they can."""
    found = importlib.util.find_spec("triton")
    if found is None:
        return "triton-ascend is not installed"
    places = found.submodule_search_locations or ()
    if any(os.path.isdir(os.path.join(place, "backends", "ascend")) for place in places):
        return None
    return "the triton installed has no Ascend backend: triton-ascend, which excludes it, must take its place"


def _runs(a: Args) -> Iterable[str]:
    """triton-ascend is installed, and the device is not simulated"""
    why = missing()
    if why is not None:
        yield why
    if simulator.active():
        yield "the device is simulated, and runs no kernels"


def _implementation(op: str, forward: Callable[..., Any], limits: dict[str, Limit], copies: set[str]) -> Implementation:
    return Implementation(
        op,
        "triton",
        forward,
        # triton-ascend compiles for no chip before 910B.
        supports=Supports(dtypes=FLOATS, architectures=WITH_BF16, limits=limits, where=_runs),
        # A row's sums are those of its own tile, whose shape depends on the row's length alone. Not declared
        # capturable: that takes a device to show.
        declares=Declares(batch_invariant=True, stride_invariant=True, capturable=False, copies=frozenset(copies)),
        priority=PRIORITY,
    )


_COLUMNS = {"features": Limit(max=2**24 - 1)}

IMPLEMENTATIONS: tuple[Implementation, ...] = (
    _implementation("rms_norm", rms_norm, _COLUMNS, {"x"}),
    _implementation("add_rms_norm", add_rms_norm, _COLUMNS, {"x", "residual"}),
    _implementation("layer_norm", layer_norm, _COLUMNS, {"x"}),
    _implementation("silu_and_mul", silu_and_mul, {}, {"x"}),
    _implementation("gelu_and_mul", gelu_and_mul, {}, {"x"}),
    _implementation("softmax", softmax, {}, {"x"}),
    _implementation("rotary_embedding", rotary_embedding, {"head_dim": Limit(max=1024)}, {"q", "k", "cos", "sin"}),
)
