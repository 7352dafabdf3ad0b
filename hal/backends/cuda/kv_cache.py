"""write_kv_cache, gather_kv_cache and copy_kv_blocks by the kernels of hal.kernels.kv_cache.

N blocks, P slots per block, K kv heads, D head dim (E of v), B sequences, n slots, U packed rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from hal.backends.cuda import launch
from hal.backends.cuda.offers import FLOATS, offer
from hal.backends.cuda.rows import power_of_two
from hal.capability import Declares, Implementation
from hal.op import Args, empty

__all__ = ["IMPLEMENTATIONS", "NATIVE_FP8", "readable", "scale_stride"]

FP8 = torch.float8_e4m3fn
NATIVE_FP8 = 89
"""The first compute capability whose kernels may take pointers to fp8 e4m3fn."""

# Columns of a tile, and its rows where there are many.
COLUMNS, ROWS, MANY = 1024, 4, 512
# Caches that one launch of copy_blocks_kernel takes; elements of its tile; ids that it compares at once.
CACHES, ELEMENTS, IDS = 16, 4096, 1024
# What pairs of a launch may need to be staged in, with one cache at least.
STAGED = 1 << 26


def readable(cache: Tensor) -> Callable[[Tensor], Tensor]:
    """What turns a cache like this one into a tensor whose pointer the device's kernels may take."""
    if cache.dtype is FP8 and launch.capability(cache.device) < NATIVE_FP8:
        return lambda t: t.view(torch.uint8)
    return lambda t: t


def scale_stride(scale: Tensor | None) -> int:
    """The step from one head's scale to the next."""
    return scale.stride(0) if scale is not None and scale.dim() else 0


