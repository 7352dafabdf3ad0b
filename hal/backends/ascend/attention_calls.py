"""What the attention operators of CANN want, and how a request of the contract becomes that.

Their masks say True where a key is hidden; causal is sparse_mode 3 (bottom-right), a window sparse_mode 4 (a band
around the bottom-right diagonal), both with one (2048, 2048) triangle; the scale defaults to 1 and is always passed.

Two facts of the kernels shape the adapters: what they do with a row that sees no key differs, so such rows are cut off
or overwritten here; and a hidden key meets a probability of 0, which its NaN survives, so keys that no query sees are
cut off or zeroed.

B batch, S queries, L keys, H query heads, K kv heads, D head dim, T packed rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hal.backends.ascend.constants import constant
from hal.host import to_host

__all__ = [
    "MAX_TOKENS",
    "U_P",
    "Band",
    "Window",
    "band",
    "hidden",
    "host_list",
    "lse_of",
    "narrowed",
    "softmax_statistics",
    "triangle",
]

Window = tuple[int | None, int | None]

MAX_TOKENS = 2**31 - 1
# The kernels round P (and dS) to the dtype of v before the second product.
U_P = {"bfloat16": 2.0**-8, "float16": 2.0**-11}
_HUGE = 3.0e38


@dataclass(frozen=True)
class Band:
    """The operators' way of saying causal and window."""

    mode: int
    mask: Tensor | None
    pre: int
    next: int


@constant
def triangle(device: torch.device) -> Tensor:
    """(2048, 2048), True above the diagonal: the compressed mask of sparse modes 2, 3 and 4."""
    i = torch.arange(2048, device=device)
    return i[:, None] < i


def narrowed(causal: bool, window: Window | None) -> Window:
    """(left, right) of causal and window together; None where unbounded."""
    left, right = (None, None) if window is None else window
    return left, (0 if right is None else min(right, 0)) if causal else right


def band(left: int | None, right: int | None, device: torch.device) -> Band:
    if left is None and right is None:
        return Band(0, None, MAX_TOKENS, MAX_TOKENS)
    if left is None and right == 0:
        return Band(3, triangle(device), MAX_TOKENS, MAX_TOKENS)
    pre, following = (MAX_TOKENS if side is None else min(side, MAX_TOKENS) for side in (left, right))
    return Band(4, triangle(device), pre, following)


def hidden(visible_BHSL: Tensor, heads: int, queries: int, keys: int) -> Tensor:
    """The operators' mask of the contract's: True = hidden, (B or 1, heads, S, L), contiguous."""
    batch = visible_BHSL.shape[0]
    return (~visible_BHSL).expand(batch, heads, queries, keys).contiguous()


def lse_of(softmax_max: Tensor, softmax_sum: Tensor) -> Tensor:
    """The log-sum-exp from the training operator's statistics, whose last axis holds 8 copies."""
    return (softmax_max[..., 0] + torch.log(softmax_sum[..., 0])).contiguous()


def softmax_statistics(lse: Tensor, sees: Tensor | None) -> tuple[Tensor, Tensor]:
    """Statistics that give back P = exp(s - max) / sum from a log-sum-exp; 0 for rows that see nothing."""
    if sees is not None:
        lse = torch.where(sees, lse, _HUGE)
    maximum = lse[..., None].expand(*lse.shape, 8).contiguous()
    return maximum, torch.ones_like(maximum)


def host_list(host: Tensor | None, device: Tensor, why: str) -> list[int]:
    """Lengths as the operators want them: from the caller's copy, or by one counted synchronisation."""
    values: list[int] = (to_host(device, why) if host is None else host).tolist()
    return values
