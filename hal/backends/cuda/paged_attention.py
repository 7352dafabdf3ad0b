"""paged_attention by the kernels of hal.kernels.paged_attention.

Everything is chosen by shapes: the tile of queries and keys, and among how many programs the keys of a sequence are
divided so that even one sequence keeps the device busy. Lengths are read on the device alone, so that a captured graph
serves every length.

T packed queries, B sequences, H query heads, K kv heads, D head dim of q and k, E of v, P slots per block, M blocks per
sequence in the block table.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hal.backends.cuda import launch
from hal.backends.cuda.kv_cache import readable, scale_stride
from hal.backends.cuda.offers import offer
from hal.backends.cuda.rows import power_of_two
from hal.capability import Declares, Implementation
from hal.op import Args, empty

__all__ = ["IMPLEMENTATIONS", "Shape", "split_count", "tile"]

LOG2_E = 1.4426950408889634
# Programs that a multiprocessor runs at once when tiles are small, and when they are large; rows of a large tile.
RESIDENT, ALONE, LARGE = 3, 1, 64
# Waves of programs that leave little idle at the end of a call, and the keys that make a part worth its own program
# then; keys that a part has at least.
WAVES, WORTH, LEAST = 16, 1024, 64
# Elements of a block of parts that the combining kernel adds at once.
COMBINED = 4096


@dataclass(frozen=True)
class Shape:
    """What the choice of a tile depends on."""

    rows: int
    """Rows of a sequence, at most: queries times the heads of a kv head's group."""
    head_dim: int
    v_head_dim: int
    q_bytes: int
    cache_bytes: int


def tile(shape: Shape, capability: int) -> tuple[dict[str, int], dict[str, int]]:
    """(blocks, the compiler's options) for a shape."""
    D, E = (max(16, power_of_two(n)) for n in (shape.head_dim, shape.v_head_dim))
    wide = max(D, E)
    rows = max(16, power_of_two(shape.rows))
    if shape.q_bytes == 4:  # no matrix units: small tiles, since a product's operands live in registers
        M, N, warps, stages = 16, 16, 4 if wide <= 128 else 8, 2
    elif wide <= 128:
        # Without products of whole warpgroups both operands live in registers: those of 128 rows would not fit.
        M = min(rows, 128 if capability >= 90 else 64)
        N, stages = 64, 3
        warps = 8 if M == 128 or (M == 64 and capability < 90) else 4
    elif wide == 256:
        M = min(rows, 64)
        N, warps, stages = 32, 8 if M == 64 else 4, 3
    else:
        M = min(rows, 32)
        N, warps, stages = 16, 8, 2
    return {"BLOCK_M": M, "BLOCK_N": N, "BLOCK_D": D, "BLOCK_E": E}, {"num_warps": warps, "num_stages": stages}


