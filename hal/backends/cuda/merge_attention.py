"""merge_attention by the kernel of hal.kernels.merge_attention.

B batch (or T packed tokens), S queries, H heads, E head dim of v.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hal.backends.cuda.launch import Launch
from hal.backends.cuda.offers import offer
from hal.backends.cuda.rows import power_of_two
from hal.capability import Declares, Implementation
from hal.op import Args, empty

__all__ = ["IMPLEMENTATIONS"]

ELEMENTS, COLUMNS = 4096, 1024


def merge_tile(columns: int) -> dict[str, int]:
    """Rows and columns of a tile, which depend on nothing else: a row's result does not depend on the others."""
    block = min(power_of_two(columns), COLUMNS)
    return {"BLOCK_R": min(64, ELEMENTS // block), "BLOCK_E": block}


def merge_attention(a: Args) -> Callable[..., tuple[Tensor, Tensor]]:
    shape, lse_shape, dtype, device = a.out_a.shape, a.lse_a.shape, a.out_a.dtype, a.out_a.device

    def results() -> tuple[Tensor, Tensor]:
        return empty(shape, dtype=dtype, device=device), empty(lse_shape, dtype=torch.float32, device=device)

    if not a.out_a.numel():
        return lambda *_, **__: results()
    logs, outs = (a.lse_a.stride(), a.lse_b.stride()), (a.out_a.stride(), a.out_b.stride())
    if len(shape) == 3:  # packed tokens are batches of one query
        S, H, E = 1, shape[1], shape[2]
        steps = [(*stride, 0) for stride in (*logs, (H, 1))]
        spans = [(stride[0], 0, *stride[1:]) for stride in outs]
        if all(s[0] == H * s[1] for s in steps) and all(s[0] == H * s[2] for s in spans):
            # Rows are evenly apart: one axis of them needs no division.
            H, steps, spans = 1, [(s[1], 0, 0) for s in steps], [(s[2], 0, 0, s[3]) for s in spans]
    else:
        _, S, H, E = shape
        steps, spans = [*logs, (H * S, S, 1)], list(outs)
    numbers: dict[str, Any] = {}
    for name, (batch, head, query) in zip(("lse_a", "lse_b", "lse"), steps, strict=True):
        numbers |= {f"{name}_batch_stride": batch, f"{name}_head_stride": head, f"{name}_query_stride": query}
    for name, (batch, query, head, stride) in zip("ab", spans, strict=True):
        numbers |= {f"{name}_batch_stride": batch, f"{name}_head_stride": head, f"{name}_query_stride": query}
        numbers[f"{name}_stride"] = stride
    rows, tile = a.lse_a.numel(), merge_tile(E)
    launch = Launch(
        "merge_attention.merge_kernel",
        (-(-rows // tile["BLOCK_R"]),),
        device,
        {"num_warps": max(1, min(4, tile["BLOCK_R"] * tile["BLOCK_E"] // 256))},
        rows=rows,
        queries=S,
        heads=H,
        columns=E,
        **numbers,
        **tile,
    )

    def call(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = results()
        launch(out_a, lse_a, out_b, lse_b, out, lse)
        return out, lse

    return call


IMPLEMENTATIONS: tuple[Implementation, ...] = (
    offer("merge_attention", merge_attention, declares=Declares(batch_invariant=True)),
)
