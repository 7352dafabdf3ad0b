"""Philox4x32-10: the published vectors, a scalar model beside the tensor one, and the draws made from it."""

from __future__ import annotations

import math

import pytest
import torch

from hal import philox

# Random123 tests/kat_vectors, "philox4x32 10": counter, key, result.
VECTORS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def scalar_block(counter, key):
    """The published algorithm on Python integers, written without regard to the tensor version."""
    c, k = list(counter), list(key)
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(p1 >> 32) ^ c[1] ^ k[0], p1 & 0xFFFFFFFF, (p0 >> 32) ^ c[3] ^ k[1], p0 & 0xFFFFFFFF]
        k = [(k[0] + 0x9E3779B9) & 0xFFFFFFFF, (k[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return tuple(c)


@pytest.mark.parametrize(("counter", "key", "expected"), VECTORS)
def test_block_gives_the_published_words(counter, key, expected):
    got = philox.block(key, tuple(torch.tensor(c) for c in counter))
    assert tuple(int(w) for w in got) == expected
    as_tensors = philox.block(tuple(torch.tensor(k) for k in key), tuple(torch.tensor(c) for c in counter))
    assert tuple(int(w) for w in as_tensors) == expected
    assert scalar_block(counter, key) == expected


@pytest.mark.parametrize("seed", [0, 1, 12345678901234567, -1, -(2**63), 2**63 - 1])
def test_words_agree_with_the_scalar_algorithm(seed):
    counters = torch.tensor([0, 1, 2, 127, 2**32 - 1, 2**32, 2**40 + 7, -1])
    key = (seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF)
    for word in range(4):
        expected = [scalar_block((c & 0xFFFFFFFF, (c >> 32) & 0xFFFFFFFF, 0, 0), key)[word] for c in counters.tolist()]
        assert philox.words(seed, counters, word).tolist() == expected
        assert philox.words(torch.tensor(seed), counters, word).tolist() == expected


def test_a_tensor_of_seeds_broadcasts_against_counters():
    seeds, counters = torch.tensor([[3], [4]]), torch.arange(5)
    got = philox.words(seeds, counters)
    assert got.shape == (2, 5)
    assert torch.equal(got[0], philox.words(3, counters))
    assert torch.equal(got[1], philox.words(4, counters))


def test_words_compile_to_the_same_bits():
    counters = torch.arange(1000) * 4294967311
    compiled = torch.compile(lambda s, c: philox.words(s, c, 2), fullgraph=True)
    assert torch.equal(compiled(torch.tensor(-77), counters), philox.words(-77, counters, 2))


def test_uniforms_are_inside_the_open_interval_and_exact_in_float32():
    ends = torch.tensor([0, 511, 512, 2**32 - 1])
    assert philox.to_uniform(ends).tolist() == [2.0**-24, 2.0**-24, 3 * 2.0**-24, 1 - 2.0**-24]
    assert torch.equal(philox.to_uniform(ends).double(), philox.to_uniform(ends, torch.float64))
    u = philox.uniform(7, (100_000,))
    assert u.dtype == torch.float64
    assert torch.equal(u.float().double(), u)
    assert torch.equal(philox.uniform(7, (100_000,), dtype=torch.float32).double(), u)
    assert abs(u.mean() - 0.5) < 5 / math.sqrt(12 * 100_000)
    counts = torch.histc(u.float(), 64, 0, 1)
    chi2 = ((counts - 100_000 / 64).square() / (100_000 / 64)).sum()
    assert 22 < chi2 < 122  # 63 degrees of freedom, 1e-5 either side


def test_streams_do_not_depend_on_how_much_is_asked_for():
    long = philox.uniform(11, (4 * philox.CHUNK + 5,))
    assert torch.equal(philox.uniform(11, (37,)), long[:37])
    assert torch.equal(philox.normal(11, (philox.CHUNK + 3,))[:41], philox.normal(11, (41,)))
    assert torch.equal(
        long[8:12],
        philox.to_uniform(torch.stack([philox.words(11, torch.tensor(2), w) for w in range(4)]), torch.float64),
    )


def test_normals_have_the_moments_of_a_sum_of_eight_uniforms():
    n = 200_000
    z = philox.normal(3, (n,))
    assert z.dtype == torch.float64
    assert abs(z.mean()) < 5 / math.sqrt(n)
    assert abs(z.var() - 1) < 5 * math.sqrt(1.9 / n)  # excess kurtosis −1.2/8
    assert abs(z.pow(3).mean()) < 0.05
    assert abs(z.pow(4).mean() - (3 - 1.2 / 8)) < 0.08
    assert z.abs().max() < 4.9
    lag = (z[1:] * z[:-1]).mean()
    assert abs(lag) < 5 / math.sqrt(n)


def test_draws_are_pinned_so_that_old_bundles_stay_valid():
    assert philox.words(42, torch.arange(3)).tolist() == [scalar_block((c, 0, 0, 0), (42, 0))[0] for c in range(3)]
    four = scalar_block((5, 0, 0, 0), (42, 0))
    total = sum((w >> 16) + (w & 0xFFFF) for w in four) - 4 * 65535
    assert philox.normal(42, (6,))[5].item() == total * math.sqrt(1.5 / (65536.0**2 - 1))


def test_integers_cover_their_range_evenly():
    x = philox.integers(5, (7, 10_000), -3, 4)
    assert x.dtype == torch.int64
    assert x.shape == (7, 10_000)
    counts = torch.bincount((x + 3).flatten(), minlength=7).double()
    assert counts.numel() == 7
    chi2 = ((counts - 10_000).square() / 10_000).sum()
    assert chi2 < 32  # 6 degrees of freedom, 1e-5
    assert philox.integers(5, (0, 3), 0, 0).shape == (0, 3)
    with pytest.raises(ValueError, match="low < high"):
        philox.integers(5, (2,), 4, 4)


@pytest.mark.parametrize("n", [0, 1, 2, 1000])
def test_permutation_is_one_and_differs_by_seed(n):
    p = philox.permutation(9, n)
    assert p.dtype == torch.int64
    assert torch.equal(p.sort().values, torch.arange(n))
    if n == 1000:
        assert not torch.equal(p, philox.permutation(10, n))
        assert not torch.equal(p, torch.arange(n))
