"""rotary_embedding and rotary_cache: values, conventions, model configurations, errors."""

from __future__ import annotations

import contextlib
import math

import pytest
import torch
from contract import FLOATS, check, within

import hal
from hal import philox
from hal.errors import ArgumentError, DeviceError, DtypeError, ShapeError
from hal.ops import rotary_cache, rotary_embedding


@pytest.fixture(params=["reference", "aten"])
def implementation(request):
    with hal.use(backend="cpu", impl={"rotary_embedding": request.param}):
        yield request.param


both = pytest.mark.usefixtures("implementation")


def normal(seed, *shape, dtype=torch.float32):
    return philox.normal(seed, shape).to(dtype)


def turned(x, positions, cos, sin, interleaved=False):
    """Each pair as a complex number, times cos + i·sin; in float64."""
    half = cos.shape[1]
    turn = torch.complex(cos.double(), sin.double())[positions].unsqueeze(-2)
    x = x.double()
    pairs = x[..., : 2 * half]
    pairs = pairs.unflatten(-1, (half, 2)) if interleaved else pairs.unflatten(-1, (2, half)).transpose(-1, -2)
    out = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * turn)
    out = out if interleaved else out.transpose(-1, -2)
    return torch.cat((out.flatten(-2), x[..., 2 * half :]), -1)


CASES = [
    # lead, heads, kv heads, head dim, rotary dim
    ((1, 1), 9, 3, 64, 64),
    ((2, 5), 4, 1, 16, 8),
    ((7,), 2, 2, 6, 6),
    ((3,), 1, 1, 5, 2),
    ((1,), 4, 2, 128, 128),
    ((), 4, 2, 8, 8),
]


@both
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_each_pair_turns_by_the_angle_of_its_position(case, interleaved, dtype):
    lead, heads, kv_heads, dim, rotary_dim = case
    cos, sin = rotary_cache(4096, rotary_dim)
    positions = philox.integers(2, lead, 0, 4096)
    q, k = normal(0, *lead, heads, dim, dtype=dtype), normal(1, *lead, kv_heads, dim, dtype=dtype)
    formulas = tuple(turned(x, positions, cos, sin, interleaved) for x in (q, k))
    got = check(rotary_embedding, formulas, q, k, positions, cos, sin, interleaved=interleaved, rotary_dim=rotary_dim)
    assert torch.equal(got[0][..., rotary_dim:], q[..., rotary_dim:])
    assert torch.equal(got[1][..., rotary_dim:], k[..., rotary_dim:])


@both
def test_halves_are_llamas_rotate_half_and_pairs_are_gpt_js():
    cos, sin = rotary_cache(16, 8)
    q, positions = normal(0, 5, 2, 8, dtype=torch.float64), torch.tensor([0, 3, 3, 15, 1])
    c, s = cos[positions].double()[:, None], sin[positions].double()[:, None]
    # transformers: x * cos + rotate_half(x) * sin, with cos and sin repeated
    rotate_half = torch.cat((-q[..., 4:], q[..., :4]), -1)
    llama = q * torch.cat((c, c), -1) + rotate_half * torch.cat((s, s), -1)
    got = rotary_embedding(q, None, positions, cos, sin)[:1]
    within(rotary_embedding, got, (llama, q), q, None, positions, cos, sin)
    # transformers: rotate_every_two, with cos and sin repeated in place
    every_two = torch.stack((-q[..., 1::2], q[..., ::2]), -1).flatten(-2)
    gptj = q * c.repeat_interleave(2, -1) + every_two * s.repeat_interleave(2, -1)
    options = {"interleaved": True}
    got = rotary_embedding(q, None, positions, cos, sin, **options)[:1]
    within(rotary_embedding, got, (gptj, q), q, None, positions, cos, sin, **options)


@both
@pytest.mark.parametrize("lead", [(1, 1), (2, 3)])
def test_without_k_there_is_no_k(lead):
    cos, sin = rotary_cache(16, 8)
    q, positions = normal(0, *lead, 2, 8), torch.ones(lead, dtype=torch.int64)
    alone, nothing = rotary_embedding(q, None, positions, cos, sin)
    assert nothing is None
    within(rotary_embedding, (alone,), (turned(q, positions, cos, sin), q), q, None, positions, cos, sin)
    grad_q = q.requires_grad_()
    alone, nothing = rotary_embedding(grad_q, None, positions, cos, sin)
    assert nothing is None
    assert torch.autograd.grad(alone.sum(), grad_q)[0].shape == q.shape


