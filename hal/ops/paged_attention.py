"""Attention of packed queries over keys and values that lie in a paged cache.

T packed queries, B sequences, H query heads, K kv heads, D head dim of q and k, E head dim of v, N blocks, P slots per
block, M blocks per sequence in the block table, L = M·P.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hal.accuracy import Accumulator, Accuracy
from hal.arithmetic import result, widen
from hal.errors import ShapeError
from hal.op import Args, Cost, Meta, Traits, dtype_name, op
from hal.ops import _attention_args as arguments
from hal.ops import _cache
from hal.ops import _lengths as ragged
from hal.ops._attention_bound import forward_bound
from hal.ops._attention_core import Sight, attend, head_scale
from hal.ops._checks import check_floating, check_rank, check_same_dtype
from hal.ops.attention_varlen import exact_rows

__all__ = ["paged_attention"]

Window = tuple[int | None, int | None]


def _pack(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    cu_seqlens_q: Tensor,
    max_seqlen_q: int,
    *,
    causal: bool = True,
    window: Window | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    sinks: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    return_lse: bool = False,
    seq_lens_cpu: Tensor | None = None,
    cu_seqlens_q_cpu: Tensor | None = None,
) -> tuple[Any, ...]:
    tensors = (
        q,
        k_cache,
        v_cache,
        block_table,
        seq_lens,
        cu_seqlens_q,
        sinks,
        k_scale,
        v_scale,
        seq_lens_cpu,
        cu_seqlens_q_cpu,
    )
    return (*tensors, max_seqlen_q, causal, *arguments.split_window(window), softcap, scale, return_lse)


def _validate(a: Args) -> None:
    name = "paged_attention"
    check_floating(name, "q", a.q)
    check_rank(name, "q", a.q, 3, "(rows, heads, head dim)")
    _cache.check_pair(name, a.k_cache, a.v_cache)
    if not _cache.quantised(a.k_cache):
        check_same_dtype(name, q=a.q, k_cache=a.k_cache)
    _cache.check_scales(name, a.k_cache, a.k_scale, a.v_scale)
    arguments.check_devices(
        name, a, "q", "k_cache", "v_cache", "block_table", "seq_lens", "cu_seqlens_q", "sinks", "k_scale", "v_scale"
    )
    arguments.check_heads(name, a.q, a.k_cache, a.v_cache)
    arguments.check_options(name, a, a.q.shape[1])
    arguments.check_index(name, "seq_lens", a.seq_lens, torch.int32, (None,), "(B,)")
    B = a.seq_lens.shape[0]
    arguments.check_index(name, "block_table", a.block_table, torch.int32, (B, None), f"({B}, blocks of a sequence)")
    arguments.check_cu_shape(name, "cu_seqlens_q", a.cu_seqlens_q)
    if a.cu_seqlens_q.shape[0] != B + 1:
        raise ShapeError(
            f"{name}: cu_seqlens_q holds {a.cu_seqlens_q.shape[0]} sums for the {B} sequences of seq_lens; it must "
            f"hold {B + 1}, the first of them 0"
        )
    arguments.check_upper_bound(name, "max_seqlen_q", a.max_seqlen_q)
    arguments.check_host_copy(name, "seq_lens", a.seq_lens_cpu, a.seq_lens)
    arguments.check_host_copy(name, "cu_seqlens_q", a.cu_seqlens_q_cpu, a.cu_seqlens_q)


def _check_values(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    cu_seqlens_q: Tensor,
    max_seqlen_q: int,
    *,
    causal: bool = True,
    window: Window | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    sinks: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    return_lse: bool = False,
    seq_lens_cpu: Tensor | None = None,
    cu_seqlens_q_cpu: Tensor | None = None,
) -> None:
    name = "paged_attention"
    ragged.check_cu(name, "cu_seqlens_q", cu_seqlens_q, q.shape[0], "the rows of q", max_seqlen_q, "max_seqlen_q")
    _cache.check_block_ids(name, block_table, seq_lens.tolist(), k_cache)
    _cache.check_scale_values(name, k_scale, v_scale)
    ragged.check_same_lengths(name, "seq_lens", seq_lens, seq_lens_cpu)
    ragged.check_same_lengths(name, "cu_seqlens_q", cu_seqlens_q, cu_seqlens_q_cpu)


def _meta(a: Args) -> tuple[Meta, ...]:
    T, H, _ = a.q.shape
    return (
        Meta((T, H, a.v_cache.shape[3]), a.q.dtype),
        Meta((T, H) if a.return_lse else (0,), arguments.lse_dtype(a.q.dtype)),
    )


def _traits(a: Args) -> Traits:
    (_, H, D), (_, P, K, E) = a.q.shape, a.v_cache.shape
    used = arguments.features(a, H, K, D, E) | _cache.cache_features(a.k_cache, a.k_scale, a.v_scale)
    if a.max_seqlen_q > 1:
        used.add("prefill")
    if a.seq_lens_cpu is not None and a.cu_seqlens_q_cpu is not None:
        used.add("host_lengths")
    dims = {"head_dim": D, "v_head_dim": E, "gqa_ratio": H // K, "block_size": P}
    return Traits(dtype=dtype_name(a.q.dtype), features=frozenset(used), dims=dims)


def _cost(a: Args) -> Cost:
    (T, H, D), (_, P, K, E) = a.q.shape, a.v_cache.shape
    B, M = a.block_table.shape
    # Lengths are values: without a host copy the table is taken to be full.
    lens = [M * P] * B if a.seq_lens_cpu is None else a.seq_lens_cpu.tolist()
    rows = T // max(B, 1)
    pairs = sum(arguments.visible_pairs(rows, n, a.causal, a.window) for n in lens)
    moved = T * H * (D + E) * a.q.element_size() + sum(lens) * K * (D + E) * a.k_cache.element_size()
    moved += sum(4 * -(-n // P) for n in lens) + 4 * (2 * B + 1)
    moved += T * H * arguments.lse_dtype(a.q.dtype).itemsize if a.return_lse else 0
    return Cost(flops=2 * H * pairs * (D + E), bytes=moved)


def _sight(a: Args) -> Sight:
    left, right = arguments.split_window(a.window)
    return Sight(
        causal=a.causal,
        left=left,
        right=right,
        queries_B=ragged.lengths(a.cu_seqlens_q),
        keys_B=a.seq_lens.to(torch.int64),
    )


def _read(a: Args, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(k_BLKD, v_BLKE) in `dtype`. Entries of the table past a sequence's end stand for block 0; nobody sees it."""
    N, P = a.k_cache.shape[:2]
    B, M = a.block_table.shape
    if N == 0:
        k, v = (torch.zeros(B, M * P, *t.shape[2:], dtype=dtype, device=t.device) for t in (a.k_cache, a.v_cache))
        return k, v
    used_BM = torch.arange(M, device=a.block_table.device) * P < a.seq_lens[:, None]
    block_BM = torch.where(used_BM, a.block_table, 0).to(torch.int64).clamp(0, N - 1)
    k, v = (
        _cache.dequantised(_cache.raw(t)[block_BM].view(t.dtype).flatten(1, 2), scale, dtype)
        for t, scale in ((a.k_cache, a.k_scale), (a.v_cache, a.v_scale))
    )
    return k, v


