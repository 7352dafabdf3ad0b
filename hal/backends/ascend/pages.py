"""Paged caches for operators that want them contiguous: the pages that a block table names, copied side by side.

N blocks, P slots per block, K kv heads, D head dim, B sequences, M entries per sequence of a block table.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["Paged", "contiguous", "named"]

Paged = tuple[Tensor, Tensor, Tensor]


def contiguous(k_cache: Tensor, v_cache: Tensor, block_table: Tensor, lens_B: Tensor) -> Paged:
    """(k_cache, v_cache, block_table), contiguous: as they are, or with the pages of these sequences alone.

    What the table holds past a sequence's end is not read. Nothing is read on the host.
    """
    if k_cache.is_contiguous() and v_cache.is_contiguous():
        return k_cache, v_cache, block_table.contiguous()
    pages = named(block_table, lens_B, k_cache.shape[1])
    numbered = torch.arange(pages.numel(), dtype=torch.int32, device=pages.device).view(pages.shape)
    return k_cache.index_select(0, pages.view(-1)), v_cache.index_select(0, pages.view(-1)), numbered


def named(block_table: Tensor, lens_B: Tensor, block_size: int) -> Tensor:
    """The block table, contiguous, with block 0 for whatever it holds past a sequence's end."""
    first_M = torch.arange(block_table.shape[1], device=block_table.device) * block_size
    return torch.where(first_M < lens_B[:, None], block_table, 0)
