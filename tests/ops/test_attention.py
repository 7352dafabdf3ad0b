"""attention: the formula, its conventions, gradients and bad input, for the reference and ATen's kernel."""

from __future__ import annotations

import math

import naive_attention as naive
import pytest
import torch
from attention_support import forced, normal, qkv

import hal
from hal.errors import ArgumentError, DeviceError, DtypeError, ShapeError, TransformError, UnsupportedError
from hal.op import OPS
from hal.ops import _attention_core
from hal.ops.attention import attention

ONLY_REFERENCE = ("softcap", "sinks")


@pytest.fixture(params=["reference", "aten"])
def implementation(request):
    with forced("attention", request.param):
        yield request.param


def need(implementation, *features):
    if implementation == "aten" and any(f in (*ONLY_REFERENCE, "different_v_dim") for f in features):
        pytest.skip("aten leaves this feature to the reference")


def random_mask(kind, shape, seed=50):
    draw = normal(seed, *shape)
    if kind == "bool":
        return draw > -0.3
    draw[draw < -0.5] = -math.inf
    if kind == "lowest":
        draw[0] = torch.finfo(torch.float64).min
    return draw


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": True},
        {"window": (2, None)},
        {"window": (None, 1)},
        {"window": (0, 0)},
        {"window": (1, 2), "causal": True},
        {"scale": 0.4},
        {"scale": -0.4, "causal": True},
        {"scale": 0.0, "causal": True},
        {"softcap": 1.5},
        {"sinks": True},
        {"sinks": True, "causal": True, "window": (1, 0), "softcap": 2.0, "scale": 0.3},
    ],
    ids=lambda o: "-".join(o) or "plain",
)
@pytest.mark.parametrize("mask", [None, "bool", "bias", "lowest"])
@pytest.mark.parametrize(("S", "L"), [(1, 6), (3, 6), (5, 5), (6, 3)])
def test_output_and_lse_are_the_schoolbook_formula(implementation, options, mask, S, L):
    need(implementation, *options)
    q, k, v = qkv(2, S, L, 4, 2, 5)
    options = dict(options)
    if "sinks" in options:
        options["sinks"] = normal(9, 4)
    if mask is not None:
        options["mask"] = random_mask(mask, (2, 1, S, L))
    o, lse = attention(q, k, v, **options, return_lse=True)
    expected_o, expected_lse = naive.dense(q, k, v, **options)
    torch.testing.assert_close(o, expected_o, atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(lse, expected_lse, atol=1e-12, rtol=1e-12)
    assert o.is_contiguous() and lse.is_contiguous()
    torch.testing.assert_close(attention(q, k, v, **options), o, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (6, 6), (6, 3), (7, 1), (71, 1), (14, 2)])
