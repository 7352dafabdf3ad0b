"""Every operator's reference, composed from ATen on the NPU, for what no operator of CANN does."""

from __future__ import annotations

from hal.backends.ascend.chips import for_310p, for_bf16_chips
from hal.capability import Declares, Implementation
from hal.op import OPS

__all__ = ["IMPLEMENTATIONS"]

# 310P multiplies float32 in float16: references that multiply would lose their precision there.
_PRODUCTS = frozenset({"linear", "attention", "attention_varlen", "paged_attention"})

_COMPOSED = tuple(
    Implementation(
        op=op.name,
        name="composed",
        forward=op.reference,
        kind="composed",
        # run_to_run: as far as torch_npu obeys torch.use_deterministic_algorithms, which is what selection asks.
        declares=Declares(lse_grad=bool(op.grad) and op.optional_result is not None),
    )
    for op in OPS.values()
)

IMPLEMENTATIONS = (
    *(for_bf16_chips(implementation) for implementation in _COMPOSED),
    *(for_310p(implementation) for implementation in _COMPOSED if implementation.op not in _PRODUCTS),
)
