"""Calls of the sampling operators that PyTorch's own checks (opcheck, compile, export) run."""

from __future__ import annotations

import torch

from hal import philox


def _logits(rows, vocabulary, dtype=torch.float32, seed=0):
    return philox.normal(seed, (rows, vocabulary)).mul(3).to(dtype)


def _row_parameters(rows):
    return {
        "temperature": torch.linspace(0.0, 1.5, rows),
        "top_k": torch.arange(rows) - 1,
        "top_p": torch.linspace(0.2, 1.0, rows),
        "min_p": torch.linspace(0.0, 0.3, rows),
    }


def _scalar_parameters():
    return {
        "temperature": torch.tensor(0.7),
        "top_k": torch.tensor(5, dtype=torch.int32),
        "top_p": torch.tensor(0.9),
        "min_p": torch.tensor(0.05),
    }


PARAMETERS = [
    lambda: (4, {}),
    lambda: (4, {"temperature": 0.5}),
    lambda: (4, {"temperature": 0}),
    lambda: (4, {"top_k": 3}),
    lambda: (4, {"top_p": 0.7}),
    lambda: (4, {"min_p": 0.1}),
    lambda: (3, {"temperature": 1.3, "top_k": 10, "top_p": 0.9, "min_p": 0.02}),
    lambda: (5, _row_parameters(5)),
    lambda: (3, _scalar_parameters()),
    lambda: (3, {"temperature": torch.tensor([0.5, 1.0, 0.0]), "top_k": 4}),
    lambda: (0, {"top_k": 3, "top_p": 0.5}),
]


def _probs(parameters, dtype):
    def make():
        rows, options = parameters()
        return (_logits(rows, 40, dtype),), options

    return make


def _sample(parameters, dtype, seeds):
    def make():
        rows, options = parameters()
        return (_logits(rows, 40, dtype), seeds(rows)), options

    return make


_PLAIN, _SCALAR, _ROWS = (
    (lambda rows: 1234),
    (lambda rows: torch.tensor(-5)),
    (lambda rows: torch.arange(rows) * 7),
)

SAMPLES = {
    "top_k_top_p_probs": [_probs(p, torch.float32) for p in PARAMETERS]
    + [_probs(PARAMETERS[6], d) for d in (torch.bfloat16, torch.float16, torch.float64)],
    "top_k_top_p_sample": [_sample(p, torch.float32, _SCALAR) for p in PARAMETERS]
    + [_sample(PARAMETERS[6], torch.bfloat16, _PLAIN), _sample(PARAMETERS[7], torch.float64, _ROWS)],
}
