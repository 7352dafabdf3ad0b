"""Attention for training: flash attention and its gradient, dense (ScoreV*) and packed (VarLen*, Unpadding*)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from hal.backends.ascend.simulator import numerics
from hal.backends.ascend.simulator.aclnn._attention import (
    Sparse,
    attend,
    backward,
    by_sequence,
    heads_first,
    hidden,
    lengths,
    mask_of,
)
from hal.backends.ascend.simulator.aclnn._versions import refuse, version

__all__: list[str] = []

_COPIES = 8  # softmax's maximum and sum stand in the result eight times: 32 bytes a row
_MEND = 2  # inner_precise: rows that see nothing give 0


def _parts(t: Tensor, layout: str, heads: int, running: Sequence[int] | None) -> list[Tensor]:
    """Each sequence of a tensor (N, S, D), as views."""
    return by_sequence(t, running or []) if layout == "TND" else list(heads_first(t, layout, heads))


def _statistics(t: Tensor, layout: str, running: Sequence[int] | None, softmax_layout: str | None) -> list[Tensor]:
    """Each sequence's maxima or sums (N, S, 8), as views.

    Packed, the result has the shape (T, N, 8), but unless asked for the input's layout each sequence lies in it as
    (N, S, 8), one after the other.
    """
    if layout != "TND":
        return list(t)
    if softmax_layout == "same_as_input":
        return by_sequence(t, running or [])
    counts, heads = lengths(running or []), t.shape[1]
    flat = t.view(-1, _COPIES)
    starts = itertools.accumulate(counts, initial=0)
    return [
        flat[start * heads : (start + count) * heads].view(heads, count, _COPIES)
        for start, count in zip(starts, counts, strict=False)
    ]


def _sparse(mode: int, before: int, behind: int, prefix: Sequence[int], sequence: int, sequences: int) -> Sparse:
    """The mode of one sequence: 7 and 8 cut a causal batch up, whose last or first sequence is a band."""
    if mode == 7:
        mode = 4 if sequence == sequences - 1 else 3
    if mode == 8:
        mode = 4 if sequence == 0 else 2
    return Sparse(mode, before, behind, prefix)


class _Call:
    """What forward and backward read alike: the sequences, and each one's mask and bias."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        self.layout: str = arguments["input_layout"].upper()
        self.heads: int = arguments["head_num"]
        self.query_sums: Sequence[int] | None = arguments.get("actual_seq_qlen")
        self.key_sums: Sequence[int] | None = arguments.get("actual_seq_kvlen")
        self._mask: Tensor | None = arguments["atten_mask"]
        self._bias: Tensor | None = arguments["pse"]
        self._mode = int(arguments["sparse_mode"])
        self._band = int(arguments["pre_tokens"]), int(arguments["next_tokens"])
        self._prefix = arguments["prefix"] or ()
        query, key = arguments["query"], arguments["key"]
        self.queries = self.by_query(query)
        width = self.queries[0].shape[-1] if self.queries else 1
        self.key_heads = self.heads
        if self.layout in ("BSH", "SBH"):
            self.key_heads = key.shape[-1] // width
        self.keys = self.by_key(key)
        self.values = self.by_key(arguments["value"])
        if arguments["keep_prob"] != 1:
            raise NotImplementedError("dropout (keep_prob below 1) is not simulated")
        refuse({"padding_mask": arguments["padding_mask"], "drop_mask": arguments["drop_mask"]})
        if arguments.get("pse_type", 1) > 1 and self._bias is not None:
            raise NotImplementedError("pse_type 2 and 3 (biases made from slopes) are not simulated")

    def by_query(self, t: Tensor) -> list[Tensor]:
        return _parts(t, self.layout, self.heads, self.query_sums)

    def by_key(self, t: Tensor) -> list[Tensor]:
        return _parts(t, self.layout, self.key_heads, self.key_sums)

    def sparse(self, sequence: int) -> Sparse:
        return _sparse(self._mode, *self._band, self._prefix, sequence, len(self.queries))

    def unseen(self, sequence: int) -> Tensor | None:
        sparse = self.sparse(sequence)
        mask = mask_of(self._mask, sequence, sparse.mode in (2, 3, 4, 6))
        return hidden(sparse, mask, self.queries[sequence].shape[1], self.keys[sequence].shape[1], sequence)

    def bias(self, sequence: int, of: Tensor | None = None) -> Tensor | None:
        """The bias (N, S, L) of a sequence, as a view of the whole."""
        whole = self._bias if of is None else of
        if whole is None or self._bias is None:
            return None
        part = whole[sequence if whole.shape[0] > 1 else 0]
        return part[:, : self.queries[sequence].shape[1], : self.keys[sequence].shape[1]]


