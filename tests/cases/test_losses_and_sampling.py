"""Cross entropy and sampling: faults seen elsewhere."""

from __future__ import annotations

import pytest
import torch
from case_models import INF, cross_entropy, draw
from case_support import each_implementation


def loss_and_gradient(choice, logits, target, **options):
    (gradient,) = choice.gradients([logits], lambda x: choice.call(x, target, **options))
    return choice.call(logits, target, **options), gradient


def model(logits, target, ignored=-100, smoothing=0.0):
    """Mean over the rows that count, and its gradient."""
    leaf = logits.double().requires_grad_()
    loss = cross_entropy(leaf, target, ignored, smoothing).sum() / (target != ignored).sum()
    return loss.detach(), torch.autograd.grad(loss, leaf)[0]


@each_implementation("cross_entropy")
@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
def test_every_target_ignored(choice, reduction):
    """pytorch/pytorch#75181, #70348: 0/0, and the NaN spreads to the whole step."""
    logits, target = draw(460, 4, 33), torch.full((4,), -100)
    loss, gradient = loss_and_gradient(choice, logits, target, reduction=reduction)
    assert loss.shape == ((4,) if reduction == "none" else ())
    assert not loss.any()
    assert not gradient.any()
    assert not gradient.isnan().any()


@each_implementation("cross_entropy")
@pytest.mark.parametrize(
    ("targets", "options", "zero_rows"),
    [([2, -100, 5, 2, 32, -100], {}, [1, 5]), ([2, 0, 5, 2, 32, 31], {"ignore_index": 2}, [0, 3])],
    ids=["default", "a class"],
)
def test_ignore_index(choice, targets, options, zero_rows):
    """flagos-ai/FlagGems#73: −100 is not ignored unless asked for, or the mean divides by all rows."""
    logits, target = draw(470, 6, 33, scale=50), torch.tensor(targets)
    expected, wanted = model(logits, target, options.get("ignore_index", -100))
    loss, gradient = loss_and_gradient(choice, logits, target, **options)
    choice.check(loss, expected, logits, target, **options)
    torch.testing.assert_close(gradient.double(), wanted, atol=1e-6, rtol=1e-4)
    assert not gradient[zero_rows].any()
    choice.told_apart(expected * 4 / 6, expected, logits, target, **options)
    counted = torch.where(target == options.get("ignore_index", -100), 0, target)
    choice.told_apart(model(logits, counted)[0], expected, logits, target, **options)


@each_implementation("cross_entropy")
def test_label_smoothing_is_not_dropped(choice):
    """linkedin/Liger-Kernel#243: the argument is accepted and never reaches the kernel."""
    logits, target = draw(480, 5, 33, scale=3), torch.tensor([0, 32, -100, 7, 7])
    options = {"label_smoothing": 0.1}
    expected, wanted = model(logits, target, smoothing=0.1)
    loss, gradient = loss_and_gradient(choice, logits, target, **options)
    choice.check(loss, expected, logits, target, **options)
    torch.testing.assert_close(gradient.double(), wanted, atol=1e-7, rtol=1e-5)
    plain, plain_gradient = model(logits, target)
    choice.told_apart(plain, expected, logits, target, **options)
    assert not torch.allclose(plain_gradient, wanted, atol=1e-7, rtol=1e-5)


@each_implementation("top_k_top_p_probs")
def test_top_k_keeps_exactly_k_of_tied_tokens(choice):
    """vllm-project/vllm#50979, #15478: a threshold keeps every token equal to the k-th."""
    logits, k = torch.tensor([[1.0, 2.0, 2.0, 2.0, 3.0], [0.0] * 5]), torch.tensor([3, 1])
    kept = choice.call(logits, top_k=k) > 0
    assert kept.sum(-1).tolist() == [3, 1]
    assert kept.tolist() == [[False, True, True, False, True], [True, False, False, False, False]]
    threshold = logits >= logits.sort(-1, descending=True).values.gather(-1, k[:, None] - 1)
    assert threshold.sum(-1).tolist() == [4, 5]
    others = draw(490, 14, 5)
    batch = torch.cat((others[:7], logits, others[7:]))
    counts = torch.cat((torch.full((7,), 2), k, torch.full((7,), 4)))
    assert torch.equal(choice.call(batch, top_k=counts)[7:9] > 0, kept)


@each_implementation("top_k_top_p_probs")
def test_top_p_acts_on_what_top_k_left(choice):
    """vllm-project/vllm#1885: top-p is applied to the full distribution."""
    logits = torch.tensor([[0.1, 0.2, 0.3, 0.4]]).log()
    assert choice.call(logits, top_k=2, top_p=0.5).tolist() == [[0, 0, 0, 1]]  # 4/7 alone reaches 0.5
    alone = choice.call(logits, top_p=0.5)
    torch.testing.assert_close(alone, torch.tensor([[0, 0, 3 / 7, 4 / 7]]))


@each_implementation("top_k_top_p_probs")
def test_top_p_at_its_ends(choice):
    """huggingface/transformers#19839: p = 0 empties the set, and softmax gives NaN."""
    logits = torch.tensor([0.0, 5.0, 1.0, -INF]).expand(4, 4)
    probs = choice.call(logits, top_p=torch.tensor([0.0, 1e-8, 1.0, 0.5]))
    assert probs[[0, 1, 3]].tolist() == [[0, 1, 0, 0]] * 3
    torch.testing.assert_close(probs[2].double(), logits[2].double().softmax(-1), atol=1e-7, rtol=1e-6)
    assert probs[2, 3] == 0


SENTINELS = [2**30, 32000, 0, -1]


def two_finite_logits():
    logits = torch.full((4, 32000), -INF)
    logits[:, 1], logits[:, 31999] = 0.0, -1.0
    return logits


@each_implementation("top_k_top_p_probs")
def test_values_of_k_that_mean_no_limit(choice):
    """flashinfer-ai/flashinfer#384, #979: ids outside the vocabulary, or k = 0 that selects nothing."""
    logits = two_finite_logits()
    expected = torch.zeros(4, 32000, dtype=torch.float64)
    expected[:, [1, 31999]] = torch.tensor([0.0, -1.0], dtype=torch.float64).softmax(0)
    together = choice.call(logits, top_k=torch.tensor(SENTINELS))
    choice.check(together, expected, logits, top_k=torch.tensor(SENTINELS))
    for row, k in enumerate(SENTINELS):
        choice.check(choice.call(logits[:1], top_k=k), expected[row : row + 1], logits[:1], top_k=k)
    emptied = expected.clone()
    emptied[2] = 0
    choice.told_apart(emptied, expected, logits, top_k=torch.tensor(SENTINELS))


@each_implementation("top_k_top_p_sample")
def test_draws_stay_among_tokens_that_have_a_probability(choice):
    """flashinfer-ai/flashinfer#384, #979: the draws themselves, with every value of k that means no limit."""
    logits = two_finite_logits()
    k = torch.tensor(SENTINELS)
    ids = torch.cat([choice.call(logits, seed * 1000, top_k=k) for seed in range(10)])
    assert set(ids.tolist()) == {1, 31999}
    share = (ids == 1).double().mean().item()
    assert abs(share - 0.731) < 5 * (0.731 * 0.269 / ids.numel()) ** 0.5
