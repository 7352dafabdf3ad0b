"""Attention over ragged batches: sequences of any length, packed one after the other.

T packed queries, U packed keys, B sequences, H query heads, K kv heads, D head dim of q and k, E head dim of v.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from hal.accuracy import Accumulator, Accuracy, unit_roundoff
from hal.arithmetic import result, widen
from hal.errors import ShapeError
from hal.op import Args, Cost, Meta, Traits, dtype_name, op
from hal.ops import _attention_args as arguments
from hal.ops import _lengths as ragged
from hal.ops._attention_bound import forward_bound, gradient_bound, rows_without_keys
from hal.ops._attention_core import Sight, attend, head_scale
from hal.ops._checks import check_floating, check_rank, check_same_dtype

__all__ = ["attention_varlen"]

Window = tuple[int | None, int | None]


def _pack(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    causal: bool = False,
    window: Window | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    sinks: Tensor | None = None,
    return_lse: bool = False,
    cu_seqlens_q_cpu: Tensor | None = None,
    cu_seqlens_k_cpu: Tensor | None = None,
) -> tuple[Any, ...]:
    tensors = (q, k, v, cu_seqlens_q, cu_seqlens_k, sinks, cu_seqlens_q_cpu, cu_seqlens_k_cpu)
    window_left, window_right = arguments.split_window(window)
    return (*tensors, max_seqlen_q, max_seqlen_k, causal, window_left, window_right, softcap, scale, return_lse)


def _validate(a: Args) -> None:
    name = "attention_varlen"
    for each in ("q", "k", "v"):
        check_floating(name, each, getattr(a, each))
        check_rank(name, each, getattr(a, each), 3, "(rows, heads, head dim)")
    check_same_dtype(name, q=a.q, k=a.k, v=a.v)
    arguments.check_devices(name, a, "q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "sinks")
    if a.k.shape[0] != a.v.shape[0]:
        raise ShapeError(f"{name}: k has {a.k.shape[0]} rows, v has {a.v.shape[0]}; they must be as many")
    arguments.check_heads(name, a.q, a.k, a.v)
    arguments.check_options(name, a, a.q.shape[1])
    arguments.check_cu_shape(name, "cu_seqlens_q", a.cu_seqlens_q)
    arguments.check_cu_shape(name, "cu_seqlens_k", a.cu_seqlens_k)
    if a.cu_seqlens_q.shape[0] != a.cu_seqlens_k.shape[0]:
        raise ShapeError(
            f"{name}: cu_seqlens_q tells of {a.cu_seqlens_q.shape[0] - 1} sequences, cu_seqlens_k of "
            f"{a.cu_seqlens_k.shape[0] - 1}; both hold B + 1 sums"
        )
    for each in ("q", "k"):
        arguments.check_upper_bound(name, f"max_seqlen_{each}", getattr(a, f"max_seqlen_{each}"))
        lengths = f"cu_seqlens_{each}"
        arguments.check_host_copy(name, lengths, getattr(a, f"{lengths}_cpu"), getattr(a, lengths))


def _check_values(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    causal: bool = False,
    window: Window | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    sinks: Tensor | None = None,
    return_lse: bool = False,
    cu_seqlens_q_cpu: Tensor | None = None,
    cu_seqlens_k_cpu: Tensor | None = None,
) -> None:
    name = "attention_varlen"
    ragged.check_cu(name, "cu_seqlens_q", cu_seqlens_q, q.shape[0], "the rows of q", max_seqlen_q, "max_seqlen_q")
    ragged.check_cu(name, "cu_seqlens_k", cu_seqlens_k, k.shape[0], "the rows of k", max_seqlen_k, "max_seqlen_k")
    ragged.check_same_lengths(name, "cu_seqlens_q", cu_seqlens_q, cu_seqlens_q_cpu)
    ragged.check_same_lengths(name, "cu_seqlens_k", cu_seqlens_k, cu_seqlens_k_cpu)


def _meta(a: Args) -> tuple[Meta, ...]:
    T, H, _ = a.q.shape
    return (
        Meta((T, H, a.v.shape[2]), a.q.dtype),
        Meta((T, H) if a.return_lse else (0,), arguments.lse_dtype(a.q.dtype)),
    )


def _traits(a: Args) -> Traits:
    (_, H, D), (_, K, E) = a.q.shape, a.v.shape
    used = arguments.features(a, H, K, D, E)
    if a.cu_seqlens_q_cpu is not None and a.cu_seqlens_k_cpu is not None:
        used.add("host_lengths")
    dims = {"head_dim": D, "v_head_dim": E, "gqa_ratio": H // K}
    return Traits(dtype=dtype_name(a.q.dtype), features=frozenset(used), dims=dims)


def _cost(a: Args) -> Cost:
    (T, H, D), (U, K, E) = a.q.shape, a.v.shape
    # Lengths are values: sequences are taken to be equally long, which is the least work for self-attention.
    B = max(a.cu_seqlens_q.shape[0] - 1, 1)
    pairs = B * arguments.visible_pairs(T // B, U // B, a.causal, a.window)
    moved = (T * H + U * K) * (D + E) * a.q.element_size() + 8 * (B + 1)
    moved += 0 if a.sinks is None else a.sinks.numel() * a.sinks.element_size()
    moved += T * H * arguments.lse_dtype(a.q.dtype).itemsize if a.return_lse else 0
    return Cost(flops=2 * H * pairs * (D + E), bytes=moved)


def _sight(a: Args) -> Sight:
    left, right = arguments.split_window(a.window)
    return Sight(
        causal=a.causal,
        left=left,
        right=right,
        queries_B=ragged.lengths(a.cu_seqlens_q),
        keys_B=ragged.lengths(a.cu_seqlens_k),
    )


def _padded(a: Args, *queries: Tensor) -> tuple[Tensor, ...]:
    S, L = arguments.bounded(a.max_seqlen_q, a.q.shape[0]), arguments.bounded(a.max_seqlen_k, a.k.shape[0])
    return (
        *(ragged.pad(t, a.cu_seqlens_q, S) for t in queries),
        ragged.pad(a.k, a.cu_seqlens_k, L),
        ragged.pad(a.v, a.cu_seqlens_k, L),
    )


def _bound(a: Args, expected: tuple[Tensor, ...], acc: Accumulator) -> tuple[Tensor, ...]:
    q_BSHD, o_BSHE, k_BLKD, v_BLKE = _padded(a, a.q, expected[0])
    scale = head_scale(a.scale, a.q.shape[2])
    options: dict[str, Any] = {"softcap": a.softcap, "scale": scale, "sinks_H": a.sinks}
    E_BSHE, E_BHS = forward_bound(q_BSHD, k_BLKD, v_BLKE, o_BSHE, _sight(a), acc, **options)
    T = a.q.shape[0]
    bounds = ragged.unpad(E_BSHE, a.cu_seqlens_q, T), ragged.unpad(E_BHS.transpose(1, 2), a.cu_seqlens_q, T)
    return bounds[: len(expected)]


def _gradient_bound(
    a: Args, expected: tuple[Tensor, ...], grads: tuple[Tensor | None, ...], acc: Accumulator
) -> tuple[Tensor | None, ...]:
    do, dlse = (*grads, None)[:2]
    do = expected[0].new_zeros(expected[0].shape) if do is None else do
    q_BSHD, o_BSHE, do_BSHE, k_BLKD, v_BLKE = _padded(a, a.q, expected[0], do)
    dlse_BHS = None
    if dlse is not None:
        dlse_BHS = ragged.pad(dlse, a.cu_seqlens_q, q_BSHD.shape[1]).transpose(1, 2)
    E = gradient_bound(
        q_BSHD,
        k_BLKD,
        v_BLKE,
        o_BSHE,
        do_BSHE,
        _sight(a),
        acc,
        unit_roundoff(a.q.dtype if acc.dtype is None else acc.dtype),
        softcap=a.softcap,
        scale=head_scale(a.scale, a.q.shape[2]),
        sinks_H=a.sinks,
        dlse_BHS=dlse_BHS,
    )
    T, U = a.q.shape[0], a.k.shape[0]
    packed_k, packed_v = (ragged.unpad(t, a.cu_seqlens_k, U) for t in (E.k, E.v))
    return ragged.unpad(E.q, a.cu_seqlens_q, T), packed_k, packed_v, E.sinks


def _exact(a: Args, expected: tuple[Tensor, ...]) -> tuple[Tensor | None, ...]:
    S, L = arguments.bounded(a.max_seqlen_q, a.q.shape[0]), arguments.bounded(a.max_seqlen_k, a.k.shape[0])
    return exact_rows(_sight(a), S, L, a.cu_seqlens_q, expected)


def exact_rows(
    sight: Sight, queries: int, keys: int, cu_seqlens_q: Tensor, expected: tuple[Tensor, ...]
) -> tuple[Tensor | None, ...]:
    """Rows that the contract fixes: those without keys, and those past the last sequence."""
    T, H = expected[0].shape[:2]
    dead_BHS = rows_without_keys(sight, queries, keys, cu_seqlens_q).expand(-1, H, -1)
    dead_TH = ragged.unpad(dead_BHS.transpose(1, 2), cu_seqlens_q, T)
    padding_TH = ~ragged.owners(cu_seqlens_q, T)[2][:, None].expand(T, H)
    return ((dead_TH | padding_TH)[..., None].expand(expected[0].shape), padding_TH)[: len(expected)]


def _to_outs(a: Args, public: Any) -> tuple[Tensor, ...]:
    if isinstance(public, tuple):
        return public
    return public, public.new_empty(0, dtype=arguments.lse_dtype(public.dtype))


def _from_outs(outs: tuple[Tensor, ...], packed: tuple[Any, ...]) -> Any:
    return outs if packed[-1] else outs[0]


ACCURACY = Accuracy(
    rule="bound",
    bound=_bound,
    exact=_exact,
    gradient_bound=_gradient_bound,
    notes="derived in hal.ops._attention_bound",
)


@op(
    schema="Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor cu_seqlens_k, Tensor? sinks, "
    "Tensor? cu_seqlens_q_cpu, Tensor? cu_seqlens_k_cpu, SymInt max_seqlen_q, SymInt max_seqlen_k, bool causal, "
    "SymInt? window_left, SymInt? window_right, float? softcap, float? scale, bool return_lse",
    results=("o", "lse"),
    pack=_pack,
    validate=_validate,
    meta=_meta,
    traits=_traits,
    dims=("head_dim", "v_head_dim", "gqa_ratio"),
    cost=_cost,
    accuracy=ACCURACY,
    features=(*arguments.FEATURES, "host_lengths"),
    grad=("q", "k", "v", "sinks"),
    saves=("o", "lse"),
    optional_result="return_lse",
    to_outs=_to_outs,
    from_outs=_from_outs,
    check_values=_check_values,
    splits={"window": ("window_left", "window_right")},
    autocast=("q", "k", "v"),
    host_lengths=("cu_seqlens_q_cpu", "cu_seqlens_k_cpu"),
)
def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    causal: bool = False,
    window: Window | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    sinks: Tensor | None = None,
    return_lse: bool = False,
    cu_seqlens_q_cpu: Tensor | None = None,
    cu_seqlens_k_cpu: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """`attention` of each sequence of a packed batch on its own.

    Args:
        q: (T, H, D). k: (U, K, D). v: (U, K, E), as for `attention`.
        cu_seqlens_q, cu_seqlens_k: int32 (B + 1,), prefix sums of the lengths, the first 0; the last may be less
            than T or U.
        max_seqlen_q, max_seqlen_k: upper bounds of the lengths.
        causal, window, softcap, scale, sinks, return_lse: as for `attention`, S and L being each sequence's own.
        cu_seqlens_q_cpu, cu_seqlens_k_cpu: copies of the sums on the CPU, for implementations that need lengths on
            the host; without them those synchronise.

    Returns:
        o (T, H, E) in q's dtype; lse (T, H), float32 (float64 for float64). Rows past cu_seqlens_q[-1] are zero in
        both, with zero gradient; what q, k and v hold past the last sequence has no influence.

    Raises:
        ShapeError, DtypeError, DeviceError, ArgumentError: arguments that do not fit the above; sums that are not
            such, or longer than a stated bound (always for CPU tensors, elsewhere under HAL_CHECK=1).

    Source: as for `attention`; the packed layout is that of FlashAttention (Dao et al. 2022).
    """
    left, right = arguments.split_window(window)
    S, L = arguments.bounded(max_seqlen_q, q.shape[0]), arguments.bounded(max_seqlen_k, k.shape[0])
    sight = Sight(
        causal=causal,
        left=left,
        right=right,
        queries_B=ragged.lengths(cu_seqlens_q),
        keys_B=ragged.lengths(cu_seqlens_k),
    )
    q_BSHD = widen(ragged.pad(q, cu_seqlens_q, S))
    o_BSHE, lse_BHS = attend(
        q_BSHD,
        widen(ragged.pad(k, cu_seqlens_k, L)),
        widen(ragged.pad(v, cu_seqlens_k, L)),
        sight,
        softcap=softcap,
        scale=head_scale(scale, q.shape[2]),
        sinks_H=None if sinks is None else sinks.to(q_BSHD.dtype),
    )
    o = result(ragged.unpad(o_BSHE, cu_seqlens_q, q.shape[0]), q.dtype)
    if not return_lse:
        return o
    return o, ragged.unpad(lse_BHS.transpose(1, 2), cu_seqlens_q, q.shape[0])