@both
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("lead", [(1, 1), (3,)])
def test_the_gradient_is_the_turn_back(dtype, interleaved, lead):
    cos, sin = rotary_cache(64, 6)
    q, k = normal(0, *lead, 4, 8, dtype=dtype), normal(1, *lead, 2, 8, dtype=dtype)
    dq, dk = normal(2, *lead, 4, 8, dtype=dtype), normal(3, *lead, 2, 8, dtype=dtype)
    positions = philox.integers(4, lead, 0, 64)
    leaves = q.requires_grad_(), k.requires_grad_()
    outs = rotary_embedding(*leaves, positions, cos, sin, interleaved=interleaved)
    got = torch.autograd.grad(outs, leaves, (dq, dk))
    formulas = tuple(turned(x, positions, cos, -sin, interleaved) for x in (dq, dk))
    within(rotary_embedding, got, formulas, dq, dk, positions, cos, -sin, interleaved=interleaved)


@both
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("length", [1, 5])
def test_strides_do_not_matter(dtype, interleaved, length):
    cos, sin = rotary_cache(16, 8)
    wide = torch.stack((cos, sin), -1)
    q = normal(0, 1, 4, length, 8, dtype=dtype).transpose(1, 2)  # (B, S, H, D) as attention layers have it
    k = normal(1, 1, length, 8, 2, dtype=dtype).transpose(-1, -2)
    positions = torch.arange(length).expand(1, length)
    formulas = tuple(turned(x, positions, cos, sin, interleaved) for x in (q, k))
    check(rotary_embedding, formulas, q, k, positions, wide[..., 0], wide[..., 1], interleaved=interleaved)


@both
def test_results_share_no_memory_with_inputs_or_each_other():
    cos, sin = rotary_cache(16, 8)
    for lead in ((1, 1), (2,)):
        q, k = normal(0, *lead, 2, 8), normal(1, *lead, 1, 8)
        outs = rotary_embedding(q, k, torch.zeros(lead, dtype=torch.int64), cos, sin)
        assert len({t.untyped_storage().data_ptr() for t in (q, k, *outs)}) == 4


@both
def test_nothing_gives_nothing():
    cos, sin = rotary_cache(16, 8)
    no_tokens = rotary_embedding(
        torch.zeros(0, 2, 8), torch.zeros(0, 1, 8), torch.zeros(0, dtype=torch.int64), cos, sin
    )
    assert [t.shape for t in no_tokens] == [(0, 2, 8), (0, 1, 8)]
    no_heads = rotary_embedding(torch.zeros(3, 0, 8), None, torch.zeros(3, dtype=torch.int64), cos, sin)
    assert no_heads[0].shape == (3, 0, 8)


COS, SIN = rotary_cache(16, 8)
Q, K, AT = torch.zeros(3, 4, 8), torch.zeros(3, 2, 8), torch.arange(3)
BAD = [
    (lambda: rotary_embedding(Q, K, AT + 14, COS, SIN), ArgumentError, "from 14 to 16; the tables hold 0 … 15"),
    (lambda: rotary_embedding(Q, K, AT - 1, COS, SIN), ArgumentError, "from -1 to 1"),
    (lambda: rotary_embedding(Q[:1], K[:1], AT[:1] + 16, COS, SIN), ArgumentError, "from 16 to 16"),
    (lambda: rotary_embedding(Q, K, AT.int(), COS, SIN), DtypeError, "positions has dtype int32"),
    (lambda: rotary_embedding(Q, K, AT[:2], COS, SIN), ShapeError, r"positions has shape \(2,\)"),
    (lambda: rotary_embedding(Q, K[:2], AT, COS, SIN), ShapeError, "number of heads only"),
    (lambda: rotary_embedding(Q, K[..., :6], AT, COS, SIN), ShapeError, "number of heads only"),
    (lambda: rotary_embedding(Q, K.double(), AT, COS, SIN), DtypeError, "share one dtype"),
    (lambda: rotary_embedding(Q.long(), K.long(), AT, COS, SIN), DtypeError, "int64"),
    (lambda: rotary_embedding(Q, K, AT, COS.bfloat16(), SIN), DtypeError, "cos has dtype bfloat16"),
    (lambda: rotary_embedding(Q, K, AT, COS, SIN[:8]), ShapeError, "cos has shape"),
    (lambda: rotary_embedding(Q[..., :6], K[..., :6], AT, COS, SIN), ShapeError, "D = 6"),
    (lambda: rotary_embedding(Q, K, AT, COS, SIN, rotary_dim=4), ShapeError, "rotary_dim is 4"),
    (lambda: rotary_embedding(Q[0, 0], None, AT, COS, SIN), ShapeError, "H, D"),
    (lambda: rotary_embedding(Q, K, AT, COS.to("meta"), SIN), DeviceError, "meta"),
]


