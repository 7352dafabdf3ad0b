"""top_k_top_p_probs and top_k_top_p_sample: filters beside a plain model of them, the draw beside its
formula."""

from __future__ import annotations

import math

import pytest
import torch

import hal
from hal import philox
from hal.errors import ArgumentError, DeviceError, DtypeError, ShapeError
from hal.ops import top_k_top_p_probs as probs
from hal.ops import top_k_top_p_sample as sample

INF = math.inf


@pytest.fixture(params=["reference", "aten"], autouse=True)
def implementation(request):
    impl = f"top_k_top_p_probs={request.param},top_k_top_p_sample={request.param}"
    with hal.use(backend="cpu", impl=impl):
        yield request.param


def model_row(logits, temperature=None, top_k=None, top_p=None, min_p=None):
    """The contract on Python floats, one row, one token at a time."""
    x = [-INF if math.isnan(v) else v for v in logits]
    vocabulary = len(x)
    if not any(math.isfinite(v) for v in logits):
        return [1.0] + [0.0] * (vocabulary - 1)
    order = sorted(range(vocabulary), key=lambda i: (-x[i], i))
    best = x[order[0]]
    if temperature == 0:
        top_k, temperature = 1, 1.0
    score = [0.0 if v == best else (v - best) / (1.0 if temperature is None else temperature) for v in x]
    kept = [i for i in order if x[i] > -INF]
    if top_k is not None and top_k > 0:
        kept = kept[:top_k]
    total = math.fsum(math.exp(score[i]) for i in kept)
    if top_p is not None and top_p < 1:
        prefix, mass = [], 0.0
        for i in kept:
            prefix.append(i)
            mass += math.exp(score[i]) / total
            if mass >= top_p:
                break
        kept = prefix
    if min_p is not None:
        kept = [i for i in kept if i == order[0] or math.exp(score[i]) >= min_p]
    total = math.fsum(math.exp(score[i]) for i in kept)
    return [math.exp(score[i]) / total if i in set(kept) else 0.0 for i in range(vocabulary)]


def model(logits, **options):
    rows = []
    for b, row in enumerate(logits.double().tolist()):
        at = {k: (v[b] if v.ndim else v).item() if isinstance(v, torch.Tensor) else v for k, v in options.items()}
        rows.append(model_row(row, **at))
    return torch.tensor(rows, dtype=torch.float64).reshape(logits.shape)


def check(logits, **options):
    got, expected = probs(logits, **options), model(logits, **options)
    assert got.dtype == torch.float32
    assert torch.equal(got > 0, expected.float() > 0), "another set of tokens is kept"
    torch.testing.assert_close(got.double(), expected, atol=1e-6, rtol=1e-5)
    return got


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.6},
        {"temperature": 0},
        {"top_k": 1},
        {"top_k": 7},
        {"top_p": 0.35},
        {"top_p": 0.93},
        {"min_p": 0.07},
        {"temperature": 1.7, "top_k": 11, "top_p": 0.81, "min_p": 0.033},
        {"top_p": 1.0, "min_p": 0.0, "top_k": 0},
    ],
    ids=str,
)
def test_equals_the_plain_model(dtype, options):
    check(philox.normal(5, (9, 50)).mul(3).to(dtype), **options)


def test_parameters_may_differ_by_row():
    logits = philox.normal(6, (5, 31)).mul(2).float()
    options = {
        "temperature": torch.tensor([0.0, 0.5, 1.0, 2.0, 0.0]),
        "top_k": torch.tensor([-1, 0, 4, 31, 1000], dtype=torch.int32),
        "top_p": torch.tensor([0.0, 0.3, 0.7, 0.97, 1.0], dtype=torch.float64),
        "min_p": torch.tensor([0.0, 0.2, 1.0, 0.01, 0.5]),
    }
    got = check(logits, **options)
    for b in range(5):
        alone = probs(logits[b : b + 1], **{k: v[b].item() for k, v in options.items()})
        torch.testing.assert_close(got[b : b + 1], alone, atol=1e-7, rtol=1e-6)
        assert torch.equal(got[b : b + 1] > 0, alone > 0)


def test_ties_go_to_the_lowest_index():
    logits = torch.tensor([[1.0, 2.0, 2.0, 2.0, 3.0], [0.0] * 5, [2.0, 5.0, 5.0, 5.0, 5.0]])
    assert (check(logits, top_k=3) > 0).tolist() == [
        [False, True, True, False, True],
        [True, True, True, False, False],
        [False, True, True, True, False],
    ]
    assert (check(logits, top_p=0.3) > 0).tolist() == [
        [False, False, False, False, True],
        [True, True, False, False, False],
        [False, True, True, False, False],
    ]
    assert check(logits, temperature=0).argmax(-1).tolist() == [4, 0, 1]
    assert check(logits, temperature=0).sum(-1).tolist() == [1, 1, 1]


