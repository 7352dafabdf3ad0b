"""Calls of linear, the norms, the gated activations, softmax and rotary embedding."""

from __future__ import annotations

import math

import torch

from hal import philox
from hal.ops import rotary_cache

F64, F32, BF16, F16 = torch.float64, torch.float32, torch.bfloat16, torch.float16


def tensor(seed, *shape, dtype=F64, grad=True):
    return philox.normal(seed, shape).to(dtype).requires_grad_(grad)


def _linear(shape, out, bias=False, dtype=F64, bias_dtype=None):
    def make():
        parameters = [tensor(1, out, shape[-1], dtype=dtype)]
        if bias:
            parameters.append(tensor(2, out, dtype=bias_dtype or dtype))
        return (tensor(0, *shape, dtype=dtype), *parameters), {}

    return make


def _norm(shape, dtype=F64, tensors=1, parameters=1, parameter_dtype=None, transposed=False, **options):
    def make():
        inputs = [tensor(i, *shape, dtype=dtype) for i in range(tensors)]
        if transposed:
            inputs = [t.detach().mT.contiguous().mT.requires_grad_() for t in inputs]
        weights = [tensor(5 + i, shape[-1], dtype=parameter_dtype or dtype) for i in range(parameters)]
        return (*inputs, *weights), dict(options)

    return make


def _one(shape, dtype=F64, **options):
    def make():
        return (tensor(0, *shape, dtype=dtype),), dict(options)

    return make


def _dead_row(dtype):
    def make():
        x = tensor(0, 3, 5, dtype=dtype, grad=False)
        x[1] = -math.inf
        x[2, 3] = -math.inf
        return (x.requires_grad_(),), {}

    return make


def _rotary(lead, heads, kv_heads, dim, rotated, dtype=F64, **options):
    def make():
        positions = philox.integers(3, lead, 0, 16)
        k = tensor(1, *lead, kv_heads, dim, dtype=dtype) if kv_heads else None
        return (tensor(0, *lead, heads, dim, dtype=dtype), k, positions, *rotary_cache(16, rotated)), dict(options)

    return make


RMS = [
    {"eps": 1e-5},
    {"weight_offset": 1.0},
    {"round_before_weight": True},
    {"weight_offset": 1.0, "round_before_weight": True},
]

SAMPLES = {
    "linear": [
        _linear((4, 6), 5, bias=True),
        _linear((2, 3, 6), 5),
        _linear((6,), 5, bias=True),
        _linear((0, 6), 5, bias=True),
        _linear((4, 0), 5, bias=True),
        _linear((4, 6), 5, bias=True, dtype=BF16, bias_dtype=F32),
        _linear((4, 6), 5, bias=True, dtype=F16),
        _linear((4, 6), 5, dtype=F32),
    ],
    "rms_norm": [
        _norm((4, 8)),
        *(_norm((2, 3, 8), **options) for options in RMS),
        _norm((8,)),
        _norm((4, 8), parameters=0),
        _norm((4, 8), transposed=True),
        _norm((0, 8)),
        _norm((3, 8), dtype=BF16, parameter_dtype=F32),
        _norm((3, 8), dtype=F16, round_before_weight=True),
        _norm((3, 8), dtype=F32),
    ],
    "add_rms_norm": [
        _norm((4, 8), tensors=2),
        *(_norm((2, 3, 8), tensors=2, **options) for options in RMS),
        _norm((4, 8), tensors=2, parameters=0, round_residual=False),
        _norm((4, 8), tensors=2, transposed=True),
        _norm((0, 8), tensors=2),
        _norm((3, 8), tensors=2, dtype=BF16, round_residual=False),
        _norm((3, 8), tensors=2, dtype=F16, round_before_weight=True),
        _norm((3, 8), tensors=2, dtype=F32),
    ],
    "layer_norm": [
        _norm((4, 8), parameters=2),
        _norm((2, 3, 8), parameters=1, eps=1e-3),
        _norm((8,), parameters=0),
        _norm((4, 8), parameters=2, transposed=True),
        _norm((0, 8), parameters=2),
        _norm((3, 8), parameters=2, dtype=BF16, parameter_dtype=F32),
        _norm((3, 8), parameters=2, dtype=F16),
        _norm((3, 8), parameters=2, dtype=F32),
    ],
    "silu_and_mul": [
        _one((4, 10)),
        _one((2, 3, 10), limit=0.7, alpha=1.702, up_offset=1.0),
        _one((10,), alpha=0.5),
        _one((0, 10)),
        _one((4, 0)),
        _one((4, 10), dtype=BF16, limit=7.0),
        _one((4, 10), dtype=F16, up_offset=1.0),
        _one((4, 10), dtype=F32),
    ],
    "gelu_and_mul": [
        _one((4, 10)),
        _one((2, 3, 10), approximate="tanh"),
        _one((10,)),
        _one((0, 10)),
        _one((4, 10), dtype=BF16, approximate="tanh"),
        _one((4, 10), dtype=F16),
        _one((4, 10), dtype=F32),
    ],
    "softmax": [
        _one((4, 9)),
        _one((2, 5, 3), dim=1),
        _one((6,), dim=0),
        _one((0, 4)),
        _one((4, 0)),
        _dead_row(F64),
        _dead_row(F32),
        _one((4, 9), dtype=BF16),
        _one((4, 9), dtype=F16, dim=0),
    ],
    "rotary_embedding": [
        _rotary((2, 3), 4, 2, 8, 8),
        _rotary((3,), 2, 1, 8, 4, rotary_dim=4),
        _rotary((3,), 2, 1, 8, 6, interleaved=True),
        _rotary((3,), 2, 0, 8, 8, interleaved=True),
        _rotary((1, 1), 3, 1, 8, 8),
        _rotary((0,), 3, 1, 8, 8),
        _rotary((1, 1), 3, 1, 8, 8, dtype=BF16),
        _rotary((2, 3), 4, 2, 8, 8, dtype=F16, interleaved=True),
        _rotary((2, 3), 4, 2, 8, 8, dtype=F32),
    ],
}
