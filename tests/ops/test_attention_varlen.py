"""attention_varlen: each sequence on its own, padding, host lengths, gradients, bad input."""

from __future__ import annotations

import math

import naive_attention as naive
import pytest
import torch
from attention_support import budget_used, forced, int32, normal

from hal.errors import ArgumentError, DtypeError, ShapeError
from hal.ops.attention import attention
from hal.ops.attention_varlen import attention_varlen


@pytest.fixture(params=["reference", "aten"])
def implementation(request):
    with forced("attention_varlen", request.param):
        yield request.param


CU_Q, CU_K = (0, 3, 3, 4, 9, 9), (0, 4, 6, 6, 13, 13)  # a sequence without queries, one without keys, an empty one


def make(T=11, U=15, H=4, K=2, D=5, dtype=torch.float64):
    return normal(0, T, H, D, dtype=dtype), normal(1, U, K, D, dtype=dtype), normal(2, U, K, D, dtype=dtype)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": True},
        {"window": (2, 1)},
        {"causal": True, "window": (1, None), "scale": 0.3},
        {"causal": True, "softcap": 1.5, "sinks": True},
    ],
    ids=lambda o: "-".join(o) or "plain",
)
@pytest.mark.parametrize("bounds", [(5, 7), (100, 1000)])
def test_every_sequence_is_attended_on_its_own(implementation, options, bounds):
    if implementation == "aten" and "softcap" in options:
        pytest.skip("aten leaves softcap and sinks to the reference")
    q, k, v = make()
    options = dict(options)
    if "sinks" in options:
        options["sinks"] = normal(3, 4)
    o, lse = attention_varlen(q, k, v, int32(*CU_Q), int32(*CU_K), *bounds, **options, return_lse=True)
    expected_o, expected_lse = naive.ragged(q, k, v, CU_Q, CU_K, **options)
    torch.testing.assert_close(o, expected_o, atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(lse, expected_lse, atol=1e-12, rtol=1e-12)
    assert o.is_contiguous() and lse.is_contiguous()
    assert (o[9:] == 0).all() and (lse[9:] == 0).all()
    plain = attention_varlen(q, k, v, int32(*CU_Q), int32(*CU_K), *bounds, **options)
    torch.testing.assert_close(plain, o, atol=1e-12, rtol=0)


def test_host_lengths_change_nothing(implementation):
    q, k, v = make()
    cu = int32(*CU_Q), int32(*CU_K)
    expected = attention_varlen(q, k, v, *cu, 5, 7, causal=True)
    told = attention_varlen(q, k, v, *cu, 5, 7, causal=True, cu_seqlens_q_cpu=cu[0], cu_seqlens_k_cpu=cu[1])
    assert torch.equal(told, expected)


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_rows_past_the_last_sequence_and_their_gradients_do_not_matter(implementation, poison):
    q, k, v = make()
    bad = q.clone(), k.clone(), v.clone()
    bad[0][9:], bad[1][13:], bad[2][13:] = poison, poison, poison
    upstream = normal(5, 11, 4, 5)
    bad_upstream = upstream.clone()
    bad_upstream[9:] = poison
    results = []
    for tensors, up in (((q, k, v), upstream), (bad, bad_upstream)):
        leaves = [t.clone().requires_grad_() for t in tensors]
        o = attention_varlen(*leaves, int32(*CU_Q), int32(*CU_K), 5, 7, causal=True)
        results.append((o.detach(), *torch.autograd.grad(o, leaves, up)))
    torch.testing.assert_close(results[1], results[0], atol=1e-13, rtol=0)
    o, dq, dk, dv = results[1]
    assert (o[9:] == 0).all() and (dq[9:] == 0).all() and (dk[13:] == 0).all() and (dv[13:] == 0).all()
    assert (dk[4:6] == 0).all()  # keys of the sequence without queries


def test_gradients_are_those_of_the_schoolbook_formula(implementation):
    leaves = [t.requires_grad_() for t in make()]
    upstream = normal(5, 11, 4, 5)
    got = torch.autograd.grad(
        attention_varlen(*leaves, int32(*CU_Q), int32(*CU_K), 5, 7, causal=True, window=(2, None)), leaves, upstream
    )
    want = torch.autograd.grad(naive.ragged(*leaves, CU_Q, CU_K, causal=True, window=(2, None))[0], leaves, upstream)
    torch.testing.assert_close(got, want, atol=1e-12, rtol=1e-10)


def test_gradcheck_with_sinks_and_lse():
    q, k, v = (t.requires_grad_() for t in (normal(0, 4, 2, 2), normal(1, 5, 1, 2), normal(2, 5, 1, 2)))
    sinks = normal(3, 2).requires_grad_()

    def run(q, k, v, sinks):
        return attention_varlen(
            q, k, v, int32(0, 1, 4), int32(0, 2, 5), 3, 3, causal=True, sinks=sinks, return_lse=True
        )

    assert torch.autograd.gradcheck(run, (q, k, v, sinks))


@pytest.mark.parametrize(
    ("T", "U", "cu_q", "cu_k"),
    [
        (0, 0, (0,), (0,)),
        (0, 0, (0, 0), (0, 0)),
        (3, 0, (0, 3), (0, 0)),
        (0, 3, (0, 0), (0, 3)),
        (2, 2, (0,), (0,)),
    ],
)
def test_empty_batches(implementation, T, U, cu_q, cu_k):
    q, k, v = (t.requires_grad_() for t in make(T, U))
    o, lse = attention_varlen(q, k, v, int32(*cu_q), int32(*cu_k), 3, 3, return_lse=True)
    assert o.shape == (T, 4, 5) and lse.shape == (T, 4)
    assert (o == 0).all()
    assert (lse[: cu_q[-1]] == -math.inf).all() and (lse[cu_q[-1] :] == 0).all()
    assert all((d == 0).all() for d in torch.autograd.grad(o.sum(), (q, k, v)))


def test_one_query_per_sequence_equals_the_last_row_of_prefill(implementation):
    _, k, v = make(U=9)
    q = normal(7, 9, 4, 5)
    whole = attention_varlen(q, k, v, int32(0, 9), int32(0, 9), 9, 9, causal=True)
    last = attention_varlen(q[8:], k, v, int32(0, 1), int32(0, 9), 1, 9, causal=True)
    torch.testing.assert_close(last, whole[8:], atol=1e-13, rtol=0)
    torch.testing.assert_close(attention(q[None], k[None], v[None], causal=True)[0], whole, atol=1e-13, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_errors_stay_within_the_derived_bound(implementation, dtype):
    q, k, v = normal(0, 80, 6, 64, dtype=dtype), normal(1, 200, 2, 64, dtype=dtype), normal(2, 200, 2, 64, dtype=dtype)
    args = (q, k, v, int32(0, 1, 30, 75), int32(0, 90, 120, 190), 45, 90)
    options = {"causal": True, "return_lse": True}
    result = attention_varlen(*args, **options)
    assert budget_used("attention_varlen", args, options, result, implementation == "aten") <= 4


@pytest.mark.parametrize(
    ("cu_q", "cu_k", "bounds", "words"),
    [
        ((1, 3, 9), (0, 4, 13), (9, 13), r"cu_seqlens_q\[0\] is 1"),
        ((0, 5, 3), (0, 4, 13), (9, 13), "decreases from 5 to 3"),
        ((0, 3, 12), (0, 4, 13), (9, 13), r"cu_seqlens_q\[-1\] is 12"),
        ((0, 3, 9), (0, 4, 16), (9, 13), r"cu_seqlens_k\[-1\] is 16"),
        ((0, 3, 9), (0, 4, 13), (5, 13), "more than max_seqlen_q=5"),
        ((0, 3, 9), (0, 4, 13), (9, 8), "more than max_seqlen_k=8"),
    ],
)
def test_sums_that_are_not_prefix_sums_of_lengths_are_refused(cu_q, cu_k, bounds, words):
    for leaf in (False, True):
        q, k, v = (t.requires_grad_(leaf) for t in make())
        with pytest.raises(ArgumentError, match=words):
            attention_varlen(q, k, v, int32(*cu_q), int32(*cu_k), *bounds)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"q": torch.zeros(1, 11, 4, 5, dtype=torch.float64)}, ShapeError, "q has shape"),
        ({"k": torch.zeros(14, 2, 5, dtype=torch.float64)}, ShapeError, "as many"),
        ({"k": torch.zeros(15, 2, 5)}, DtypeError, "share one dtype"),
        ({"cu_seqlens_q": torch.tensor(CU_Q)}, DtypeError, "must be int32"),
        ({"cu_seqlens_q": int32()}, ShapeError, "cu_seqlens_q is empty"),
        ({"cu_seqlens_q": int32(0, 9)}, ShapeError, "1 sequences"),
        ({"max_seqlen_q": -1}, ArgumentError, "max_seqlen_q is -1"),
        ({"cu_seqlens_q_cpu": int32(0, 9)}, ShapeError, "cu_seqlens_q_cpu"),
        ({"cu_seqlens_k_cpu": torch.tensor(CU_K)}, DtypeError, "cu_seqlens_k_cpu"),
        ({"cu_seqlens_q_cpu": int32(0, 2, 3, 4, 9, 9)}, ArgumentError, "cu_seqlens_q_cpu is"),
        ({"window": (0, -2)}, ArgumentError, "window right"),
    ],
)
def test_bad_arguments_say_what_is_wrong(change, error, words):
    q, k, v = make()
    arguments = {
        "q": q,
        "k": k,
        "v": v,
        "cu_seqlens_q": int32(*CU_Q),
        "cu_seqlens_k": int32(*CU_K),
        "max_seqlen_q": 5,
        "max_seqlen_k": 7,
    }
    with pytest.raises(error, match=words):
        attention_varlen(**(arguments | change))