def _bound(a: Args, expected: tuple[Tensor, ...], acc: Accumulator) -> tuple[Tensor, ...]:
    T = a.q.shape[0]
    S = arguments.bounded(a.max_seqlen_q, T)
    q_BSHD, o_BSHE = (ragged.pad(t, a.cu_seqlens_q, S) for t in (a.q, expected[0]))
    scale = head_scale(a.scale, a.q.shape[2])
    options: dict[str, Any] = {"softcap": a.softcap, "scale": scale, "sinks_H": a.sinks}
    E_BSHE, E_BHS = forward_bound(q_BSHD, *_read(a, torch.float64), o_BSHE, _sight(a), acc, **options)
    bounds = ragged.unpad(E_BSHE, a.cu_seqlens_q, T), ragged.unpad(E_BHS.transpose(1, 2), a.cu_seqlens_q, T)
    return bounds[: len(expected)]


def _exact(a: Args, expected: tuple[Tensor, ...]) -> tuple[Tensor | None, ...]:
    S = arguments.bounded(a.max_seqlen_q, a.q.shape[0])
    L = a.block_table.shape[1] * a.k_cache.shape[1]
    return exact_rows(_sight(a), S, L, a.cu_seqlens_q, expected)


def _to_outs(a: Args, public: Any) -> tuple[Tensor, ...]:
    if isinstance(public, tuple):
        return public
    return public, public.new_empty(0, dtype=arguments.lse_dtype(public.dtype))


def _from_outs(outs: tuple[Tensor, ...], packed: tuple[Any, ...]) -> Any:
    return outs if packed[-1] else outs[0]


