"""Every documented constraint refuses a wrong call and lets the right one beside it through (simulated)."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch_npu

from hal.backends.ascend import simulator
from hal.backends.ascend.simulator import constraints
from hal.backends.ascend.simulator.socs import ALIASES, SOCS

HALF, BF16, FP32, FP64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
I32, I64 = torch.int32, torch.int64
HOME, CANN = "910B3", "8.5.0"


@dataclass(frozen=True)
class Case:
    """A call that keeps all rules, and what to change so that it breaks one; `says`: torch_npu's own words."""

    rule: str
    call: Callable[..., Any]
    right: dict[str, Any]
    wrong: dict[str, Any]
    soc: str = HOME
    cann: str = CANN
    says: str = ""
    here: bool = field(init=False)

    def __post_init__(self) -> None:
        now = simulator.current()
        object.__setattr__(self, "here", SOCS[ALIASES.get(self.soc, self.soc)] == now.soc and self.cann == now.cann)

    def __str__(self) -> str:
        return re.sub(r"\W+", "-", self.rule)[:70]


def zeros(*shape: int, dtype: torch.dtype = HALF) -> Callable[[], torch.Tensor]:
    return lambda: torch.zeros(shape, dtype=dtype).npu()


def turned(*shape: int, dtype: torch.dtype = HALF) -> Callable[[], torch.Tensor]:
    """Of this shape, with the last two dimensions in the other order in memory."""
    return lambda: torch.zeros(*shape[:-2], shape[-1], shape[-2], dtype=dtype).npu().transpose(-1, -2)


def values(content: Any, dtype: torch.dtype = I32) -> Callable[[], torch.Tensor]:
    return lambda: torch.tensor(content, dtype=dtype).npu()


def triangle(*leading: int, side: int = 2048) -> Callable[[], torch.Tensor]:
    return lambda: torch.ones(*leading, side, side, dtype=torch.bool).triu(1).npu()


def run(call: Callable[..., Any], arguments: dict[str, Any]) -> None:
    made = {name: value() if callable(value) else value for name, value in arguments.items()}
    call(**made)
    torch.npu.synchronize()


def positional(function: Callable[..., Any], *names: str) -> Callable[..., Any]:
    """The first parameters are named differently in schema and document: give them by place."""
    return lambda **given: function(*[given.pop(name) for name in names], **given)


rms = positional(torch_npu.npu_rms_norm, "x", "gamma")
add_rms = positional(torch_npu.npu_add_rms_norm, "x1", "x2", "gamma")
gemma = positional(torch_npu.npu_gemma_rms_norm, "x", "gamma")
layer = positional(F.layer_norm, "x", "shape")
swiglu = positional(torch_npu.npu_swiglu, "x")
geglu = positional(torch_npu.npu_geglu, "x")
gelu_mul = positional(torch_npu.npu_gelu_mul, "x")
softmax = positional(torch.softmax, "x", "dim")
rotary = positional(torch_npu.npu_rotary_mul, "x", "cos", "sin", "mode")
apply_rotary = positional(torch_npu.npu_apply_rotary_pos_emb, "query", "key", "cos", "sin")
scatter = positional(torch_npu.npu_scatter_pa_kv_cache, "key", "value", "key_cache", "value_cache", "slots")
gather = positional(torch_npu.npu_gather_pa_kv_cache, "key_cache", "value_cache", "tables", "lengths", "key", "value")
top = positional(torch_npu.npu_top_k_top_p, "logits", "p", "k")
loss = positional(torch_npu.npu_cross_entropy_loss, "x", "target")
fused = positional(torch_npu.npu_fused_infer_attention_score, "query", "key", "value")
fused_v2 = positional(torch_npu.npu_fused_infer_attention_score_v2, "query", "key", "value")
prompt = positional(torch_npu.npu_prompt_flash_attention, "query", "key", "value")
step = positional(torch_npu.npu_incre_flash_attention, "query", "key", "value")
train = positional(torch_npu.npu_fusion_attention, "query", "key", "value", "heads", "layout")
train_v3 = positional(torch_npu.npu_fusion_attention_v3, "query", "key", "value", "heads", "layout")