@both
@pytest.mark.parametrize(("call", "error", "message"), BAD)
def test_bad_input_gives_a_typed_error_that_names_it(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_the_cache_is_one_rounding_of_the_float64_angles():
    cos, sin = rotary_cache(300, 10, base=500.0)
    assert cos.shape == sin.shape == (300, 5)
    assert cos.dtype is sin.dtype is torch.float32
    for p in (0, 1, 7, 299):
        for i in range(5):
            angle = p * 500.0 ** (-2 * i / 10)
            for got, want in ((cos[p, i].item(), math.cos(angle)), (sin[p, i].item(), math.sin(angle))):
                # Half a unit in the last place, and what a different order of float64 products makes of the angle.
                assert abs(got - want) <= 2.0**-24 * abs(want) + 2.0**-51 * angle


def test_the_cache_is_precise_at_a_million_where_float32_angles_are_not():
    cos, _ = rotary_cache(1_000_001, 4)
    assert cos[1_000_000, 0].item() == torch.tensor(math.cos(1e6)).item()
    assert torch.equal(rotary_cache(0, 4)[0], torch.zeros(0, 2))


DYNAMIC = {"rope_type": "dynamic", "factor": 4.0, "max_position_embeddings": 4}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}
LONG = {
    "rope_type": "longrope",
    "short_factor": [1.0 + i / 64 for i in range(32)],
    "long_factor": [1.0 + i for i in range(32)],
    "original_max_position_embeddings": 4096,
    "factor": 32.0,
}
CONFIGURATIONS = [
    ({"rope_type": "linear", "factor": 2.5}, 8192, 8192),
    ({"rope_type": "dynamic", "factor": 4.0}, 2048, 2048),
    ({"rope_type": "dynamic", "factor": 4.0}, 2048, 6000),
    (LLAMA3, 131072, 9000),
    (YARN, 16384, 16384),
    (YARN | {"truncate": False, "beta_fast": 48, "beta_slow": 2}, 16384, 8192),
    (YARN | {"factor": 40.0, "mscale": 1.0, "mscale_all_dim": 0.707}, 163840, 5000),
    (YARN | {"attention_factor": 1.5}, 16384, 5000),
    (LONG, 131072, 4096),
    (LONG, 131072, 4097),
    (LONG | {"attention_factor": 1.25}, 131072, 5000),
]


@pytest.mark.parametrize(("scaling", "trained", "length"), CONFIGURATIONS)
@pytest.mark.parametrize("base", [10000.0, 500000.0])
def test_scalings_are_those_of_transformers_computed_in_float64(scaling, trained, length, base, monkeypatch):
    rope = pytest.importorskip("transformers.modeling_rope_utils")
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=256,
        num_attention_heads=4,
        head_dim=64,
        max_position_embeddings=trained,
        rope_parameters={"rope_theta": base} | scaling,
    )

    class Float64:
        """torch, but for its default float."""

        float = float32 = torch.float64

        def __getattr__(self, name):
            return getattr(torch, name)

    monkeypatch.setattr(rope, "torch", Float64())
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    kind = scaling["rope_type"]
    frequency, factor = rope.ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"), seq_len=length)
    monkeypatch.undo()
    assert frequency.dtype is torch.float64

    known = scaling | ({"max_position_embeddings": trained} if kind == "dynamic" else {})
    cos, sin = rotary_cache(length, 64, base=base, scaling=known)
    angle = torch.arange(length, dtype=torch.float64)[:, None] * frequency
    for got, want in ((cos, angle.cos() * factor), (sin, angle.sin() * factor)):
        assert got.shape == (length, 32)
        # One rounding to float32; the two float64 formulas may order their few operations differently.
        assert ((got.double() - want).abs() <= 2.0**-24 * want.abs() + 2.0**-48 * (1 + angle)).all()


def test_the_factor_may_be_the_ratio_of_lengths():
    given = rotary_cache(64, 16, scaling=YARN)
    ratio = {k: v for k, v in YARN.items() if k != "factor"} | {"max_position_embeddings": 4 * 4096}
    assert all(map(torch.equal, given, rotary_cache(64, 16, scaling=ratio)))


