"""Rotary embedding, gated activations and softmax: faults seen elsewhere."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from case_models import INF, draw, rotary_tables, rotate
from case_support import each_implementation

from hal.ops import rotary_cache


@each_implementation("rotary_embedding")
def test_interleaved_pairs_are_not_halves(choice):
    """vllm-project/vllm-ascend#12765: one backend always asks its kernel for halves, whatever the flag
    says."""
    q, positions = draw(9, 4, 3, 128), torch.tensor([0, 1, 17, 4000])
    cos, sin = rotary_tables(positions, 128)
    args, options = (q, q[:, :1], positions, cos, sin), {"interleaved": True}
    expected = tuple(rotate(x, positions, cos, sin, interleaved=True) for x in (q, q[:, :1]))
    got = choice.call(*args, **options)
    choice.check(got, expected, *args, **options)
    halves = tuple(rotate(x, positions, cos, sin) for x in (q, q[:, :1]))
    choice.told_apart(halves, expected, *args, **options)
    assert torch.equal(halves[0][0], expected[0][0]), "position 0 cannot detect the fault"


@each_implementation("rotary_embedding")
def test_head_of_192_keeps_its_norm(choice):
    """vllm-project/vllm-ascend#12723: vectors come back with other norms at a width that is no power of
    two."""
    q, positions = draw(11, 3, 7, 192, dtype=torch.bfloat16), torch.tensor([100, 5000, 65535])
    cos, sin = rotary_tables(positions, 192, base=1e6)
    args = q, None, positions, cos, sin
    expected = rotate(q, positions, cos, sin)
    y, none = choice.call(*args)
    assert none is None
    choice.check(y, expected, *args)
    torch.testing.assert_close(y.double().norm(dim=-1), q.double().norm(dim=-1), rtol=2.0**-8, atol=0)
    lost = torch.cat((expected[..., :128], q[..., 128:].double()), dim=-1)
    choice.told_apart(lost, expected, *args)


@each_implementation("rotary_embedding")
def test_angles_of_late_positions_are_exact(choice):
    """huggingface/transformers#25681: cos and sin are built after the module was cast to 16 bits."""
    q, positions = torch.ones(4, 1, 32, dtype=torch.bfloat16), torch.tensor([257, 1857, 15962, 131071])
    cos, sin = rotary_cache(131072, 32)
    exact = rotary_tables(positions, 32)
    torch.testing.assert_close((cos, sin), exact, rtol=0, atol=2.0**-24)
    args = q, None, positions, cos, sin
    expected = rotate(q, positions, *exact)
    choice.check(choice.call(*args)[0], expected, *args)
    inverse = (1e4 ** (-torch.arange(0, 32, 2) / 32)).bfloat16()
    angle = (positions.bfloat16()[:, None] * inverse).double()[:, None]
    held_in_bf16 = torch.cat((angle.cos() - angle.sin(), angle.cos() + angle.sin()), dim=-1)
    choice.told_apart(held_in_bf16, expected, *args)


@each_implementation("gelu_and_mul")
@pytest.mark.parametrize(("approximate", "other"), [("none", "tanh"), ("tanh", "none")])
def test_one_gelu_does_not_stand_in_for_the_other(choice, approximate, other):
    """microsoft/onnxruntime#2270: the erf form is silently replaced by the tanh approximation."""
    gate, up = torch.linspace(-4, 4, 128).view(64, 2).unbind(1)
    x = torch.cat((gate, up))[None]
    expected = F.gelu(gate.double(), approximate=approximate)[None] * up.double()
    choice.check(choice.call(x, approximate=approximate), expected, x, approximate=approximate)
    wrong = F.gelu(gate.double(), approximate=other)[None] * up.double()
    choice.told_apart(wrong, expected, x, approximate=approximate)


@each_implementation("silu_and_mul")
def test_absent_limit_is_no_limit(choice):
    """microsoft/onnxruntime#27221: a clamp limit that was not given is taken as 0 and clears the output."""
    x = torch.tensor([[-9.0, -0.5, 0.25, 3.0, 12.0, -20.0, 2.0, 8.0, -8.0, 0.5]])
    gate, up = x.double().chunk(2, -1)
    expected = gate * torch.sigmoid(gate) * up
    y = choice.call(x)
    choice.check(y, expected, x)
    assert y[0, 4].item() == pytest.approx(5.99996, abs=1e-5)
    choice.told_apart(torch.zeros(1, 5), expected, x)


@each_implementation("silu_and_mul")
def test_limit_caps_the_gate_above_only_and_up_on_both_sides(choice):
    """microsoft/onnxruntime#27221, second half: with a limit, alpha and an offset of up."""
    x = torch.tensor([[-9.0, -0.5, 0.25, 3.0, 12.0, -20.0, 2.0, 8.0, -8.0, 0.5]])
    options = {"limit": 7.0, "alpha": 1.702, "up_offset": 1.0}
    gate, up = x.double().chunk(2, -1)
    low = gate.clamp(max=7.0)
    expected = low * torch.sigmoid(1.702 * low) * (up.clamp(-7.0, 7.0) + 1.0)
    choice.check(choice.call(x, **options), expected, x, **options)
    both = gate.clamp(-7.0, 7.0)
    two_sided = both * torch.sigmoid(1.702 * both) * (up.clamp(-7.0, 7.0) + 1.0)
    choice.told_apart(two_sided, expected, x, **options)


@each_implementation("softmax")
@pytest.mark.parametrize("dim", [0, 1])
def test_softmax_over_an_axis_that_is_not_the_last(choice, dim):
    """flagos-ai/FlagGems#4995: the kernel takes the elements that it reduces for neighbours in memory."""
    x = draw(530, 6, 5, 7)
    x[2, 3, :] = -INF
    e = (x.double() - x.double().amax(dim, keepdim=True)).exp()
    expected = e / e.sum(dim, keepdim=True)
    y = choice.call(x, dim)
    choice.check(y, expected, x, dim)
    assert not y[2, 3].any()
    assert torch.equal(y, choice.call(x, dim)), "runs differ"
    neighbours = x.double().reshape(x.shape[dim], -1).t().reshape(-1, x.shape[dim]).softmax(-1).reshape(x.shape)
    choice.told_apart(neighbours, expected, x, dim)


@each_implementation("softmax")
def test_softmax_of_a_row_of_minus_infinity_is_zero(choice):
    """pytorch/pytorch#103963: softmax of all −inf is NaN elsewhere; here the row is 0, and so is its
    gradient."""
    x = draw(531, 3, 8)
    x[1] = -INF
    y = choice.call(x)
    assert not y[1].any()
    assert not y.isnan().any()
    (gradient,) = choice.gradients([x], choice.call, draw(532, 3, 8))
    assert not gradient[1].any()
    assert not gradient.isnan().any()
    assert gradient[0].any()