RMS = {"x": zeros(2, 64), "gamma": zeros(64)}
ADD = {"x1": zeros(2, 64), "x2": zeros(2, 64), "gamma": zeros(64)}
WIDE = {name: zeros(*shape, dtype=FP64) for name, shape in (("x", (2, 64)), ("gamma", (64,)))}
ROTARY = {"x": zeros(2, 7, 4, 64), "cos": zeros(1, 7, 1, 64), "sin": zeros(1, 7, 1, 64), "mode": "half"}
ODD = {"x": zeros(2, 7, 4, 896), "cos": zeros(1, 7, 1, 896), "sin": zeros(1, 7, 1, 896)}
APPLY = {"query": zeros(2, 7, 4, 64), "key": zeros(2, 7, 2, 64), "cos": zeros(2, 7, 1, 64), "sin": zeros(2, 7, 1, 64)}
NARROW = {"query": zeros(2, 7, 4, 32), "key": zeros(2, 7, 2, 32), "cos": zeros(2, 7, 1, 32), "sin": zeros(2, 7, 1, 32)}
SCATTER = {
    "key": zeros(3, 2, 64),
    "value": zeros(3, 2, 64),
    "key_cache": zeros(4, 16, 2, 64),
    "value_cache": zeros(4, 16, 2, 64),
    "slots": values([5, 0, 7]),
    "cache_mode": "Norm",
}
NZ = {"key_cache": zeros(4, 8, 16, 16), "value_cache": zeros(4, 8, 16, 16), "cache_mode": "PA_NZ"}
GATHER = {
    "key_cache": zeros(4, 16, 2, 64),
    "value_cache": zeros(4, 16, 2, 64),
    "tables": values([[0, 3], [2, 1]]),
    "lengths": values([20, 5]),
    "key": zeros(25, 2, 64),
    "value": zeros(25, 2, 64),
}
SUMS = {"is_seq_lens_cumsum": True, "lengths": values([0, 20, 25])}
TOP = {"logits": zeros(3, 50, dtype=FP32), "p": zeros(3, dtype=FP32), "k": values([1, 9, 50])}
LOSS = {"x": zeros(4, 11), "target": values([0, 3, 10, 5], I64)}

