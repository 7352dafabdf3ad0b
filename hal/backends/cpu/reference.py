"""The contract itself as an implementation: every operator's reference, run on the CPU."""

from __future__ import annotations

from hal.capability import Declares, Implementation
from hal.op import OPS

IMPLEMENTATIONS = tuple(
    # Native although composed of ATen calls: on the CPU the reference is an implementation of first rank.
    Implementation(
        op=op.name,
        name="reference",
        forward=op.reference,
        declares=Declares(lse_grad=bool(op.grad) and op.optional_result is not None),
    )
    for op in OPS.values()
)
