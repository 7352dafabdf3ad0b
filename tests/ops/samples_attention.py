"""Calls of the attention and KV-cache operators that PyTorch's own checks (opcheck, compile, export) run."""

from __future__ import annotations

import itertools
import math

import torch

from hal import philox


def _normal(seed, *shape, dtype=torch.float64, grad=False):
    return philox.normal(seed, shape).to(dtype).requires_grad_(grad)


def _int32(*values):
    return torch.tensor(values, dtype=torch.int32)


def _attention(B, S, L, H, K, D, E=None, dtype=torch.float64, mask=None, sinks=False, **options):
    def make():
        E_ = D if E is None else E
        args = (
            _normal(0, B, S, H, D, dtype=dtype, grad=True),
            _normal(1, B, L, K, D, dtype=dtype, grad=True),
            _normal(2, B, L, K, E_, dtype=dtype, grad=True),
        )
        kwargs = dict(options)
        if mask == "bool":
            kwargs["mask"] = _normal(3, B, 1, S, L) > -0.5
        elif mask == "bias":
            bias = _normal(3, 1, H, S, L, dtype=dtype)
            bias[..., 0] = -math.inf
            kwargs["mask"] = bias.requires_grad_()
        if sinks:
            kwargs["sinks"] = _normal(4, H, dtype=dtype, grad=True)
        return args, kwargs

    return make


def _varlen(cu_q, cu_k, T, U, H, K, D, dtype=torch.float64, sinks=False, host=False, **options):
    def make():
        args = (
            _normal(0, T, H, D, dtype=dtype, grad=True),
            _normal(1, U, K, D, dtype=dtype, grad=True),
            _normal(2, U, K, D, dtype=dtype, grad=True),
            _int32(*cu_q),
            _int32(*cu_k),
            max(b - a for a, b in itertools.pairwise(cu_q)),
            max(b - a for a, b in itertools.pairwise(cu_k)),
        )
        kwargs = dict(options)
        if sinks:
            kwargs["sinks"] = _normal(4, H, dtype=dtype, grad=True)
        if host:
            kwargs |= {"cu_seqlens_q_cpu": _int32(*cu_q), "cu_seqlens_k_cpu": _int32(*cu_k)}
        return args, kwargs

    return make


def _merge(shape, dtype=torch.float32, lse_dtype=torch.float32):
    def make():
        lse_shape = shape[:2] if len(shape) == 3 else (shape[0], shape[2], shape[1])
        return (
            _normal(0, *shape, dtype=dtype),
            _normal(1, *lse_shape, dtype=lse_dtype),
            _normal(2, *shape, dtype=dtype),
            _normal(3, *lse_shape, dtype=lse_dtype),
        ), {}

    return make


def _cache(seed, blocks, size, heads, dim, dtype):
    values = _normal(seed, blocks, size, heads, dim)
    if dtype is torch.int8:
        return values.mul(40).clamp(-128, 127).to(torch.int8)
    return values.to(dtype)


def _scales(dtype, heads):
    if dtype is torch.int8:
        return {"k_scale": torch.tensor(0.05), "v_scale": torch.linspace(0.01, 0.02, heads)}
    return {"k_scale": torch.tensor(0.5)} if dtype is torch.float8_e4m3fn else {}