DENSE = {
    "query": zeros(2, 8, 4, 64),
    "key": zeros(2, 2, 6, 64),
    "value": zeros(2, 2, 6, 64),
    "num_heads": 8,
    "num_key_value_heads": 2,
    "input_layout": "BNSD",
}
ONE = DENSE | {"query": zeros(2, 8, 1, 64)}
PAGES = {
    "key": zeros(9, 128, 128),
    "value": zeros(9, 128, 128),
    "block_table": values([[0, 8], [2, 1]]),
    "block_size": 128,
    "actual_seq_lengths_kv": [200, 5],
}
PAGED, PAGED_ONE = DENSE | PAGES, ONE | PAGES
SMALL = {"key": zeros(9, 8, 128), "value": zeros(9, 8, 128), "block_size": 8, "actual_seq_lengths_kv": [9, 5]}
SIXTEEN = {"key": zeros(9, 16, 128), "value": zeros(9, 16, 128), "block_size": 16, "actual_seq_lengths_kv": [20, 5]}
HEADED = {"key": zeros(9, 2, 128, 64), "value": zeros(9, 2, 128, 64)}
PACKED = {
    "query": zeros(9, 8, 128),
    "key": zeros(11, 2, 128),
    "value": zeros(11, 2, 128),
    "num_heads": 8,
    "num_key_value_heads": 2,
    "input_layout": "TND",
    "actual_seq_lengths": [4, 9],
    "actual_seq_lengths_kv": [5, 11],
}
D64 = {"query": zeros(9, 8, 64), "key": zeros(11, 2, 64), "value": zeros(11, 2, 64)}
PACKED_PAGES = PACKED | PAGES | {"key": zeros(9, 128, 256), "value": zeros(9, 128, 256)}
SINK = {
    "query": zeros(9, 8, 128),
    "key": zeros(11, 2, 128),
    "value": zeros(11, 2, 128),
    "num_query_heads": 8,
    "num_key_value_heads": 2,
    "input_layout": "TND",
    "actual_seq_qlen": [4, 9],
    "actual_seq_kvlen": [5, 11],
    "learnable_sink": zeros(8, dtype=BF16),
}
SINK_DENSE = {
    "query": zeros(2, 8, 4, 128),
    "key": zeros(2, 2, 6, 128),
    "value": zeros(2, 2, 6, 128),
    "input_layout": "BNSD",
    "actual_seq_qlen": None,
    "actual_seq_kvlen": None,
}
D192 = {"query": zeros(9, 8, 192), "key": zeros(11, 2, 192), "value": zeros(11, 2, 192)}
D520 = {"query": zeros(2, 8, 4, 520), "key": zeros(2, 2, 6, 520), "value": zeros(2, 2, 6, 520)}
D40 = {"query": zeros(2, 8, 4, 40), "key": zeros(2, 2, 6, 40), "value": zeros(2, 2, 6, 40)}
BF = {name: zeros(2, n, s, 64, dtype=BF16) for name, n, s in (("query", 8, 4), ("key", 2, 6), ("value", 2, 6))}
TRAIN = {
    "query": zeros(2, 4, 9, 64),
    "key": zeros(2, 2, 13, 64),
    "value": zeros(2, 2, 13, 64),
    "heads": 4,
    "layout": "BNSD",
}
TRAIN_PACKED = {
    "query": zeros(9, 4, 64),
    "key": zeros(13, 2, 64),
    "value": zeros(13, 2, 64),
    "heads": 4,
    "layout": "TND",
    "actual_seq_qlen": [4, 9],
    "actual_seq_kvlen": [5, 13],
}
STEP_PAGES = PAGES | {"actual_seq_lengths": [200, 5]}
del STEP_PAGES["actual_seq_lengths_kv"]
CASES = [
    Case("gamma's shape is that of the input's last dimensions", rms, RMS, {"gamma": zeros(32)}),
    Case("input and gamma have one dtype", rms, RMS, {"gamma": zeros(64, dtype=FP32)}),
    Case("the input is float16, bfloat16 or float32", rms, RMS, WIDE),
    Case("the input has 2 to 8 dimensions", rms, RMS, {"x": zeros(64)}),
    Case("x1 and x2 have one shape", add_rms, ADD, {"x2": zeros(1, 64)}),
    Case("x1, x2 and gamma have one dtype", add_rms, ADD, {"x2": zeros(2, 64, dtype=FP32)}),
    Case("gamma's shape is that of the last dimensions of x1", add_rms, ADD, {"gamma": zeros(32)}),
    Case(
        "x1 is float16, bfloat16 or float32",
        add_rms,
        ADD,
        {"x1": zeros(2, 64, dtype=FP64), "x2": zeros(2, 64, dtype=FP64), "gamma": zeros(64, dtype=FP64)},
    ),
    Case("the operands of the Gemma form are contiguous", gemma, RMS, {"x": turned(2, 64)}),
    Case("the input of the Gemma form is not empty", gemma, RMS, {"x": zeros(0, 64)}),
    Case("input and gamma of the Gemma form have one dtype", gemma, RMS, {"gamma": zeros(64, dtype=FP32)}),
    Case("gamma's shape is that of the last dimensions of the Gemma form's input", gemma, RMS, {"gamma": zeros(32)}),
    Case(
        "the input of a layer norm is float16, bfloat16 or float32",
        layer,
        {"x": zeros(2, 64), "shape": (64,)},
        {"x": zeros(2, 64, dtype=FP64)},
    ),
    Case("the dimension that is split in two has an even size", swiglu, {"x": zeros(2, 64)}, {"x": zeros(2, 63)}),
    Case(
        "the input of swiglu is float16, bfloat16 or float32",
        swiglu,
        {"x": zeros(2, 64)},
        {"x": zeros(2, 64, dtype=FP64)},
    ),
    Case("the dimension that geglu splits in two has an even size", geglu, {"x": zeros(2, 64)}, {"x": zeros(2, 63)}),
    Case(
        "the input of geglu is float16, bfloat16 or float32",
        geglu,
        {"x": zeros(2, 64)},
        {"x": zeros(2, 64, dtype=FP64)},
    ),
    Case(
        "the last dimension of gelu_mul's input is even and at most 1024",
        gelu_mul,
        {"x": zeros(2, 1024)},
        {"x": zeros(2, 1026)},
    ),
    Case("gelu_mul's input has at most 200,000 rows", gelu_mul, {"x": zeros(200_000, 2)}, {"x": zeros(200_001, 2)}),
    Case("the input has 3 or 4 dimensions", rotary, ROTARY, {n: zeros(7, 64) for n in ("x", "cos", "sin")}),
    Case("the head dim is even and below 896", rotary, ROTARY, ODD),
    Case(
        "the head dim is even and below 1025", rotary, ROTARY | ODD, {n: zeros(1, 7, 1, 1026) for n in ODD}, soc="950"
    ),
    Case(
        "each dimension of cos is the input's or 1, the last the input's",
        rotary,
        ROTARY,
        {"cos": zeros(1, 3, 1, 64), "sin": zeros(1, 3, 1, 64)},
    ),
    Case(
        "interleaved, cos varies along the sequence alone",
        rotary,
        ROTARY | {"mode": "interleave"},
        {"cos": zeros(2, 7, 1, 64), "sin": zeros(2, 7, 1, 64)},
    ),
    Case(
        "batch and heads are each below 1000",
        rotary,
        ROTARY,
        {"x": zeros(1000, 1000, 1, 2), "cos": zeros(1, 1000, 1, 2), "sin": zeros(1, 1000, 1, 2)},
    ),
    Case("the head dim is 64 or 128", apply_rotary, APPLY, NARROW),
    Case("query, key, cos and sin have one dtype", apply_rotary, APPLY, {"cos": zeros(2, 7, 1, 64, dtype=FP32)}),
    Case(
        "cos and sin have the queries' batch and sequence, and one head",
        apply_rotary,
        APPLY,
        {"cos": zeros(1, 7, 1, 64), "sin": zeros(1, 7, 1, 64)},
    ),
    Case("rotary_mode is half", apply_rotary, APPLY, {"rotary_mode": "interleave"}),
    Case("query and key that are turned in place are contiguous", apply_rotary, APPLY, {"query": turned(2, 7, 4, 64)}),
    Case(
        "query and key that are turned in place are not empty",
        apply_rotary,
        APPLY,
        {n: zeros(0, 7, h, 64) for n, h in (("query", 4), ("key", 2), ("cos", 1), ("sin", 1))},
    ),
    Case("keys, values and caches have one dtype", scatter, SCATTER, {"value": zeros(3, 2, 64, dtype=BF16)}),
    Case("keys, values, caches and slots are contiguous", scatter, SCATTER, {"key": turned(3, 2, 64)}),
    Case("slots are int32 or int64", scatter, SCATTER, {"slots": values([5, 0, 63], torch.int16)}),
    Case("no slot is negative", scatter, SCATTER, {"slots": values([5, -1, 63])}),
    Case("each slot lies within the cache", scatter, SCATTER, {"slots": values([5, 0, 64])}),
    Case("no slot is given twice", scatter, SCATTER, {"slots": values([5, 0, 5])}),
    Case("there is a slot for each token", scatter, SCATTER, {"slots": values([5, 0])}),
    Case(
        "caches have 4 dimensions",
        scatter,
        SCATTER,
        {"key_cache": zeros(64, 2, 64), "value_cache": zeros(64, 2, 64)},
    ),
    Case(
        "with cache_mode Norm a cache is (blocks, block size, heads, head dim)",
        scatter,
        SCATTER,
        {n: zeros(4, 8, 16, 16) for n in ("key_cache", "value_cache")},
    ),
    Case(
        "with cache_mode PA_NZ, the default, a cache is (blocks, heads · head dim / c, block size, c), c 32 bytes",
        scatter,
        SCATTER | NZ,
        {n: zeros(4, 16, 2, 64) for n in ("key_cache", "value_cache")},
    ),
    Case(
        "a cache is not fp8, which comes with the 950",
        scatter,
        SCATTER,
        {
            n: zeros(*s, dtype=torch.float8_e4m3fn)
            for n, s in (
                ("key", (3, 2, 64)),
                ("value", (3, 2, 64)),
                ("key_cache", (4, 16, 2, 64)),
                ("value_cache", (4, 16, 2, 64)),
            )
        },
    ),
    Case("block_tables and seq_lens are int32", gather, GATHER, {"lengths": values([20, 5], I64)}),
    Case(
        "caches to gather from are int8, float16 or bfloat16",
        gather,
        GATHER,
        {n: zeros(4, 16, 2, 64, dtype=FP32) for n in ("key_cache", "value_cache")}
        | {n: zeros(25, 2, 64, dtype=FP32) for n in ("key", "value")},
    ),
    Case("what is gathered, and where to, is contiguous", gather, GATHER, {"key": turned(25, 2, 64)}),
    Case("seq_lens has one entry a sequence, running sums one more", gather, GATHER, {"lengths": values([0, 20, 5])}),
    Case("running sums of lengths begin with 0", gather, GATHER | SUMS, {"lengths": values([1, 20, 25])}),
    Case("the results have as many rows as the lengths add up to", gather, GATHER, {"lengths": values([20, 4])}),
    Case("each block of block_tables is one of the cache's", gather, GATHER, {"tables": values([[0, 4], [2, 1]])}),
    Case("logits have 2 dimensions", top, TOP, {"logits": zeros(3, 50, 1, dtype=FP32)}),
    Case("p has the dtype of the logits", top, TOP, {"p": zeros(3)}),
    Case("k is int32", top, TOP, {"k": values([1, 9, 50], I64)}),
    Case("p and k have one entry a row", top, TOP, {"k": values([3])}),
    Case("k is at least 1 and at most 1024 and the number of logits", top, TOP, {"k": values([1, 9, 51])}),
    Case("p is from 0 to 1", top, TOP, {"p": values([0.5, 1.5, 0.1], FP32)}),
    Case("p or k is given", top, TOP, {"p": None, "k": None}),
    Case("logits are (N, C) with N from 1 to 200,000", loss, LOSS, {"x": zeros(4, 1, 11)}),
    Case("logits are float16, bfloat16 or float32", loss, LOSS, {"x": zeros(4, 11, dtype=FP64)}),
    Case("targets are int64", loss, LOSS, {"target": values([0, 3, 10, 5])}),
    Case(
        "each target is a class or ignore_index; a negative ignore_index ignores none",
        loss,
        LOSS,
        {"target": values([0, -100, 10, 5], I64)},
    ),
    Case("weights are float32", loss, LOSS, {"weight": zeros(11)}),
    Case("label_smoothing is at least 0 and below 1", loss, LOSS, {"label_smoothing": 1.0}),
    Case("ignore_index is below the number of classes", loss, LOSS, {"ignore_index": 11}),
    Case("the z-loss stays off, which is not enabled", loss, LOSS, {"lse_square_scale_for_zloss": 0.1}),
    Case("query, key, value and mask are contiguous", fused, DENSE, {"query": turned(2, 8, 4, 64)}),
    Case(
        "the query is float16 or bfloat16",
        fused,
        DENSE,
        {n: zeros(2, h, s, 64, dtype=FP32) for n, h, s in (("query", 8, 4), ("key", 2, 6), ("value", 2, 6))},
    ),
    Case("query, key and value have one dtype", fused, DENSE, {"key": zeros(2, 2, 6, 64, dtype=BF16)}),
    Case("key and value have one shape, packed ones but for the head dim", fused, DENSE, {"value": zeros(2, 2, 5, 64)}),
    Case(
        "there are at most 256 query heads",
        fused,
        DENSE
        | {"query": zeros(1, 256, 4, 16), "key": zeros(1, 4, 6, 16), "value": zeros(1, 4, 6, 16)}
        | {"num_heads": 256, "num_key_value_heads": 4},
        {"query": zeros(1, 260, 4, 16), "num_heads": 260, "num_key_value_heads": 5}
        | {n: zeros(1, 5, 6, 16) for n in ("key", "value")},
    ),
    Case(
        "num_heads is a multiple of num_key_value_heads, at most 64 times as many",
        fused,
        DENSE | {"query": zeros(1, 128, 4, 16), "num_heads": 128} | {n: zeros(1, 2, 6, 16) for n in ("key", "value")},
        {"num_key_value_heads": 1} | {n: zeros(1, 1, 6, 16) for n in ("key", "value")},
    ),
    Case(
        "num_heads, whose default is 1, is the number of heads of the query's shape",
        fused,
        DENSE,
        {"num_heads": 1, "num_key_value_heads": 0},
    ),
    Case("num_key_value_heads is the number of heads of the key's shape", fused, DENSE, {"num_key_value_heads": 0}),
    Case("the head dim is a multiple of 16 and at most 512", fused, DENSE, D40),
    Case("the head dim is at most 512", fused, DENSE | D40, D520, soc="950"),
    Case("packed, the head dim is 128, or 192 with values of 128 or 192", fused, PACKED, D64),
    Case("sparse_mode is from 0 to 4", fused, DENSE | {"atten_mask": triangle()}, {"sparse_mode": 6}),
    Case(
        "with sparse_mode 2, 3 and 4 atten_mask is a triangle (2048, 2048), of one or two more dimensions of 1",
        fused,
        DENSE | {"atten_mask": triangle(), "sparse_mode": 3},
        {"atten_mask": zeros(4, 6, dtype=torch.bool)},
    ),
    Case(
        "with sparse_mode 1 there is an atten_mask",
        fused,
        DENSE | {"sparse_mode": 1, "atten_mask": zeros(4, 6, dtype=torch.bool)},
        {"atten_mask": None},
    ),
    Case(
        "a whole atten_mask is (S, L), (1 or B, S, L) or (1 or B, 1, S, L) at least",
        fused,
        DENSE | {"atten_mask": zeros(2, 1, 4, 6, dtype=torch.bool)},
        {"atten_mask": zeros(2, 8, 4, 6, dtype=torch.bool)},
    ),
    Case(
        "of a single query, atten_mask is (B, L), (B, 1, L) or (B, 1, 1, L), L no less than all keys or blocks",
        fused,
        PAGED_ONE | {"atten_mask": zeros(2, 1, 1, 256, dtype=torch.bool)},
        {"atten_mask": zeros(2, 1, 1, 200, dtype=torch.bool)},
    ),
    Case(
        "atten_mask is bool, int8 or uint8",
        fused,
        DENSE | {"atten_mask": zeros(4, 6, dtype=torch.bool)},
        {"atten_mask": zeros(4, 6)},
    ),
    Case("inner_precise is from 0 to 3, of a single query 0 or 1", fused, ONE, {"inner_precise": 2}),
    Case("packed, both lists of lengths are given", fused, PACKED, {"actual_seq_lengths_kv": None}),
    Case("packed, lengths are running sums that never fall", fused, PACKED, {"actual_seq_lengths": [9, 5, 9]}),
    Case("packed, the last running sum is the number of tokens", fused, PACKED, {"actual_seq_lengths": [4, 8]}),
    Case(
        "packed, both lists of lengths have one entry a sequence, 4096 at most",
        fused,
        PACKED,
        {"actual_seq_lengths_kv": [11]},
    ),
    Case("no length is greater than what is there, or negative", fused, DENSE, {"actual_seq_lengths_kv": [6, 7]}),
    Case(
        "there is one length, or one a sequence",
        fused,
        DENSE
        | {"query": zeros(3, 8, 4, 64), "actual_seq_lengths_kv": [6, 5, 4]}
        | {n: zeros(3, 2, 6, 64) for n in ("key", "value")},
        {"actual_seq_lengths_kv": [6, 5]},
    ),
    Case("with a block_table actual_seq_lengths_kv is given", fused, PAGED, {"actual_seq_lengths_kv": None}),
    Case("block_table is int32 with 2 dimensions", fused, PAGED, {"block_table": values([[0, 8], [2, 1]], I64)}),
    Case("block_table has a row for each sequence", fused, PAGED, {"block_table": values([[0, 8]])}),
    Case("for more than one query block_size is a multiple of 128, from 128 to 512", fused, PAGED, SIXTEEN),
    Case("for a single query block_size is a multiple of 16, at most 512", fused, PAGED_ONE | SIXTEEN, SMALL),
    Case(
        "packed, block_size is a multiple of 16, at most 1024",
        fused,
        PACKED_PAGES,
        SMALL | {n: zeros(9, 8, 256) for n in ("key", "value")},
    ),
    Case(
        "a paged cache is (blocks, block size, heads · head dim); BNSD and TND take (blocks, heads, block size, head "
        "dim) too",
        fused,
        PAGED | {"query": zeros(2, 4, 8, 64), "input_layout": "BSND"},
        HEADED,
    ),
    Case("block_size is that of the cache", fused, PAGED, {"block_size": 256}),
    Case(
        "heads · head dim of a cache (blocks, block size, heads · head dim) is at most 65535",
        fused,
        PAGED,
        {"query": zeros(2, 256, 4, 512), "num_heads": 256, "num_key_value_heads": 128}
        | {n: zeros(2, 128, 65536) for n in ("key", "value")}
        | {"block_table": values([[0, 1], [1, 0]])},
    ),
    Case(
        "each block that a length reaches is one of the cache's, which no device checks",
        fused,
        PAGED | {"block_table": values([[0, 8], [2, 99]])},
        {"block_table": values([[0, 9], [2, 1]])},
    ),
    Case("learnable_sink is bfloat16", fused_v2, SINK, {"learnable_sink": zeros(8)}),
    Case("learnable_sink has one entry a query head", fused_v2, SINK, {"learnable_sink": zeros(2, dtype=BF16)}),
    Case("learnable_sink comes with the layouts TND and NTD_TND", fused_v2, SINK, SINK_DENSE),
    Case("with learnable_sink the values' head dim is at most 128", fused_v2, SINK, D192),
    Case(
        "layout BNSD_BSND has more than one query",
        fused,
        DENSE | {"input_layout": "BNSD_BSND"},
        {"query": zeros(2, 8, 1, 64)},
    ),
    Case(
        "the layout is BSH, BSND, BNSD, BNSD_BSND or TND",
        fused,
        PACKED,
        {"input_layout": "NTD"}
        | {n: zeros(h, s, 128) for n, h, s in (("query", 8, 9), ("key", 2, 11), ("value", 2, 11))},
        soc="950",
    ),
    Case(
        "sparse_mode is 0 on the 310P",
        prompt,
        DENSE,
        {"sparse_mode": 3, "atten_mask": triangle()},
        soc="310P3",
    ),
    Case(
        "pre_tokens is 2147483647 and next_tokens 0 or 2147483647 on the 310P",
        prompt,
        DENSE,
        {"pre_tokens": 3},
        soc="310P3",
    ),
    Case(
        "there are at most 128 sequences on the 310P",
        prompt,
        DENSE,
        {n: zeros(129, h, s, 64) for n, h, s in (("query", 8, 4), ("key", 2, 6), ("value", 2, 6))},
        soc="310P3",
    ),
    Case("there is one query a sequence", step, ONE, {"query": zeros(2, 8, 4, 64)}),
    Case("with a block_table actual_seq_lengths is given", step, ONE | STEP_PAGES, {"actual_seq_lengths": None}),
    Case("block_size is a multiple of 16", step, ONE | STEP_PAGES, {"block_size": 8}),
    Case(
        "a cache (blocks, heads, block size, head dim) comes with layout BNSD",
        step,
        ONE | STEP_PAGES | {"query": zeros(2, 1, 8, 64), "input_layout": "BSND"},
        HEADED,
    ),
    Case("inner_precise is 0 or 1", step, ONE, {"inner_precise": 2}),
    Case(
        "the 950 takes the fused operator instead",
        prompt,
        {},
        DENSE,
        soc="950",
        says="no longer supported on Ascend950",
    ),
    Case(
        "the layout is BSH, SBH, BNSD, BSND or TND",
        train,
        TRAIN,
        {"layout": "BND"},
        says="The input_layout should be BSH/SBH/BNSD/BSND/TND",
    ),
    Case(
        "dense, sparse_mode is from 0 to 6; packed, from 0 to 8 but not 5",
        train,
        TRAIN,
        {"sparse_mode": 7},
        says="The sparse_mode value must be in range",
    ),
    Case(
        "packed, actual_seq_qlen and actual_seq_kvlen are given and as long as each other",
        train,
        TRAIN_PACKED,
        {"actual_seq_kvlen": [13]},
        says="the size of actual_seq_qlen and actual_seq_kvlen must be the same",
    ),
    Case(
        "keep_prob is above 0 and at most 1",
        train,
        TRAIN,
        {"keep_prob": 0.0},
        says="The keep_prob value must be in range",
    ),
    Case("npu_fusion_attention_v3 is not called on the 950", train_v3, {}, TRAIN, soc="950", says="not support"),
    Case(
        "query, key, value and pse of flash attention have one dtype",
        train,
        TRAIN,
        {"key": zeros(2, 2, 13, 64, dtype=FP32)},
    ),
    Case(
        "the query of flash attention is float16, bfloat16 or float32",
        train,
        TRAIN,
        {n: zeros(2, h, s, 64, dtype=FP64) for n, h, s in (("query", 4, 9), ("key", 2, 13), ("value", 2, 13))},
    ),
    Case("head_num is the number of heads of the query's shape", train, TRAIN, {"heads": 8}),
    Case(
        "there are at most 256 heads",
        train,
        TRAIN | {"query": zeros(1, 256, 9, 16), "heads": 256} | {n: zeros(1, 2, 13, 16) for n in ("key", "value")},
        {"query": zeros(1, 258, 9, 16), "heads": 258},
    ),
    Case(
        "the query heads are a multiple of the key heads",
        train,
        TRAIN,
        {n: zeros(2, 3, 13, 64) for n in ("key", "value")},
    ),
    Case(
        "the head dims of query and key are equal, the value's no greater, all at most 768",
        train,
        TRAIN,
        {"value": zeros(2, 2, 13, 80)},
    ),
    Case("flash attention's atten_mask is bool or uint8", train, TRAIN, {"atten_mask": zeros(9, 13)}),
    Case(
        "with sparse_mode 2, 3, 4, 7 and 8 atten_mask is a triangle (2048, 2048)",
        train,
        TRAIN | {"sparse_mode": 3, "atten_mask": triangle()},
        {"atten_mask": zeros(9, 13, dtype=torch.bool)},
    ),
    Case(
        "with sparse_mode 6 atten_mask is a triangle above a rectangle (3072, 2048)",
        train,
        TRAIN | {"sparse_mode": 6, "prefix": [4, 5], "atten_mask": zeros(3072, 2048, dtype=torch.bool)},
        {"atten_mask": triangle()},
    ),
    Case(
        "flash attention's whole atten_mask is (S, L), (1, 1, S, L), (B, 1, S, L) or (B, N, S, L)",
        train,
        TRAIN | {"atten_mask": zeros(9, 13, dtype=torch.bool)},
        {"atten_mask": zeros(2, 9, 13, dtype=torch.bool)},
    ),
    Case(
        "packed, a whole atten_mask is (longest S, longest L)",
        train,
        TRAIN_PACKED | {"atten_mask": zeros(5, 8, dtype=torch.bool)},
        {"atten_mask": zeros(4, 8, dtype=torch.bool)},
    ),
    Case(
        "packed, no row of atten_mask hides everything",
        train,
        TRAIN_PACKED | {"atten_mask": zeros(5, 8, dtype=torch.bool)},
        {"atten_mask": lambda: torch.ones(5, 8, dtype=torch.bool).npu()},
    ),
    Case(
        "with sparse_mode 5 and 6 there is a prefix for each of at most 32 sequences, from max(0, L - S) to L",
        train,
        TRAIN | {"sparse_mode": 5, "prefix": [4, 5], "atten_mask": zeros(2, 1, 9, 13, dtype=torch.bool)},
        {"prefix": [4, 14]},
    ),
    Case(
        "running sums of lengths never fall, but for zeros at the end", train, TRAIN_PACKED, {"actual_seq_qlen": [9, 4]}
    ),
    Case("no running sum is greater than the number of tokens", train, TRAIN_PACKED, {"actual_seq_qlen": [4, 10]}),
    Case(
        "sparse_mode 7 and 8 come without pse",
        train,
        TRAIN_PACKED | {"sparse_mode": 7, "atten_mask": triangle()},
        {"pse": zeros(1, 4, 1024, 8)},
    ),
    Case("sink is float32", train, TRAIN | {"sink": zeros(4, dtype=FP32)}, {"sink": zeros(4)}),
    Case("sink has one entry a head", train, TRAIN | {"sink": zeros(4, dtype=FP32)}, {"sink": zeros(2, dtype=FP32)}),
    Case("there is no sink, which comes with CANN 8.5.0", train, TRAIN, {"sink": zeros(4, dtype=FP32)}, cann="8.2.0"),
    Case(
        "softmax_layout is not given, which comes with CANN 8.3.RC1",
        train,
        TRAIN_PACKED,
        {"softmax_layout": "TND"},
        cann="8.2.0",
    ),
]
for name, call, arguments in (
    ("GemmaRmsNorm", gemma, RMS),
    ("GeluMul", gelu_mul, {"x": zeros(2, 64)}),
    ("ScatterPaKvCache", scatter, SCATTER),
    ("ApplyTopKTopP", top, TOP),
    ("CrossEntropyLoss", loss, LOSS),
    ("FusedInferAttentionScoreV2", fused, DENSE),
    ("FlashAttentionScore", train, TRAIN),
):
    rule = f"the chip is not a 310P, which the page of {name} does not name"
    CASES.append(Case(rule, call, {}, arguments, soc="310P3"))
