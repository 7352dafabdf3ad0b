"""Attention as a schoolbook would write it: loops over batch, head and query, float64, differentiable."""

from __future__ import annotations

import math

import torch


def keys_seen(i, queries, keys, causal=False, window=None):
    """Indices of the keys that query i may see by causal and window."""
    position = i + keys - queries
    left, right = (None, None) if window is None else window
    return [
        j
        for j in range(keys)
        if (not causal or j <= position)
        and (left is None or j >= position - left)
        and (right is None or j <= position + right)
    ]


def row(q_D, k_LD, v_LE, seen, scale, softcap=None, bias_L=None, sink=None):
    """(o_E, lse) of one query and head."""
    terms = []
    for j in seen:
        s = (q_D * k_LD[j]).sum() * scale
        if softcap is not None:
            s = softcap * torch.tanh(s / softcap)
        if bias_L is not None:
            s = s + bias_L[j]
        terms.append(s)
    if sink is not None:
        terms.append(sink)
    if not terms:
        return torch.zeros_like(v_LE[:0].sum(0)), torch.tensor(-math.inf, dtype=torch.float64)
    weights = torch.softmax(torch.stack(terms), 0)
    o = torch.zeros(v_LE.shape[1], dtype=torch.float64)
    for j, p in zip(seen, weights, strict=False):
        o = o + p * v_LE[j]
    return o, torch.logsumexp(torch.stack(terms), 0)


def dense(q, k, v, *, causal=False, window=None, mask=None, softcap=None, scale=None, sinks=None):
    """(o (B, S, H, E), lse (B, H, S)) in float64."""
    (B, S, H, D), (_, L, K, _) = q.shape, k.shape
    q, k, v = q.double(), k.double(), v.double()
    scale = 1 / math.sqrt(D) if scale is None else scale
    full = None if mask is None else mask.expand(B, H, S, L)
    outs = []
    for b in range(B):
        for h in range(H):
            for i in range(S):
                seen, bias = keys_seen(i, S, L, causal, window), None
                if full is not None and full.dtype is torch.bool:
                    seen = [j for j in seen if full[b, h, i, j]]
                elif full is not None:
                    seen = [j for j in seen if full[b, h, i, j] != -math.inf]
                    bias = full[b, h, i].double()
                sink = None if sinks is None else sinks[h].double()
                kv = h // (H // K)
                outs.append(row(q[b, i, h], k[b, :, kv], v[b, :, kv], seen, scale, softcap, bias, sink))
    o = torch.stack([o for o, _ in outs]).view(B, H, S, v.shape[3]).transpose(1, 2)
    return o, torch.stack([lse for _, lse in outs]).view(B, H, S)


def ragged(q, k, v, cu_q, cu_k, **options):
    """(o (T, H, E), lse (T, H)) in float64; zero past the last sequence."""
    o = torch.zeros(*q.shape[:2], v.shape[2], dtype=torch.float64)
    lse = torch.zeros(q.shape[:2], dtype=torch.float64)
    for a, b, c, d in zip(cu_q, cu_q[1:], cu_k, cu_k[1:], strict=False):
        if b > a:
            part, part_lse = dense(q[None, a:b], k[None, c:d], v[None, c:d], **options)
            o[a:b], lse[a:b] = part[0], part_lse[0].T
    return o, lse


def from_blocks(cache, table, length):
    """The first `length` rows of a sequence, read block by block."""
    block_size = cache.shape[1]
    rows = [cache[table[j // block_size], j % block_size] for j in range(length)]
    return torch.stack(rows) if rows else cache[:0, 0]
