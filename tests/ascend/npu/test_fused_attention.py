"""Attention of torch_npu: for inference, paged and packed too, and for training with its gradient, against float64; and
the calls that are legal but mean something else than a careless caller thinks (simulated)."""

from __future__ import annotations

import math

import pytest
import torch
import torch_npu

from hal.backends.ascend import simulator
from hal.backends.ascend.simulator import trace

INF = math.inf
SCALE = 0.125


def triangle(side=2048):
    return torch.ones(side, side, dtype=torch.bool).triu(1)


def close(actual, reference, roundings=3, stored=None):
    """As near as so many roundings of the greatest value to `stored`, or to its own dtype; perturbed, as of 8 times."""
    actual = actual.detach().cpu()
    loose = 1 if simulator.current().numerics == "exact" else 8
    bound = loose * roundings * torch.finfo(stored or actual.dtype).eps * reference.detach().abs().max().clamp_min(1)
    error = (actual.double() - reference.detach().double()).abs().max()
    assert error <= bound, f"{error:g} off, {bound:g} allowed"


def reference(query, key, value, hidden=None, sink=None, bias=None):
    """Attention in float64 of (…, N, S, D) with (…, K, L, D), and the logarithm of its sums (…, N, S)."""
    query, key, value = query.double(), key.double(), value.double()
    group = query.shape[-3] // key.shape[-3]
    key, value = key.repeat_interleave(group, -3), value.repeat_interleave(group, -3)
    scores = query @ key.transpose(-1, -2) * SCALE
    if bias is not None:
        scores = scores + bias
    if hidden is not None:
        scores = scores.masked_fill(hidden, -INF)
    if sink is not None:
        column = sink.reshape(-1, 1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat((scores, column), -1)
    weights = scores.softmax(-1)[..., : key.shape[-2]]
    return weights @ value, scores.logsumexp(-1)


def causal(queries, keys, offset=None):
    return torch.ones(queries, keys, dtype=torch.bool).triu(1 + (keys - queries if offset is None else offset))


def laid(t, layout):
    """A batch (B, N, S, D) in another order."""
    orders = {
        "BNSD": lambda: t,
        "BSND": lambda: t.transpose(1, 2),
        "BSH": lambda: t.transpose(1, 2).flatten(2),
        "SBH": lambda: t.permute(2, 0, 1, 3).flatten(2),
        "TND": lambda: t.transpose(1, 2).flatten(0, 1),
    }
    return orders[layout]().contiguous()


def draw(*shape, dtype=torch.float16, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(dtype)


def batch(queries=9, keys=13, dim=64, dtype=torch.float16, sequences=2, heads=4, groups=2):
    return tuple(
        draw(sequences, n, s, dim, dtype=dtype, seed=seed)
        for seed, (n, s) in enumerate(((heads, queries), (groups, keys), (groups, keys)))
    )


def infer(query, key, value, layout="BNSD", **options):
    tensors = (laid(t, layout).npu() for t in (query, key, value))
    options = {"scale": SCALE, "softmax_lse_flag": True} | options
    return torch_npu.npu_fused_infer_attention_score(
        *tensors, num_heads=query.shape[1], num_key_value_heads=key.shape[1], input_layout=layout, **options
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("layout", ["BNSD", "BSND", "BSH"])
def test_dense_layouts_give_output_and_natural_lse(layout, dtype):
    query, key, value = batch(dtype=dtype)
    out, lse = infer(query, key, value, layout, atten_mask=triangle().npu(), sparse_mode=3)
    expected, sums = reference(query, key, value, causal(9, 13))
    close(out, laid(expected, layout))
    assert lse.dtype is torch.float32
    close(lse.squeeze(-1), sums, 8)


@pytest.mark.parametrize(
    ("mode", "hidden", "options"),
    [
        (0, causal(9, 13), {}),
        (0, causal(9, 13, 2) | ~causal(9, 13, -5), {"pre_tokens": 4, "next_tokens": 2}),
        (1, causal(9, 13), {"pre_tokens": 1, "next_tokens": 0}),
        (2, causal(9, 13, 0), {}),
        (4, causal(9, 13, 5) | ~causal(9, 13, 0), {"pre_tokens": 3, "next_tokens": 1}),
    ],
)
def test_sparse_modes(mode, hidden, options):
    query, key, value = batch()
    whole = {0: torch.zeros(9, 13, dtype=torch.bool), 1: hidden}
    if mode == 0 and not options:
        whole[0] = hidden
    out, _ = infer(query, key, value, atten_mask=whole.get(mode, triangle()).npu(), sparse_mode=mode, **options)
    close(out, reference(query, key, value, hidden)[0])


def test_lengths_cut_queries_and_keys():
    query, key, value = batch()
    out, lse = infer(query, key, value, actual_seq_lengths=[4, 9], actual_seq_lengths_kv=[13, 5])
    for i, (queries, keys) in enumerate(((4, 13), (9, 5))):
        expected, sums = reference(query[i, :, :queries], key[i, :, :keys], value[i, :, :keys])
        close(out[i, :, :queries], expected)
        close(lse[i, :, :queries, 0], sums, 8)


def packed(tokens, heads, dim, seed):
    return draw(tokens, heads, dim, seed=seed)


def test_packed_sequences_are_running_sums():
    query, key, value = packed(9, 4, 128, 0), packed(13, 2, 128, 1), packed(13, 2, 128, 2)
    out, lse = torch_npu.npu_fused_infer_attention_score(
        query.npu(),
        key.npu(),
        value.npu(),
        num_heads=4,
        num_key_value_heads=2,
        input_layout="TND",
        scale=SCALE,
        actual_seq_lengths=[4, 4, 9],
        actual_seq_lengths_kv=[5, 5, 13],
        atten_mask=triangle().npu(),
        sparse_mode=3,
        softmax_lse_flag=True,
    )
    for (a, b), (c, d) in (((0, 4), (0, 5)), ((4, 9), (5, 13))):
        parts = query[a:b].transpose(0, 1), *(t[c:d].transpose(0, 1) for t in (key, value))
        expected, sums = reference(*parts, causal(b - a, d - c))
        close(out[a:b].transpose(0, 1), expected)
        close(lse[a:b, :, 0].T, sums, 8)


def paged(lengths, heads, dim, rows):
    """Keys and values (T, K, D) in a cache (blocks, rows, K, D) out of order, with its table."""
    counts = [-(-length // rows) for length in lengths]
    order = torch.randperm(sum(counts) + 2, generator=torch.Generator().manual_seed(0)).tolist()
    table = torch.zeros(len(lengths), max(counts), dtype=torch.int32)
    key, value = packed(sum(lengths), heads, dim, 1), packed(sum(lengths), heads, dim, 2)
    caches = [torch.full((len(order), rows, heads, dim), INF).half() for _ in range(2)]
    start = 0
    for i, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        table[i, :count] = torch.tensor([order.pop() for _ in range(count)])
        for position in range(length):
            block = int(table[i, position // rows])
            for cache, tokens in zip(caches, (key, value), strict=True):
                cache[block, position % rows] = tokens[start + position]
        start += length
    return key, value, *caches, table


@pytest.mark.parametrize(("layout", "headed"), [("BNSD", False), ("BNSD", True), ("BSND", False), ("BSH", False)])
def test_decode_reads_pages(layout, headed):
    lengths = [5, 130, 256]
    key, value, keys, values, table = paged(lengths, 2, 64, 128)
    query = draw(3, 4, 1, 64)
    caches = [(c.transpose(1, 2).contiguous() if headed else c.flatten(2)).npu() for c in (keys, values)]
    out, lse = torch_npu.npu_fused_infer_attention_score(
        laid(query, layout).npu(),
        *caches,
        num_heads=4,
        num_key_value_heads=2,
        input_layout=layout,
        scale=SCALE,
        block_table=table.npu(),
        block_size=128,
        actual_seq_lengths_kv=lengths,
        softmax_lse_flag=True,
    )
    start = 0
    for i, length in enumerate(lengths):
        parts = (t[start : start + length].transpose(0, 1) for t in (key, value))
        expected, sums = reference(query[i], *parts)
        close(out[i].reshape(4, 1, 64), expected)
        close(lse[i, ..., 0], sums, 8)
        start += length


def test_packed_prefill_of_pages_takes_lengths_of_keys_not_sums():
    lengths, queries = [5, 130, 256], [5, 1, 70]
    key, value, keys, values, table = paged(lengths, 2, 128, 128)
    query = packed(76, 4, 128, 0)
    out, _ = torch_npu.npu_fused_infer_attention_score(
        query.npu(),
        keys.flatten(2).npu(),
        values.flatten(2).npu(),
        num_heads=4,
        num_key_value_heads=2,
        input_layout="TND",
        scale=SCALE,
        block_table=table.npu(),
        block_size=128,
        actual_seq_lengths=[5, 6, 76],
        actual_seq_lengths_kv=lengths,
        atten_mask=triangle().npu(),
        sparse_mode=3,
    )
    first = start = 0
    for count, length in zip(queries, lengths, strict=True):
        parts = (t[start : start + length].transpose(0, 1) for t in (key, value))
        expected, _ = reference(query[first : first + count].transpose(0, 1), *parts, causal(count, length))
        close(out[first : first + count].transpose(0, 1), expected)
        first, start = first + count, start + length


def test_a_learnable_sink_takes_weight_and_has_no_value():
    query, key, value = packed(9, 4, 128, 0), packed(9, 2, 128, 1), packed(9, 2, 128, 2)
    sink = torch.tensor([-1.0, 0.0, 1.0, 4.0], dtype=torch.bfloat16)
    out, _ = torch_npu.npu_fused_infer_attention_score_v2(
        query.npu(),
        key.npu(),
        value.npu(),
        num_query_heads=4,
        num_key_value_heads=2,
        input_layout="TND",
        softmax_scale=SCALE,
        actual_seq_qlen=[9],
        actual_seq_kvlen=[9],
        learnable_sink=sink.npu(),
    )
    close(out.transpose(0, 1), reference(*(t.transpose(0, 1) for t in (query, key, value)), sink=sink.double())[0])


def test_prompt_and_incremental_attention():
    query, key, value = batch()
    options = {"num_heads": 4, "num_key_value_heads": 2, "input_layout": "BNSD", "scale_value": SCALE}
    out = torch_npu.npu_prompt_flash_attention(
        query.npu(), key.npu(), value.npu(), **options, atten_mask=triangle().npu(), sparse_mode=3
    )
    close(out, reference(query, key, value, causal(9, 13))[0])
    one = query[:, :, :1].contiguous()
    out = torch_npu.npu_incre_flash_attention(one.npu(), key.npu(), value.npu(), **options, actual_seq_lengths=[13, 5])
    close(out[1], reference(one[1], key[1, :, :5], value[1, :, :5])[0])


def test_a_row_that_sees_nothing_is_an_average_unless_mended():
    query, key, value = batch()
    mask = torch.zeros(9, 13, dtype=torch.bool)
    mask[2] = True
    out, _ = infer(query, key, value, atten_mask=mask.npu())
    close(out[:, :, 2], value.double().mean(2).repeat_interleave(2, 1))
    out, lse = infer(query, key, value, atten_mask=mask.npu(), inner_precise=2)
    assert out[:, :, 2].cpu().count_nonzero() == 0
    assert bool((lse[:, :, 2] == INF).all())
    assert bool(lse[:, :, 3].isfinite().all())


def test_causal_with_fewer_keys_than_queries_is_mended_unasked():
    query, key, value = batch(13, 9)
    out, _ = infer(query, key, value, atten_mask=triangle().npu(), sparse_mode=3)
    assert out[:, :, :4].cpu().count_nonzero() == 0
    close(out[:, :, 4:], reference(query[:, :, 4:], key, value, causal(9, 9))[0])


def test_a_single_query_of_a_dense_layout_knows_no_window():
    query, key, value = batch(queries=1)
    out, _ = infer(query, key, value, sparse_mode=4, pre_tokens=2, next_tokens=0)
    close(out, reference(query, key, value)[0])


def test_what_a_careless_caller_writes_is_accepted_and_wrong():
    query, key, value = batch()
    right = infer(query, key, value, atten_mask=triangle().npu(), sparse_mode=3)[0].cpu()
    for change in (
        {"sparse_mode": 2},
        {"atten_mask": (~triangle()).npu()},
        {"scale": 1.0},
        {"atten_mask": None, "sparse_mode": 0},
    ):
        other = infer(query, key, value, **{"atten_mask": triangle().npu(), "sparse_mode": 3} | change)[0].cpu()
        assert (other - right).abs().max() > 0.05, f"{change} makes no difference"


VERSIONS = """
import torch, torch_npu
from hal.backends.ascend.simulator import trace
q = torch.zeros(1, 2, 4, 64).half().npu()
with trace.recording() as recorded:
    torch_npu.npu_fused_infer_attention_score(q, q, q, num_heads=2, input_layout="BNSD")
    torch_npu.npu_fused_infer_attention_score_v2(q, q, q, num_query_heads=2, input_layout="BNSD")
    torch_npu.npu_fusion_attention(q, q, q, 2, "BNSD")
    torch_npu.npu_fusion_attention(q, q, q, 2, "BNSD", sink=torch.ones(2).npu())
    torch_npu.npu_fusion_attention_v2(q, q, q, 2, "BNSD", sink=torch.ones(2).npu())
calls = [call for call in recorded.calls if "Attention" in call.operator]
print(*(call.operator.removeprefix("aclnn") + "+sink" * (call.arguments.get("sink") is not None) for call in calls))
"""


@pytest.mark.parametrize(
    ("soc", "called"),
    [
        (
            "910B3",
            "FusedInferAttentionScoreV3 FusedInferAttentionScoreV4 FlashAttentionScore FlashAttentionScoreV3+sink "
            "FlashAttentionScoreV3+sink",
        ),
        # The first form of training attention drops a sink on this chip.
        (
            "950",
            "FusedInferAttentionScoreV5 FusedInferAttentionScoreV5 FlashAttentionScoreV4 FlashAttentionScoreV4 "
            "FlashAttentionScoreV4+sink",
        ),
    ],
)
def test_the_versions_that_torch_npu_picks(simulated, soc, called):
    assert simulated(VERSIONS, "--soc", soc) == called


def train(layout, mode=0, hidden=None, mask=None, sink=None, form=1, queries=9, **options):
    """Result, gradients and statistics of training attention, against float64."""
    tensors = batch(queries)
    ours = [laid(t, layout).npu().requires_grad_() for t in tensors]
    theirs = [t.double().requires_grad_() for t in tensors]
    sinks = []
    if sink is not None:
        sinks = [sink.npu().requires_grad_(), sink.double().requires_grad_()]
        options["sink"] = sinks[0]
    if layout == "TND":
        options |= {"actual_seq_qlen": [queries, 2 * queries], "actual_seq_kvlen": [13, 26]}
    function = [torch_npu.npu_fusion_attention, torch_npu.npu_fusion_attention_v2, torch_npu.npu_fusion_attention_v3]
    mask = None if mask is None else mask.npu()
    result = function[form - 1](*ours, 4, layout, atten_mask=mask, scale=SCALE, sparse_mode=mode, **options)
    expected, sums = reference(*theirs, hidden, sinks[1] if sinks else None)
    close(result[0], laid(expected, layout))
    upstream = draw(*expected.shape, seed=7)
    result[0].backward(laid(upstream, layout).npu())
    expected.backward(upstream.double())
    for mine, other in zip(ours, theirs, strict=True):
        close(mine.grad, laid(other.grad, layout), 6)
    if sinks:
        close(sinks[0].grad, sinks[1].grad, 6, stored=torch.float16)  # from a result that was stored
    return result[1:3], sums


@pytest.mark.parametrize(
    ("mode", "hidden", "options"),
    [
        (0, None, {}),
        (0, causal(9, 13), {"mask": causal(9, 13)}),
        (1, causal(9, 13), {"mask": causal(9, 13)}),
        (2, causal(9, 13, 0), {"mask": triangle()}),
        (3, causal(9, 13), {"mask": triangle()}),
        (4, causal(9, 13, 5) | ~causal(9, 13, 0), {"mask": triangle(), "pre_tockens": 3, "next_tockens": 1}),
    ],
)
@pytest.mark.parametrize("layout", ["BNSD", "BSND", "BSH", "SBH", "TND"])
def test_training_attention_and_its_gradient(layout, mode, hidden, options):
    train(layout, mode, hidden, **options)


@pytest.mark.parametrize(("layout", "form"), [("BNSD", 1), ("BNSD", 2), ("BNSD", 3), ("TND", 1), ("TND", 2)])
def test_all_forms_with_a_sink(layout, form):
    train(layout, 3, causal(9, 13), triangle(), torch.tensor([-1.0, 0.0, 1.0, 4.0]), form)


def test_the_statistics_stand_eight_times_in_the_result():
    (maxima, totals), sums = train("BSND", 3, causal(9, 13), triangle())
    assert maxima.shape == totals.shape == (2, 4, 9, 8)
    close((maxima + totals.log()).cpu(), sums.unsqueeze(-1).expand(2, 4, 9, 8), 8)


def test_packed_statistics_lie_by_sequence_and_head_unless_asked_otherwise():
    (maxima, totals), sums = train("TND", 3, causal(9, 13), triangle())
    assert maxima.shape == (18, 4, 8)
    close((maxima + totals.log()).cpu().view(2, 4, 9, 8)[..., 0], sums, 8)
    (maxima, totals), sums = train("TND", 3, causal(9, 13), triangle(), softmax_layout="TND")
    close((maxima + totals.log()).cpu()[..., 0], sums.transpose(1, 2).flatten(0, 1), 8)


def test_prefix_modes_show_the_prefix_to_all():
    query, key, value = batch()
    prefix = [4, 12]
    hidden = causal(9, 13).expand(2, 1, 9, 13) & (torch.arange(13) >= torch.tensor(prefix).view(2, 1, 1, 1))
    compressed = torch.cat((triangle(), (torch.arange(2048) >= 1024).expand(1024, 2048)))
    expected = reference(query, key, value, hidden)[0]
    for mode, mask in ((5, hidden), (6, compressed)):
        out = torch_npu.npu_fusion_attention(
            *(t.npu() for t in (query, key, value)),
            4,
            "BNSD",
            atten_mask=mask.npu(),
            scale=SCALE,
            sparse_mode=mode,
            prefix=prefix,
        )[0]
        close(out, expected)


@pytest.mark.parametrize(("mode", "banded"), [(7, 1), (8, 0)])
def test_cut_packed_modes_have_one_band(mode, banded):
    query, key, value = batch()
    hidden = [causal(9, 13) if mode == 7 else causal(9, 13, 0)] * 2
    hidden[banded] = causal(9, 13, 4 - 2) | ~causal(9, 13, 4 - 13 - 1)
    out = torch_npu.npu_fusion_attention(
        *(laid(t, "TND").npu() for t in (query, key, value)),
        4,
        "TND",
        atten_mask=triangle().npu(),
        scale=SCALE,
        sparse_mode=mode,
        pre_tockens=13,
        next_tockens=-2,
        actual_seq_qlen=[9, 18],
        actual_seq_kvlen=[13, 26],
    )[0]
    close(out, laid(reference(query, key, value, torch.stack(hidden).unsqueeze(1))[0], "TND"))


def test_a_bias_and_its_gradient():
    query, key, value = batch()
    bias = draw(1, 4, 9, 13)
    ours, theirs = bias.npu().requires_grad_(), bias.double().requires_grad_()
    out = torch_npu.npu_fusion_attention(*(t.npu() for t in (query, key, value)), 4, "BNSD", pse=ours, scale=SCALE)[0]
    expected = reference(query, key, value, bias=theirs)[0]
    close(out, expected)
    out.sum().backward()
    expected.sum().backward()
    close(ours.grad, theirs.grad, 8)


def test_a_blind_row_in_training_gives_an_average_or_zero_with_inner_precise_2():
    query, key, value = batch()
    mask = torch.zeros(9, 13, dtype=torch.bool)
    mask[2] = True
    tensors = [t.npu() for t in (query, key, value)]
    out = torch_npu.npu_fusion_attention(*tensors, 4, "BNSD", atten_mask=mask.npu(), scale=SCALE)[0]
    close(out[:, :, 2], value.double().mean(2).repeat_interleave(2, 1))
    out = torch_npu.npu_fusion_attention(*tensors, 4, "BNSD", atten_mask=mask.npu(), scale=SCALE, inner_precise=2)[0]
    assert out[:, :, 2].cpu().count_nonzero() == 0


def test_a_sparse_mode_without_a_mask_is_ignored():
    query, key, value = batch()
    out = torch_npu.npu_fusion_attention(*(t.npu() for t in (query, key, value)), 4, "BNSD", scale=SCALE, sparse_mode=3)
    close(out[0], reference(query, key, value)[0])


def test_host_lengths_are_arguments_of_the_call():
    query, key, value = batch()
    with trace.recording() as recorded:
        infer(query, key, value, actual_seq_lengths_kv=[13, 5])
    (call,) = [call for call in recorded.calls if "Attention" in call.operator]
    assert call.arguments["actual_seq_lengths_kv"] == [13, 5]