for name, call, right, wrong in (
    ("RmsNorm", rms, RMS, {n: zeros(*s, dtype=BF16) for n, s in (("x", (2, 64)), ("gamma", (64,)))}),
    (
        "AddRmsNorm",
        add_rms,
        ADD,
        {n: zeros(*s, dtype=BF16) for n, s in (("x1", (2, 64)), ("x2", (2, 64)), ("gamma", (64,)))},
    ),
    ("LayerNorm", layer, {"x": zeros(2, 64), "shape": (64,)}, {"x": zeros(2, 64, dtype=BF16)}),
    ("SwiGlu", swiglu, {"x": zeros(2, 64)}, {"x": zeros(2, 64, dtype=BF16)}),
    ("Softmax", softmax, {"x": zeros(2, 64), "dim": -1}, {"x": zeros(2, 64, dtype=BF16)}),
    (
        "ApplyRotaryPosEmb",
        apply_rotary,
        APPLY,
        {n: zeros(2, 7, h, 64, dtype=BF16) for n, h in (("query", 4), ("key", 2), ("cos", 1), ("sin", 1))},
    ),
    ("PromptFlashAttentionV3", prompt, DENSE, BF),
):
    rule = f"no operand of {name} is bfloat16, which the 310P has not"
    CASES.append(Case(rule, call, right, wrong, soc="310P3"))


