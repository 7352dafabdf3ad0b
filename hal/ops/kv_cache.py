"""Writing tokens into a paged KV cache, and reading them back.

T tokens, N blocks, P slots per block, K kv heads, D head dim (E of v), B sequences, U packed rows.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor

from hal.accuracy import Accumulator, Accuracy
from hal.arithmetic import compute_dtype, result
from hal.contract import FLOATS
from hal.errors import ArgumentError, ShapeError
from hal.op import Args, Cost, Meta, Traits, dtype_name, op
from hal.ops import _attention_args as arguments
from hal.ops import _cache
from hal.ops import _lengths as ragged
from hal.ops._checks import check_dtype, check_floating, check_rank, check_same_dtype, check_shape
from hal.ops._overlap import check_apart
from hal.ops.kv_blocks import copy_kv_blocks

__all__ = ["copy_kv_blocks", "gather_kv_cache", "write_kv_cache"]


def _pack_write(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    *,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> tuple[Any, ...]:
    return k, v, k_cache, v_cache, slot_mapping, k_scale, v_scale


def _validate_write(a: Args) -> None:
    name = "write_kv_cache"
    for each, cache in (("k", a.k_cache), ("v", a.v_cache)):
        check_floating(name, each, getattr(a, each))
        check_rank(name, each, getattr(a, each), 3, "(tokens, kv heads, head dim)")
        check_rank(name, f"{each}_cache", cache, 4, "(blocks, slots of a block, kv heads, head dim)")
    check_same_dtype(name, k=a.k, v=a.v)
    _cache.check_pair(name, a.k_cache, a.v_cache)
    if not _cache.quantised(a.k_cache):
        check_same_dtype(name, k=a.k, k_cache=a.k_cache)
    arguments.check_devices(name, a, "k", "v", "k_cache", "v_cache", "slot_mapping", "k_scale", "v_scale")
    T = a.k.shape[0]
    for each, cache in (("k", a.k_cache), ("v", a.v_cache)):
        check_shape(name, each, getattr(a, each), (T, *cache.shape[2:]), f"the tokens of k, the heads of {each}_cache")
    _cache.check_scales(name, a.k_cache, a.k_scale, a.v_scale)
    arguments.check_index(name, "slot_mapping", a.slot_mapping, torch.int64, (None,), "(tokens,), or shorter")
    if a.slot_mapping.shape[0] > T:
        raise ShapeError(
            f"{name}: slot_mapping names {a.slot_mapping.shape[0]} slots for {T} tokens; it may be shorter than k, not "
            "longer"
        )


def _check_write_values(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    *,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    check_apart("write_kv_cache", [("k_cache", k_cache), ("v_cache", v_cache)])
    _cache.check_scale_values("write_kv_cache", k_scale, v_scale)
    slots = k_cache.shape[0] * k_cache.shape[1]
    if slot_mapping.shape[0] == 0:
        return
    low, high = (int(x) for x in slot_mapping.aminmax())
    if low < -1 or high >= slots:
        raise ArgumentError(
            f"write_kv_cache: slot_mapping holds {low if low < -1 else high}, but the cache has slots 0 … {slots - 1}; "
            "-1 skips a token"
        )


def _traits_write(a: Args) -> Traits:
    _, P, K, D = a.k_cache.shape
    used = _cache.cache_features(a.k_cache, a.k_scale, a.v_scale)
    if a.v_cache.shape[3] != D:
        used.add("different_v_dim")
    return Traits(
        dtype=dtype_name(a.k.dtype),
        features=frozenset(used),
        dims={"block_size": P, "kv_heads": K, "head_dim": D, "v_head_dim": a.v_cache.shape[3]},
    )


def _cost_write(a: Args) -> Cost:
    n, (_, _, K, D), E = a.slot_mapping.shape[0], a.k_cache.shape, a.v_cache.shape[3]
    moved = n * K * (D + E) * (a.k.element_size() + a.k_cache.element_size()) + 8 * n
    return Cost(flops=n * K * (D + E) if _cache.quantised(a.k_cache) else 0, bytes=moved)


@op(
    schema="Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor slot_mapping, Tensor? k_scale, "
    "Tensor? v_scale",
    results=(),
    pack=_pack_write,
    validate=_validate_write,
    meta=lambda a: (),
    traits=_traits_write,
    dims=("block_size", "kv_heads", "head_dim", "v_head_dim"),
    cost=_cost_write,
    accuracy=Accuracy(
        rule="codes",
        notes="Float caches get a copy, bit for bit. A code is one division and one rounding of value / scale; within "
        "2·eps·|value / scale| of a tie the adjacent code is admissible.",
    ),
    features=("kv_int8", "kv_fp8", "kv_scale", "kv_scale_per_head", "different_v_dim"),
    check_values=_check_write_values,
    mutates=("k_cache", "v_cache"),
)
def write_kv_cache(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    *,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    """Write the keys and values of tokens into the slots of a paged cache, in place.

    Args:
        k, v: (T, K, D) and (T, K, E), one floating dtype.
        k_cache, v_cache: (N, P, K, D) and (N, P, K, E): k's own dtype, float8_e4m3fn or int8; any strides with a last
            one of 1, no overlap.
        slot_mapping: int64 (n,), n ≤ T. Token i goes to slot block·P + offset; -1 skips it, as are tokens from n on.
            Two tokens on one slot: which of them stays is undefined.
        k_scale, v_scale: float32 () or (K,), above 0. The code is value / scale, one IEEE division, rounded once: int8
            to nearest even in -128 … 127 (NaN gives 0); fp8 saturates finite values and ±Inf to ±448, NaN stays.
            Required for int8, None = 1 for fp8, an error for float caches.

    Raises:
        ShapeError, DtypeError, DeviceError, ArgumentError: arguments that do not fit the above; slots out of range and
            scales that are not above 0 (always for CPU tensors, elsewhere under HAL_CHECK=1).

    Source: the slot mapping is vLLM's (Kwon et al. 2023, "Efficient memory management … with PagedAttention").
    """
    n, (N, P) = slot_mapping.shape[0], k_cache.shape[:2]
    if n == 0 or N == 0:
        return
    # Skipped tokens repeat the write of one that is not, or write back what slot 0 holds if all are skipped: the same
    # bits at the same place, which no order of writing can tell, and no value has to be known on the host.
    kept_n = slot_mapping >= 0
    some = kept_n.any()
    source_n = torch.where(kept_n, torch.arange(n, device=k.device), kept_n.to(torch.uint8).argmax())
    slot_n = torch.where(some, slot_mapping[source_n], 0)
    block_n, offset_n = slot_n // P, slot_n % P
    for x, cache, scale in ((k, k_cache, k_scale), (v, v_cache, v_scale)):
        rows = x[source_n]
        if _cache.quantised(cache):
            rows = _cache.codes(rows, scale, cache.dtype)
        places = _cache.raw(cache)
        places[block_n, offset_n] = torch.where(some, _cache.bits(rows), places[0, 0])


def _pack_gather(
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    cu_seqlens_k: Tensor,
    total_k: int,
    *,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    cu_seqlens_k_cpu: Tensor | None = None,
) -> tuple[Any, ...]:
    return k_cache, v_cache, block_table, cu_seqlens_k, k_scale, v_scale, cu_seqlens_k_cpu, total_k, out_dtype


def _validate_gather(a: Args) -> None:
    name = "gather_kv_cache"
    _cache.check_pair(name, a.k_cache, a.v_cache)
    _cache.check_scales(name, a.k_cache, a.k_scale, a.v_scale)
    arguments.check_devices(name, a, "k_cache", "v_cache", "block_table", "cu_seqlens_k", "k_scale", "v_scale")
    arguments.check_cu_shape(name, "cu_seqlens_k", a.cu_seqlens_k)
    B = a.cu_seqlens_k.shape[0] - 1
    arguments.check_index(name, "block_table", a.block_table, torch.int32, (B, None), f"({B}, blocks of a sequence)")
    arguments.check_upper_bound(name, "total_k", a.total_k)
    arguments.check_host_copy(name, "cu_seqlens_k", a.cu_seqlens_k_cpu, a.cu_seqlens_k)
    if a.out_dtype is None:
        if _cache.quantised(a.k_cache):
            raise ArgumentError(
                f"{name}: out_dtype is None, but the cache holds {dtype_name(a.k_cache.dtype)} codes; name the dtype "
                "to dequantise to: float64, float32, bfloat16 or float16"
            )
    else:
        check_dtype(name, "out_dtype (as a dtype)", torch.empty(0, dtype=a.out_dtype, device="meta"), FLOATS)


def _check_gather_values(
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    cu_seqlens_k: Tensor,
    total_k: int,
    *,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    cu_seqlens_k_cpu: Tensor | None = None,
) -> None:
    name = "gather_kv_cache"
    cu = ragged.check_cu(name, "cu_seqlens_k", cu_seqlens_k, total_k, "total_k", None, "")
    _cache.check_block_ids(name, block_table, [b - a for a, b in itertools.pairwise(cu)], k_cache)
    _cache.check_scale_values(name, k_scale, v_scale)
    ragged.check_same_lengths(name, "cu_seqlens_k", cu_seqlens_k, cu_seqlens_k_cpu)


def _out_dtype(a: Args) -> torch.dtype:
    dtype: torch.dtype = a.k_cache.dtype if a.out_dtype is None else a.out_dtype
    return dtype


def _meta_gather(a: Args) -> tuple[Meta, ...]:
    K = a.k_cache.shape[2]
    return tuple(Meta((a.total_k, K, cache.shape[3]), _out_dtype(a)) for cache in (a.k_cache, a.v_cache))


def _traits_gather(a: Args) -> Traits:
    _, P, K, D = a.k_cache.shape
    used = _cache.cache_features(a.k_cache, a.k_scale, a.v_scale)
    if _out_dtype(a) is not a.k_cache.dtype:
        used.add("out_dtype")
    if a.v_cache.shape[3] != D:
        used.add("different_v_dim")
    if a.cu_seqlens_k_cpu is not None:
        used.add("host_lengths")
    return Traits(
        dtype=dtype_name(_out_dtype(a)),
        features=frozenset(used),
        dims={"block_size": P, "kv_heads": K, "head_dim": D, "v_head_dim": a.v_cache.shape[3]},
    )


def _cost_gather(a: Args) -> Cost:
    elements = a.total_k * a.k_cache.shape[2] * (a.k_cache.shape[3] + a.v_cache.shape[3])
    moved = elements * (a.k_cache.element_size() + _out_dtype(a).itemsize) + 4 * a.cu_seqlens_k.shape[0]
    moved += 4 * -(-a.total_k // a.k_cache.shape[1])
    return Cost(flops=elements if _cache.quantised(a.k_cache) else 0, bytes=moved)


def _bound_gather(a: Args, expected: tuple[Tensor, ...], acc: Accumulator) -> tuple[Tensor, ...]:
    return tuple(acc.eps * Y.abs() for Y in expected)


def _exact_gather(a: Args, expected: tuple[Tensor, ...]) -> tuple[Tensor | None, ...]:
    padding_U = ~ragged.owners(a.cu_seqlens_k, a.total_k)[2]
    copied = _out_dtype(a) is a.k_cache.dtype
    return tuple((padding_U | copied)[:, None, None].expand(Y.shape) for Y in expected)


@op(
    schema="Tensor k_cache, Tensor v_cache, Tensor block_table, Tensor cu_seqlens_k, Tensor? k_scale, "
    "Tensor? v_scale, Tensor? cu_seqlens_k_cpu, SymInt total_k, ScalarType? out_dtype",
    results=("k", "v"),
    pack=_pack_gather,
    validate=_validate_gather,
    meta=_meta_gather,
    traits=_traits_gather,
    dims=("block_size", "kv_heads", "head_dim", "v_head_dim"),
    cost=_cost_gather,
    accuracy=Accuracy(
        rule="bound",
        bound=_bound_gather,
        exact=_exact_gather,
        notes="A copy in the cache's own dtype is exact; code times scale is one product, then the result's rounding.",
    ),
    features=("kv_int8", "kv_fp8", "kv_scale", "kv_scale_per_head", "out_dtype", "different_v_dim", "host_lengths"),
    check_values=_check_gather_values,
    host_lengths=("cu_seqlens_k_cpu",),
)
def gather_kv_cache(
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    cu_seqlens_k: Tensor,
    total_k: int,
    *,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    cu_seqlens_k_cpu: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The keys and values of sequences, read from a paged cache into packed rows.

    Args:
        k_cache, v_cache: (N, P, K, D) and (N, P, K, E), as for `write_kv_cache`.
        block_table: int32 (B, M); entries past a sequence's end are never read.
        cu_seqlens_k: int32 (B + 1,), prefix sums of the keys to read, the first 0.
        total_k: rows of the result, at least cu_seqlens_k[-1].
        k_scale, v_scale: as for `write_kv_cache`; code times scale is formed in float32
            (float64 for float64) and rounded once.
        out_dtype: dtype of the result; None = the cache's, not allowed for quantised caches.
        cu_seqlens_k_cpu: a copy of the sums on the CPU, for implementations that need lengths on the host.

    Returns:
        k (total_k, K, D) and v (total_k, K, E). Rows past cu_seqlens_k[-1] are zero.

    Raises:
        ShapeError, DtypeError, DeviceError, ArgumentError: arguments that do not fit the above; sums that are not such
            and block ids out of range (always for CPU tensors, elsewhere under HAL_CHECK=1).
    """
    dtype = k_cache.dtype if out_dtype is None else out_dtype
    (N, P), M = k_cache.shape[:2], block_table.shape[1]
    b_U, place_U, owned_U = ragged.owners(cu_seqlens_k, total_k)
    if N * M * block_table.shape[0] == 0:
        K = k_cache.shape[2]
        k, v = (
            torch.zeros(total_k, K, cache.shape[3], dtype=dtype, device=cache.device) for cache in (k_cache, v_cache)
        )
        return k, v
    owned_U = owned_U & (place_U < M * P)
    place_U = torch.where(owned_U, place_U, 0)
    block_U = torch.where(owned_U, block_table[b_U, place_U // P].to(torch.int64), 0).clamp(0, N - 1)
    compute = compute_dtype(torch.float64 if torch.float64 in (dtype, k_cache.dtype) else torch.float32)
    gathered = []
    for cache, scale in ((k_cache, k_scale), (v_cache, v_scale)):
        rows = _cache.raw(cache)[block_U, place_U % P].view(cache.dtype)
        if dtype is not cache.dtype:
            rows = result(_cache.dequantised(rows, scale, compute), dtype)
        gathered.append(
            torch.where(owned_U[:, None, None], rows, torch.zeros((), dtype=rows.dtype, device=rows.device))
        )
    return gathered[0], gathered[1]
