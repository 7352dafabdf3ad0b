"""Rules of attention for training."""

from __future__ import annotations

import itertools
from functools import partial

import torch
from torch import Tensor

from hal.backends.ascend.simulator.constraints import A5, Constraint
from hal.backends.ascend.simulator.rules._common import FLOATS, absent, dtypes, one_dtype

_PAGE = "torch_npu-npu_fusion_attention"
_DENSE = tuple(f"aclnnFlashAttentionScore{version}" for version in ("", "V2", "V3", "V4"))
_PACKED = tuple(f"aclnnFlashAttentionVarLenScore{version}" for version in ("", "V2", "V3", "V4", "V5"))
_FORWARD = (*_DENSE, *_PACKED)
_SINKING = ("aclnnFlashAttentionScoreV3", "aclnnFlashAttentionScoreV4", "aclnnFlashAttentionVarLenScoreV5")
_SUMMED = ("aclnnFlashAttentionScoreV4", *_PACKED)
_SIDE, _PREFIXED = 2048, 3072
_all = partial(Constraint, _FORWARD, page=_PAGE, enforced_by="document")
_summed = partial(Constraint, _SUMMED, page=_PAGE, enforced_by="document")
_sinking = partial(Constraint, _SINKING, page=_PAGE, enforced_by="document")


def _dims(t: Tensor, input_layout: str, heads: int) -> tuple[int, int, int]:
    """Heads, tokens of a sequence (packed: all) and head dim; heads counts for BSH and SBH."""
    layout = input_layout.upper()
    if layout in ("BSH", "SBH"):
        return heads, t.shape[1 if layout == "BSH" else 0], t.shape[2] // heads
    if layout == "TND":
        return t.shape[1], t.shape[0], t.shape[2]
    return (t.shape[1], t.shape[2], t.shape[3]) if layout == "BNSD" else (t.shape[2], t.shape[1], t.shape[3])


def _batch(query: Tensor, input_layout: str) -> int:
    return query.shape[1 if input_layout.upper() == "SBH" else 0]


def _key_heads(query: Tensor, key: Tensor, input_layout: str, head_num: int) -> int:
    if input_layout.upper() not in ("BSH", "SBH"):
        return _dims(key, input_layout, 0)[0]
    return key.shape[2] // (query.shape[2] // head_num)


def _heads(query: Tensor, input_layout: str, head_num: int) -> str | None:
    heads = _dims(query, input_layout, head_num)[0]
    divides = input_layout.upper() not in ("BSH", "SBH") or query.shape[2] % head_num == 0
    return None if heads == head_num and divides else f"{head_num} for queries {tuple(query.shape)} as {input_layout}"


def _groups(query: Tensor, key: Tensor, input_layout: str, head_num: int) -> str | None:
    keys = _key_heads(query, key, input_layout, head_num)
    return None if keys and head_num % keys == 0 else f"{head_num} over {keys}"


def _head_dims(query: Tensor, key: Tensor, value: Tensor, input_layout: str, head_num: int) -> str | None:
    if input_layout.upper() in ("BSH", "SBH"):
        keys = max(1, _key_heads(query, key, input_layout, head_num))
        q, k, v = query.shape[2] // head_num, key.shape[2] // keys, value.shape[2] // keys
    else:
        q, k, v = (t.shape[-1] for t in (query, key, value))
    return None if q == k >= v and 1 <= q <= 768 else f"{q}, {k} and {v}"


def _triangle(sparse_mode: int, atten_mask: Tensor | None) -> str | None:
    if sparse_mode not in (2, 3, 4, 7, 8) or atten_mask is None:
        return None
    return None if tuple(atten_mask.shape) == (_SIDE, _SIDE) else f"{tuple(atten_mask.shape)}"


def _prefixed(sparse_mode: int, atten_mask: Tensor | None) -> str | None:
    if sparse_mode != 6 or atten_mask is None:
        return None
    return None if tuple(atten_mask.shape) == (_PREFIXED, _SIDE) else f"{tuple(atten_mask.shape)}"


def _whole(
    query: Tensor, key: Tensor, input_layout: str, head_num: int, sparse_mode: int, atten_mask: Tensor | None
) -> str | None:
    if sparse_mode not in (0, 1) or atten_mask is None or input_layout.upper() == "TND":
        return None
    queries = _dims(query, input_layout, head_num)[1]
    keys = key.shape[{"SBH": 0, "BNSD": 2}.get(input_layout.upper(), 1)]
    batch = _batch(query, input_layout)
    whole = (queries, keys)
    allowed = (whole, (batch, head_num, *whole), (batch, 1, *whole), (1, 1, *whole))
    return None if tuple(atten_mask.shape) in allowed else f"{tuple(atten_mask.shape)} for {queries} and {keys}"


def _packed_whole(
    sparse_mode: int,
    atten_mask: Tensor | None,
    actual_seq_qlen: list[int] | None,
    actual_seq_kvlen: list[int] | None,
) -> str | None:
    if sparse_mode not in (0, 1) or atten_mask is None or not actual_seq_qlen or not actual_seq_kvlen:
        return None
    longest = [max(b - a for a, b in itertools.pairwise((0, *sums))) for sums in (actual_seq_qlen, actual_seq_kvlen)]
    fits = atten_mask.dim() == 2 and all(n >= least for n, least in zip(atten_mask.shape, longest, strict=True))
    return None if fits else f"{tuple(atten_mask.shape)} for {longest[0]} and {longest[1]}"


def _no_blind_row(sparse_mode: int, atten_mask: Tensor | None, actual_seq_qlen: list[int] | None) -> str | None:
    if sparse_mode not in (0, 1) or atten_mask is None or not actual_seq_qlen:
        return None
    blind = atten_mask.bool().all(-1).flatten().nonzero()
    return f"row {int(blind[0])}" if blind.numel() else None