def test_each_rule_has_a_wrong_call_of_its_own():
    rules = Counter(row.rule for row in constraints.load())
    assert [rule for rule, count in rules.items() if count > 1] == []
    assert set(rules) - {case.rule for case in CASES} == set()
    assert {case.rule for case in CASES} - set(rules) == set()


@pytest.mark.parametrize("case", [case for case in CASES if case.here], ids=str)
def test_a_rule_refuses_the_wrong_call_and_lets_the_right_one_through(case):
    if case.right:
        run(case.call, case.right)
    with pytest.raises(RuntimeError, match=re.escape(case.says or case.rule)):
        run(case.call, case.right | case.wrong)


@pytest.mark.parametrize(("soc", "cann"), sorted({(case.soc, case.cann) for case in CASES if not case.here}))
def test_the_rules_of_other_chips_and_versions_refuse_too(soc, cann):
    node = f"{__file__}::{test_a_rule_refuses_the_wrong_call_and_lets_the_right_one_through.__name__}"
    command = [os.path.join(os.path.dirname(sys.executable), "hal"), "simulate", "ascend", "--soc", soc, "--cann", cann]
    done = subprocess.run(
        [*command, "--", "python", "-m", "pytest", "-n0", "-q", "-p", "no:cacheprovider", node],
        capture_output=True,
        text=True,
        timeout=300,
    )
    expected = sum(case.soc == soc and case.cann == cann for case in CASES)
    assert done.returncode == 0 and f"{expected} passed" in done.stdout, done.stdout + done.stderr