@op(
    schema="Tensor q, Tensor k_cache, Tensor v_cache, Tensor block_table, Tensor seq_lens, Tensor cu_seqlens_q, "
    "Tensor? sinks, Tensor? k_scale, Tensor? v_scale, Tensor? seq_lens_cpu, Tensor? cu_seqlens_q_cpu, "
    "SymInt max_seqlen_q, bool causal, SymInt? window_left, SymInt? window_right, float? softcap, float? scale, "
    "bool return_lse",
    results=("o", "lse"),
    pack=_pack,
    validate=_validate,
    meta=_meta,
    traits=_traits,
    dims=("head_dim", "v_head_dim", "gqa_ratio", "block_size"),
    cost=_cost,
    accuracy=Accuracy(
        rule="bound",
        bound=_bound,
        exact=_exact,
        notes="derived in hal.ops._attention_bound; dequantising adds one rounding per element, within its first terms",
    ),
    features=(
        *arguments.FEATURES,
        "prefill",
        "kv_int8",
        "kv_fp8",
        "kv_scale",
        "kv_scale_per_head",
        "host_lengths",
    ),
    optional_result="return_lse",
    to_outs=_to_outs,
    from_outs=_from_outs,
    check_values=_check_values,
    splits={"window": ("window_left", "window_right")},
    autocast=("q",),
    host_lengths=("seq_lens_cpu", "cu_seqlens_q_cpu"),
)
def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    cu_seqlens_q: Tensor,
    max_seqlen_q: int,
    *,
    causal: bool = True,
    window: Window | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    sinks: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    return_lse: bool = False,
    seq_lens_cpu: Tensor | None = None,
    cu_seqlens_q_cpu: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of each sequence's queries over its keys in a paged cache: decode, chunked prefill and mixtures.

    Args:
        q: (T, H, D), the packed queries, whose keys and values are in the cache already.
        k_cache, v_cache: (N, P, K, D) and (N, P, K, E): q's dtype, float8_e4m3fn or int8; any strides with a last one
            of 1.
        block_table: int32 (B, M); token j of a sequence lies in block j // P of its row, at slot j % P. Entries past a
            sequence's end are never read.
        seq_lens: int32 (B,), keys of each sequence, the new ones included.
        cu_seqlens_q: int32 (B + 1,), prefix sums of the queries of each sequence, the first 0.
        max_seqlen_q: upper bound of the queries of a sequence.
        causal: query i of s sees keys 0 … i + (seq_len - s).
        window, softcap, scale, sinks, return_lse: as for `attention`.
        k_scale, v_scale: float32 () or (K,), what the caches' codes are multiplied with; required for int8, None = 1
            for fp8, an error for float caches.
        seq_lens_cpu, cu_seqlens_q_cpu: copies on the CPU, for implementations that need lengths on the host.

    Returns:
        o (T, H, E) in q's dtype; lse (T, H), float32 (float64 for float64). Rows past cu_seqlens_q[-1] are zero in
        both. Slots past a sequence's end have no influence, whatever they hold.

    Raises:
        ShapeError, DtypeError, DeviceError, ArgumentError: arguments that do not fit the above; block ids out of range,
            sums that are not such, scales that are not above 0 (always for CPU tensors, elsewhere under HAL_CHECK=1).

    Source: Kwon et al. 2023, "Efficient Memory Management for Large Language Model Serving with PagedAttention".
    """
    a = Args(
        k_cache=k_cache,
        v_cache=v_cache,
        block_table=block_table,
        seq_lens=seq_lens,
        cu_seqlens_q=cu_seqlens_q,
        causal=causal,
        window=window,
        k_scale=k_scale,
        v_scale=v_scale,
    )
    T = q.shape[0]
    q_BSHD = widen(ragged.pad(q, cu_seqlens_q, arguments.bounded(max_seqlen_q, T)))
    o_BSHE, lse_BHS = attend(
        q_BSHD,
        *_read(a, q_BSHD.dtype),
        _sight(a),
        softcap=softcap,
        scale=head_scale(scale, q.shape[2]),
        sinks_H=None if sinks is None else sinks.to(q_BSHD.dtype),
    )
    o = result(ragged.unpad(o_BSHE, cu_seqlens_q, T), q.dtype)
    if not return_lse:
        return o
    return o, ragged.unpad(lse_BHS.transpose(1, 2), cu_seqlens_q, T)