def test_signed_zeros_are_equal():
    assert (probs(torch.tensor([[-0.0, 0.0, -0.0]]), top_k=1) > 0).tolist() == [[True, False, False]]
    assert (probs(torch.tensor([[0.0, -0.0, 0.0]]), top_k=2) > 0).tolist() == [[True, True, False]]


def test_ranks_come_from_the_logits_and_not_from_their_rounded_quotients():
    near = torch.tensor([[16777216.0 - 1, 16777216.0, 0.0]])
    assert sample(near, 0, temperature=0).tolist() == [1]
    kept = probs(torch.tensor([[1.0, 1.0000001, 1.0000002]]), top_k=1, temperature=1e4)
    assert kept.tolist() == [[0, 0, 1]]


def test_top_p_acts_on_what_top_k_left():
    logits = torch.tensor([[0.1, 0.2, 0.3, 0.4]]).log()
    assert check(logits, top_k=2, top_p=0.5).tolist() == [[0, 0, 0, 1]]
    torch.testing.assert_close(probs(logits, top_p=0.5), torch.tensor([[0, 0, 3 / 7, 4 / 7]]))


@pytest.mark.parametrize("odd", [math.nan, -INF])
def test_nan_and_minus_infinity_sort_last_and_have_no_probability(odd):
    logits = torch.tensor([[odd, 1.0, odd, 0.0]])
    for options in ({}, {"top_k": 3}, {"top_p": 0.99}, {"min_p": 0.01}, {"temperature": 0}, {"top_k": 4}):
        got = check(logits, **options)
        assert got[0, 0] == got[0, 2] == 0
        assert sample(logits, 3, **options).item() in (1, 3)


@pytest.mark.parametrize("row", [[-INF] * 4, [math.nan] * 4, [-INF, math.nan, -INF, -INF], [-INF, INF, INF, 0 * INF]])
@pytest.mark.parametrize(
    "options", [{}, {"top_k": 2, "top_p": 0.5, "temperature": 0.3, "min_p": 0.1}, {"temperature": 0}]
)
def test_a_row_without_a_finite_logit_is_certain_of_token_0(row, options):
    logits = torch.tensor([row, [0.0, 1.0, 5.0, 2.0]])
    assert probs(logits, **options)[0].tolist() == [1, 0, 0, 0]
    assert {sample(logits, seed, **options)[0].item() for seed in range(20)} == {0}


def test_plus_infinity_takes_all_of_its_row():
    logits = torch.tensor([[0.0, INF, 3.0, INF]])
    assert check(logits).tolist() == [[0, 0.5, 0, 0.5]]
    assert check(logits, top_k=1, temperature=0.2).tolist() == [[0, 1, 0, 0]]


def test_extreme_temperatures_stay_finite():
    logits = torch.tensor([[100.0, -3.0, 99.0], [3e38, -3e38, 0.0]])
    assert probs(logits, temperature=1e-40)[0].tolist() == [1, 0, 0]
    assert probs(torch.tensor([[5.0, 1.0, 5.0]]), temperature=1e-60).tolist() == [[0.5, 0, 0.5]]
    assert probs(torch.tensor([[5.0, 1.0, 5.0]]), temperature=0).tolist() == [[1, 0, 0]]
    assert probs(logits, temperature=1e30)[1].isfinite().all()
    torch.testing.assert_close(probs(logits, temperature=1e30)[0], torch.full((3,), 1 / 3))


def test_draw_is_the_argmax_of_log_p_plus_gumbel_under_the_documented_key_and_counter():
    logits = philox.normal(8, (6, 40)).mul(2).float()
    options = {"temperature": 0.8, "top_k": 20, "top_p": 0.9}
    log_p = model(logits, **options).log()
    for seed in (0, 1, -7, 2**63 - 7):
        rows = []
        for b in range(6):
            words = philox.words(seed + b, torch.arange(40))
            u = ((words >> 9).double() + 0.5) / 2**23
            rows.append((log_p[b] - (-u.log()).log()).argmax())
        expected = torch.stack(rows)
        assert torch.equal(sample(logits, seed, **options), expected)
        assert torch.equal(sample(logits, torch.tensor(seed), **options), expected)
        assert torch.equal(sample(logits, torch.tensor(seed) + torch.arange(6), **options), expected)


def test_a_row_keeps_its_token_whatever_else_is_in_the_batch():
    logits = philox.normal(9, (16, 100)).float()
    seeds = philox.integers(10, (16,), -(2**62), 2**62)
    together = sample(logits, seeds, top_k=30)
    alone = torch.cat([sample(logits[b : b + 1], seeds[b : b + 1], top_k=30) for b in range(16)])
    assert torch.equal(together, alone)


def test_draws_follow_the_distribution():
    n = 20_000
    logits = torch.tensor([[0.0, 1.0, -1.0, 2.0, 0.5]])
    p = probs(logits, top_k=4, temperature=1.5)[0]
    ids = sample(logits.expand(n, 5), torch.tensor(77), top_k=4, temperature=1.5)
    assert ids.dtype == torch.int64
    counts = torch.bincount(ids, minlength=5)
    assert counts[2] == 0
    kept = p > 0
    chi2 = ((counts[kept] - n * p[kept]).square() / (n * p[kept])).sum()
    assert chi2 < 24  # 3 degrees of freedom, 3e-5
    assert len(set(sample(logits.expand(64, 5), 78).tolist())) > 1


