"""merge_attention: two halves make the whole, empty pieces, the bound, bad input."""

from __future__ import annotations

import math

import pytest
import torch
from attention_support import budget_used, normal, qkv

from hal.errors import DtypeError, ShapeError
from hal.ops.attention import attention
from hal.ops.merge_attention import merge_attention


def ragged(o, lse):
    return o[0], lse[0].T


@pytest.mark.parametrize("layout", ["dense", "ragged"])
def test_pieces_over_disjoint_keys_merge_to_the_whole(layout):
    q, k, v = qkv(1, 3, 9, 4, 2, 5)
    pieces = [attention(q, k[:, part], v[:, part], return_lse=True) for part in (slice(0, 4), slice(4, 9), slice(0, 9))]
    if layout == "ragged":
        pieces = [ragged(*p) for p in pieces]
    out, lse = merge_attention(*pieces[0], *pieces[1])
    torch.testing.assert_close((out, lse), pieces[2], atol=1e-13, rtol=1e-13)
    assert out.is_contiguous() and lse.is_contiguous()


@pytest.mark.parametrize("empty_holds", [0.0, math.nan, math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_empty_piece_weighs_nothing_and_returns_the_other_bit_for_bit(empty_holds, dtype):
    a, b = normal(0, 3, 2, 8, dtype=dtype), normal(1, 3, 2, 8, dtype=dtype)
    lse_a, lse_b = normal(2, 3, 2).float(), normal(3, 3, 2).float()
    for out, lse, row in ((a, lse_a, 0), (b, lse_b, 1), (a, lse_a, 2), (b, lse_b, 2)):
        out[row], lse[row] = empty_holds, -math.inf
    out, lse = merge_attention(a, lse_a, b, lse_b)
    assert torch.equal(out[0], b[0]) and torch.equal(lse[0], lse_b[0])
    assert torch.equal(out[1], a[1]) and torch.equal(lse[1], lse_a[1])
    assert (out[2] == 0).all() and (lse[2] == -math.inf).all()
    assert out.dtype is dtype and lse.dtype is torch.float32


def test_weights_are_those_of_the_denominators():
    a, b = torch.ones(1, 1, 1, dtype=torch.float64), torch.zeros(1, 1, 1, dtype=torch.float64)
    lse_a, lse_b = (torch.tensor([[700 + math.log(n)]], dtype=torch.float64) for n in (1, 3))
    out, lse = merge_attention(a, lse_a, b, lse_b)
    assert out.item() == pytest.approx(0.25, rel=1e-12)
    assert lse.item() == pytest.approx(700 + math.log(4), rel=1e-14)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("apart", [0.0, 5.0, 40.0])
def test_errors_stay_within_the_derived_bound(dtype, apart):
    args = (
        normal(0, 50, 4, 16, dtype=dtype),
        normal(1, 50, 4).float() + apart,
        normal(2, 50, 4, 16, dtype=dtype),
        normal(3, 50, 4).float(),
    )
    assert budget_used("merge_attention", args, {}, merge_attention(*args), False) <= 4


def test_base_two_logarithms_do_not_pass_the_bound():
    args = (
        normal(0, 50, 4, 16).float(),
        normal(1, 50, 4).float(),
        normal(2, 50, 4, 16).float(),
        normal(3, 50, 4).float(),
    )
    wrong, lse = merge_attention(args[0], args[1] * math.log(2), args[2], args[3] * math.log(2))
    assert budget_used("merge_attention", args, {}, (wrong, lse / math.log(2)), False) > 4


def test_strided_and_empty_inputs():
    a, b = normal(0, 8, 3, 4).transpose(0, 1), normal(1, 3, 8, 8)[..., ::2]
    lse_a, lse_b = normal(2, 8, 3).T, normal(3, 3, 8)
    torch.testing.assert_close(
        merge_attention(a, lse_a, b, lse_b), merge_attention(a.contiguous(), lse_a.contiguous(), b.contiguous(), lse_b)
    )
    out, lse = merge_attention(a[:0], lse_a[:0], b[:0], lse_b[:0])
    assert out.shape == (0, 8, 4) and lse.shape == (0, 8)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"out_b": torch.zeros(3, 2, 5)}, ShapeError, "out_b"),
        ({"lse_a": torch.zeros(2, 3)}, ShapeError, "lse_a"),
        ({"out_a": torch.zeros(2, 4), "out_b": torch.zeros(2, 4)}, ShapeError, "out_a has shape"),
        ({"out_b": torch.zeros(3, 2, 4).bfloat16()}, DtypeError, "share one dtype"),
        ({"lse_b": torch.zeros(3, 2).double()}, DtypeError, "lse_b"),
        ({"lse_b": torch.zeros(3, 2).bfloat16()}, DtypeError, "lse_b"),
    ],
)
def test_bad_arguments_say_what_is_wrong(change, error, words):
    arguments = {
        "out_a": torch.zeros(3, 2, 4),
        "lse_a": torch.zeros(3, 2),
        "out_b": torch.zeros(3, 2, 4),
        "lse_b": torch.zeros(3, 2),
    }
    with pytest.raises(error, match=words):
        merge_attention(**(arguments | change))
