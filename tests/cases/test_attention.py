"""Attention over dense and ragged sequences: masks, windows, head widths, gradients; faults seen
elsewhere."""

from __future__ import annotations

import pytest
import torch
from case_models import INF, attention, draw, visible
from case_support import each_implementation

NAN = float("nan")


def batched(*tensors):
    return tuple(t[None] for t in tensors)


@each_implementation("attention")
def test_causal_with_fewer_queries_than_keys(choice):
    """Dao-AILab/flash-attention#282, #351, #402: the triangle starts at the top left, and the last keys go
    unseen."""
    q, k, v = draw(170, 2, 4, 64), draw(171, 5, 2, 64), draw(172, 5, 2, 64)
    args, options = batched(q, k, v), {"causal": True, "return_lse": True}
    expected = batched(*attention(q, k, v, seen=visible(2, 5, causal=True)))
    choice.check(choice.call(*args, **options), expected, *args, **options)
    top_left = batched(*attention(q, k, v, seen=torch.ones(2, 5).tril().bool()))
    choice.told_apart(top_left, expected, *args, **options)


@each_implementation("attention")
def test_rows_that_the_mask_leaves_nothing(choice):
    """pytorch/pytorch#103963, #103749: softmax of all −inf is NaN, and the NaN reaches every gradient."""
    q, k, v = draw(190, 8, 2, 32), draw(191, 8, 2, 32), draw(192, 8, 2, 32)
    mask = torch.zeros(8, 8, dtype=torch.bool)
    mask[:4, :4] = True
    args, options = batched(q, k, v), {"mask": mask, "return_lse": True}
    expected = batched(*attention(q, k, v, seen=mask))
    o, lse = choice.call(*args, **options)
    choice.check((o, lse), expected, *args, **options)
    assert not o[0, 4:].any()
    assert (lse[0, :, 4:] == -INF).all()

    leaves = [t.double().requires_grad_() for t in (q, k, v)]
    wanted = torch.autograd.grad(attention(*leaves, seen=mask)[0].sum(), leaves)
    found = choice.gradients(args, lambda *leaf: choice.call(*leaf, mask=mask))
    for got, want in zip(found, wanted, strict=True):
        torch.testing.assert_close(got[0].double(), want, atol=1e-5, rtol=1e-5)
        assert not got[0, 4:].any()
    choice.told_apart(
        (expected[0].masked_fill(~mask.any(-1)[None, :, None, None], NAN), lse), expected, *args, **options
    )


@each_implementation("attention")
def test_nan_behind_the_mask(choice):
    """pytorch/pytorch#101967: masked probabilities are 0, but 0 · NaN from the value rows is summed in."""
    q, k, v = draw(200, 3, 1, 64), draw(201, 10, 1, 64), draw(202, 10, 1, 64)
    clean, mask = batched(q, k[:7], v[:7]), torch.arange(10).expand(3, 10) < 7
    expected = attention(q, k[:7], v[:7])[0][None]
    k[7:], v[7:] = NAN, NAN
    args = batched(q, k, v)
    o = choice.call(*args, mask=mask)
    choice.check(o, expected, *clean)
    summed_in = 0 * o + (0 * v[7:].sum(0))[None, None]
    choice.told_apart(summed_in, expected, *clean)
    found = choice.gradients(args, lambda *leaf: choice.call(*leaf, mask=mask))
    assert all(not g.isnan().any() for g in found)
    assert not found[1][0, 7:].any()
    assert not found[2][0, 7:].any()


@each_implementation("attention")
def test_a_sliding_window_of_w_tokens_counts_the_query_itself(choice):
    """huggingface/transformers#39408, vllm-project/vllm#3385: W is handed on as an inclusive bound: one key
    too many."""
    width = 4
    q, k, v = draw(210, 9, 2, 64), draw(211, 9, 1, 64), draw(212, 9, 1, 64)
    seen = visible(9, 9, causal=True, left=width - 1)
    assert seen.sum(1).tolist() == [1, 2, 3, 4, 4, 4, 4, 4, 4]
    args = batched(q, k, v)
    expected = attention(q, k, v, seen=seen)[0][None]
    too_wide = attention(q, k, v, seen=visible(9, 9, causal=True, left=width))[0][None]
    for options in ({"causal": True, "window": (width - 1, None)}, {"window": (width - 1, 0)}):
        choice.check(choice.call(*args, **options), expected, *args, **options)
        choice.told_apart(too_wide, expected, *args, **options)


@each_implementation("attention")
def test_softcap_bounds_the_logits(choice):
    """Dao-AILab/flash-attention#2402, #2396: tanh is multiplied by the score and not by the cap."""
    cap = 15.0
    q, k, v = draw(220, 4, 2, 64, scale=4), draw(221, 6, 2, 64, scale=4), draw(222, 6, 2, 64)
    args, options = batched(q, k, v), {"softcap": cap, "return_lse": True}
    expected = batched(*attention(q, k, v, softcap=cap))
    o, lse = choice.call(*args, **options)
    choice.check((o, lse), expected, *args, **options)
    assert lse.max() < cap + torch.tensor(6.0).log()
    score = torch.einsum("ihd,jhd->hij", q.double(), k.double()) / 8
    p = torch.softmax(score / cap * torch.tanh(score / cap), -1)
    by_score = torch.einsum("hij,jhd->ihd", p, v.double())[None]
    choice.told_apart((by_score, lse), expected, *args, **options)