def split_count(tiles: int, rows: int, keys: int, multiprocessors: int) -> int:
    """Among how many programs the keys of a tile are divided.

    Of `tiles` tiles in all, kv heads counted, of `rows` rows each and `keys` keys at most. Few tiles get as many parts
    as make one wave; many small ones, whose keys are what takes time, parts that even out several waves.
    """
    large = rows >= LARGE
    slots = (ALONE if large else RESIDENT) * multiprocessors
    if tiles <= slots:
        return max(1, min(slots // tiles, keys // LEAST))
    return 1 if large else max(1, min(-(-WAVES * slots // tiles), keys // WORTH))


def _window(a: Args, longest: int) -> tuple[int | None, int | None]:
    """The window, causality in it; a side that reaches beyond `longest` positions is none."""
    left, right = (None, None) if a.window is None else a.window
    right = 0 if a.causal else right
    left, right = (None if n is None or n >= longest else n for n in (left, right))
    return left, right


def _scaling(a: Args) -> dict[str, float | None]:
    """factor and cap as the kernel has them."""
    scale = a.q.shape[2] ** -0.5 if a.scale is None else a.scale
    if a.softcap is None:
        return {"factor": scale * LOG2_E, "cap": None}
    return {"factor": 2 * LOG2_E * scale / a.softcap, "cap": a.softcap * LOG2_E}


def _strides(a: Args) -> dict[str, int]:
    q, k, v = a.q.stride(), a.k_cache.stride(), a.v_cache.stride()
    return {
        "q_token_stride": q[0],
        "q_head_stride": q[1],
        "q_stride": q[2],
        "k_block_stride": k[0],
        "k_slot_stride": k[1],
        "k_head_stride": k[2],
        "v_block_stride": v[0],
        "v_slot_stride": v[1],
        "v_head_stride": v[2],
        "table_stride": a.block_table.stride(0),
        "entry_stride": a.block_table.stride(1),
        "lens_stride": a.seq_lens.stride(0),
        "cu_stride": a.cu_seqlens_q.stride(0),
        "sinks_stride": 0 if a.sinks is None else a.sinks.stride(0),
        "k_scale_stride": scale_stride(a.k_scale),
        "v_scale_stride": scale_stride(a.v_scale),
    }


def paged_attention(a: Args) -> Callable[..., Any]:
    (T, H, D), (_, P, K, E), (B, M) = a.q.shape, a.v_cache.shape, a.block_table.shape
    dtype, device, with_lse = a.q.dtype, a.q.device, a.return_lse
    longest = min(a.max_seqlen_q, T)

    def results() -> tuple[Tensor, Tensor | None]:
        o = empty((T, H, E), dtype=dtype, device=device)
        return o, empty((T, H), dtype=torch.float32, device=device) if with_lse else None

    if not (T and B):

        def blank(*_: Any, **__: Any) -> Any:
            o, lse = results()
            return o.zero_() if lse is None else (o.zero_(), lse.zero_())

        return blank
    rows = H // K * max(longest, 1)
    blocks, options = tile(Shape(rows, D, E, dtype.itemsize, a.k_cache.dtype.itemsize), launch.capability(device))
    one_each = rows <= blocks["BLOCK_M"]
    tiles = B if one_each else T * (H // K) // blocks["BLOCK_M"] + B
    splits = split_count(tiles * K, blocks["BLOCK_M"], M * P, launch.multiprocessors(device))
    left, right = _window(a, T + M * P)

    def attend(precision: str) -> launch.Launch:
        return launch.Launch(
            "paged_attention.paged_attention_kernel",
            (K * splits * tiles,),
            device,
            options,
            tokens=T,
            sequences=B,
            splits=splits,
            **_scaling(a),
            **_strides(a),
            HALVINGS=None if one_each else (B - 1).bit_length(),
            K=K,
            GROUP=H // K,
            P=P,
            D=D,
            E=E,
            LEFT=left,
            RIGHT=right,
            SINGLE=longest <= 1,
            EDGES=blocks["BLOCK_M"] >= LARGE,
            ALIKE=a.k_cache.stride()[:2] == a.v_cache.stride()[:2],
            DIVIDED=splits > 1,
            PRECISION=precision,
            **blocks,
        )

    run = _by_precision(attend) if dtype is torch.float32 else attend("ieee")
    pointer = readable(a.k_cache)
    if splits == 1:

        def whole(
            q: Tensor,
            k_cache: Tensor,
            v_cache: Tensor,
            block_table: Tensor,
            seq_lens: Tensor,
            cu_seqlens_q: Tensor,
            max_seqlen_q: int,
            *,
            sinks: Tensor | None = None,
            k_scale: Tensor | None = None,
            v_scale: Tensor | None = None,
            **_: Any,
        ) -> Any:
            o, lse = results()
            k, v = pointer(k_cache), pointer(v_cache)
            run(q, k, v, block_table, seq_lens, cu_seqlens_q, sinks, k_scale, v_scale, o, lse)
            return o if lse is None else (o, lse)

        return whole
    block = power_of_two(E)
    combine = launch.Launch(
        "paged_attention.combine_kernel",
        (T * H,),
        device,
        {"num_warps": 4},
        sequences=B,
        splits=splits,
        cu_stride=a.cu_seqlens_q.stride(0),
        sinks_stride=0 if a.sinks is None else a.sinks.stride(0),
        H=H,
        E=E,
        ALL_S=power_of_two(splits),
        BLOCK_S=min(power_of_two(splits), max(1, COMBINED // block)),
        BLOCK_E=block,
    )

    def divided(
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        block_table: Tensor,
        seq_lens: Tensor,
        cu_seqlens_q: Tensor,
        max_seqlen_q: int,
        *,
        sinks: Tensor | None = None,
        k_scale: Tensor | None = None,
        v_scale: Tensor | None = None,
        **_: Any,
    ) -> Any:
        parts = empty((T, H, splits, E), dtype=torch.float32, device=device)
        part_lse = empty((T, H, splits), dtype=torch.float32, device=device)
        o, lse = results()
        k, v = pointer(k_cache), pointer(v_cache)
        run(q, k, v, block_table, seq_lens, cu_seqlens_q, None, k_scale, v_scale, parts, part_lse)
        combine(parts, part_lse, cu_seqlens_q, sinks, o, lse)
        return o if lse is None else (o, lse)

    return divided


def _by_precision(make: Callable[[str], launch.Launch]) -> Callable[..., None]:
    """The launch that torch's precision of float32 products, as it stands at the call, asks for."""
    exact, tf32 = make("ieee"), make("tf32")

    def run(*tensors: Tensor | None) -> None:
        (exact if torch.get_float32_matmul_precision() == "highest" else tf32)(*tensors)

    return run


IMPLEMENTATIONS: tuple[Implementation, ...] = (
    offer(
        "paged_attention",
        paged_attention,
        declares=Declares(u_p={"bfloat16": 2.0**-8, "float16": 2.0**-11}, block_permutation=True),
    ),
)