def _paged(lens, queries, dtype=torch.float32, cache=None, size=4, host=False, **options):
    def make():
        heads, kv_heads, dim = 4, 2, 8
        kind = dtype if cache is None else cache
        columns = max(-(-n // size) for n in lens)
        cu = [sum(queries[:i]) for i in range(len(queries) + 1)]
        args = (
            _normal(0, cu[-1], heads, dim, dtype=dtype),
            _cache(1, 16, size, kv_heads, dim, kind),
            _cache(2, 16, size, kv_heads, dim, kind),
            philox.permutation(3, 16)[: len(lens) * columns].view(len(lens), columns).to(torch.int32),
            _int32(*lens),
            _int32(*cu),
            max(queries),
        )
        kwargs = _scales(kind, kv_heads) | options
        if host:
            kwargs |= {"seq_lens_cpu": _int32(*lens), "cu_seqlens_q_cpu": _int32(*cu)}
        return args, kwargs

    return make


def _write(dtype, cache, slots, tokens=5):
    def make():
        return (
            _normal(0, tokens, 2, 8, dtype=dtype),
            _normal(1, tokens, 2, 8, dtype=dtype),
            _cache(2, 3, 4, 2, 8, cache),
            _cache(3, 3, 4, 2, 8, cache),
            torch.tensor(slots, dtype=torch.int64),
        ), _scales(cache, 2)

    return make


def _gather(cache, lens, spare=0, **options):
    def make():
        cu = [sum(lens[:i]) for i in range(len(lens) + 1)]
        return (
            _cache(0, 9, 4, 2, 8, cache),
            _cache(1, 9, 4, 2, 8, cache),
            philox.permutation(2, 9)[: 3 * len(lens)].view(len(lens), 3).to(torch.int32),
            _int32(*cu),
            cu[-1] + spare,
        ), _scales(cache, 2) | options

    return make


def _copy(layers, src, dst, dtype=torch.float32):
    def make():
        return (
            [_cache(2 * i, 6, 4, 2, 8, dtype) for i in range(layers)],
            [_cache(2 * i + 1, 6, 4, 2, 8, dtype) for i in range(layers)],
            torch.tensor(src, dtype=torch.int64),
            torch.tensor(dst, dtype=torch.int64),
        ), {}

    return make


# torch's opcheck cannot compare float8 tensors; fp8 caches have theirs beside the other tests of these operators.
FP8_SAMPLES = {
    "write_kv_cache": [_write(torch.bfloat16, torch.float8_e4m3fn, (4, 5, 6, 7, 1))],
    "paged_attention": [_paged((8,), (8,), cache=torch.float8_e4m3fn, causal=False)],
    "gather_kv_cache": [_gather(torch.float8_e4m3fn, (1, 2), spare=1, out_dtype=torch.bfloat16)],
}

SAMPLES = {
    "attention": [
        _attention(2, 3, 5, 4, 2, 4, causal=True),
        _attention(1, 4, 4, 2, 2, 3, E=5, window=(1, 0), return_lse=True),
        _attention(2, 3, 4, 2, 1, 4, mask="bool", softcap=2.0),
        _attention(2, 3, 4, 2, 1, 4, mask="bias", sinks=True, scale=0.7),
        _attention(1, 5, 2, 2, 1, 4, causal=True, return_lse=True),
        _attention(0, 3, 4, 2, 1, 4),
        _attention(1, 3, 0, 2, 1, 4, return_lse=True),
        _attention(1, 1, 9, 6, 2, 16, dtype=torch.float32, causal=True, mask="bool"),
        _attention(1, 7, 9, 7, 1, 16, dtype=torch.bfloat16, causal=True),
        _attention(1, 7, 9, 6, 3, 16, dtype=torch.float16, mask="bias"),
    ],
    "attention_varlen": [
        _varlen((0, 2, 2, 5), (0, 3, 4, 7), 5, 7, 4, 2, 4, causal=True),
        _varlen((0, 3, 4), (0, 3, 5), 6, 7, 2, 1, 4, sinks=True, softcap=3.0, return_lse=True),
        _varlen((0, 4, 7), (0, 4, 7), 7, 7, 3, 3, 8, dtype=torch.float32, causal=True, window=(2, None), host=True),
        _varlen((0, 1, 2), (0, 5, 6), 2, 6, 6, 2, 16, dtype=torch.bfloat16, scale=0.3),
    ],
    "merge_attention": [
        _merge((5, 3, 4)),
        _merge((2, 5, 3, 4), dtype=torch.bfloat16),
        _merge((0, 3, 4), dtype=torch.float64, lse_dtype=torch.float64),
    ],
    "write_kv_cache": [
        _write(torch.float32, torch.float32, (3, -1, 11, 0)),
        _write(torch.bfloat16, torch.bfloat16, (-1, -1, -1, -1, -1)),
        _write(torch.float16, torch.int8, (2,)),
        _write(torch.float32, torch.float32, ()),
    ],
    "paged_attention": [
        _paged((5, 9, 1), (1, 1, 1)),
        _paged((5, 9), (3, 1), dtype=torch.bfloat16, window=(3, 0), return_lse=True, host=True),
        _paged((5, 7), (2, 2), cache=torch.int8, softcap=4.0),
        _paged((8,), (8,), causal=False),
    ],
    "gather_kv_cache": [
        _gather(torch.float32, (5, 0, 7)),
        _gather(torch.bfloat16, (3,), spare=4, out_dtype=torch.float32),
        _gather(torch.int8, (12, 2), out_dtype=torch.float16),
    ],
    "copy_kv_blocks": [
        _copy(2, (0, 1, 2), (1, 2, 3)),
        _copy(1, (), (), dtype=torch.bfloat16),
        _copy(1, (0, 5), (5, 0), dtype=torch.int8),
    ],
}
