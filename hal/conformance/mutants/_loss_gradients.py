"""Faulty gradients of cross entropy.

Shape letters: T rows, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch

from hal.conformance.mutants._changes import Step, same
from hal.conformance.mutants._gradient_changes import Found, graded, gradient
from hal.conformance.mutants.coarse import rounded, wide
from hal.conformance.mutants.mutant import Candidate, Mutant, written
from hal.contract import Args

__all__ = ["MUTANTS", "cross_entropy"]


def cross_entropy(*, smoothing: float = 1.0, others: bool = False, z: float = 1.0, ignored: bool = True,
                  count: bool = True, onehot: float = 1.0, value: Step = same) -> Candidate:  # fmt: skip
    """dx = share·[p(1 + 2z·lse) − (1 − s)·onehot − s/V].

    smoothing, z, onehot: factors of those. others: the smoothed part goes to the other classes. ignored: their rows get
    nothing. count: a mean divides by the rows that count. value: what becomes of p.
    """

    def formula(a: Args, grads: Any) -> Found:
        keep_T, classes = a.target != a.ignore_index, a.logits.shape[1]
        x_TV = wide(a.logits)
        share_T = grads[0].to(x_TV.dtype).expand(keep_T.shape)
        if ignored:
            x_TV, share_T = torch.where(keep_T[:, None], x_TV, 0.0), torch.where(keep_T, share_T, 0.0)
        if a.reduction == "mean":
            share_T = share_T / (keep_T.sum().clamp(min=1) if count else keep_T.numel())
        lse_T1 = torch.logsumexp(x_TV, -1, keepdim=True)
        s = a.label_smoothing * smoothing
        chosen_TV = torch.zeros_like(x_TV).scatter_(-1, torch.where(keep_T, a.target, 0)[:, None], 1.0)
        even_TV = (1 - chosen_TV) / max(classes - 1, 1) if others else torch.full_like(x_TV, 1 / classes)
        p_TV = value(torch.exp(x_TV - lse_T1))
        d_TV = p_TV * (1 + 2 * a.z_loss * z * lse_T1) - (1 - s) * onehot * chosen_TV - s * even_TV
        return (share_T[:, None] * d_TV,)

    return written("cross_entropy", formula)


MUTANTS: list[Mutant] = [
    *gradient("cross_entropy", "a mean divides by all rows", "cross entropy", lambda op: cross_entropy(count=False)),
    *gradient("cross_entropy", "ignored rows move", "cross entropy", lambda op: cross_entropy(ignored=False)),
    *gradient("cross_entropy", "smoothing is left out", "cross entropy", lambda op: cross_entropy(smoothing=0.0)),
    *gradient("cross_entropy", "smoothing leaves the target out", "cross entropy",
              lambda op: cross_entropy(others=True)),
    *gradient("cross_entropy", "z-loss is left out", "cross entropy", lambda op: cross_entropy(z=0.0)),
    *gradient("cross_entropy", "z-loss is not doubled", "cross entropy", lambda op: cross_entropy(z=0.5)),
    *graded("cross_entropy", "smoothing is a little more", "cross entropy",
            lambda op, s: cross_entropy(smoothing=1 + s), 2.0**-8),
    *graded("cross_entropy", "the target counts a little more", "cross entropy",
            lambda op, s: cross_entropy(onehot=1 + s), 2.0**-8),
    *graded("cross_entropy", "probabilities have a rounding of their own", "precision",
            lambda op, s: cross_entropy(value=lambda t: rounded(t, s)), 2.0**-8),
]  # fmt: skip
