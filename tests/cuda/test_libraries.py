"""What hal adds to the libraries' attention, judged by its own quick suite; a stand-in takes the library's place.

The stand-in computes what torch documents of the library: layout (B, H, S, D), top-left causal, grouped heads. That the
libraries themselves do is shown on a GPU alone.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from hal.backends.cuda import sdpa
from hal.capability import Accepted, Rejected
from hal.conformance.case import Case, cases
from hal.conformance.judge import judge
from hal.op import OPS

CUDNN = next(found for found in sdpa.IMPLEMENTATIONS if found.name == "cudnn")
ATTENTION = OPS["attention"]


def library(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None, lse: bool) -> tuple[Tensor, Tensor]:
    assert all(t.transpose(1, 2).is_contiguous() and t.data_ptr() % 16 == 0 for t in (q, k, v))
    group = q.shape[1] // k.shape[1]
    k, v = (t.repeat_interleave(group, 1) for t in (k, v))
    scores = (q.float() * (scale or 1 / math.sqrt(q.shape[3]))) @ k.float().mT
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[2:], dtype=torch.bool).triu(1), -math.inf)
    weights = (scores - scores.amax(-1, keepdim=True)).exp()
    o = weights.to(q.dtype).float() @ v.float() / weights.sum(-1, keepdim=True)
    return o.to(q.dtype), scores.logsumexp(-1)[..., None]


STAND_IN = replace(
    CUDNN, forward=sdpa.forward_of("attention", sdpa._prepared(library)), prepare=sdpa._prepared(library)
)


def taken(case: Case) -> bool:
    return judge(case, STAND_IN).status != "unsupported"


SUITE = [case for case in cases("attention") if case.dtype in ("bfloat16", "float16") and not case.gradient]


@pytest.mark.parametrize("case", [case for case in SUITE if taken(case)], ids=lambda case: case.id)
def test_what_is_taken_conforms(case: Case) -> None:
    result = judge(case, STAND_IN)
    assert result.status == "passed", str(result.findings)


def test_some_of_the_suite_is_taken_and_some_refused_with_reasons() -> None:
    judged = [judge(case, STAND_IN) for case in SUITE]
    assert sum(result.status == "passed" for result in judged) > 20
    said = {reason for result in judged if result.status == "unsupported" for reason in result.reasons}
    assert {"sinks is not supported", "softcap is not supported", "window is not supported"} <= said


@pytest.mark.parametrize(
    ("queries", "keys", "arguments", "reason"),
    [
        (4, 6, {"causal": True}, "causal with 4 queries and 6 keys, and the library aligns it to the first key"),
        (4, 0, {}, "there are no queries or no keys"),
        (4, 4, {"scale": -1.0}, "scale is -1.0, and the library takes those above 0"),
        (1, 6, {"causal": True}, None),
        (4, 4, {"causal": True}, None),
        (4, 6, {}, None),
    ],
)
def test_calls_that_the_library_would_read_otherwise_are_refused(
    queries: int, keys: int, arguments: dict[str, object], reason: str | None
) -> None:
    q = torch.empty(2, queries, 4, 64, dtype=torch.bfloat16)
    k = torch.empty(2, keys, 2, 64, dtype=torch.bfloat16)
    answer = CUDNN.judge(ATTENTION, ATTENTION.bind((q, k, k), arguments), "cuda")
    assert answer == (Accepted() if reason is None else Rejected((reason,)))
