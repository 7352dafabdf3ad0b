"""Every operator's reference as an implementation for devices of which nothing more is known."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from hal.capability import Declares, Implementation, Supports
from hal.op import OPS, Args

__all__ = ["IMPLEMENTATIONS"]

# Device types whose ATen computes no float64: torch_npu has no float64 products and sorts, mps no float64 at all.
_NO_FLOAT64 = frozenset({"npu", "mps"})


def _computes(a: Args) -> Iterable[str]:
    """The device's ATen computes in the dtype."""
    given = [item for value in vars(a).values() for item in (value if isinstance(value, list) else [value])]
    tensors = [item for item in given if isinstance(item, Tensor)]
    device_type = tensors[0].device.type if tensors else "cpu"
    asked = {t.dtype for t in tensors} | {item for item in given if isinstance(item, torch.dtype)}
    if device_type in _NO_FLOAT64 and torch.float64 in asked:
        yield f"torch's operators for {device_type} compute no float64"


IMPLEMENTATIONS = tuple(
    Implementation(
        op=op.name,
        name="composed",
        forward=op.reference,
        kind="composed",
        supports=Supports(where=_computes),
        # run_to_run: as far as ATen obeys torch.use_deterministic_algorithms there, which is what selection
        # asks. No host lengths, no synchronisation, nothing that a capture forbids: the references are
        # plain tensor code.
        declares=Declares(lse_grad=bool(op.grad) and op.optional_result is not None),
    )
    for op in OPS.values()
)
