"""Attention for inference: fused infer attention (V2 to V5), prompt and incremental flash attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hal.backends.ascend.simulator import numerics
from hal.backends.ascend.simulator.aclnn._attention import (
    Attended,
    Sparse,
    attend,
    by_sequence,
    heads_first,
    hidden,
    mask_of,
)
from hal.backends.ascend.simulator.aclnn._versions import refuse, version

__all__: list[str] = []

_MENDED = 2  # the bit of inner_precise that asks for rows without any key to be mended


def _key_rows(cache: Tensor, table: Tensor, length: int, heads: int) -> Tensor:
    """A sequence's keys (K, L, D) from a paged cache of blocks (rows, K·D) or (K, rows, D) or NZ (K, D/c, rows, c)."""
    if cache.dim() == 3:
        blocks = cache[table[: -(-length // cache.shape[1])]]
        found = blocks.reshape(-1, heads, blocks.shape[2] // heads).transpose(0, 1)
    elif cache.dim() == 4:
        blocks = cache[table[: -(-length // cache.shape[2])]]
        found = blocks.transpose(0, 1).flatten(1, 2)
    else:
        blocks = cache[table[: -(-length // cache.shape[3])]]
        found = blocks.permute(1, 0, 3, 2, 4).flatten(3).flatten(1, 2)
    return found[:, :length]


def _given(sizes: Sequence[int] | None, batch: int, whole: int) -> list[int]:
    """A length for each sequence: none given means whole ones, one given is everybody's."""
    if not sizes:
        return [whole] * batch
    return [sizes[0]] * batch if len(sizes) == 1 else list(sizes[:batch])


def _keys(
    t: Tensor, layout: str, heads: int, table: Tensor | None, sizes: Sequence[int] | None, batch: int
) -> list[Tensor]:
    """The keys, or values, of each sequence (K, L, D)."""
    if table is not None:
        rows = _given(sizes, batch, 0)
        return [_key_rows(t, table[i].long(), rows[i], heads) for i in range(batch)]
    if layout in ("TND", "NTD"):
        return by_sequence(t, sizes or [], layout)
    whole = heads_first(t, layout, heads)
    return [whole[i, :, :length] for i, length in enumerate(_given(sizes, batch, whole.shape[2]))]


@dataclass(frozen=True)
class _Sequences:
    """The parts of each sequence: its queries (N, S, D), and where its results go."""

    queries: list[Tensor]
    outs: list[Tensor]
    lses: list[Tensor]
    single: bool  # one query each, in a layout that has its own decode kernel


def _sequences(
    query: Tensor, input_layout: str, heads: int, sizes: Sequence[int] | None, out: Tensor, lse: Tensor | None
) -> _Sequences:
    given, _, wanted = input_layout.partition("_")
    wanted = wanted or given
    if given in ("TND", "NTD"):
        running = sizes or []
        queries, outs = by_sequence(query, running, given), by_sequence(out, running, wanted)
        return _Sequences(queries, outs, by_sequence(lse, running) if lse is not None else [], single=False)
    whole, place = heads_first(query, given, heads), heads_first(out, wanted, heads)
    longest = whole.shape[2]
    counts = _given(None if longest == 1 else sizes, whole.shape[0], longest)
    place.zero_()
    if lse is not None:
        lse.fill_(torch.inf)
    return _Sequences(
        [whole[i, :, :count] for i, count in enumerate(counts)],
        [place[i, :, :count] for i, count in enumerate(counts)],
        [lse[i, :, :count] for i, count in enumerate(counts)] if lse is not None else [],
        single=longest == 1,
    )


def _infer(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_out: Tensor,
    *,
    softmax_lse: Tensor | None,
    pse_shift: Tensor | None,
    atten_mask: Tensor | None,
    actual_seq_lengths: Sequence[int] | None,
    actual_seq_lengths_kv: Sequence[int] | None,
    block_table: Tensor | None,
    sink: Tensor | None,
    num_heads: int,
    num_key_value_heads: int,
    scale_value: float,
    sparse: Sparse,
    input_layout: str,
    inner_precise: int,
) -> None:
    parts = _sequences(query, input_layout, num_heads, actual_seq_lengths, attention_out, softmax_lse)
    if parts.single:  # the decode kernel knows neither sparse modes nor tokens before and behind
        sparse = Sparse(1, 0, 0)
        if atten_mask is not None and atten_mask.dim() == 2:
            atten_mask = atten_mask.unsqueeze(1)
    layout, heads = input_layout.partition("_")[0], num_key_value_heads or num_heads
    batch = len(parts.queries)
    keys = _keys(key, layout, heads, block_table, actual_seq_lengths_kv, batch)
    values = _keys(value, layout, heads, block_table, actual_seq_lengths_kv, batch)
    for i, (q, k, v) in enumerate(zip(parts.queries, keys, values, strict=True)):
        mask = mask_of(atten_mask, i, sparse.mode in (2, 3, 4))
        bias = None
        if pse_shift is not None:
            bias = pse_shift[i if pse_shift.shape[0] > 1 else 0][:, : q.shape[1], : k.shape[1]]
        unseen = hidden(sparse, mask, q.shape[1], k.shape[1])
        mend = bool(inner_precise & _MENDED) or (sparse.mode == 3 and q.shape[1] > k.shape[1])
        found = attend(q, k, v, scale_value, unseen, bias, sink, mend)
        _keep(found, parts.outs[i], parts.lses[i] if parts.lses else None)


def _keep(found: Attended, out: Tensor, lse: Tensor | None) -> None:
    numerics.store(out, found.out)
    if lse is not None:
        lse.copy_(found.lse.unsqueeze(-1))


def _fused(
    *,
    query: Tensor,
    key: list[Tensor],
    value: list[Tensor],
    pse_shift: Tensor | None,
    atten_mask: Tensor | None,
    actual_seq_lengths: list[int] | None,
    actual_seq_lengths_kv: list[int] | None,
    block_table: Tensor | None,
    num_heads: int,
    scale_value: float,
    pre_tokens: int,
    next_tokens: int,
    input_layout: str,
    num_key_value_heads: int,
    sparse_mode: int,
    inner_precise: int,
    block_size: int,
    softmax_lse_flag: bool,
    attention_out: Tensor,
    softmax_lse: Tensor | None,
    learnable_sink: Tensor | None = None,
    antiquant_mode: int,
    key_antiquant_mode: int,
    value_antiquant_mode: int,
    query_quant_mode: int = 0,
    pse_type: int = 0,
    **rest: Any,
) -> None:
    if len(key) != 1:
        raise NotImplementedError("lists of key tensors are not simulated; pass one tensor")
    refuse(rest)
    _infer(
        query,
        key[0],
        value[0],
        attention_out,
        softmax_lse=softmax_lse if softmax_lse_flag else None,
        pse_shift=pse_shift,
        atten_mask=atten_mask,
        actual_seq_lengths=actual_seq_lengths,
        actual_seq_lengths_kv=actual_seq_lengths_kv,
        block_table=block_table,
        sink=learnable_sink,
        num_heads=num_heads,
        num_key_value_heads=num_key_value_heads,
        scale_value=scale_value,
        sparse=Sparse(sparse_mode, pre_tokens, next_tokens),
        input_layout=input_layout,
        inner_precise=inner_precise,
    )


def _incremental(
    *,
    query: Tensor,
    key: list[Tensor],
    value: list[Tensor],
    pse_shift: Tensor | None,
    atten_mask: Tensor | None,
    actual_seq_lengths: list[int] | None,
    block_table: Tensor | None,
    num_heads: int,
    scale_value: float,
    input_layout: str,
    num_key_value_heads: int,
    block_size: int,
    inner_precise: int,
    attention_out: Tensor,
    **rest: Any,
) -> None:
    refuse(rest)
    _infer(
        query,
        key[0],
        value[0],
        attention_out,
        softmax_lse=None,
        pse_shift=pse_shift,
        atten_mask=atten_mask,
        actual_seq_lengths=None,
        actual_seq_lengths_kv=actual_seq_lengths,
        block_table=block_table,
        sink=None,
        num_heads=num_heads,
        num_key_value_heads=num_key_value_heads,
        scale_value=scale_value,
        sparse=Sparse(1, 0, 0),
        input_layout=input_layout,
        inner_precise=inner_precise,
    )


def _prompt(
    *,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pse_shift: Tensor | None,
    atten_mask: Tensor | None,
    actual_seq_lengths: list[int] | None,
    actual_seq_lengths_kv: list[int] | None,
    num_heads: int,
    scale_value: float,
    pre_tokens: int,
    next_tokens: int,
    input_layout: str,
    num_key_value_heads: int,
    sparse_mode: int,
    inner_precise: int,
    attention_out: Tensor,
    **rest: Any,
) -> None:
    refuse(rest)
    _infer(
        query,
        key,
        value,
        attention_out,
        softmax_lse=None,
        pse_shift=pse_shift,
        atten_mask=atten_mask,
        actual_seq_lengths=actual_seq_lengths,
        actual_seq_lengths_kv=actual_seq_lengths_kv,
        block_table=None,
        sink=None,
        num_heads=num_heads,
        num_key_value_heads=num_key_value_heads,
        scale_value=scale_value,
        sparse=Sparse(sparse_mode, pre_tokens, next_tokens),
        input_layout=input_layout,
        inner_precise=inner_precise,
    )


_FUSED_TENSORS = """
    t:query l:key l:value t:pse_shift t:atten_mask a:actual_seq_lengths a:actual_seq_lengths_kv t:deq_scale1
    t:quant_scale1 t:deq_scale2 t:quant_scale2 t:quant_offset2 t:antiquant_scale t:antiquant_offset t:block_table
    t:query_padding_size t:kv_padding_size t:key_antiquant_scale t:key_antiquant_offset t:value_antiquant_scale
    t:value_antiquant_offset t:key_shared_prefix t:value_shared_prefix a:actual_shared_prefix_len """
_ROPE = "t:query_rope t:key_rope t:key_rope_antiquant_scale "
_SINK = "t:dequant_scale_query t:learnable_sink "
_FUSED_NUMBERS = """
    i:num_heads d:scale_value i:pre_tokens i:next_tokens s:input_layout i:num_key_value_heads i:sparse_mode
    i:inner_precise i:block_size i:antiquant_mode b:softmax_lse_flag i:key_antiquant_mode i:value_antiquant_mode """
_RESULTS = "t:attention_out t:softmax_lse"

version("aclnnFusedInferAttentionScoreV2", _FUSED_TENSORS + _FUSED_NUMBERS + _RESULTS, _fused)
version("aclnnFusedInferAttentionScoreV3", _FUSED_TENSORS + _ROPE + _FUSED_NUMBERS + _RESULTS, _fused)
version(
    "aclnnFusedInferAttentionScoreV4",
    _FUSED_TENSORS + _ROPE + _SINK + _FUSED_NUMBERS + "i:query_quant_mode " + _RESULTS,
    _fused,
)
version(
    "aclnnFusedInferAttentionScoreV5",
    _FUSED_TENSORS
    + _ROPE
    + _SINK
    + "a:q_start_idx a:kv_start_idx "
    + _FUSED_NUMBERS
    + "i:query_quant_mode i:pse_type "
    + _RESULTS,
    _fused,
)
version(
    "aclnnIncreFlashAttentionV4",
    """t:query l:key l:value t:pse_shift t:atten_mask a:actual_seq_lengths t:dequant_scale1 t:quant_scale1
    t:dequant_scale2 t:quant_scale2 t:quant_offset2 t:antiquant_scale t:antiquant_offset t:block_table
    t:kv_padding_size i:num_heads d:scale_value s:input_layout i:num_key_value_heads i:block_size i:inner_precise
    t:attention_out""",
    _incremental,
)
version(
    "aclnnPromptFlashAttentionV3",
    """t:query t:key t:value t:pse_shift t:atten_mask a:actual_seq_lengths a:actual_seq_lengths_kv t:deq_scale1
    t:quant_scale1 t:deq_scale2 t:quant_scale2 t:quant_offset2 i:num_heads d:scale_value i:pre_tokens i:next_tokens
    s:input_layout i:num_key_value_heads i:sparse_mode i:inner_precise t:attention_out""",
    _prompt,
)
