"""Rules of attention for inference: dtypes, heads, head dims, masks, sinks, layouts."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from hal.backends.ascend.simulator.constraints import A2, A3, A5, P310, Constraint
from hal.backends.ascend.simulator.rules._calls import (
    ALL,
    FUSED,
    PAGE,
    PROMPT,
    SINKING,
    V2_PAGE,
    head_dim,
    key_rows,
    one,
    packed,
    query_dims,
    single,
)
from hal.backends.ascend.simulator.rules._common import HALVES, absent, contiguous, dtypes, one_dtype, taking

_TRIANGLE = 2048
_fused = partial(Constraint, FUSED, page=PAGE, enforced_by="document")
_any = partial(Constraint, ALL, page=PAGE, enforced_by="document")
_masked = partial(Constraint, (*FUSED, PROMPT), page=PAGE, enforced_by="document")
_sinking = partial(Constraint, SINKING, page=V2_PAGE, enforced_by="document")


def _groups(num_heads: int, num_key_value_heads: int) -> str | None:
    keys = num_key_value_heads or num_heads
    if num_heads % keys == 0 and num_heads // keys <= 64:
        return None
    return f"{num_heads} heads over {keys}"


def _heads_of_shape(query: Tensor, input_layout: str, num_heads: int) -> str | None:
    given = input_layout.partition("_")[0]
    if given == "BSH":
        return None if query.shape[-1] % num_heads == 0 else f"{num_heads} heads in {query.shape[-1]}"
    axis = {"BSND": 2, "BNSD": 1, "TND": 1, "NTD": 0}.get(given)
    if axis is None or query.shape[axis] == num_heads:
        return None
    return f"{num_heads} for queries {tuple(query.shape)} as {given}"


def _key_heads_of_shape(
    key: list[Tensor], input_layout: str, num_heads: int, num_key_value_heads: int, block_table: Tensor | None
) -> str | None:
    if block_table is not None:
        return None
    return _heads_of_shape(one(key), input_layout, num_key_value_heads or num_heads)


def _aligned(query: Tensor, input_layout: str, num_heads: int) -> str | None:
    dim = head_dim(query, input_layout, num_heads)
    return None if dim % 16 == 0 and dim <= 512 else f"{dim}"


def _packed_dims(query: Tensor, value: list[Tensor], input_layout: str, block_table: Tensor | None) -> str | None:
    if not packed(input_layout):
        return None
    query_dim, value_dim = query.shape[-1], one(value).shape[-1]
    if block_table is not None:
        return None if query_dim in (128, 192) else f"{query_dim}"
    fits = (query_dim, value_dim) in ((128, 128), (192, 128), (192, 192))
    return None if fits else f"{query_dim} and {value_dim}"


def _same_keys(key: list[Tensor], value: list[Tensor], input_layout: str) -> str | None:
    k, v = one(key).shape, one(value).shape
    same = k[:-1] == v[:-1] if packed(input_layout) else k == v
    return None if same else f"{tuple(k)} and {tuple(v)}"


def _mode(query: Tensor, input_layout: str, num_heads: int, sparse_mode: int) -> str | None:
    return None if sparse_mode in range(5) or single(query, input_layout, num_heads) else f"{sparse_mode}"


def _triangle(
    query: Tensor, input_layout: str, num_heads: int, sparse_mode: int, atten_mask: Tensor | None
) -> str | None:
    if sparse_mode not in (2, 3, 4) or single(query, input_layout, num_heads):
        return None
    shape = None if atten_mask is None else tuple(atten_mask.shape)
    whole = (_TRIANGLE, _TRIANGLE)
    return None if shape in (whole, (1, *whole), (1, 1, *whole)) else f"{shape}"


def _all_mask(
    query: Tensor, input_layout: str, num_heads: int, sparse_mode: int, atten_mask: Tensor | None
) -> str | None:
    if sparse_mode != 1 or atten_mask is not None or single(query, input_layout, num_heads):
        return None
    return "none"


def _whole_mask(
    query: Tensor,
    key: list[Tensor],
    input_layout: str,
    num_heads: int,
    num_key_value_heads: int,
    sparse_mode: int,
    atten_mask: Tensor | None,
    block_table: Tensor | None,
) -> str | None:
    if atten_mask is None or packed(input_layout) or sparse_mode not in (0, 1) or block_table is not None:
        return None
    batch, _, queries, _ = query_dims(query, input_layout, num_heads)
    if queries == 1:
        return None
    keys = key_rows(key, input_layout, num_heads, num_key_value_heads)
    leading = {2: ((),), 3: ((1,), (batch,)), 4: ((1, 1), (batch, 1))}.get(atten_mask.dim(), ())
    fits = tuple(atten_mask.shape[:-2]) in leading
    fits = fits and atten_mask.shape[-2] >= queries and atten_mask.shape[-1] >= keys
    return None if fits else f"{tuple(atten_mask.shape)} for {queries} queries and {keys} keys"


def _single_mask(
    query: Tensor,
    key: list[Tensor],
    input_layout: str,
    num_heads: int,
    num_key_value_heads: int,
    atten_mask: Tensor | None,
    block_table: Tensor | None,
    block_size: int,
) -> str | None:
    if atten_mask is None or not single(query, input_layout, num_heads):
        return None
    batch = query.shape[0]
    if block_table is not None:
        keys = block_table.shape[1] * block_size
    else:
        keys = key_rows(key, input_layout, num_heads, num_key_value_heads)
    leading = tuple(atten_mask.shape[:-1])
    fits = leading in ((batch,), (batch, 1), (1, 1), (batch, 1, 1), (1, 1, 1)) and atten_mask.shape[-1] >= keys
    return None if fits else f"{tuple(atten_mask.shape)} for {batch} sequences and {keys} keys"


def _precise(query: Tensor, input_layout: str, num_heads: int, inner_precise: int) -> str | None:
    allowed = (0, 1) if single(query, input_layout, num_heads) else (0, 1, 2, 3)
    return None if inner_precise in allowed else f"{inner_precise}"


def _sink_layout(input_layout: str, learnable_sink: Tensor | None) -> str | None:
    return None if learnable_sink is None or input_layout in ("TND", "NTD_TND") else input_layout


def _sink_shape(learnable_sink: Tensor | None, num_heads: int) -> str | None:
    if learnable_sink is None or (tuple(learnable_sink.shape) == (num_heads,)):
        return None
    return f"{tuple(learnable_sink.shape)} for {num_heads} heads"


def _sink_width(learnable_sink: Tensor | None, value: list[Tensor], block_table: Tensor | None) -> str | None:
    if learnable_sink is None or block_table is not None:
        return None
    return None if one(value).shape[-1] <= 128 else f"{one(value).shape[-1]}"


def _both_out(query: Tensor, input_layout: str, num_heads: int) -> str | None:
    return "a single query" if input_layout == "BNSD_BSND" and query.shape[2] == 1 else None


def _layouts_950(input_layout: str) -> str | None:
    return None if input_layout in ("BSH", "BSND", "BNSD", "BNSD_BSND", "TND") else input_layout


ROWS = (
    absent(FUSED, PAGE),
    _fused(rule="query, key, value and mask are contiguous", check=contiguous("query", "key", "value", "atten_mask")),
    _any(rule="the query is float16 or bfloat16", check=dtypes("query", allowed=HALVES)),
    _any(rule="query, key and value have one dtype", check=one_dtype("query", "key", "value")),
    _any(rule="key and value have one shape, packed ones but for the head dim", check=_same_keys),
    _any(
        rule="there are at most 256 query heads", check=lambda num_heads: None if num_heads <= 256 else f"{num_heads}"
    ),
    _any(rule="num_heads is a multiple of num_key_value_heads, at most 64 times as many", check=_groups),
    _any(rule="num_heads, whose default is 1, is the number of heads of the query's shape", check=_heads_of_shape),
    _fused(rule="num_key_value_heads is the number of heads of the key's shape", check=_key_heads_of_shape),
    _any(rule="the head dim is a multiple of 16 and at most 512", check=_aligned, socs=A2 | A3 | P310),
    _fused(
        rule="the head dim is at most 512",
        check=taking(
            ("query", "input_layout", "num_heads"),
            lambda query, layout, heads: None if head_dim(query, layout, heads) <= 512 else f"{query.shape[-1]}",
        ),
        socs=A5,
    ),
    Constraint(
        operator=FUSED,
        rule="packed, the head dim is 128, or 192 with values of 128 or 192",
        page=PAGE,
        enforced_by="field",
        check=_packed_dims,
        socs=A2 | A3,
    ),
    _masked(rule="sparse_mode is from 0 to 4", check=_mode),
    _masked(
        rule="with sparse_mode 2, 3 and 4 atten_mask is a triangle (2048, 2048), of one or two more dimensions of 1",
        check=_triangle,
    ),
    _masked(rule="with sparse_mode 1 there is an atten_mask", check=_all_mask),
    _fused(rule="a whole atten_mask is (S, L), (1 or B, S, L) or (1 or B, 1, S, L) at least", check=_whole_mask),
    _fused(
        rule="of a single query, atten_mask is (B, L), (B, 1, L) or (B, 1, 1, L), L no less than all keys or blocks",
        check=_single_mask,
    ),
    _any(
        rule="atten_mask is bool, int8 or uint8",
        check=dtypes("atten_mask", allowed=(torch.bool, torch.int8, torch.uint8)),
    ),
    _fused(rule="inner_precise is from 0 to 3, of a single query 0 or 1", check=_precise),
    _sinking(rule="learnable_sink is bfloat16", check=dtypes("learnable_sink", allowed=(torch.bfloat16,))),
    _sinking(rule="learnable_sink has one entry a query head", check=_sink_shape),
    _sinking(rule="learnable_sink comes with the layouts TND and NTD_TND", check=_sink_layout),
    _sinking(rule="with learnable_sink the values' head dim is at most 128", check=_sink_width),
    _fused(rule="layout BNSD_BSND has more than one query", check=_both_out),
    _fused(rule="the layout is BSH, BSND, BNSD, BNSD_BSND or TND", check=_layouts_950, socs=A5),
)
