"""paged_attention: gathered rows, tables, quantised caches, poisoned slots, bad input."""

from __future__ import annotations

import math

import naive_attention as naive
import pytest
import torch
from attention_support import budget_used, forced, int32, normal

from hal.errors import ArgumentError, DeviceError, DtypeError, ShapeError, TransformError
from hal.ops.attention_varlen import attention_varlen
from hal.ops.kv_cache import gather_kv_cache
from hal.ops.paged_attention import paged_attention


@pytest.fixture(params=["reference", "aten"])
def implementation(request):
    with forced("paged_attention", request.param):
        yield request.param


LENS, CU_Q = (5, 9, 0, 1), (0, 1, 4, 5, 6)  # decode, a chunk of prefill, a sequence without keys, one without a past
TABLE = torch.tensor([[3, 6, 999], [0, 5, 2], [-7, 999, 999], [4, -1, 999]], dtype=torch.int32)


def make(dtype=torch.float64, H=4, K=2, D=5, P=4):
    return (
        normal(0, 7, H, D, dtype=dtype),
        normal(1, 7, P, K, D, dtype=dtype),
        normal(2, 7, P, K, D, dtype=dtype),
        TABLE,
        int32(*LENS),
        int32(*CU_Q),
        3,
    )


def schoolbook(q, k_cache, v_cache, table, lens, cu, _, k_scale=1.0, v_scale=1.0, **options):
    o = torch.zeros(*q.shape[:2], v_cache.shape[3], dtype=torch.float64)
    lse = torch.zeros(q.shape[:2], dtype=torch.float64)
    for b, n in enumerate(lens.tolist()):
        rows = slice(int(cu[b]), int(cu[b + 1]))
        k = naive.from_blocks(k_cache.double(), table[b].tolist(), n) * k_scale
        v = naive.from_blocks(v_cache.double(), table[b].tolist(), n) * v_scale
        part, part_lse = naive.dense(q[None, rows], k[None], v[None], **options)
        o[rows], lse[rows] = part[0], part_lse[0].T
    return o, lse


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": False},
        {"window": (2, 0)},
        {"window": (3, None), "scale": 0.3},
        {"softcap": 1.5, "sinks": True},
    ],
    ids=lambda o: "-".join(o) or "plain",
)
def test_each_sequence_attends_to_the_rows_its_table_names(implementation, options):
    if implementation == "aten" and "softcap" in options:
        pytest.skip("aten leaves softcap and sinks to the reference")
    args, options = make(), dict(options)
    if "sinks" in options:
        options["sinks"] = normal(3, 4)
    o, lse = paged_attention(*args, **options, return_lse=True)
    expected = schoolbook(*args, **({"causal": True} | options))
    torch.testing.assert_close((o, lse), expected, atol=1e-12, rtol=1e-12)
    assert (o[6:] == 0).all() and (lse[6:] == 0).all()
    torch.testing.assert_close(paged_attention(*args, **options), o, atol=1e-12, rtol=0)
    host = {"seq_lens_cpu": args[4].clone(), "cu_seqlens_q_cpu": args[5].clone()}
    assert torch.equal(paged_attention(*args, **options, **host, return_lse=True)[0], o)


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_slots_past_the_end_and_unnamed_blocks_have_no_influence(implementation, poison):
    args = make(torch.bfloat16)
    expected = paged_attention(*args, return_lse=True)
    for cache in args[1:3]:
        used = torch.zeros(7, 4, dtype=torch.bool)
        for b, n in enumerate(LENS):
            for j in range(n):
                used[TABLE[b, j // 4], j % 4] = True
        cache[~used] = poison
    torch.testing.assert_close(paged_attention(*args, return_lse=True), expected, atol=0, rtol=0)


def test_caches_interleaved_per_block_are_read_by_their_strides(implementation):
    args = list(make())
    expected = paged_attention(*args)
    args[1:3] = torch.stack(args[1:3], 1).unbind(1)
    torch.testing.assert_close(paged_attention(*args), expected, atol=1e-14, rtol=0)
    args[1:3] = torch.cat(args[1:3], -1).split(5, -1)
    torch.testing.assert_close(paged_attention(*args), expected, atol=1e-14, rtol=0)


@pytest.mark.parametrize("kind", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_codes_are_multiplied_with_their_own_scale(implementation, kind, per_head, dtype):
    args = list(make())
    args[0] = args[0].to(dtype)
    args[1:3] = (t.mul(20).round().to(kind) for t in args[1:3])
    k_scale, v_scale = torch.tensor([0.04, 0.07]), torch.tensor([0.0004, 0.02])
    if not per_head:
        k_scale, v_scale = k_scale[0], v_scale[0]
    options = {"k_scale": k_scale, "v_scale": v_scale, "return_lse": True}
    result = paged_attention(*args, **options)
    wide = [s.double()[:, None] if per_head else s.double() for s in (k_scale, v_scale)]
    expected = schoolbook(*args, k_scale=wide[0], v_scale=wide[1], causal=True)
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1e-2}[dtype]
    torch.testing.assert_close([t.double() for t in result], list(expected), atol=tolerance * 0.1, rtol=tolerance)
    assert result[0].dtype is dtype
    assert budget_used("paged_attention", args, options, result, implementation == "aten") <= 4


def test_an_fp8_cache_without_scales_means_scale_one(implementation):
    args = list(make(torch.float32))
    args[1:3] = (t.to(torch.float8_e4m3fn) for t in args[1:3])
    one = torch.tensor(1.0)
    assert torch.equal(paged_attention(*args), paged_attention(*args, k_scale=one, v_scale=one))


def test_it_equals_ragged_attention_over_the_gathered_cache(implementation):
    args = make()
    cu_k = int32(0, 5, 14, 14, 15)
    k, v = gather_kv_cache(args[1], args[2], TABLE, cu_k, 15)
    expected = attention_varlen(args[0], k, v, args[5], cu_k, 3, 9, causal=True)
    torch.testing.assert_close(paged_attention(*args), expected, atol=1e-13, rtol=0)


def test_more_queries_than_keys_leaves_the_first_ones_without(implementation):
    q, k_cache, v_cache = normal(0, 4, 2, 3), normal(1, 2, 4, 1, 3), normal(2, 2, 4, 1, 3)
    args = (q, k_cache, v_cache, torch.tensor([[1]], dtype=torch.int32), int32(2), int32(0, 4), 4)
    o, lse = paged_attention(*args, return_lse=True)
    assert (o[:2] == 0).all() and (lse[:2] == -math.inf).all() and (o[2:] != 0).all()


@pytest.mark.parametrize(("B", "T", "M", "N"), [(0, 0, 0, 0), (0, 0, 2, 3), (2, 0, 0, 0), (2, 3, 0, 3), (2, 3, 2, 0)])
def test_empty_batches_tables_and_caches(implementation, B, T, M, N):
    cache = normal(1, N, 4, 2, 5)
    cu = int32(*([0] + [T] * B if B else [0]))
    o, lse = paged_attention(
        normal(0, T, 4, 5),
        cache,
        cache.clone(),
        torch.zeros(B, M, dtype=torch.int32),
        torch.zeros(B, dtype=torch.int32),
        cu,
        T,
        return_lse=True,
    )
    assert o.shape == (T, 4, 5) and (o == 0).all() and (lse == -math.inf).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_errors_stay_within_the_derived_bound(implementation, dtype):
    q, k_cache, v_cache = (normal(i, n, h, 64, dtype=dtype) for i, (n, h) in enumerate(((40, 6), (320, 2), (320, 2))))
    args = (
        q,
        k_cache.view(20, 16, 2, 64),
        v_cache.view(20, 16, 2, 64),
        torch.arange(20).view(2, 10).flip(0).int(),
        int32(150, 77),
        int32(0, 1, 40),
        39,
    )
    result = paged_attention(*args, return_lse=True)
    assert budget_used("paged_attention", args, {"return_lse": True}, result, implementation == "aten") <= 4


def test_a_gradient_is_refused_by_name():
    args = list(make())
    args[0].requires_grad_()
    with pytest.raises(TransformError, match="paged_attention has no gradient"):
        paged_attention(*args).sum().backward()


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"q": torch.zeros(1, 7, 4, 5)}, ShapeError, "q has shape"),
        ({"q": torch.zeros(7, 4, 5).bfloat16()}, DtypeError, "share one dtype"),
        ({"q": torch.zeros(7, 3, 5)}, ShapeError, "multiple"),
        ({"q": torch.zeros(7, 4, 6)}, ShapeError, "head dim"),
        ({"k_cache": torch.zeros(6, 4, 2, 5)}, ShapeError, "must be equal"),
        ({"k_cache": torch.zeros(7, 4, 2, 5).bfloat16()}, DtypeError, "one dtype"),
        ({"k_cache": torch.zeros(7, 4, 5, 2).transpose(2, 3)}, ArgumentError, "last stride"),
        ({"block_table": TABLE.long()}, DtypeError, "block_table is int64"),
        ({"block_table": TABLE[:3]}, ShapeError, "block_table"),
        ({"block_table": TABLE[:, :2]}, ArgumentError, "hold 8"),
        ({"block_table": torch.full_like(TABLE, 7)}, ArgumentError, r"block_table\[0, 0\] is 7"),
        ({"block_table": torch.full_like(TABLE, -1)}, ArgumentError, r"block_table\[0, 0\] is -1"),
        ({"seq_lens": int32(5, 9, -1, 1)}, ArgumentError, "-1 keys"),
        ({"seq_lens": torch.tensor(LENS)}, DtypeError, "seq_lens"),
        ({"seq_lens": int32(5, 9, 0)}, ShapeError, "block_table"),
        ({"cu_seqlens_q": int32(0, 1, 4, 5)}, ShapeError, "must hold 5"),
        ({"cu_seqlens_q": int32(0, 1, 4, 3, 5)}, ArgumentError, "decreases"),
        ({"max_seqlen_q": 2}, ArgumentError, "max_seqlen_q=2"),
        ({"seq_lens_cpu": int32(5, 9, 0, 2)}, ArgumentError, "seq_lens_cpu"),
        ({"seq_lens_cpu": int32(5, 9, 0)}, ShapeError, "seq_lens_cpu"),
        ({"k_scale": torch.tensor(1.0)}, ArgumentError, "only int8 and float8"),
        ({"softcap": -1.0}, ArgumentError, "softcap"),
        ({"q": torch.zeros(7, 4, 5, device="meta")}, DeviceError, "device"),
    ],
)
def test_bad_arguments_say_what_is_wrong(change, error, words):
    names = ("q", "k_cache", "v_cache", "block_table", "seq_lens", "cu_seqlens_q", "max_seqlen_q")
    with pytest.raises(error, match=words):
        paged_attention(**(dict(zip(names, make(torch.float32), strict=True)) | change))


