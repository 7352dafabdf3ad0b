"""Calls that torch_npu and every rule accept but that mean something else: the conformance suite must fail them.

Each mutant is the adapter with one argument of one of its calls changed (simulated).
"""

from __future__ import annotations

import math

import pytest
import torch
import torch_npu  # noqa: F401 - registers torch.ops.npu
from judging import judged

CAUSAL = {"S": 6, "L": 23, "H": 4, "K": 2, "D": 64, "causal": True}
WINDOW = {"S": 17, "L": 23, "H": 4, "K": 2, "D": 64, "causal": True, "window": [5, 0]}
MASKED = {"S": 6, "L": 23, "H": 4, "K": 2, "D": 32, "mask": "dead", "mask_shape": "SL"}
GRAD = {"S": 8, "L": 12, "H": 4, "K": 2, "D": 64, "causal": True, "grad": True}
PAGED = {"q": [3, 1, 5], "k": [200, 20, 133], "P": 128, "H": 4, "K": 2, "D": 64, "cpu": True}
PACKED = PAGED | {"D": 128}
DECODE = {"q": [1, 1, 1], "k": [5, 20, 33], "P": 16, "H": 4, "K": 2, "D": 64, "cpu": True}
VARLEN = {"q": [4, 9, 1], "k": [7, 20, 33], "H": 4, "K": 2, "D": 64, "causal": True}
GATHER = {"k": [7, 1, 16], "P": 4, "K": 3, "D": 40, "E": 24, "cpu": True}


def change(**new):
    """The call with arguments replaced, by values or by functions of the old ones."""

    def mutate(function, args, kwargs):
        changed = {name: value(kwargs[name]) if callable(value) else value for name, value in new.items()}
        return function(*args, **kwargs | changed)

    return mutate


def drop(*names):
    return lambda function, args, kwargs: function(*args, **{k: v for k, v in kwargs.items() if k not in names})


def swap(i, j):
    """The call with two of its leading arguments in each other's place."""

    def mutate(function, args, kwargs):
        order = list(args)
        order[i], order[j] = order[j], order[i]
        return function(*order, **kwargs)

    return mutate


def place(i, value):
    """The call with a function of its i-th argument in place of that."""
    return lambda function, args, kwargs: function(*args[:i], value(args[i]), *args[i + 1 :], **kwargs)


def result(i, value):
    """The call with a function of its i-th result in place of that."""

    def mutate(function, args, kwargs):
        found = list(function(*args, **kwargs))
        found[i] = value(found[i])
        return tuple(found)

    return mutate


def later(t):
    """A mask that is one place further right: a causal one that sees the next key."""
    return torch.roll(t, 1, -1) & torch.ones_like(t).triu(2)