def write_tile(rows: int, columns: int) -> dict[str, int]:
    """Rows and columns of a tile of rows; few rows are spread over more programs."""
    block = min(power_of_two(columns), COLUMNS)
    return {"BLOCK_T": ROWS * (COLUMNS // block) if rows > MANY else 1, "BLOCK_F": block}


def _grid(rows: int, K: int, D: int, E: int, tile: dict[str, int]) -> tuple[int, int]:
    return -(-rows // tile["BLOCK_T"]), -(-K * D // tile["BLOCK_F"]) + -(-K * E // tile["BLOCK_F"])


def _warps(tile: dict[str, int]) -> dict[str, int]:
    return {"num_warps": max(1, min(4, tile["BLOCK_T"] * tile["BLOCK_F"] // 256))}


def write_kv_cache(a: Args) -> Callable[..., None]:
    n, (N, P, K, D), E = a.slot_mapping.shape[0], a.k_cache.shape, a.v_cache.shape[3]
    if n == 0 or N == 0:
        return lambda *_, **__: None
    tile = write_tile(n, K * max(D, E))
    sides: dict[str, Any] = {}
    for side, x, cache, scale in (("k", a.k, a.k_cache, a.k_scale), ("v", a.v, a.v_cache, a.v_scale)):
        names = ("token_stride", "head_stride", "stride", "block_stride", "slot_stride", "cache_head_stride")
        steps = (*x.stride(), *cache.stride()[:3], scale_stride(scale))
        sides |= {f"{side}_{name}": step for name, step in zip((*names, "scale_stride"), steps, strict=True)}
    write = launch.Launch(
        "kv_cache.write_kernel",
        _grid(n, K, D, E, tile),
        a.k.device,
        _warps(tile),
        tokens=n,
        slots_stride=a.slot_mapping.stride(0),
        **sides,
        P=P,
        K=K,
        D=D,
        E=E,
        **tile,
    )
    pointer = readable(a.k_cache)

    def call(
        k: Tensor,
        v: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        slot_mapping: Tensor,
        *,
        k_scale: Tensor | None = None,
        v_scale: Tensor | None = None,
    ) -> None:
        write(k, v, pointer(k_cache), pointer(v_cache), slot_mapping, k_scale, v_scale)

    return call


def gather_kv_cache(a: Args) -> Callable[..., tuple[Tensor, Tensor]]:
    U, (N, P, K, D), E, (B, M) = a.total_k, a.k_cache.shape, a.v_cache.shape[3], a.block_table.shape
    dtype = a.k_cache.dtype if a.out_dtype is None else a.out_dtype
    device = a.k_cache.device

    def results() -> tuple[Tensor, Tensor]:
        return empty((U, K, D), dtype=dtype, device=device), empty((U, K, E), dtype=dtype, device=device)

    def zeros(*_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        k, v = results()
        return k.zero_(), v.zero_()

    if not (U and N and B and M):
        return zeros
    tile = write_tile(U, K * max(D, E))
    sides: dict[str, Any] = {}
    for side, cache, scale in (("k", a.k_cache, a.k_scale), ("v", a.v_cache, a.v_scale)):
        names = ("block_stride", "slot_stride", "head_stride", "scale_stride")
        steps = (*cache.stride()[:3], scale_stride(scale))
        sides |= {f"{side}_{name}": step for name, step in zip(names, steps, strict=True)}
    gather = launch.Launch(
        "kv_cache.gather_kernel",
        _grid(U, K, D, E, tile),
        device,
        _warps(tile),
        total=U,
        sequences=B,
        entries=M,
        table_stride=a.block_table.stride(0),
        entry_stride=a.block_table.stride(1),
        cu_stride=a.cu_seqlens_k.stride(0),
        **sides,
        HALVINGS=(B - 1).bit_length(),
        P=P,
        K=K,
        D=D,
        E=E,
        **tile,
    )
    pointer = readable(a.k_cache)

    def call(
        k_cache: Tensor,
        v_cache: Tensor,
        block_table: Tensor,
        cu_seqlens_k: Tensor,
        total_k: int,
        *,
        k_scale: Tensor | None = None,
        v_scale: Tensor | None = None,
        **_: Any,
    ) -> tuple[Tensor, Tensor]:
        k, v = results()
        gather(pointer(k_cache), pointer(v_cache), block_table, cu_seqlens_k, k_scale, v_scale, k, v)
        return k, v

    return call


def copy_kv_blocks(a: Args) -> Callable[..., None]:
    n, caches = a.src.shape[0], [*a.k_caches, *a.v_caches]
    if not (n and caches and caches[0].shape[0]):
        return lambda *_, **__: None
    alike: dict[Any, list[int]] = {}
    for i, cache in enumerate(caches):
        alike.setdefault((cache.dtype, tuple(cache.shape), cache.stride()), []).append(i)
    steps = [step for members in alike.values() for step in _copies(a, caches, members)]

    def call(k_caches: list[Tensor], v_caches: list[Tensor], src: Tensor, dst: Tensor) -> None:
        given = [*k_caches, *v_caches]
        for step in steps:
            step(given, src, dst)

    return call


def _copies(
    a: Args, caches: list[Tensor], members: list[int]
) -> Iterable[Callable[[list[Tensor], Tensor, Tensor], None]]:
    """Steps that copy the pairs of these caches, which are alike; each has a pair of launches."""
    one, n = caches[members[0]], a.src.shape[0]
    elements = one[0].numel()
    most = max(1, min(CACHES, STAGED // (n * elements * one.element_size())))
    for start in range(0, len(members), most):
        yield _copy(a, one, members[start : start + most])


def _copy(a: Args, one: Tensor, members: list[int]) -> Callable[[list[Tensor], Tensor, Tensor], None]:
    n, elements = a.src.shape[0], one[0].numel()
    dtype, device, pointer = one.dtype, one.device, readable(one)
    _, P, K, D = one.shape
    block_stride, slot_stride, head_stride = one.stride()[:3]
    if one[0].is_contiguous():
        P, K, D = 1, 1, elements
    tile = min(power_of_two(elements), ELEMENTS)

    def made(commit: bool) -> launch.Launch:
        return launch.Launch(
            "kv_cache.copy_blocks_kernel",
            (n, len(members), -(-elements // tile)),
            device,
            {"num_warps": max(1, min(4, tile // 256))},
            pairs=n,
            source_stride=a.src.stride(0),
            target_stride=a.dst.stride(0),
            block_stride=block_stride,
            slot_stride=slot_stride,
            head_stride=head_stride,
            P=P,
            K=K,
            D=D,
            COUNT=len(members),
            COMMIT=commit,
            BLOCK_N=min(power_of_two(n), IDS),
            BLOCK_F=tile,
        )

    copy, commit = made(False), made(True)
    padded = members + members[:1] * (CACHES - len(members))

    def step(given: list[Tensor], src: Tensor, dst: Tensor) -> None:
        pointers = [pointer(given[i]) for i in padded]
        staged = empty((len(members), n, elements), dtype=dtype, device=device)
        kept = pointer(staged)
        copy(*pointers, src, dst, kept)
        commit(*pointers, src, dst, kept)

    return step


def _float64_cache(a: Args) -> Iterable[str]:
    """a cache of float32, a 16-bit float dtype, fp8 or int8"""
    if a.k_cache.dtype is torch.float64 and a.out_dtype not in (None, torch.float64):
        yield "the cache is float64, supported are float32, bfloat16, float16, float8_e4m3fn and int8"


_MOVES = Declares(batch_invariant=True, stride_invariant=True, block_permutation=True)

IMPLEMENTATIONS: tuple[Implementation, ...] = (
    offer("write_kv_cache", write_kv_cache, dtypes=FLOATS, declares=_MOVES),
    offer("gather_kv_cache", gather_kv_cache, dtypes=FLOATS, where=_float64_cache, declares=_MOVES),
    offer(
        "copy_kv_blocks",
        copy_kv_blocks,
        dtypes=FLOATS | {"float64", "int8", "float8_e4m3fn"},
        declares=_MOVES,
    ),
)