def _prefix(
    query: Tensor, key: Tensor, input_layout: str, head_num: int, sparse_mode: int, prefix: list[int] | None
) -> str | None:
    if sparse_mode not in (5, 6):
        return None
    if not prefix:
        return "no prefix"
    if input_layout.upper() == "TND":
        return None if len(prefix) <= 32 else f"{len(prefix)} sequences"
    queries = _dims(query, input_layout, head_num)[1]
    keys = key.shape[{"SBH": 0, "BNSD": 2}.get(input_layout.upper(), 1)]
    fits = len(prefix) == _batch(query, input_layout) <= 32
    return None if fits and all(max(0, keys - queries) <= n <= keys for n in prefix) else f"{prefix}"


def _rising(actual_seq_qlen: list[int] | None, actual_seq_kvlen: list[int] | None) -> str | None:
    for sums in (actual_seq_qlen, actual_seq_kvlen):
        used = list(sums or ())
        while used and used[-1] == 0:
            used.pop()
        if any(a > b for a, b in itertools.pairwise((0, *used))):
            return f"{sums}"
    return None


def _tokens(
    query: Tensor,
    key: Tensor,
    input_layout: str,
    actual_seq_qlen: list[int] | None,
    actual_seq_kvlen: list[int] | None,
) -> str | None:
    if input_layout.upper() != "TND":
        return None
    for sums, t in ((actual_seq_qlen, query), (actual_seq_kvlen, key)):
        if sums and max(sums) > t.shape[0]:
            return f"{max(sums)} of {t.shape[0]}"
    return None


def _no_bias(sparse_mode: int, pse: Tensor | None) -> str | None:
    return f"sparse_mode {sparse_mode} with pse" if sparse_mode in (7, 8) and pse is not None else None


def _sink_shape(sink: Tensor | None, head_num: int) -> str | None:
    return None if sink is None or tuple(sink.shape) == (head_num,) else f"{tuple(sink.shape)} for {head_num} heads"


def _no_sink(sink: Tensor | None) -> str | None:
    return None if sink is None else "a sink"


def _input_layout_only(softmax_layout: str | None) -> str | None:
    return "same_as_input" if softmax_layout == "same_as_input" else None


def _host(rule: str, socs: frozenset[str] | None = None) -> Constraint:
    """A row of torch_npu's own host code."""
    return Constraint(operator=_FORWARD, rule=rule, page=_PAGE, enforced_by="wheel", socs=socs)


ROWS = (
    absent(_FORWARD, _PAGE),
    _host("the layout is BSH, SBH, BNSD, BSND or TND"),
    _host("dense, sparse_mode is from 0 to 6; packed, from 0 to 8 but not 5"),
    _host("packed, actual_seq_qlen and actual_seq_kvlen are given and as long as each other"),
    _host("keep_prob is above 0 and at most 1"),
    _host("npu_fusion_attention_v3 is not called on the 950", socs=A5),
    _all(
        rule="query, key, value and pse of flash attention have one dtype",
        check=one_dtype("query", "key", "value", "pse"),
    ),
    _all(rule="the query of flash attention is float16, bfloat16 or float32", check=dtypes("query", allowed=FLOATS)),
    _all(rule="head_num is the number of heads of the query's shape", check=_heads),
    _all(rule="there are at most 256 heads", check=lambda head_num: None if 1 <= head_num <= 256 else f"{head_num}"),
    _all(rule="the query heads are a multiple of the key heads", check=_groups),
    _all(rule="the head dims of query and key are equal, the value's no greater, all at most 768", check=_head_dims),
    _all(
        rule="flash attention's atten_mask is bool or uint8",
        check=dtypes("atten_mask", allowed=(torch.bool, torch.uint8)),
    ),
    _all(rule="with sparse_mode 2, 3, 4, 7 and 8 atten_mask is a triangle (2048, 2048)", check=_triangle),
    _all(rule="with sparse_mode 6 atten_mask is a triangle above a rectangle (3072, 2048)", check=_prefixed),
    Constraint(
        operator=_DENSE,
        rule="flash attention's whole atten_mask is (S, L), (1, 1, S, L), (B, 1, S, L) or (B, N, S, L)",
        page=_PAGE,
        enforced_by="document",
        check=_whole,
    ),
    _summed(rule="packed, a whole atten_mask is (longest S, longest L)", check=_packed_whole),
    _summed(rule="packed, no row of atten_mask hides everything", check=_no_blind_row, values=True),
    _all(
        rule="with sparse_mode 5 and 6 there is a prefix for each of at most 32 sequences, from max(0, L - S) to L",
        check=_prefix,
    ),
    _summed(rule="running sums of lengths never fall, but for zeros at the end", check=_rising),
    _summed(rule="no running sum is greater than the number of tokens", check=_tokens),
    _all(rule="sparse_mode 7 and 8 come without pse", check=_no_bias),
    _sinking(rule="sink is float32", check=dtypes("sink", allowed=(torch.float32,))),
    _sinking(rule="sink has one entry a head", check=_sink_shape),
    _sinking(rule="there is no sink, which comes with CANN 8.5.0", check=_no_sink, cann="<8.5.0"),
    Constraint(
        operator=("aclnnFlashAttentionVarLenScoreV4", "aclnnFlashAttentionVarLenScoreV5"),
        rule="softmax_layout is not given, which comes with CANN 8.3.RC1",
        page=_PAGE,
        enforced_by="document",
        check=_input_layout_only,
        cann="<8.3.RC1",
    ),
)
