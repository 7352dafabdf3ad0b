"""Copying whole blocks of a paged KV cache.

N blocks, P slots per block, K kv heads, D head dim.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hal.accuracy import Accuracy
from hal.errors import ArgumentError, ShapeError
from hal.op import Args, Cost, Traits, dtype_name, op
from hal.ops import _attention_args as arguments
from hal.ops import _cache
from hal.ops._checks import check_same_device
from hal.ops._overlap import check_apart

__all__ = ["copy_kv_blocks"]


def _pack_copy(k_caches: list[Tensor], v_caches: list[Tensor], src: Tensor, dst: Tensor) -> tuple[Any, ...]:
    return k_caches, v_caches, src, dst


def _named(a: Args) -> list[tuple[str, Tensor]]:
    return [(f"{name}[{i}]", t) for name in ("k_caches", "v_caches") for i, t in enumerate(getattr(a, name))]


def _validate_copy(a: Args) -> None:
    name = "copy_kv_blocks"
    for each in ("k_caches", "v_caches"):
        if not isinstance(getattr(a, each), list | tuple):
            raise ArgumentError(
                f"{name}: {each} is {type(getattr(a, each)).__name__}; pass a list with one cache per layer"
            )
    if len(a.k_caches) != len(a.v_caches):
        raise ArgumentError(
            f"{name}: {len(a.k_caches)} k_caches and {len(a.v_caches)} v_caches; both lists hold one cache per layer"
        )
    for each, cache in _named(a):
        _cache.check_cache(name, each, cache)
        if cache.shape[0] != a.k_caches[0].shape[0]:
            raise ShapeError(
                f"{name}: {each} has {cache.shape[0]} blocks, k_caches[0] has {a.k_caches[0].shape[0]}; all layers "
                "share block ids"
            )
    for each in ("src", "dst"):
        arguments.check_index(name, each, getattr(a, each), torch.int64, (None,), "(pairs,)")
    if a.src.shape != a.dst.shape:
        raise ShapeError(f"{name}: {a.src.shape[0]} sources and {a.dst.shape[0]} destinations; they are pairs")
    check_same_device(name, **dict(_named(a)), src=a.src, dst=a.dst)


def _check_copy_values(k_caches: list[Tensor], v_caches: list[Tensor], src: Tensor, dst: Tensor) -> None:
    name = "copy_kv_blocks"
    if not k_caches or src.shape[0] == 0:
        return
    check_apart(name, _named(Args(k_caches=k_caches, v_caches=v_caches)))
    N = k_caches[0].shape[0]
    sources, targets = src.tolist(), dst.tolist()
    for each, ids in (("src", sources), ("dst", targets)):
        if min(ids) < 0 or max(ids) >= N:
            bad = min(ids) if min(ids) < 0 else max(ids)
            raise ArgumentError(f"{name}: {each} holds {bad}, but the caches have blocks 0 … {N - 1}")
    if len(set(targets)) < len(set(zip(sources, targets, strict=True))):
        twice = next(t for t in targets if len({s for s, d in zip(sources, targets, strict=True) if d == t}) > 1)
        raise ArgumentError(f"{name}: dst names block {twice} for several sources; a block can be a copy of one only")


def _traits_copy(a: Args) -> Traits:
    if not a.k_caches:
        return Traits(dtype="float32")
    _, P, K, D = a.k_caches[0].shape
    return Traits(
        dtype=dtype_name(a.k_caches[0].dtype),
        dims={"block_size": P, "kv_heads": K, "head_dim": D, "v_head_dim": a.v_caches[0].shape[3]},
    )


def _cost_copy(a: Args) -> Cost:
    n = a.src.shape[0]
    moved = sum(2 * n * t.shape[1] * t.shape[2] * t.shape[3] * t.element_size() for _, t in _named(a))
    return Cost(flops=0, bytes=moved + 16 * n)


@op(
    schema="Tensor(a!)[] k_caches, Tensor(b!)[] v_caches, Tensor src, Tensor dst",
    results=(),
    pack=_pack_copy,
    validate=_validate_copy,
    meta=lambda a: (),
    traits=_traits_copy,
    dims=("block_size", "kv_heads", "head_dim", "v_head_dim"),
    cost=_cost_copy,
    accuracy=Accuracy(rule="bitwise", notes="A copy."),
    check_values=_check_copy_values,
    mutates=("k_caches", "v_caches"),
)
def copy_kv_blocks(k_caches: list[Tensor], v_caches: list[Tensor], src: Tensor, dst: Tensor) -> None:
    """Copy whole blocks within each layer's caches: block dst[i] becomes what block src[i] was before the call.

    Args:
        k_caches, v_caches: one (N, P, K, D) tensor per layer, as for `write_kv_cache`; all have N blocks.
        src, dst: int64 (n,). All sources are read before anything is written, so pairs may chain or swap.

    Raises:
        ShapeError, DtypeError, DeviceError, ArgumentError: arguments that do not fit the above; ids out of range and a
            destination with several sources (always for CPU tensors, elsewhere under HAL_CHECK=1).
    """
    for cache in (*k_caches, *v_caches):
        places = _cache.raw(cache)
        places[dst] = places[src]
