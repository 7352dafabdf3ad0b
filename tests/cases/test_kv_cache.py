"""The paged KV cache: strides, padding, scales, rounding and 64-bit offsets; faults seen elsewhere."""

from __future__ import annotations

import pytest
import torch
from case_models import attention, draw, paged
from case_support import each_implementation

import hal

NAN = float("nan")
FP8 = torch.float8_e4m3fn


def ints(*values, dtype=torch.int32):
    return torch.tensor(values, dtype=dtype)


def decode(q, k_cache, v_cache, table, length):
    """Arguments of one query over one sequence of `length` keys."""
    return q, k_cache, v_cache, ints(*table)[None], ints(length), ints(0, 1), 1


@each_implementation("paged_attention")
def test_unwritten_slots_of_a_used_block_hold_nan(choice):
    """Dao-AILab/flash-attention#2374, vllm-project/vllm#936: scores are masked, then 0 · NaN enters the
    product with v."""
    q = draw(270, 1, 7, 128, dtype=torch.bfloat16)
    k, v = (draw(271 + i, 33, 1, 128, dtype=torch.bfloat16) for i in range(2))
    caches = [paged(t, 32, 4, [2, 0], fill=NAN) for t in (k, v)]
    clean = [paged(t, 32, 4, [2, 0]) for t in (k, v)]
    args, options = decode(q, *caches, [2, 0], 33), {"return_lse": True}
    o, lse = attention(q, k, v)
    expected = o, lse.t()
    judged = decode(q, *clean, [2, 0], 33)
    choice.check(choice.call(*args, **options), expected, *judged, **options)
    choice.told_apart((o * NAN, lse.t()), expected, *judged, **options)


@each_implementation("write_kv_cache")
def test_slots_of_minus_one_and_a_mapping_shorter_than_k(choice):
    """vllm-project/vllm#13922: the loop runs over the rows of k, or −1 wraps to the last slot."""
    k = draw(280, 8, 2, 32)
    slots = ints(5, -1, 16, 31, -1, 0, dtype=torch.int64)
    marker = draw(281, 3, 16, 2, 32)
    k_cache, v_cache = marker.clone(), marker.clone()
    expected = marker.clone().view(48, 2, 32)
    for slot, row in ((5, 0), (16, 2), (31, 3), (0, 5)):
        expected[slot] = k[row]
    assert choice.call(k, 2 * k, k_cache, v_cache, slots) is None
    assert torch.equal(k_cache.view(48, 2, 32), expected)
    untouched = torch.ones(48, dtype=torch.bool)
    untouched[[5, 16, 31, 0]] = False
    assert torch.equal(v_cache.view(48, 2, 32)[untouched], marker.view(48, 2, 32)[untouched])
    assert torch.equal(v_cache.view(48, 2, 32)[[5, 16, 31, 0]], 2 * k[[0, 2, 3, 5]])
    assert not torch.equal(k[4], expected[-1]), "a wrapped −1 would go unseen"