def test_default_and_type_are_understood():
    plain = rotary_cache(64, 16)
    assert all(map(torch.equal, plain, rotary_cache(64, 16, scaling={"rope_type": "default", "rope_theta": 1.0})))
    linear = rotary_cache(64, 16, scaling={"type": "linear", "factor": 2.0})
    assert torch.equal(linear[0][::2], plain[0][:32])


CACHE_BAD = [
    (lambda: rotary_cache(-1, 8), "max_pos is -1"),
    (lambda: rotary_cache(8.0, 8), "max_pos is 8.0"),
    (lambda: rotary_cache(8, 7), "rotary_dim is 7"),
    (lambda: rotary_cache(8, 0), "rotary_dim is 0"),
    (lambda: rotary_cache(8, 8, base=math.nan), "base is nan"),
    (lambda: rotary_cache(8, 8, base=-1.0), "base is -1.0; it must be a number greater than 1"),
    (lambda: rotary_cache(8, 8, scaling="linear"), "scaling is 'linear'"),
    (lambda: rotary_cache(8, 8, scaling={"rope_type": "ntk"}), "'ntk'; supported are default, dynamic, linear, llama3"),
    (lambda: rotary_cache(8, 8, scaling={"rope_type": "linear"}), "factor is missing"),
    (lambda: rotary_cache(8, 8, scaling={"rope_type": "linear", "factor": 0}), "factor of rope_type 'linear' is 0"),
    (lambda: rotary_cache(8, 8, scaling={"rope_type": "linear", "factor": "x"}), "is 'x'"),
    (lambda: rotary_cache(8, 2, scaling=DYNAMIC), "at least 4"),
    (lambda: rotary_cache(8, 64, scaling=LONG | {"original_max_position_embeddings": 1}), "greater than 1"),
    (lambda: rotary_cache(8, 8, scaling=LLAMA3 | {"low_freq_factor": 4.0}), "must be the smaller"),
    (lambda: rotary_cache(8, 8, scaling={"rope_type": "yarn", "original_max_position_embeddings": 4}), "factor or"),
    (lambda: rotary_cache(8, 8, scaling=LONG), "must be rotary_dim / 2 = 4 numbers"),
    (lambda: rotary_cache(8, 64, scaling=LONG | {"long_factor": None}), "long_factor"),
    (lambda: rotary_cache(True, 8), "max_pos is True"),
    (lambda: rotary_cache(8, 8, base="x"), "base is 'x'"),
    (lambda: rotary_cache(8, 8, base=10**400), "base is 1000"),
    (lambda: rotary_cache(8, 8, base=torch.ones(2)), "base is tensor"),
    (lambda: rotary_cache(8, 8, scaling={"rope_type": ["linear"]}), "rope_type is"),
    (lambda: rotary_cache(8, 8, scaling={"rope_type": "linear", "factor": True}), "is True"),
    (lambda: rotary_cache(8, 8, scaling=DYNAMIC | {"factor": 1e300}), "stay a finite number"),
    (lambda: rotary_cache(8, 8, scaling=YARN | {"mscale": math.nan}), "mscale of rope_type 'yarn' is nan"),
    (lambda: rotary_cache(8, 8, scaling=YARN | {"mscale_all_dim": "x"}), "mscale_all_dim of rope_type 'yarn' is 'x'"),
    (lambda: rotary_cache(8, 8, scaling=YARN | {"beta_fast": [32]}), "beta_fast of rope_type 'yarn' is"),
    (lambda: rotary_cache(8, 8, scaling=YARN | {"truncate": "no"}), "truncate of rope_type 'yarn' is 'no'"),
]


@pytest.mark.parametrize(("call", "message"), CACHE_BAD)
def test_a_bad_cache_request_gives_an_argument_error_that_names_it(call, message):
    with pytest.raises(ArgumentError, match=message):
        call()


@pytest.mark.parametrize("way", ["eager", "through the torch op", "compiled"])
def test_tables_that_require_a_gradient_get_none_and_make_no_graph(way):
    cos, sin = (t.requires_grad_() for t in rotary_cache(8, 8))
    q, positions = torch.randn(3, 2, 8), torch.arange(3)

    def rotate(q):
        return rotary_embedding(q, None, positions, cos, sin)[0]

    call = torch.compile(rotate, backend="aot_eager", fullgraph=True) if way == "compiled" else rotate
    with torch.device("cpu") if way == "through the torch op" else contextlib.nullcontext():
        assert not call(q).requires_grad
        call(q.requires_grad_()).sum().backward()
    assert q.grad is not None
    assert cos.grad is None