SCATTER = "npu_scatter_pa_kv_cache"
FUSED, TRAIN = "npu_fused_infer_attention_score", "npu_fusion_attention"
MUTANTS = [
    ("causal from the top left", "attention", "fused_infer", CAUSAL, FUSED, change(sparse_mode=2)),
    ("no mask", "attention", "fused_infer", CAUSAL, FUSED, change(atten_mask=None, sparse_mode=0)),
    ("mask inverted", "attention", "fused_infer", CAUSAL, FUSED, change(atten_mask=torch.logical_not)),
    ("mask one to the right", "attention", "fused_infer", CAUSAL, FUSED, change(atten_mask=later)),
    ("scale forgotten", "attention", "fused_infer", CAUSAL, FUSED, drop("scale")),
    ("lse to base 2", "attention", "fused_infer", CAUSAL | {"lse": True}, FUSED, result(1, lambda t: t / math.log(2))),
    ("window one wider", "attention", "fused_infer", WINDOW, FUSED, change(pre_tokens=lambda n: n + 1)),
    ("window one ahead", "attention", "fused_infer", WINDOW, FUSED, change(next_tokens=lambda n: n + 1)),
    ("key and value swapped", "attention", "fused_infer", CAUSAL, FUSED, swap(1, 2)),
    ("mask of its own inverted", "attention", "fused_infer", MASKED, FUSED, change(atten_mask=torch.logical_not)),
    ("training: causal from the top left", "attention", "flash", CAUSAL, TRAIN, change(sparse_mode=2)),
    ("training: a mode without its mask", "attention", "flash", CAUSAL, TRAIN, drop("atten_mask")),
    ("training: scale forgotten", "attention", "flash", CAUSAL, TRAIN, drop("scale")),
    (
        "training: the sum taken for the maximum",
        "attention",
        "flash",
        CAUSAL | {"lse": True},
        TRAIN,
        result(1, torch.exp),
    ),
    ("gradient: scale forgotten", "attention", "flash", GRAD, TRAIN + "_grad", change(scale_value=1.0)),
    ("gradient: causal from the top left", "attention", "flash", GRAD, TRAIN + "_grad", change(sparse_mode=2)),
    ("gradient: sums doubled", "attention", "flash", GRAD, TRAIN + "_grad", change(softmax_sum=lambda t: t * 2)),
    (
        "gradient: the result not given back",
        "attention",
        "flash",
        GRAD,
        TRAIN + "_grad",
        change(attention_in=torch.zeros_like),
    ),
    ("packed: causal from the top left", "attention_varlen", "flash", VARLEN, TRAIN, change(sparse_mode=2)),
    (
        "pages: lengths of the step before",
        "paged_attention",
        "fused_infer",
        DECODE,
        FUSED,
        change(actual_seq_lengths_kv=lambda n: [x - 1 for x in n]),
    ),
    (
        "pages: one length for all",
        "paged_attention",
        "fused_infer",
        DECODE,
        FUSED,
        change(actual_seq_lengths_kv=lambda n: [max(n)]),
    ),
    (
        "pages: the next sequence's row",
        "paged_attention",
        "fused_infer",
        DECODE,
        FUSED,
        change(block_table=lambda t: t.roll(1, 0), actual_seq_lengths_kv=lambda n: [min(n)] * len(n)),
    ),
    ("pages: causal from the top left", "paged_attention", "fused_infer", PAGED, FUSED, change(sparse_mode=2)),
    ("packed pages: causal from the top left", "paged_attention", "fused_infer", PACKED, FUSED, change(sparse_mode=2)),
    ("packed pages: no mask", "paged_attention", "fused_infer", PACKED, FUSED, change(atten_mask=None, sparse_mode=0)),
    (
        "norm: epsilon forgotten",
        "rms_norm",
        "aclnn",
        {"T": 7, "F": 576, "x": "tiny"},
        "npu_rms_norm",
        place(2, lambda e: 1e-2),
    ),
    ("norm: Gemma's form", "rms_norm", "aclnn", {"T": 7, "F": 576}, "npu_rms_norm", place(1, lambda g: g + 1)),
    (
        "rotary: the other pairs",
        "rotary_embedding",
        "aclnn",
        {"H": 7},
        "npu_rotary_mul",
        place(3, lambda m: "interleave"),
    ),
    ("rotary: backwards", "rotary_embedding", "aclnn", {"H": 7}, "npu_rotary_mul", place(2, torch.neg)),
    (
        "gate and value swapped",
        "silu_and_mul",
        "aclnn",
        {"T": 7, "F": 173, "spread": 2.0},
        "npu_swiglu",
        place(0, lambda x: torch.cat(x.chunk(2, -1)[::-1], -1)),
    ),
    ("gather: keys for values", "gather_kv_cache", "aclnn", GATHER | {"E": 40}, "npu_gather_pa_kv_cache", swap(0, 1)),
    ("scatter: keys for values", "write_kv_cache", "aclnn", {"skip": "never"}, SCATTER, swap(0, 1)),
    ("scatter: the caches swapped", "write_kv_cache", "aclnn", {"skip": "never"}, SCATTER, swap(2, 3)),
    ("scatter: the next slots", "write_kv_cache", "aclnn", {"skip": "never"}, SCATTER, place(4, lambda s: s.roll(1))),
]


def findings(op, name, params):
    """What the suite finds wrong. A variant of attention asks for an additive mask, which is declared as refused."""
    torch.npu.set_device(0)
    verdict = judged(op, name, "float16", params)
    assert verdict.status != "unsupported", verdict.reasons
    return [finding.message for finding in verdict.findings if "keys in two pieces" not in finding.message]


@pytest.mark.parametrize(
    ("op", "name", "params", "function", "mutate"),
    [pytest.param(*mutant, id=told) for told, *mutant in MUTANTS],
)
def test_the_suite_fails_an_adapter_that_asks_for_something_else(monkeypatch, op, name, params, function, mutate):
    assert findings(op, name, params) == []
    original, calls = getattr(torch.ops.npu, function), []

    def mutant(*args, **kwargs):
        calls.append(args)
        return mutate(original, args, kwargs)

    monkeypatch.setattr(torch.ops.npu, function, mutant)
    told = findings(op, name, params)
    assert calls, f"the adapter does not call {function} here"
    assert told, "nothing was found"
    assert not [text for text in told if "simulated CANN" in text], told
