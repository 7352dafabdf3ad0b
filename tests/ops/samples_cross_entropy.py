"""Calls of cross_entropy that PyTorch's own checks (opcheck, compile, export, gradcheck) run."""

from __future__ import annotations

import torch

from hal import philox


def _call(rows, classes, dtype=torch.float64, seed=0, ignored=(), minus_inf=False, **options):
    def make():
        logits = philox.normal(seed, (rows, classes)).mul(2).to(dtype)
        target = philox.integers(seed + 1, (rows,), 0, classes)
        for row in ignored:
            target[row] = options.get("ignore_index", -100)
        if minus_inf:
            # Column 0 is nobody's target: the loss stays finite.
            logits[:, 0] = float("-inf")
            target = target.clamp(min=1)
        return (logits.requires_grad_(), target), dict(options)

    return make


SAMPLES = {
    "cross_entropy": [
        _call(5, 7),
        _call(5, 7, ignored=(1, 3)),
        _call(4, 33, reduction="sum", label_smoothing=0.1, ignored=(0,)),
        _call(4, 33, reduction="none", z_loss=1e-2),
        _call(3, 9, reduction="mean", label_smoothing=0.25, z_loss=0.1, ignore_index=2, ignored=(1,)),
        _call(3, 5, ignored=(0, 1, 2)),
        _call(0, 5),
        _call(1, 1),
        _call(6, 50, dtype=torch.float32, ignored=(2,)),
        _call(6, 50, dtype=torch.bfloat16, label_smoothing=0.1, reduction="sum"),
        _call(6, 50, dtype=torch.float16, reduction="none"),
        _call(4, 6, dtype=torch.float32, minus_inf=True),
    ]
}
