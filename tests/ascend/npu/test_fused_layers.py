"""Norms, gated activations, rotary, softmax, cache writes and reads, filters and the loss: torch_npu's fused operators,
with their gradients, against float64 (simulated)."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
import torch_npu

from hal.backends.ascend import simulator
from hal.backends.ascend.simulator import trace

DTYPES = [torch.float16, torch.bfloat16, torch.float32]


@pytest.fixture(params=DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
def draw(request):
    generator = torch.Generator().manual_seed(0)
    return lambda *shape: torch.randn(*shape, generator=generator).to(request.param)


def close(actual, reference, roundings=2):
    """As near as so many roundings of the greatest value; perturbed numerics add their own."""
    actual = actual.detach().cpu()
    loose = 1 if simulator.current().numerics == "exact" else 8
    bound = loose * roundings * torch.finfo(actual.dtype).eps * reference.detach().abs().max().clamp_min(1)
    error = (actual.double() - reference.detach().double()).abs().max()
    assert error <= bound, f"{error:g} off, {bound:g} allowed"


def check(fused, reference, *inputs, roundings=3):
    """Result and gradients of `fused` on the device against those of `reference` in float64."""
    ours = [x.npu().requires_grad_() for x in inputs]
    theirs = [x.double().requires_grad_() for x in inputs]
    result, expected = fused(*ours), reference(*theirs)
    close(result, expected, roundings)
    upstream = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1)).to(inputs[0].dtype)
    result.backward(upstream.npu())
    expected.backward(upstream.double())
    for ours_in, theirs_in in zip(ours, theirs, strict=True):
        close(ours_in.grad, theirs_in.grad, roundings)


def test_rms_norm(draw):
    check(
        lambda x, g: torch_npu.npu_rms_norm(x, g, 1e-5)[0],
        lambda x, g: F.rms_norm(x, (64,), g, 1e-5),
        draw(3, 5, 64),
        draw(64),
    )


def test_layer_norm(draw):
    check(
        lambda x, g, b: F.layer_norm(x, (64,), g, b),
        lambda x, g, b: F.layer_norm(x, (64,), g, b),
        draw(3, 5, 64),
        draw(64),
        draw(64),
    )
    check(lambda x: F.layer_norm(x, (64,)), lambda x: F.layer_norm(x, (64,)), draw(3, 64))


def test_add_rms_norm_returns_norm_and_sum(draw):
    x, residual, gamma = draw(3, 64), draw(3, 64), draw(64)
    y, rstd, total = torch_npu.npu_add_rms_norm(x.npu(), residual.npu(), gamma.npu())
    expected = x.double() + residual.double()
    close(total, expected, 1)
    close(y, F.rms_norm(expected, (64,), gamma.double(), 1e-6))
    close(rstd, (expected.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt())


def test_add_rms_norm_v2_writes_the_norm_over_x1_and_the_sum_over_x2(draw):
    x, residual, gamma = draw(3, 64), draw(3, 64), draw(64)
    first, second = x.npu(), residual.npu()
    torch_npu.npu_add_rms_norm_v2(first, second, gamma.npu())
    expected = x.double() + residual.double()
    close(second, expected, 1)
    close(first, F.rms_norm(expected, (64,), gamma.double(), 1e-6))


def test_gemma_rms_norm_adds_one_to_gamma(draw):
    x, gamma = draw(3, 64), draw(64)
    y, _ = torch_npu.npu_gemma_rms_norm(x.npu(), gamma.npu())
    close(y, F.rms_norm(x.double(), (64,), 1 + gamma.double(), 1e-6))


def left(x):
    return x.chunk(2, -1)[0]


def right(x):
    return x.chunk(2, -1)[1]


def test_swiglu(draw):
    check(torch_npu.npu_swiglu, lambda x: F.silu(left(x)) * right(x), draw(3, 5, 64))


@pytest.mark.parametrize(("approximate", "form"), [(0, "none"), (1, "tanh")])
def test_geglu_activates_the_half_that_it_is_told(draw, approximate, form):
    check(
        lambda x: torch_npu.npu_geglu(x, -1, approximate, True)[0],
        lambda x: F.gelu(left(x), approximate=form) * right(x),
        draw(3, 64),
        roundings=4,
    )
    check(
        lambda x: torch_npu.npu_geglu(x, -1, approximate)[0],
        lambda x: F.gelu(right(x), approximate=form) * left(x),
        draw(3, 64),
        roundings=4,
    )


@pytest.mark.parametrize("form", ["none", "tanh"])
def test_gelu_and_gelu_mul(draw, form):
    x = draw(3, 64)
    expected = F.gelu(left(x.double()), approximate=form) * right(x.double())
    close(torch_npu.npu_gelu_mul(x.npu(), approximate=form), expected)
    check(lambda x: torch_npu.npu_gelu(x, approximate=form), lambda x: F.gelu(x, approximate=form), x)
    # torch's own gelu goes to an operator that has the tanh form alone.
    check(lambda x: F.gelu(x, approximate=form), lambda x: F.gelu(x, approximate="tanh"), x)


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_softmax_and_log_softmax(draw, dim):
    check(lambda x: x.softmax(dim), lambda x: x.softmax(dim), draw(3, 5, 7))
    check(lambda x: x.log_softmax(dim), lambda x: x.log_softmax(dim), draw(3, 5, 7), roundings=8)


def turned(x, mode):
    if mode == "half":
        first, second = x.chunk(2, -1)
        return torch.cat((-second, first), -1)
    return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)


@pytest.mark.parametrize("mode", ["half", "interleave"])
def test_rotary_mul(draw, mode):
    check(
        lambda x, c, s: torch_npu.npu_rotary_mul(x, c, s, mode),
        lambda x, c, s: x * c + turned(x, mode) * s,
        draw(2, 7, 4, 64),
        draw(1, 7, 1, 64),
        draw(1, 7, 1, 64),
        roundings=8,
    )


def test_rotary_mul_rounds_the_tables_to_the_dtype_of_the_input():
    x, table = torch.ones(1, 1, 1, 64).half().npu(), torch.full((1, 1, 1, 64), 1 / 3).npu()
    with trace.recording() as recorded:
        torch_npu.npu_rotary_mul(x, table, table)
    (call,) = [call for call in recorded.calls if "Rotary" in call.operator]
    assert call.arguments["cos"]["dtype"] == call.arguments["sin"]["dtype"] == "float16"


def test_apply_rotary_pos_emb_turns_in_place(draw):
    query, key, cos, sin = draw(2, 7, 4, 64), draw(2, 7, 2, 64), draw(2, 7, 1, 64), draw(2, 7, 1, 64)
    ours = query.npu(), key.npu()
    results = torch_npu.npu_apply_rotary_pos_emb(*ours, cos.npu(), sin.npu())
    for x, given, result in zip((query, key), ours, results, strict=True):
        close(given, x.double() * cos.double() + turned(x.double(), "half") * sin.double())
        assert result.data_ptr() == given.data_ptr()


@pytest.mark.parametrize("mode", ["Norm", "PA_NZ"])
def test_a_cache_gives_back_what_was_written_into_its_slots(mode):
    key, value = torch.randn(5, 2, 64).half(), torch.randn(5, 2, 32).half()
    slots = torch.tensor([0, 33, 7, 95, 40])
    shapes = {"Norm": ((3, 32, 2, 64), (3, 32, 2, 32)), "PA_NZ": ((3, 8, 32, 16), (3, 4, 32, 16))}[mode]
    caches = [torch.zeros(shape).half().npu() for shape in shapes]
    torch_npu.npu_scatter_pa_kv_cache(key.npu(), value.npu(), *caches, slots.npu(), cache_mode=mode)
    for tokens, cache in zip((key, value), (c.cpu() for c in caches), strict=True):
        block, row = slots // 32, slots % 32
        found = cache[block, row] if mode == "Norm" else cache[block, :, row].reshape(tokens.shape)
        assert torch.equal(found, tokens)
        assert cache.count_nonzero() == tokens.count_nonzero()


@pytest.mark.parametrize("lengths", [[20, 5], [0, 20, 25]], ids=["lengths", "running sums"])
def test_gather_reads_sequences_out_of_blocks(lengths):
    keys, values = torch.randn(4, 16, 2, 64).half(), torch.randn(4, 16, 2, 32).half()
    table = torch.tensor([[3, 0], [2, 1]], dtype=torch.int32)
    results = torch.zeros(25, 2, 64).half().npu(), torch.zeros(25, 2, 32).half().npu()
    torch_npu.npu_gather_pa_kv_cache(
        keys.npu(),
        values.npu(),
        table.npu(),
        torch.tensor(lengths, dtype=torch.int32).npu(),
        *results,
        is_seq_lens_cumsum=len(lengths) == 3,
    )
    for cache, result in zip((keys, values), results, strict=True):
        assert torch.equal(result.cpu(), torch.cat((cache[3], cache[0][:4], cache[2][:5])))


def test_gather_starts_at_an_offset():
    cache, table = torch.randn(4, 16, 2, 64).half(), torch.tensor([[3, 0, 2]], dtype=torch.int32)
    results = [torch.zeros(20, 2, 64).half().npu() for _ in range(2)]
    length, offset = (torch.tensor([n], dtype=torch.int32).npu() for n in (20, 16))
    torch_npu.npu_gather_pa_kv_cache(cache.npu(), cache.npu(), table.npu(), length, *results, seq_offset=offset)
    assert torch.equal(results[0].cpu(), torch.cat((cache[0], cache[2][:4])))


def test_top_k_top_p_keeps_the_fewest_logits_that_reach_p():
    logits = torch.tensor([[0.5, 0.25, 0.15, 0.1]] * 4).log()
    k, p = torch.tensor([2, 4, 4, 3], dtype=torch.int32), torch.tensor([1.0, 0.7, 0.0, 0.95])
    kept = torch_npu.npu_top_k_top_p(logits.npu(), p.npu(), k.npu()).cpu()
    # The last row: of the three greatest, the least has probability 0.15 / 0.9, more than 1 - 0.95.
    expected = torch.tensor([[1, 1, 0, 0], [1, 1, 0, 0], [1, 0, 0, 0], [1, 1, 1, 0]], dtype=torch.bool)
    assert torch.equal(kept > float("-inf"), expected)
    assert torch.equal(kept[expected], logits[expected])


def test_top_k_keeps_equal_logits():
    logits = torch.tensor([[2.0, 1.0, 1.0, 0.0]])
    kept = torch_npu.npu_top_k_top_p(logits.npu(), None, torch.tensor([2], dtype=torch.int32).npu()).cpu()
    assert (kept > float("-inf")).tolist() == [[True, True, True, False]]


TARGETS = torch.tensor([0, 3, 10, 5, 5, 2])


def test_cross_entropy_and_its_gradient(draw):
    check(
        lambda x: torch_npu.npu_cross_entropy_loss(x, TARGETS.npu())[0].squeeze(),
        lambda x: F.cross_entropy(x, TARGETS),
        draw(6, 11),
        roundings=4,
    )


@pytest.mark.parametrize(
    "options",
    [
        {"reduction": "sum"},
        {"reduction": "none"},
        {"ignore_index": 5},
        {"label_smoothing": 0.1},
        {"weight": torch.linspace(0.1, 1, 11)},
        {"weight": torch.linspace(0.1, 1, 11), "label_smoothing": 0.1, "ignore_index": 3},
    ],
    ids=lambda options: "-".join(options),
)
def test_cross_entropy_options(draw, options):
    x = draw(6, 11)
    ours = {name: value.npu() if torch.is_tensor(value) else value for name, value in options.items()}
    theirs = {name: value.double() if torch.is_tensor(value) else value for name, value in options.items()}
    result = torch_npu.npu_cross_entropy_loss(x.npu(), TARGETS.npu(), **ours)[0]
    close(result, F.cross_entropy(x.double(), TARGETS, **theirs).reshape(result.shape))