def _forward(
    *,
    scale_value: float,
    inner_precise: int,
    softmax_max: Tensor,
    softmax_sum: Tensor,
    attention_out: Tensor,
    sink: Tensor | None = None,
    softmax_layout: str | None = None,
    **arguments: Any,
) -> None:
    call = _Call(arguments)
    refuse({name: arguments.get(name) for name in ("query_rope", "key_rope", "d_scale_q", "d_scale_k", "d_scale_v")})
    outs = call.by_query(attention_out)
    maxima = _statistics(softmax_max, call.layout, call.query_sums, softmax_layout)
    totals = _statistics(softmax_sum, call.layout, call.query_sums, softmax_layout)
    for i, (query, key, value) in enumerate(zip(call.queries, call.keys, call.values, strict=True)):
        mend = inner_precise == _MEND or (call.sparse(i).mode == 3 and query.shape[1] > key.shape[1])
        found = attend(query, key, value, scale_value, call.unseen(i), call.bias(i), sink, mend)
        numerics.store(outs[i], found.out)
        maxima[i].copy_(found.maximum.unsqueeze(-1).expand(maxima[i].shape))
        totals[i].copy_(found.total.unsqueeze(-1).expand(totals[i].shape))


def _backward(
    *,
    dy: Tensor,
    scale_value: float,
    softmax_max: Tensor,
    softmax_sum: Tensor,
    attention_in: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    dpse: Tensor | None,
    sink: Tensor | None = None,
    dsink: Tensor | None = None,
    softmax_layout: str | None = None,
    **arguments: Any,
) -> None:
    call = _Call(arguments)
    refuse({name: arguments.get(name) for name in ("query_rope", "key_rope", "d_scale_q", "d_scale_k", "d_scale_v")})
    maxima = _statistics(softmax_max, call.layout, call.query_sums, softmax_layout)
    totals = _statistics(softmax_sum, call.layout, call.query_sums, softmax_layout)
    upstreams, outs = call.by_query(dy), call.by_query(attention_in)
    to_queries, to_keys, to_values = call.by_query(dq), call.by_key(dk), call.by_key(dv)
    of_sink = None
    if dpse is not None and arguments["pse"] is not None:
        dpse.zero_()
    for i, (query, key, value) in enumerate(zip(call.queries, call.keys, call.values, strict=True)):
        if not (query.shape[1] and key.shape[1]):
            # No work, so nothing is written; what is found there must not look like a gradient.
            for out in (to_queries[i], to_keys[i], to_values[i]):
                out.fill_(math.nan)
            continue
        found = backward(
            query,
            key,
            value,
            upstreams[i],
            outs[i],
            numerics.wide(maxima[i][..., 0]),
            numerics.wide(totals[i][..., 0]),
            scale_value,
            call.unseen(i),
            call.bias(i),
            sink,
        )
        for out, result in zip((to_queries[i], to_keys[i], to_values[i]), found[:3], strict=True):
            numerics.store(out, result)
        if dpse is not None and (place := call.bias(i, dpse)) is not None:
            place += found[3].to(place.dtype)
        if found[4] is not None:
            of_sink = found[4] if of_sink is None else of_sink + found[4]
    if dsink is not None and of_sink is not None:
        numerics.store(dsink, of_sink)


_IN = "t:query t:key t:value "
_ROPED = "t:query t:query_rope t:key t:key_rope t:value "
_MASKS = "t:pse t:drop_mask t:padding_mask t:atten_mask "
_SINK = "t:sink "
_SUMS = "a:actual_seq_qlen a:actual_seq_kvlen "
_STARTS = "a:q_start_idx a:kv_start_idx "
_NUMBERS = """
    d:scale_value d:keep_prob i:pre_tokens i:next_tokens i:head_num s:input_layout i:inner_precise i:sparse_mode """
_PREFIX, _PSE, _LAYOUT = "a:prefix ", "i:pse_type ", "s:softmax_layout "
_OUT = "t:softmax_max t:softmax_sum t:softmax_out t:attention_out"
_STORED = "t:softmax_max t:softmax_sum t:softmax_in t:attention_in "
_GRADS = "t:dq t:dk t:dv t:dpse "
_ROPED_GRADS = "t:dq t:dq_rope t:dk t:dk_rope t:dv t:dpse "
_DSINK = "t:dsink"
_SCALES = "t:d_scale_q t:d_scale_k t:d_scale_v "

