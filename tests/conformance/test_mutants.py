"""What the mutants are made of is honest: without a fault each template passes the quick cases of its operators.

Otherwise a mutant could be rejected for what its template gets wrong, and prove nothing of its fault. The templates of
gradients stand in test_gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from hal.conformance import gradients, subject
from hal.conformance.case import cases
from hal.conformance.judge import judge
from hal.conformance.mutants import (
    _cache_codes,
    _cache_writing,
    _gates,
    _linear,
    _merging,
    _rotary,
    _softmax,
    everywhere,
    losses,
    norms,
    sampling,
)
from hal.conformance.mutants._plain_attention import plain, spoilt
from hal.conformance.mutants.coarse import wide
from hal.conformance.mutants.mutant import Candidate, before, differentiated
from hal.contract import OPS

DTYPES = ("float32", "bfloat16")
ATTENTION = ("attention", "attention_varlen", "paged_attention")


def templates(op: str) -> Iterator[tuple[str, Candidate]]:
    """Name and implementation of each template for results, without a fault."""
    if not OPS[op].mutates:
        yield "off", everywhere._off(op, 0.0)
        yield "own memory", everywhere._into_own_memory(op, lambda new, y: new.copy_(y))
    if op in norms.NORMS:
        yield "norm", norms.norm(op)
    if op == "add_rms_norm":
        yield "sum", norms.taken(lambda total, a: wide(a["x"]) + wide(a["residual"]))
    if op in _gates.GATED:
        yield "gated", _gates.gated(op)
    if op in ATTENTION:
        yield "plain", plain()(op)
        yield "spoilt", spoilt(lambda o, lse, s: (o, lse))(op)
    if op in sampling.SAMPLERS:
        yield "plain", sampling.plain(op)
    if op == sampling.SAMPLE:
        yield "noise", sampling.plain(op, noise=sampling.noise_of())
    if op in ("paged_attention", "gather_kv_cache"):
        for codes in (torch.int8, torch.float8_e4m3fn):
            yield f"codes of {codes}", before(op, _cache_codes.codes_as(lambda t: t.float(), codes))
    if op == "write_kv_cache":
        yield "quantising", _cache_codes.quantising(lambda ratio, to: ratio)(op)
        yield "writing", _cache_writing.write(lambda a, held: None)(op)
    alone: dict[str, Callable[[], Candidate]] = {
        "linear": _linear.product,
        "softmax": _softmax.share,
        "rotary_embedding": _rotary.rotation,
        "cross_entropy": losses.loss,
        "merge_attention": lambda: _merging._weighed(torch.float64)(op),
        "copy_kv_blocks": lambda: _cache_writing.copying()(op),
    }
    if op in alone:
        yield "alone", alone[op]()


@pytest.mark.parametrize("op", [op for op in OPS if cases(op)])
def test_a_template_without_a_fault_passes(op: str) -> None:
    found = dict(templates(op))
    assert found
    if OPS[op].grad:
        found["differentiated"] = differentiated(op, lambda grads, a, into: grads)
    with subject.recent.keeping(200), gradients.recent.keeping(200):
        for case in cases(op):
            if case.dtype not in DTYPES or case.bad_input:
                continue
            for name, template in found.items():
                if case.gradient is (name == "differentiated"):
                    verdict = judge(case, template)
                    assert verdict.status == "passed", (name, case.id, verdict.findings)
