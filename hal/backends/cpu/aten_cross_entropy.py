"""cross_entropy on the CPU, a few rows at a time, so that a row's passes find it in the cache.

The reference widens and blanks the whole of logits and differentiates through copies of them; here nothing of
that size is made but the gradient itself.

Shape letters: T rows, V vocabulary; C rows of one piece.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from hal.capability import Declares, Implementation
from hal.op import Args, empty

__all__ = ["IMPLEMENTATIONS"]

PIECE = 1 << 17


def _pieces(logits: Tensor) -> Iterator[slice]:
    rows, classes = logits.shape
    step = max(1, PIECE // classes)
    return (slice(low, min(low + step, rows)) for low in range(0, rows, step))


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype is torch.float64 else x.float()


def train(
    logits: Tensor,
    target: Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: str = "mean",
) -> tuple[Tensor, Tensor]:
    """The loss, and for backward the logarithm of each row's denominator (0 where ignored)."""
    dtype = torch.float64 if logits.dtype is torch.float64 else torch.float32
    keep_T = target != ignore_index
    lse_T = empty(target.shape, dtype=dtype, device=logits.device)
    mean_T = empty(target.shape, dtype=dtype, device=logits.device) if label_smoothing else None
    for rows in _pieces(logits):
        x_CV = _wide(logits[rows])
        torch.logsumexp(x_CV, -1, out=lse_T[rows])
        if mean_T is not None:
            torch.mean(x_CV, -1, out=mean_T[rows])
    chosen_T = _wide(logits.gather(-1, torch.where(keep_T, target, 0)[:, None])[:, 0])
    loss_T = lse_T - chosen_T
    if mean_T is not None:
        uniform_T = lse_T - mean_T
        mixed_T = (1.0 - label_smoothing) * loss_T + label_smoothing * uniform_T
        loss_T = uniform_T if label_smoothing == 1.0 else mixed_T
    if z_loss:
        loss_T = loss_T + z_loss * lse_T.square()
    # Ignored rows went through the arithmetic with whatever they held.
    loss_T, lse_T = loss_T.masked_fill_(~keep_T, 0.0), lse_T.masked_fill_(~keep_T, 0.0)
    if reduction == "none":
        return loss_T, lse_T
    total = loss_T.sum()
    return total / keep_T.sum().clamp(min=1) if reduction == "mean" else total, lse_T


def forward(
    logits: Tensor,
    target: Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: str = "mean",
) -> Tensor:
    return train(
        logits,
        target,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        z_loss=z_loss,
        reduction=reduction,
    )[0]


def backward(
    a: Args, outs: dict[str, Tensor], grads: tuple[Tensor | None, ...], needs: tuple[bool, ...]
) -> tuple[Tensor | None, ...]:
    """g·[p·(1 + 2z·lse) − (1 − s)·onehot − s/V] in each row, with g the row's share of the incoming
    gradient."""
    if not needs[0] or grads[0] is None:
        return (None,)
    keep_T, lse_T = a.target != a.ignore_index, outs["lse"]
    share_T = grads[0].to(lse_T.dtype).expand(keep_T.shape)
    if a.reduction == "mean":
        share_T = share_T / keep_T.sum().clamp(min=1)
    share_T1 = share_T.masked_fill(~keep_T, 0.0)[:, None]
    factor_T1 = share_T1 * (1.0 + 2.0 * a.z_loss * lse_T[:, None]) if a.z_loss else share_T1
    index_T1 = torch.where(keep_T, a.target, 0)[:, None]
    onehot_T1 = share_T1 * (a.label_smoothing - 1.0)
    gradient = empty(a.logits.shape, dtype=a.logits.dtype, device=a.logits.device)
    for rows in _pieces(a.logits):
        d_CV = torch.sub(_wide(a.logits[rows]), lse_T[rows, None]).exp_().mul_(factor_T1[rows])
        if a.label_smoothing:
            d_CV.sub_(share_T1[rows] * (a.label_smoothing / a.logits.shape[1]))
        d_CV.scatter_add_(-1, index_T1[rows], onehot_T1[rows])
        # Rubbish in an ignored row survives a factor of 0.
        if not bool(keep_T[rows].all()):
            d_CV.masked_fill_(~keep_T[rows, None], 0.0)
        gradient[rows] = d_CV
    return (gradient,)


IMPLEMENTATIONS = (
    Implementation(
        op="cross_entropy",
        name="aten",
        forward=forward,
        train=train,
        backward=backward,
        # Rows are reduced one by one over their own V, whatever else is in the batch; only the last sum sees
        # the rows.
        declares=Declares(run_to_run=True, batch_invariant=False, capturable=False),
        priority=10,
    ),
)
