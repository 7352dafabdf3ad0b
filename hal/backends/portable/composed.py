"""Every operator's reference as an implementation for devices of which nothing more is known."""

from __future__ import annotations

from hal.capability import Declares, Implementation
from hal.op import OPS

__all__ = ["IMPLEMENTATIONS"]

IMPLEMENTATIONS = tuple(
    Implementation(
        op=op.name,
        name="composed",
        forward=op.reference,
        kind="composed",
        # run_to_run: as far as ATen obeys torch.use_deterministic_algorithms there, which is what selection
        # asks. No host lengths, no synchronisation, nothing that a capture forbids: the references are
        # plain tensor code.
        declares=Declares(lse_grad=bool(op.grad) and op.optional_result is not None),
    )
    for op in OPS.values()
)