for _name, _arguments in {
    "aclnnFlashAttentionScore": _IN + _MASKS + _PREFIX + _NUMBERS + _OUT,
    "aclnnFlashAttentionScoreV2": _IN + _MASKS + _PREFIX + _STARTS + _NUMBERS + _PSE + _OUT,
    "aclnnFlashAttentionScoreV3": _IN + _MASKS + _SINK + _PREFIX + _STARTS + _NUMBERS + _PSE + _OUT,
    "aclnnFlashAttentionScoreV4": _IN
    + _MASKS
    + "t:query_rope t:key_rope "
    + _SCALES
    + _SINK
    + _PREFIX
    + _SUMS
    + _STARTS
    + _NUMBERS
    + "i:out_dtype "
    + _PSE
    + _LAYOUT
    + "i:seed i:offset "
    + _OUT,
    "aclnnFlashAttentionVarLenScore": _IN + _MASKS + _PREFIX + _SUMS + _NUMBERS + _OUT,
    "aclnnFlashAttentionVarLenScoreV2": _IN + _MASKS + _PREFIX + _SUMS + _STARTS + _NUMBERS + _PSE + _OUT,
    "aclnnFlashAttentionVarLenScoreV3": _ROPED + _MASKS + _PREFIX + _SUMS + _STARTS + _NUMBERS + _PSE + _OUT,
    "aclnnFlashAttentionVarLenScoreV4": _IN + _MASKS + _PREFIX + _SUMS + _NUMBERS + _LAYOUT + _OUT,
    "aclnnFlashAttentionVarLenScoreV5": _ROPED
    + _MASKS
    + _SINK
    + _PREFIX
    + _SUMS
    + _STARTS
    + _NUMBERS
    + _PSE
    + _LAYOUT
    + _OUT,
}.items():
    version(_name, _arguments, _forward)

_GRAD_IN, _ROPED_GRAD_IN = _IN + "t:dy " + _MASKS + _STORED, _ROPED + "t:dy " + _MASKS + _STORED
for _name, _arguments in {
    "aclnnFlashAttentionScoreGrad": _GRAD_IN + _PREFIX + _NUMBERS + _GRADS,
    "aclnnFlashAttentionScoreGradV2": _GRAD_IN + _PREFIX + _STARTS + _NUMBERS + _PSE + _GRADS,
    "aclnnFlashAttentionScoreGradV3": _GRAD_IN + _SINK + _PREFIX + _STARTS + _NUMBERS + _PSE + _GRADS + _DSINK,
    "aclnnFlashAttentionScoreGradV4": _GRAD_IN
    + _SINK
    + "t:query_rope t:key_rope "
    + _SCALES
    + "t:d_scale_dy t:d_scale_o "
    + _PREFIX
    + _SUMS
    + _STARTS
    + "d:scale_value d:keep_prob i:pre_tokens i:next_tokens i:head_num s:input_layout s:softmax_layout "
    + "i:inner_precise i:sparse_mode i:pse_type i:seed i:offset i:out_dtype "
    + "t:dq t:dk t:dv t:dq_rope t:dk_rope t:dpse t:dsink",
    "aclnnFlashAttentionUnpaddingScoreGrad": _GRAD_IN + _PREFIX + _SUMS + _NUMBERS + _GRADS,
    "aclnnFlashAttentionUnpaddingScoreGradV2": _GRAD_IN + _PREFIX + _SUMS + _STARTS + _NUMBERS + _PSE + _GRADS,
    "aclnnFlashAttentionUnpaddingScoreGradV3": _ROPED_GRAD_IN
    + _PREFIX
    + _SUMS
    + _STARTS
    + _NUMBERS
    + _PSE
    + _ROPED_GRADS,
    "aclnnFlashAttentionUnpaddingScoreGradV4": _GRAD_IN + _PREFIX + _SUMS + _NUMBERS + _GRADS + _LAYOUT,
    "aclnnFlashAttentionUnpaddingScoreGradV5": _ROPED_GRAD_IN
    + _SINK
    + _PREFIX
    + _SUMS
    + _STARTS
    + _NUMBERS
    + _PSE
    + _LAYOUT
    + _ROPED_GRADS
    + _DSINK,
}.items():
    version(_name, _arguments, _backward)
