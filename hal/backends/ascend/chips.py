"""The chips that are told apart, and one implementation declared for each of them.

Architectures as descriptors name them: Ascend910B is A2, Ascend910_93 is A3, dav-c310 is 950; 310P has no bf16, has
no float32 products, and its arithmetic saturates.

On 310P nothing is declared capturable: no document says that torch_npu's graphs (torch.npu.NPUGraph) are for that chip.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from hal.capability import Implementation

__all__ = ["A2", "A3", "A5", "FLOATS", "P310", "WITH_BF16", "architecture", "for_310p", "for_bf16_chips", "on_both"]

A2, A3, A5, P310 = "Ascend910B", "Ascend910_93", "dav-c310", "Ascend310P"
WITH_BF16 = frozenset({A2, A3, A5})

FLOATS = frozenset({"float32", "bfloat16", "float16"})
_FLOATS_310P = frozenset({"float32", "float16"})


def architecture(soc_version: int) -> str | None:
    """The architecture of torch_npu's SoC number (c10_npu::SocVersion); None for chips that nothing here knows."""
    for first, last, name in ((200, 205, P310), (220, 225, A2), (250, 256, A3), (260, 269, A5)):
        if first <= soc_version <= last:
            return name
    return None


def for_bf16_chips(implementation: Implementation) -> Implementation:
    """The implementation as declared for A2, A3 and 950."""
    supports = implementation.supports
    dtypes = FLOATS if supports.dtypes is None else supports.dtypes
    architectures = WITH_BF16 if supports.architectures is None else supports.architectures
    return replace(implementation, supports=replace(supports, dtypes=dtypes, architectures=architectures))


def for_310p(
    implementation: Implementation,
    *,
    train: Callable[..., Any] | None = None,
    backward: Callable[..., Any] | None = None,
) -> Implementation:
    """The implementation as declared for 310P, under a name of its own; gradients' operators are lacking there."""
    supports = implementation.supports
    dtypes = _FLOATS_310P if supports.dtypes is None else supports.dtypes & _FLOATS_310P
    return replace(
        implementation,
        name=f"{implementation.name}_310p",
        supports=replace(supports, dtypes=dtypes, architectures=frozenset({P310})),
        declares=replace(implementation.declares, saturates=True, capturable=False),
        train=train,
        backward=backward,
    )


def on_both(implementation: Implementation) -> tuple[Implementation, Implementation]:
    return for_bf16_chips(implementation), for_310p(implementation)