def test_query_head_h_reads_kv_head_h_over_the_ratio(implementation, heads, kv_heads):
    q, k, v = qkv(1, 2, 3, heads, kv_heads, 4)
    torch.testing.assert_close(attention(q, k, v), naive.dense(q, k, v)[0], atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize(("D", "E"), [(1, 1), (20, 20), (72, 72), (96, 96), (576, 576), (8, 3), (3, 8), (576, 512)])
def test_any_head_dim_with_the_scale_of_the_true_one(implementation, D, E):
    need(implementation, "different_v_dim" if D != E else "")
    q, k, v = qkv(1, 2, 3, 2, 1, D, E)
    torch.testing.assert_close(attention(q, k, v), naive.dense(q, k, v)[0], atol=1e-12, rtol=1e-12)


def test_causal_is_aligned_bottom_right(implementation):
    q, k, v = qkv(1, 2, 5, 1, 1, 4)
    o = attention(q, k, v, causal=True)
    torch.testing.assert_close(o[:, :1], attention(q[:, :1], k[:, :4], v[:, :4]), atol=1e-12, rtol=0)
    torch.testing.assert_close(o[:, 1:], attention(q[:, 1:], k, v), atol=1e-12, rtol=0)


@pytest.mark.parametrize(("S", "L"), [(20, 20), (3, 40), (20, 17)])
@pytest.mark.parametrize("scale", [None, 0.0, -0.4])
@pytest.mark.parametrize("window", [None, (None, 1), (18, None)])
def test_causal_holds_at_lengths_beyond_a_vector(implementation, S, L, scale, window):
    q, k, v = qkv(1, S, L, 2, 1, 3)
    options = {"causal": True, "scale": scale, "window": window}
    o, lse = attention(q, k, v, **options, return_lse=True)
    torch.testing.assert_close((o, lse), naive.dense(q, k, v, **options), atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(attention(q, k, v, **options), o, atol=1e-12, rtol=1e-12)


def test_window_of_a_model_that_slides_over_four_keys(implementation):
    v = torch.eye(9, dtype=torch.float64)[None, :, None, :]
    q, k = torch.zeros(1, 9, 1, 9, dtype=torch.float64), torch.zeros(1, 9, 1, 9, dtype=torch.float64)
    seen = (attention(q, k, v, causal=True, window=(3, 0)) > 0).sum(-1).flatten()
    assert seen.tolist() == [1, 2, 3, 4, 4, 4, 4, 4, 4]


@pytest.mark.parametrize(
    "shape",
    [(), (6,), (1, 6), (3, 1), (3, 6), (1, 3, 6), (4, 3, 6), (2, 1, 3, 6), (2, 4, 1, 6), (2, 4, 3, 6), (1, 1, 1, 1)],
)
@pytest.mark.parametrize("kind", ["bool", "bias"])
def test_masks_broadcast_to_batch_heads_queries_keys(implementation, shape, kind):
    q, k, v = qkv(2, 3, 6, 4, 2, 5)
    mask = random_mask(kind, shape, seed=60)
    o, lse = attention(q, k, v, mask=mask, return_lse=True)
    expected_o, expected_lse = naive.dense(q, k, v, mask=mask)
    torch.testing.assert_close(o, expected_o, atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(lse, expected_lse, atol=1e-12, rtol=1e-12)


def test_expanded_and_transposed_masks_are_legal(implementation):
    q, k, v = qkv(2, 3, 6, 4, 2, 5)
    row = random_mask("bool", (6,))
    torch.testing.assert_close(attention(q, k, v, mask=row.expand(2, 4, 3, 6)), attention(q, k, v, mask=row))
    square = random_mask("bias", (6, 3))
    torch.testing.assert_close(attention(q, k, v, mask=square.T), attention(q, k, v, mask=square.T.contiguous()))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("mask_dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_minus_infinity_in_a_bias_masks_and_the_lowest_number_does_not(implementation, dtype, mask_dtype):
    q, k, v = qkv(1, 2, 4, 2, 1, 4, dtype=dtype)
    lowest = torch.finfo(mask_dtype).min
    o = attention(q, k, v, mask=torch.full((2, 4), lowest, dtype=mask_dtype))
    assert o.isfinite().all() and (o != 0).any()
    hidden = torch.tensor([[0.0, -math.inf, 0.0, -math.inf]], dtype=mask_dtype)
    torch.testing.assert_close(attention(q, k, v, mask=hidden), attention(q, k[:, ::2], v[:, ::2]))


@pytest.mark.parametrize("with_sinks", [False, True])
def test_a_row_that_sees_nothing_is_zero_with_the_sinks_logit_and_passes_no_gradient(implementation, with_sinks):
    need(implementation, "sinks" if with_sinks else "")
    q, k, v = qkv(1, 5, 3, 2, 1, 4)
    q[0, 0] = math.nan  # rows 0 and 1 stand before the first key
    leaves = [t.requires_grad_() for t in (q, k, v)]
    sinks = normal(7, 2) if with_sinks else None
    o, lse = attention(q, k, v, causal=True, sinks=sinks, return_lse=True)
    assert (o[0, :2] == 0).all()
    expected = torch.full((2, 2), -math.inf, dtype=torch.float64) if sinks is None else sinks[:, None].expand(2, 2)
    assert torch.equal(lse[0, :, :2], expected)
    upstream = normal(8, 1, 5, 2, 4)
    upstream[0, :2] = math.nan
    dq, dk, dv = torch.autograd.grad(o, leaves, upstream)
    assert (dq[0, :2] == 0).all()
    assert all(d.isfinite().all() for d in (dq, dk, dv))
    rest = [t.detach()[:, 2:] if t is q else t.detach() for t in (q, k, v)]
    rest = [t.requires_grad_() for t in rest]
    alone = torch.autograd.grad(attention(*rest, causal=True, sinks=sinks), rest, upstream[:, 2:])
    torch.testing.assert_close((dq[:, 2:], dk, dv), alone, atol=1e-12, rtol=0)


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", ["k", "v", "both", "one element"])
@pytest.mark.parametrize("hiding", ["bool", "bias", "row", "window", "head"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_key_that_nobody_sees_has_no_influence(implementation, poison, where, hiding, dtype):
    q, k, v = qkv(2, 3, 7, 4, 2, 8, dtype=dtype)
    options, clean = {}, (k.clone(), v.clone())
    hidden = [2, 6]
    if hiding == "window":
        options, hidden = {"window": (1, None)}, [0, 2]
    elif hiding == "row":
        options = {"mask": torch.tensor([j not in hidden for j in range(7)])}
    elif hiding == "head":
        mask = torch.ones(1, 4, 3, 7, dtype=torch.bool)
        mask[:, :2, :, hidden] = False  # nobody of kv head 0; kv head 1 sees them
        options = {"mask": mask}
    else:
        mask = torch.ones(2, 1, 3, 7, dtype=torch.bool)
        mask[..., hidden] = False
        options = {"mask": mask if hiding == "bool" else torch.zeros(2, 1, 3, 7).masked_fill(~mask, -math.inf)}
    heads = [0] if hiding == "head" else [0, 1]
    for t, name in ((k, "k"), (v, "v")):
        if where in (name, "both"):
            for head in heads:
                t[:, hidden, head] = poison
        elif where == "one element" and name == "k":
            t[1, hidden[0], 0, 3] = poison
    expected, expected_lse = attention(q, *clean, **options, return_lse=True)
    o, lse = attention(q, k, v, **options, return_lse=True)
    torch.testing.assert_close(o, expected)
    torch.testing.assert_close(lse, expected_lse)
    torch.testing.assert_close(attention(q, k, v, **options), expected, atol=0.05, rtol=0.02)
    leaves, clean_leaves = ([t.detach().requires_grad_() for t in ts] for ts in ((q, k, v), (q, *clean)))
    got = torch.autograd.grad(attention(*leaves, **options).sum(), leaves)
    want = torch.autograd.grad(attention(*clean_leaves, **options).sum(), clean_leaves)
    torch.testing.assert_close(got, want)
    assert all((d[:, hidden, 0] == 0).all() for d in got[1:])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("S", "L"), [(1, 3), (1, 16), (3, 7), (20, 20), (3, 513)])
@pytest.mark.parametrize("causal", [False, True])
def test_a_nan_query_spoils_its_own_row_and_no_other(implementation, dtype, S, L, causal):
    q, k, v = qkv(1, S, L, 4, 2, 8, dtype=dtype)
    clean = attention(q, k, v, causal=causal)
    q[0, S - 1, 2, 5] = math.nan
    o, lse = attention(q, k, v, causal=causal, return_lse=True)
    for result in (o, attention(q, k, v, causal=causal)):
        spoilt = result.isnan()
        assert spoilt[0, S - 1, 2].all() and spoilt.sum() == 8
        torch.testing.assert_close(result[~spoilt], clean[~spoilt], atol=1e-2, rtol=1e-2)
    assert lse.isnan().sum() == 1 and lse[0, 2, S - 1].isnan()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("L", [3, 40])
def test_an_infinite_logit_is_not_taken_for_a_number(implementation, dtype, L):
    q, k, v = (
        torch.ones(1, 2, 1, 4, dtype=dtype),
        torch.zeros(1, L, 1, 4, dtype=dtype),
        normal(0, 1, L, 1, 4, dtype=dtype),
    )
    k[0, 1] = -math.inf  # weighs nothing, like a masked key
    torch.testing.assert_close(attention(q, k, v), v[:, torch.arange(L) != 1].mean(1, keepdim=True).expand(1, 2, 1, 4))
    k[0, 1] = math.inf  # inf - inf
    o, lse = attention(q, k, v, return_lse=True)
    assert o.isnan().all() and attention(q, k, v).isnan().all() and lse.isnan().all()


def test_lse_is_the_natural_logarithm_of_the_denominator_in_float32(implementation):
    q, k, v = qkv(1, 1, 4, 1, 1, 2, dtype=torch.bfloat16)
    _, lse = attention(q * 0, k, v, return_lse=True)
    assert lse.dtype is torch.float32 and lse.shape == (1, 1, 1)
    assert lse.item() == pytest.approx(math.log(4), abs=1e-6)
    assert attention(q.double(), k.double(), v.double(), return_lse=True)[1].dtype is torch.float64


@pytest.mark.parametrize("shape", [(0, 3, 4), (2, 0, 4), (2, 3, 0), (2, 1, 0), (0, 0, 0)])
@pytest.mark.parametrize("mask", [None, "bool", "bias"])
def test_empty_inputs_give_empty_or_zero_results_and_gradients(implementation, shape, mask):
    B, S, L = shape
    q, k, v = (t.requires_grad_() for t in qkv(B, S, L, 4, 2, 5))
    full = torch.ones(B, 1, S, L)
    options = {} if mask is None else {"mask": full.bool() if mask == "bool" else full}
    o, lse = attention(q, k, v, causal=True, **options, return_lse=True)
    assert o.shape == (B, S, 4, 5) and lse.shape == (B, 4, S)
    assert (o == 0).all() and (lse == -math.inf).all()
    for t, d in zip((q, k, v), torch.autograd.grad(o.sum(), (q, k, v)), strict=True):
        assert d.shape == t.shape and (d == 0).all()


def test_any_strides_give_the_same_numbers_and_leave_inputs_alone(implementation):
    q, k, v = qkv(2, 3, 6, 4, 2, 5)
    expected = attention(q, k, v, causal=True)
    others = (
        q.permute(3, 0, 2, 1).contiguous().permute(1, 3, 2, 0),
        torch.cat((k, k), -1)[..., :5],
        torch.stack((v, v), -1)[..., 0],
    )
    before = [t.clone() for t in others]
    torch.testing.assert_close(attention(*others, causal=True), expected, atol=1e-13, rtol=0)
    assert all(map(torch.equal, others, before))
    expanded = k[:, :, :1].expand(2, 6, 2, 5)
    torch.testing.assert_close(attention(q, expanded, v), attention(q, expanded.contiguous(), v), atol=1e-13, rtol=0)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": True, "window": (2, None)},
        {"softcap": 1.0, "scale": 0.7},
        {"mask": "bool", "causal": True},
        {"mask": "bias", "sinks": True},
    ],
    ids=lambda o: "-".join(o) or "plain",
)
def test_gradients_are_those_of_the_schoolbook_formula(implementation, options):
    need(implementation, *options)
    q, k, v = (t.requires_grad_() for t in qkv(1, 4, 5, 4, 2, 3))
    leaves, options = [q, k, v], dict(options)
    if "mask" in options:
        options["mask"] = random_mask(options["mask"], (4, 5))
        if options["mask"].is_floating_point():
            leaves.append(options["mask"].requires_grad_())
    if "sinks" in options:
        options["sinks"] = normal(9, 4).requires_grad_()
        leaves.append(options["sinks"])
    upstream, upstream_lse = normal(10, 1, 4, 4, 3), normal(11, 1, 4, 4)
    o, lse = attention(q, k, v, **options, return_lse=True)
    expected_o, expected_lse = naive.dense(q, k, v, **options)
    seen = expected_lse.isfinite()
    got = torch.autograd.grad((o, lse), leaves, (upstream, upstream_lse * seen))
    loss = (expected_o * upstream).sum() + (expected_lse[seen] * upstream_lse[seen]).sum()
    want = torch.autograd.grad(loss, leaves)
    torch.testing.assert_close(got, want, atol=1e-12, rtol=1e-10)


def test_gradcheck_with_bias_sinks_and_softcap():
    q, k, v = (t.requires_grad_() for t in qkv(1, 3, 4, 2, 1, 3, 2))
    bias, sinks = random_mask("bias", (2, 3, 4)).requires_grad_(), normal(9, 2).requires_grad_()

    def run(q, k, v, bias, sinks):
        return attention(q, k, v, causal=True, mask=bias, softcap=3.0, sinks=sinks, return_lse=True)

    bias.data[bias.data == -math.inf] = 0.5  # finite differences cannot cross the edge of the mask
    assert torch.autograd.gradcheck(run, (q, k, v, bias, sinks))


def test_a_bias_of_minus_infinity_has_gradient_zero(implementation):
    q, k, v = qkv(1, 2, 3, 1, 1, 4)
    bias = torch.tensor([[0.0, -math.inf, 1.0], [-math.inf] * 3], dtype=torch.float64).requires_grad_()
    (d,) = torch.autograd.grad(attention(q, k, v, mask=bias).sum(), bias)
    assert d[0, 1] == 0 and (d[1] == 0).all() and (d[0, ::2] != 0).all()


def test_a_float32_gradient_reaches_bias_and_sinks_of_a_bfloat16_call():
    q, k, v = qkv(1, 2, 3, 2, 1, 4, dtype=torch.bfloat16)
    bias, sinks = torch.zeros(2, 3, requires_grad=True), torch.zeros(2, requires_grad=True)
    attention(q, k, v, mask=bias, sinks=sinks).float().pow(2).sum().backward()
    assert bias.grad.dtype is torch.float32 and sinks.grad.dtype is torch.float32
    assert (bias.grad != 0).all() and (sinks.grad != 0).all()


def test_long_sequences_in_chunks_give_the_same_numbers(monkeypatch):
    q, k, v = qkv(2, 13, 17, 4, 2, 5)
    mask = random_mask("bool", (1, 4, 13, 17))
    k[:, 3], mask[..., 3] = math.nan, False
    with forced("attention", "reference"):
        whole = attention(q, k, v, causal=True, mask=mask, return_lse=True)
        monkeypatch.setattr(_attention_core, "CHUNK_ELEMENTS", 2 * 4 * 17 * 5)
        assert len(list(_attention_core.chunks(2, 4, 13, 17))) == 3
        parts = attention(q, k, v, causal=True, mask=mask, return_lse=True)
    torch.testing.assert_close(parts, whole, atol=1e-13, rtol=0)


def test_aten_is_preferred_and_refuses_with_reasons_what_its_kernel_lacks():
    q, k, v = qkv(1, 2, 3, 2, 1, 4)
    plain = hal.selection.explain(OPS["attention"], OPS["attention"].bind((q, k, v), {}))
    assert plain.chosen.implementation.name == "aten"
    asked = OPS["attention"].bind((q, k, v), {"softcap": 1.0, "sinks": normal(0, 2)})
    capped = hal.selection.explain(OPS["attention"], asked)
    assert capped.chosen.implementation.name == "reference"
    reasons = next(c.reasons for c in capped.candidates if c.implementation.name == "aten")
    assert {"softcap is not supported", "sinks is not supported"} <= set(reasons)
    with forced("attention", "aten"), pytest.raises(UnsupportedError, match="softcap"):
        attention(q, k, v, softcap=1.0)


def test_second_derivatives_are_refused():
    q, k, v = (t.requires_grad_() for t in qkv(1, 2, 3, 2, 1, 4))
    (d,) = torch.autograd.grad(attention(q, k, v).sum(), q, create_graph=True)
    with pytest.raises(TransformError):
        d.sum().backward()


def test_autocast_brings_q_k_and_v_to_its_dtype():
    q, k, v = qkv(1, 2, 3, 2, 1, 4, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        o = attention(q, k.bfloat16(), v)
    assert o.dtype is torch.bfloat16


Q, K, V = (1, 2, 4, 8), (1, 3, 2, 8), (1, 3, 2, 8)


@pytest.mark.parametrize(
    ("shapes", "options", "error", "words"),
    [
        (((2, 4, 8), K, V), {}, ShapeError, "q has shape"),
        ((Q, (1, 3, 8), V), {}, ShapeError, "k has shape"),
        (((2, 2, 4, 8), K, V), {}, ShapeError, "batch"),
        ((Q, (1, 3, 3, 8), (1, 3, 3, 8)), {}, ShapeError, "multiple"),
        ((Q, (1, 3, 0, 8), (1, 3, 0, 8)), {}, ShapeError, "multiple"),
        ((Q, K, (1, 3, 1, 8)), {}, ShapeError, "same number"),
        ((Q, K, (1, 4, 2, 8)), {}, ShapeError, "values"),
        ((Q, (1, 3, 2, 9), V), {}, ShapeError, "head dim"),
        (((1, 2, 4, 577), (1, 3, 2, 577), V), {}, ShapeError, "576"),
        (((1, 2, 4, 0), (1, 3, 2, 0), V), {}, ShapeError, "576"),
        ((Q, K, V), {"window": (-1, 0)}, ArgumentError, "window left"),
        ((Q, K, V), {"window": 4}, ArgumentError, "left, right"),
        ((Q, K, V), {"window": (1, 2, 3)}, ArgumentError, "left, right"),
        ((Q, K, V), {"softcap": 0.0}, ArgumentError, "softcap"),
        ((Q, K, V), {"softcap": -1.0}, ArgumentError, "softcap"),
        ((Q, K, V), {"softcap": math.nan}, ArgumentError, "softcap"),
        ((Q, K, V), {"scale": math.nan}, ArgumentError, "scale"),
        ((Q, K, V), {"scale": math.inf}, ArgumentError, "scale"),
        ((Q, K, V), {"sinks": torch.zeros(2)}, ShapeError, "sinks"),
        ((Q, K, V), {"sinks": torch.zeros(4, dtype=torch.int64)}, DtypeError, "sinks"),
        ((Q, K, V), {"mask": torch.zeros(3, 3, dtype=torch.bool)}, ShapeError, "broadcast"),
        ((Q, K, V), {"mask": torch.zeros(1, 1, 1, 2, 3, dtype=torch.bool)}, ShapeError, "broadcast"),
        ((Q, K, V), {"mask": torch.zeros(2, 3, dtype=torch.int64)}, DtypeError, "mask"),
        ((Q, K, V), {"mask": torch.zeros(2, 3, device="meta")}, DeviceError, "device"),
    ],
)
def test_bad_arguments_say_what_is_wrong(shapes, options, error, words):
    tensors = [torch.zeros(shape) for shape in shapes]
    with pytest.raises(error, match=words):
        attention(*tensors, **options)


@pytest.mark.parametrize(
    ("dtypes", "words"),
    [
        ((torch.float32, torch.bfloat16, torch.bfloat16), "share one dtype"),
        ((torch.bfloat16, torch.bfloat16, torch.float32), "share one dtype"),
        ((torch.int32, torch.int32, torch.int32), "q has dtype int32"),
        ((torch.float8_e4m3fn,) * 3, "q has dtype float8_e4m3fn"),
    ],
)
def test_wrong_dtypes_are_refused(dtypes, words):
    tensors = [torch.zeros(shape).to(dtype) for shape, dtype in zip((Q, K, V), dtypes, strict=True)]
    with pytest.raises(DtypeError, match=words):
        attention(*tensors)


@pytest.mark.parametrize(
    ("S", "L", "causal", "window", "pairs"),
    [
        (4, 4, False, None, 16),
        (4, 4, True, None, 10),
        (2, 5, True, None, 9),
        (5, 2, True, None, 3),
        (4, 4, True, (1, 0), 7),
        (4, 4, False, (1, 1), 10),
        (3, 3, False, (None, 0), 6),
        (0, 3, True, None, 0),
    ],
)
def test_cost_counts_the_visible_pairs(S, L, causal, window, pairs):
    q, k, v = qkv(2, S, L, 4, 2, 8, 3, dtype=torch.bfloat16)
    cost = OPS["attention"].cost(OPS["attention"].bind((q, k, v), {"causal": causal, "window": window}))
    assert cost.flops == 2 * 2 * 4 * pairs * (8 + 3)
    assert cost.bytes == 2 * (2 * S * 4 * (8 + 3) + 2 * L * 2 * (8 + 3))


@pytest.mark.parametrize("L", [2, 5])
@pytest.mark.parametrize("largest", [2**31 - 1, 2**62, 2**63 - 1])
@pytest.mark.parametrize("sides", [(1, 1), (1, None), (None, 1)])
def test_the_largest_integer_as_a_window_is_no_window(implementation, sides, largest, L):
    q, k, v = qkv(1, 4, L, 2, 1, 4)
    window = tuple(None if side is None else largest for side in sides)
    for causal in (False, True):
        with forced("attention", implementation):
            o, lse = attention(q, k, v, window=window, causal=causal, return_lse=True)
            expected, expected_lse = attention(q, k, v, causal=causal, return_lse=True)
        torch.testing.assert_close(o, expected)
        torch.testing.assert_close(lse, expected_lse)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_lowest_float64_in_a_bias_keeps_its_gradient_in_a_narrower_call(implementation, dtype):
    q, k, v = qkv(1, 2, 3, 1, 1, 4, dtype=dtype)
    lowest = torch.full((2, 3), torch.finfo(torch.float64).min, dtype=torch.float64, requires_grad=True)
    level = torch.zeros(2, 3, dtype=torch.float64, requires_grad=True)
    seed = normal(9, 1, 2, 1, 4, dtype=dtype)
    with forced("attention", implementation):
        # Beside the lowest number the scores vanish: all keys weigh alike, as they do with a scale of 0.
        (got,) = torch.autograd.grad(attention(q, k, v, mask=lowest), lowest, seed)
        (want,) = torch.autograd.grad(attention(q, k, v, mask=level, scale=0.0), level, seed)
    assert want.abs().max() > 0
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("record", [False, True])
def test_autocast_does_not_reach_the_arithmetic_of_an_implementation(implementation, record):
    q, k, v = (t.requires_grad_(record) for t in qkv(1, 9, 40, 2, 1, 64, dtype=torch.bfloat16))

    def results():
        with forced("attention", implementation):
            o = attention(q, k, v, causal=True)
            return [o.detach(), *(torch.autograd.grad(o, (q, k, v), torch.ones_like(o)) if record else ())]

    expected = results()
    with torch.autocast("cpu", torch.bfloat16):
        got = results()
    if not record:  # the implementation that records forms lse besides, and may round o otherwise
        assert torch.equal(got[0], expected[0])
    for g, e in zip(got, expected, strict=True):
        torch.testing.assert_close(g, e, rtol=2.0**-8, atol=2.0**-8)