@each_implementation("paged_attention")
def test_pages_beyond_two_to_the_31_elements(choice):
    """vllm-project/vllm#47671: page id times page stride in 32 bits. Of the 4.6 GB only the two pages are
    touched."""
    pages, stride = 2200, 2**20
    memory = torch.empty(pages * stride, dtype=torch.bfloat16)
    k_cache, v_cache = (
        memory.as_strided((pages, 16, 1, 64), (stride, 64, 64, 1), offset) for offset in (0, stride // 2)
    )
    q, k, v = draw(290, 1, 4, 64, dtype=torch.bfloat16), *(draw(i, 32, 1, 64, dtype=torch.bfloat16) for i in (291, 292))
    for cache, rows in ((k_cache, k), (v_cache, v)):
        cache[2199], cache[7] = rows[:16], rows[16:]
    o = choice.call(*decode(q, k_cache, v_cache, [2199, 7], 32))
    dense = decode(q, k.view(2, 16, 1, 64), v.view(2, 16, 1, 64), [0, 1], 32)
    expected = attention(q, k, v)[0]
    choice.check(o, expected, *dense)
    choice.told_apart(attention(q, k.flip(0), v)[0], expected, *dense)


@each_implementation("write_kv_cache")
def test_writing_beyond_two_to_the_31_elements(choice):
    """vllm-project/vllm#47671, the writing side: slot = block · P + offset is 64-bit, and so is its
    address."""
    pages, stride = 2200, 2**20
    memory = torch.empty(pages * stride, dtype=torch.bfloat16)
    k_cache, v_cache = (
        memory.as_strided((pages, 16, 1, 64), (stride, 64, 64, 1), offset) for offset in (0, stride // 2)
    )
    k, v = (draw(i, 2, 1, 64, dtype=torch.bfloat16) for i in (293, 294))
    choice.call(k, v, k_cache, v_cache, ints(2199 * 16 + 3, 7 * 16, dtype=torch.int64))
    assert torch.equal(k_cache[2199, 3], k[0])
    assert torch.equal(v_cache[2199, 3], v[0])
    assert torch.equal(k_cache[7, 0], k[1])
    assert torch.equal(v_cache[7, 0], v[1])


def interleaved(seed=300):
    """k and v alternate block by block in one buffer: (block, k | v, slot, head, dim)."""
    both = draw(seed, 5, 2, 16, 2, 64)
    return both, *both.unbind(1)


@each_implementation("paged_attention")
def test_k_and_v_interleaved_per_block(choice):
    """vllm-project/vllm-xpu-kernels#335, ROCm/aiter#3498: the block stride is computed instead of read."""
    both, k_cache, v_cache = interleaved()
    q, table, length = draw(301, 1, 4, 64), [4, 1], 20
    args = decode(q, k_cache, v_cache, table, length)

    def rows(cache):
        return torch.cat([cache[block] for block in table])[:length]

    expected = attention(q, rows(k_cache), rows(v_cache))[0]
    choice.check(choice.call(*args), expected, *args)
    dense = both.view(10, 16, 2, 64)
    choice.told_apart(attention(q, rows(dense), rows(dense[1:]))[0], expected, *args)


@each_implementation("write_kv_cache")
def test_writing_into_interleaved_blocks(choice):
    """vllm-project/vllm-xpu-kernels#335: the same views, written."""
    both, k_cache, v_cache = interleaved()
    expected = both.clone()
    k, v = draw(302, 2, 2, 64), draw(303, 2, 2, 64)
    expected[4, 0, 3], expected[4, 1, 3], expected[1, 0, 0], expected[1, 1, 0] = k[0], v[0], k[1], v[1]
    choice.call(k, v, k_cache, v_cache, ints(4 * 16 + 3, 16, dtype=torch.int64))
    assert torch.equal(both, expected)


@each_implementation("gather_kv_cache")
def test_gathering_from_interleaved_blocks(choice):
    """vllm-project/vllm-xpu-kernels#335: the same views, gathered."""
    both, k_cache, v_cache = interleaved()
    k, v = choice.call(k_cache, v_cache, ints(4, 1)[None], ints(0, 20), 22)
    for rows, part in ((k, 0), (v, 1)):
        assert torch.equal(rows[:20], torch.cat((both[4, part], both[1, part]))[:20])
        assert not rows[20:].any()


@each_implementation("paged_attention")
@pytest.mark.parametrize("per_head", [False, True])
def test_scales_of_an_fp8_cache_are_both_applied(choice, per_head):
    """sgl-project/sglang#20705, vllm-project/vllm#14221: scales fall back to 1, or one serves for both
    caches."""
    k, v, q = draw(330, 24, 2, 64, scale=3), draw(331, 24, 2, 64, scale=0.01), draw(332, 1, 4, 64)
    k_scale = torch.tensor([0.05, 0.06] if per_head else 0.05)
    v_scale = torch.tensor([0.0004, 0.0003] if per_head else 0.0004)
    codes = [(t / s.view(-1, 1)).clamp(-448, 448).to(FP8) for t, s in ((k, k_scale), (v, v_scale))]
    caches = [torch.zeros(2, 16, 2, 64).to(FP8) for _ in codes]
    for cache, code in zip(caches, codes, strict=True):
        cache.view(torch.uint8).view(32, 2, 64)[:24] = code.view(torch.uint8)
    args, options = decode(q, *caches, [0, 1], 24), {"k_scale": k_scale, "v_scale": v_scale}

    def with_scales(ks, vs):
        return attention(q, codes[0].double() * ks.double().view(-1, 1), codes[1].double() * vs.double().view(-1, 1))[0]

    expected = with_scales(k_scale, v_scale)
    choice.check(choice.call(*args, **options), expected, *args, **options)
    one = torch.ones(())
    for faulty in ((k_scale, k_scale), (one, one), (v_scale, k_scale), (one, v_scale), (k_scale, one)):
        choice.told_apart(with_scales(*faulty), expected, *args, **options)


def written(choice, values, dtype, scale=1.0):
    """Codes that the cache holds after `values` (1, 1, D) were written."""
    caches = [torch.zeros(1, 4, 1, values.shape[-1]).to(dtype) for _ in range(2)]
    scales = {"k_scale": torch.tensor(scale), "v_scale": torch.tensor(scale)}
    choice.call(values, values, *caches, ints(2, dtype=torch.int64), **scales)
    assert torch.equal(caches[0].view(torch.uint8), caches[1].view(torch.uint8))
    return caches[0][0, 2, 0]


@each_implementation("write_kv_cache")
def test_int8_codes_round_to_nearest_even(choice):
    """vllm-project/vllm#45361 and #4525: the store truncates, or rounds halves away from zero."""
    k = torch.tensor([[[127.0, 0.6, -0.6, 1.5, 2.5, -1.5, -2.5, 99.9]]])
    assert written(choice, k, torch.int8).tolist() == [127, 1, -1, 2, 2, -2, -2, 100]
    ties = torch.tensor([[[0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 126.5, 130.0, -200.0]]])
    expected = [0, 2, 2, 0, -2, -2, 126, 127, -128]
    assert written(choice, ties, torch.int8).tolist() == expected
    away = torch.trunc(ties + 0.5 * ties.sign()).clamp(-128, 127).flatten().tolist()
    assert away != expected
    assert written(choice, ties / 4, torch.int8, scale=0.25).tolist() == expected


@each_implementation("write_kv_cache")
def test_fp8_codes_saturate(choice):
    """pytorch/pytorch#178817, jax-ml/ml_dtypes#400: overflow is NaN on one backend and 448 on another."""
    x = torch.tensor([[[500.0, -1e4, 448.0, 464.0, 465.0, 3e38, 1.0, float("inf"), -float("inf"), NAN]]])
    codes = written(choice, x, FP8).float()
    assert codes[:9].tolist() == [448, -448, 448, 448, 448, 448, 1, 448, -448]
    assert codes[9].isnan()


@each_implementation("paged_attention")
@pytest.mark.parametrize("lengths", [[1, 17, 1024, 5000], [1024, 17, 1]], ids=["growing", "shrinking"])
def test_a_plan_made_for_a_short_sequence_serves_long_ones(choice, lengths):
    """sgl-project/sglang#26019: lengths or splits are frozen when the first call is made.

    The tensors stay the same objects and are rewritten in place, as for the replay of a captured graph.
    """
    block, longest = 16, max(lengths)
    blocks = -(-longest // block)
    q, k, v = draw(640, 1, 8, 128), draw(641, longest, 2, 128), draw(642, longest, 2, 128)
    caches = [paged(t, block, blocks, range(blocks)) for t in (k, v)]
    table, seq_lens = torch.full((1, blocks), -1, dtype=torch.int32), ints(1)
    args = q, *caches, table, seq_lens, ints(0, 1), 1
    outputs = []
    for length in lengths:
        used = -(-length // block)
        table.fill_(-1)
        table[0, :used] = torch.arange(used)
        seq_lens.fill_(length)
        expected = attention(q, k[:length], v[:length])[0]
        o = choice.call(*args)
        choice.check(o, expected, *args)
        outputs.append(expected)
    args[4].fill_(lengths[-1])
    choice.told_apart(outputs[0], outputs[-1], *args)


@each_implementation("paged_attention")
def test_a_compiled_call_follows_lengths_that_are_rewritten(choice):
    """sgl-project/sglang#26019, through torch.compile: nothing of the lengths may be baked into the graph."""
    q, k, v = draw(643, 1, 4, 64), draw(644, 64, 2, 64), draw(645, 64, 2, 64)
    table, seq_lens, starts = (choice.moved(t) for t in (ints(0, 1, 2, 3)[None], ints(1), ints(0, 1)))

    compiled = torch.compile(
        lambda *a: hal.ops.paged_attention(*a, seq_lens, starts, 1), fullgraph=True, backend="aot_eager"
    )
    caches = k.view(4, 16, 2, 64), v.view(4, 16, 2, 64)
    with choice.use():
        for length in (1, 17, 64, 3):
            seq_lens.fill_(length)
            o = compiled(*(choice.moved(t) for t in (q, *caches)), table).cpu()
            choice.check(
                o, attention(q, k[:length], v[:length])[0], q, *caches, table.cpu(), seq_lens.cpu(), starts.cpu(), 1
            )
