"""A row's bits must not depend on how many rows run with it where an implementation declares so."""

from __future__ import annotations

import pytest
import torch
from case_models import draw, rms_norm
from case_support import choices

import hal
from hal.errors import UnsupportedError

ROWS = [1, 2, 16, 255, 256, 257, 1024]


def rows_of(op, count, features=512):
    """The first `count` rows of one large input, as arguments of `op`."""
    x = draw(630, 1024, features, dtype=torch.bfloat16)[:count]
    weight = torch.linspace(0.5, 1.5, features).bfloat16()
    if op == "add_rms_norm":
        return x, draw(631, 1024, features, dtype=torch.bfloat16)[:count], weight
    if op == "linear":
        return x, draw(632, 64, features, dtype=torch.bfloat16)
    if op in ("rms_norm", "layer_norm"):
        return x, weight
    return (x,)


OPS = ["rms_norm", "add_rms_norm", "layer_norm", "softmax", "linear", "silu_and_mul", "gelu_and_mul"]


@pytest.mark.parametrize("choice", [c for op in OPS for c in choices(op)], ids=lambda c: f"{c.op}-{c}")
def test_first_row_is_right_and_keeps_its_bits_where_that_is_declared(choice):
    """vllm-project/vllm#48271, #48391, #55131: the block size follows the number of tokens, and with it the
    order of sums."""
    firsts = []
    for count in ROWS:
        y = choice.call(*rows_of(choice.op, count))
        y = y[0] if isinstance(y, tuple) else y
        firsts.append(y[:1])
        assert y.shape[0] == count
    if choice.op == "rms_norm":
        x, weight = rows_of("rms_norm", 1)
        for first in firsts:
            choice.check(first, rms_norm(x, weight), x, weight)
    if choice.implementation.declares.batch_invariant:
        assert all(torch.equal(first, firsts[0]) for first in firsts)


@pytest.mark.parametrize("op", OPS)
def test_invariant_mode_runs_only_what_declares_it(op):
    """vllm-project/vllm#48271: in invariant mode an implementation either keeps the bits or is refused, by
    name."""
    declared = [c for c in choices(op) if c.backend == "cpu" and c.implementation.declares.batch_invariant]
    with hal.use(backend="cpu", invariant=True):
        if not declared:
            with pytest.raises(UnsupportedError, match="batch_invariant"):
                getattr(hal.ops, op)(*rows_of(op, 2))
            return
        outputs = []
        for count in ROWS:
            y = getattr(hal.ops, op)(*rows_of(op, count))
            outputs.append((y[0] if isinstance(y, tuple) else y)[0])
        assert all(torch.equal(y, outputs[0]) for y in outputs)
