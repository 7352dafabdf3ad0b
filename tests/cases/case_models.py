"""What the operators mean, in float64 and written for the cases alone.

B batch, S queries, L keys, H query heads, K kv heads, D head dim.
"""

from __future__ import annotations

import torch

from hal import philox

INF = float("inf")


def draw(seed, *shape, dtype=torch.float32, scale=1.0):
    """The same numbers on every machine."""
    return (philox.normal(seed, shape) * scale).to(dtype)


def rms_norm(x, weight=None, eps=1e-6, offset=0.0):
    x = x.double()
    y = x / (x.square().mean(-1, keepdim=True) + eps).sqrt()
    return y if weight is None else y * (offset + weight.double())


def layer_norm(x, weight, bias, eps):
    x = x.double()
    centred = x - x.mean(-1, keepdim=True)
    y = centred / (centred.square().mean(-1, keepdim=True) + eps).sqrt()
    return y * weight.double() + bias.double()


def rotary_tables(positions, rotary_dim, base=1e4):
    """cos and sin (max position + 1, rotary_dim / 2), angles in float64, rounded once."""
    exponents = torch.arange(rotary_dim // 2, dtype=torch.float64) * (2.0 / rotary_dim)
    angles = torch.arange(int(positions.max()) + 1, dtype=torch.float64)[:, None] / base**exponents
    return angles.cos().float(), angles.sin().float()


def rotate(x, positions, cos, sin, interleaved=False):
    """x (T, H, D); the first 2·cos.shape[1] channels turn, pair by pair, as complex numbers."""
    x = x.double()
    half = cos.shape[-1]
    turning, rest = x[..., : 2 * half], x[..., 2 * half :]
    real, imaginary = (
        (turning[..., ::2], turning[..., 1::2]) if interleaved else (turning[..., :half], turning[..., half:])
    )
    turned = torch.complex(real, imaginary) * torch.complex(cos.double(), sin.double())[positions][:, None]
    if interleaved:
        y = torch.view_as_real(turned.contiguous()).flatten(-2)
    else:
        y = torch.cat((turned.real, turned.imag), dim=-1)
    return torch.cat((y, rest), dim=-1)


def visible(queries, keys, causal=False, left=None, right=None):
    """Which keys each query may see: query i stands at i + keys − queries."""
    at = torch.arange(queries)[:, None] + (keys - queries)
    key = torch.arange(keys)[None]
    seen = torch.ones(queries, keys, dtype=torch.bool)
    if causal:
        seen &= key <= at
    if left is not None:
        seen &= key >= at - left
    if right is not None:
        seen &= key <= at + right
    return seen


def attention(q, k, v, *, scale=None, softcap=None, seen=None):
    """One sequence, q (S, H, D), k and v (L, K, D): output (S, H, D) and lse (H, S), one query and head at a
    time."""
    q, k, v = q.double(), k.double(), v.double()
    queries, heads, width = q.shape
    group = heads // k.shape[1]
    seen = torch.ones(queries, k.shape[0], dtype=torch.bool) if seen is None else seen
    rows, lses = [], []
    for i in range(queries):
        keys, values = k[seen[i]], v[seen[i]]
        for h in range(heads):
            if keys.shape[0] == 0:
                rows.append(torch.zeros(v.shape[-1], dtype=torch.float64) + 0 * q[i, h].sum())
                lses.append(torch.tensor(-INF, dtype=torch.float64))
                continue
            score = keys[:, h // group] @ q[i, h] * (width**-0.5 if scale is None else scale)
            if softcap is not None:
                score = softcap * torch.tanh(score / softcap)
            lse = torch.logsumexp(score, 0)
            rows.append((score - lse).exp() @ values[:, h // group])
            lses.append(lse)
    return torch.stack(rows).view(queries, heads, -1), torch.stack(lses).view(queries, heads).t()


def paged(values, block_size, blocks, table, fill=0.0):
    """A cache (blocks, block_size, K, D) that holds the rows of `values` in the blocks of `table`, `fill`
    elsewhere."""
    cache = torch.full((blocks, block_size, *values.shape[1:]), fill, dtype=values.dtype)
    for row in range(values.shape[0]):
        cache[table[row // block_size], row % block_size] = values[row]
    return cache


def cross_entropy(x, target, ignored=-100, smoothing=0.0):
    """Losses (T,) with 0 where ignored."""
    losses = []
    for row, t in zip(x.double(), target.tolist(), strict=True):
        if t == ignored:
            losses.append(0.0 * row.sum())
            continue
        log_p = row - torch.logsumexp(row, 0)
        losses.append(-(1 - smoothing) * log_p[t] - smoothing * log_p.mean())
    return torch.stack(losses)