@pytest.mark.parametrize(
    ("scales", "error", "words"),
    [
        ({}, ArgumentError, "int8 cache needs it"),
        ({"k_scale": torch.tensor(1.0)}, ArgumentError, "v_scale is None"),
        ({"k_scale": torch.tensor(1.0), "v_scale": torch.ones(3)}, ShapeError, "one per kv head"),
        ({"k_scale": torch.tensor(1.0).double(), "v_scale": torch.tensor(1.0)}, DtypeError, "k_scale"),
        ({"k_scale": torch.tensor(math.nan), "v_scale": torch.tensor(1.0)}, ArgumentError, "k_scale holds nan"),
        ({"k_scale": torch.tensor(1.0), "v_scale": torch.tensor([1.0, 0.0])}, ArgumentError, "v_scale holds 0"),
    ],
)
def test_scales_that_do_not_fit_an_int8_cache_are_refused(scales, error, words):
    args = list(make(torch.float32))
    args[1:3] = (t.to(torch.int8) for t in args[1:3])
    with pytest.raises(error, match=words):
        paged_attention(*args, **scales)


def test_a_wide_table_is_checked_too():
    table = torch.zeros(2, 400, dtype=torch.int32)
    table[1, 300] = 9
    args = (normal(0, 2, 1, 4), normal(1, 3, 2, 1, 4), normal(2, 3, 2, 1, 4), table, int32(3, 601), int32(0, 1, 2), 1)
    with pytest.raises(ArgumentError, match=r"block_table\[1, 300\] is 9"):
        paged_attention(*args)
    args[4][1] = 600  # the bad entry is past the end now
    assert paged_attention(*args).isfinite().all()