@pytest.mark.parametrize("rows", [0, 1])
def test_one_token_and_no_rows(rows):
    logits = torch.zeros(rows, 1, dtype=torch.bfloat16)
    assert probs(logits, top_k=5, top_p=0.0, temperature=0).tolist() == [[1.0]] * rows
    assert sample(logits, 1, min_p=1.0).tolist() == [0] * rows
    assert sample(torch.zeros(0, 7), torch.tensor(4)).shape == (0,)


def test_strides_do_not_matter_and_inputs_stay_unchanged():
    logits = philox.normal(12, (6, 24)).float()
    for view in (
        logits.t().contiguous().t(),
        torch.stack([logits, logits], -1)[..., 0],
        logits[:1].expand(6, 24),
    ):
        before = view.clone()
        got = probs(view, top_k=9, top_p=0.8)
        torch.testing.assert_close(got, probs(view.contiguous(), top_k=9, top_p=0.8))
        assert got.is_contiguous()
        assert torch.equal(sample(view, 5, top_k=9), sample(view.contiguous(), 5, top_k=9))
        assert torch.equal(view, before)


def test_rewriting_the_seed_tensor_draws_anew():
    logits, seed = philox.normal(13, (4, 500)).float(), torch.tensor(1)
    first = sample(logits, seed)
    seed.fill_(2)
    second = sample(logits, seed)
    assert torch.equal(second, sample(logits, 2))
    assert not torch.equal(first, second)


def bad_calls():
    x = torch.zeros(3, 5)
    return [
        (ShapeError, "logits", (x[0],), {}),
        (ShapeError, "V must be at least 1", (x[:, :0],), {}),
        (DtypeError, "logits", (x.int(),), {}),
        (ShapeError, "top_k has shape", (x,), {"top_k": torch.zeros(2, dtype=torch.int64)}),
        (ShapeError, "top_p has shape", (x,), {"top_p": torch.ones(3, 1)}),
        (DtypeError, "top_k", (x,), {"top_k": torch.ones(3)}),
        (DtypeError, "temperature", (x,), {"temperature": torch.ones(3, dtype=torch.int64)}),
        (DeviceError, "min_p", (x,), {"min_p": torch.ones(3, device="meta")}),
        (ArgumentError, "temperature", (x,), {"temperature": -1.0}),
        (ArgumentError, "temperature", (x,), {"temperature": math.nan}),
        (ArgumentError, "temperature", (x,), {"temperature": INF}),
        (ArgumentError, "temperature", (x,), {"temperature": torch.tensor([1.0, math.nan, 1.0])}),
        (ArgumentError, "top_p", (x,), {"top_p": 1.5}),
        (ArgumentError, "top_p", (x,), {"top_p": torch.tensor(-0.1)}),
        (ArgumentError, "min_p", (x,), {"min_p": -0.5}),
        (ArgumentError, "min_p", (x,), {"min_p": torch.tensor([0.0, 2.0, 0.0])}),
        (ArgumentError, "top_k", (x,), {"top_k": 2.5}),
    ]


@pytest.mark.parametrize(("error", "match", "args", "options"), bad_calls())
def test_bad_input_raises_a_typed_error_that_names_it(error, match, args, options):
    with pytest.raises(error, match=match):
        probs(*args, **options)
    with pytest.raises(error, match=match):
        sample(*args, 1, **options)


@pytest.mark.parametrize(
    ("error", "seed"),
    [
        (ArgumentError, 1.5),
        (ArgumentError, None),
        (ArgumentError, 2**63),
        (DtypeError, torch.tensor(1.0)),
        (DtypeError, torch.tensor(1, dtype=torch.int32)),
        (ShapeError, torch.arange(2)),
        (ShapeError, torch.zeros(3, 1, dtype=torch.int64)),
        (DeviceError, torch.tensor(1, device="meta")),
    ],
)
def test_bad_seeds_raise_a_typed_error(error, seed):
    with pytest.raises(error, match="seed"):
        sample(torch.zeros(3, 5), seed)


@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_default_dtype_changes_neither_probabilities_nor_draws(dtype, default):
    logits = philox.normal(77, (64, 300)).to(dtype)
    logits[3] = -math.inf
    options = {"temperature": 0.9, "top_p": 0.97, "min_p": 0.001}
    expected = probs(logits, **options), sample(logits, 5, **options), sample(logits, 5)
    before = torch.get_default_dtype()
    torch.set_default_dtype(default)
    try:
        got = probs(logits, **options), sample(logits, 5, **options), sample(logits, 5)
        kept = hal.ops.sampling.cleaned(logits).dtype
    finally:
        torch.set_default_dtype(before)
    assert kept is torch.float32
    assert all(map(torch.equal, got, expected))