@each_implementation("attention")
def test_softcap_gradient_holds_the_derivative_of_tanh(choice):
    """Dao-AILab/flash-attention#2402: the backward pass of the capped logit."""
    cap = 2.0
    q, k, v = draw(223, 4, 2, 64, scale=2), draw(224, 6, 2, 64, scale=2), draw(225, 6, 2, 64)
    leaves = [t.double().requires_grad_() for t in (q, k, v)]
    out = attention(*leaves, softcap=cap)[0]
    weights = draw(226, *out.shape)
    wanted = torch.autograd.grad((out * weights).sum(), leaves)
    found = choice.gradients(batched(q, k, v), lambda *leaf: choice.call(*leaf, softcap=cap), weights[None])
    for got, want in zip(found, wanted, strict=True):
        torch.testing.assert_close(got[0].double(), want, atol=2e-5, rtol=1e-4)
    score = torch.einsum("ihd,jhd->hij", q.double(), k.double()) / 8
    p = torch.softmax(cap * torch.tanh(score / cap), -1)
    dp = torch.einsum("ihd,jhd->hij", weights.double(), v.double())
    uncapped = torch.einsum("hij,jhd->ihd", p * (dp - (p * dp).sum(-1, keepdim=True)), k.double()) / 8
    assert not torch.allclose(uncapped, wanted[0], atol=2e-5, rtol=1e-4)


@each_implementation("attention")
@pytest.mark.parametrize("width", [20, 72, 80, 96, 120])
def test_default_scale_is_that_of_the_true_width(choice, width):
    """pytorch/pytorch#110630: a width that needs padding is refused, or the padded width leaks into the
    scale."""
    q, k, v = draw(250, 5, 6, width), draw(251, 9, 3, width), draw(252, 9, 3, width)
    args = batched(q, k, v)
    expected = attention(q, k, v)[0][None]
    choice.check(choice.call(*args), expected, *args)
    padded = 1 << (width - 1).bit_length()
    choice.told_apart(attention(q, k, v, scale=padded**-0.5)[0][None], expected, *args)


@each_implementation("attention")
@pytest.mark.parametrize("kept", [137, 512, 513, 600, 4095])
def test_a_mask_holds_past_key_512(choice, kept):
    """vllm-project/vllm-ascend#15503: a mask is accepted, but not applied beyond key 512."""
    keys = 4096
    q, k, v = draw(540, 1, 12, 64), draw(541, keys, 2, 64), draw(542, keys, 2, 64)
    mask = (torch.arange(keys) < kept)[None]
    args, options = batched(q, k, v), {"mask": mask}
    expected = attention(q, k[:kept], v[:kept])[0][None]
    choice.check(choice.call(*args, **options), expected, *args, **options)
    leaking = attention(q, k, v, seen=mask | (torch.arange(keys) >= 512))[0][None]
    choice.told_apart(leaking, expected, *args, **options)


@each_implementation("attention_varlen")
def test_ragged_without_mask_is_no_plain_mean(choice):
    """vllm-project/vllm-ascend#13699: the fused operator returns the mean of v."""
    lengths = [5, 1, 13]
    q, k, v = (draw(550 + i, 19, 16, 72, scale=2) for i in range(3))
    cu = torch.tensor([0, 5, 6, 19], dtype=torch.int32)
    args = q, k, v, cu, cu, 13, 13
    parts = zip(q.split(lengths), k.split(lengths), v.split(lengths), strict=True)
    expected = torch.cat([attention(*part)[0] for part in parts])
    choice.check(choice.call(*args), expected, *args)
    means = torch.cat([part.double().mean(0, keepdim=True).expand_as(part) for part in v.split(lengths)])
    choice.told_apart(means, expected, *args)


@each_implementation("attention_varlen")
def test_rows_after_the_last_sequence_have_zero_gradients(choice):
    """pytorch/pytorch#176793: their gradients are uninitialised memory, and NaN reaches the projection
    weights."""
    q, k, v = (draw(570 + i, 9, 4, 64) for i in range(3))
    cu = torch.tensor([0, 3, 7], dtype=torch.int32)

    def run(q, k, v):
        return choice.call(q, k, v, cu, cu, 4, 4, causal=True)

    leaves = [t.double().requires_grad_() for t in (q, k, v)]
    parts = zip(*(leaf[:7].split([3, 4]) for leaf in leaves), strict=True)
    out = torch.cat([attention(*p, seen=visible(len(p[0]), len(p[1]), causal=True))[0] for p in parts])
    wanted = torch.autograd.grad(out.sum(), leaves)
    q[7:], k[7:], v[7:] = NAN, NAN, NAN
    o = run(q, k, v)
    torch.testing.assert_close(o[:7].double(), out.detach(), atol=1e-5, rtol=1e-5)
    assert not o[7:].any()
    for got, want in zip(choice.gradients([q, k, v], run), wanted, strict=True):
        torch.testing.assert_close(got.double(), want, atol=2e-5, rtol=1e-4)
        assert not got[7:].any()


@each_implementation("merge_attention")
def test_merging_empty_pieces(choice):
    """flashinfer-ai/flashinfer#4051: (−inf) − (−inf) gives NaN in output and lse."""
    a, b = draw(310, 3, 2, 64), draw(311, 3, 2, 64)
    lse_a, lse_b = draw(312, 3, 2), draw(313, 3, 2)
    a[0], lse_a[0], b[1], lse_b[1] = 0, -INF, 0, -INF
    a[2], lse_a[2], b[2], lse_b[2] = 0, -INF, 0, -INF
    out, lse = choice.call(a, lse_a, b, lse_b)
    expected = torch.stack((b[0], a[1], torch.zeros(2, 64)))
    assert torch.equal(out, expected)
    assert torch.equal(lse, torch.stack((lse_b[0], lse_a[1], torch.full((2,), -INF))))
    best = torch.maximum(lse_a, lse_b)[..., None]
    naive = (lse_a[..., None] - best).exp() * a + (lse_b[..., None] - best).exp() * b
    assert naive[2].isnan().all(), "the naive weights must be the fault that this case meets"
