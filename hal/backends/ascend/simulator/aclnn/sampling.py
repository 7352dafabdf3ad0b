"""Filters of logits before sampling."""

from __future__ import annotations

from torch import Tensor

from hal.backends.ascend.simulator import numerics
from hal.backends.ascend.simulator.operators import operator

__all__: list[str] = []


@operator("aclnnApplyTopKTopP", "tttt")
def apply_top_k_top_p(logits: Tensor, p: Tensor | None, k: Tensor | None, out: Tensor) -> None:
    """Keep the k greatest logits of a row, of these the fewest whose probabilities reach p; the rest is -inf.

    Equal logits at the k-th place all stay. Probabilities add up from the least; where their sum is still at most
    1 - p, the logit goes. The greatest stays always.
    """
    infinity = float("-inf")
    values, order = numerics.wide(logits).sort(dim=-1, stable=True)
    if k is not None:
        least = values.gather(-1, (values.shape[-1] - k.long()).unsqueeze(-1))
        values = values.masked_fill(values < least, infinity)
    if p is not None:
        below = (values - values.amax(-1, keepdim=True)).exp()
        summed = (below / numerics.total(below, -1, keepdim=True)).cumsum(-1)
        dropped = summed <= 1 - numerics.wide(p).unsqueeze(-1)
        dropped[..., -1] = False
        values = values.masked_fill(dropped, infinity)
    out.copy_(values.new_empty(values.shape).scatter_(-1, order, values))
