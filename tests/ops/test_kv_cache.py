"""write_kv_cache, gather_kv_cache and copy_kv_blocks: bits, codes, skipped slots, views, bad input."""

from __future__ import annotations

import math

import pytest
import torch
from attention_support import budget_used, forced, int32, normal
from samples_attention import FP8_SAMPLES

import hal
from hal.errors import ArgumentError, DtypeError, ShapeError, TransformError
from hal.op import OPS
from hal.ops.kv_cache import copy_kv_blocks, gather_kv_cache, write_kv_cache


@pytest.fixture(params=["reference", "aten"])
def implementation(request):
    with forced("write_kv_cache", request.param):
        yield request.param


def tokens(n=6, K=2, D=8, E=8, dtype=torch.float32):
    return normal(0, n, K, D, dtype=dtype), normal(1, n, K, E, dtype=dtype)


def caches(N=3, P=4, K=2, D=8, E=8, dtype=torch.float32):
    return normal(2, N, P, K, D).mul(9).to(dtype), normal(3, N, P, K, E).mul(9).to(dtype)


def bits(t):
    return t.contiguous().view(torch.uint8)


def slots(*values):
    return torch.tensor(values, dtype=torch.int64)


@pytest.mark.parametrize(
    "mapping",
    [
        (5, -1, 7, 11, -1, 0),
        (-1, 3),
        (3, -1),
        (-1, -1, -1),
        (9,),
        (),
        (0, 1, 2, 3, 4, 5),
        (-1, 0),
        (-1, 11, -1, -1),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_mapped_tokens_are_written_and_every_other_slot_keeps_its_bits(implementation, mapping, dtype):
    k, v = tokens(dtype=dtype)
    k_cache, v_cache = caches(dtype=dtype)
    k_cache[0, 0, 0, 0] = v_cache[2, 3, 1, 7] = math.nan
    expected = k_cache.clone(), v_cache.clone()
    for i, slot in enumerate(mapping):
        if slot >= 0:
            expected[0].view(12, 2, 8)[slot], expected[1].view(12, 2, 8)[slot] = k[i], v[i]
    assert write_kv_cache(k, v, k_cache, v_cache, slots(*mapping)) is None
    assert torch.equal(bits(k_cache), bits(expected[0])) and torch.equal(bits(v_cache), bits(expected[1]))


def test_widths_of_k_and_v_may_differ_and_inputs_may_be_strided(implementation):
    k, v = tokens(D=8, E=3)
    k, v = k.transpose(0, 2).contiguous().transpose(0, 2), torch.cat((v, v), -1)[..., ::2]
    k_cache, v_cache = caches(D=8, E=3)
    before = k.clone(), v.clone()
    write_kv_cache(k, v, k_cache, v_cache, slots(7, -1, 2))
    assert torch.equal(k_cache[1, 3], k[0]) and torch.equal(v_cache[0, 2], v[2])
    assert torch.equal(k, before[0]) and torch.equal(v, before[1])


@pytest.mark.parametrize("layout", ["per block", "last axis", "per slot", "narrow blocks", "transposed"])
@pytest.mark.parametrize("mapping", [(5, -1, 11), (6,)])
def test_interleaved_and_strided_views_are_written_in_place(implementation, layout, mapping):
    k, v = tokens()
    base = normal(4, 3 * 4 * 2 * 8 * 4).float()
    if layout == "per block":
        k_cache, v_cache = base[:384].view(3, 2, 4, 2, 8).unbind(1)
    elif layout == "last axis":
        k_cache, v_cache = base[:384].view(3, 4, 2, 16).split(8, -1)
    elif layout == "per slot":
        k_cache, v_cache = base[:384].view(3, 4, 2, 2, 8).unbind(2)
    elif layout == "narrow blocks":
        k_cache, v_cache = base.view(2, 3, 8, 2, 8)[:, :, 2:6].unbind(0)
    else:
        k_cache, v_cache = base[:384].view(2, 2, 3, 4, 8).permute(0, 2, 3, 1, 4).unbind(0)
    before = base.clone()
    k_expected, v_expected = k_cache.clone(), v_cache.clone()
    for i, slot in enumerate(mapping):
        if slot >= 0:
            k_expected[slot // 4, slot % 4], v_expected[slot // 4, slot % 4] = k[i], v[i]
    write_kv_cache(k, v, k_cache, v_cache, slots(*mapping))
    assert torch.equal(k_cache, k_expected) and torch.equal(v_cache, v_expected)
    written = sum(slot >= 0 for slot in mapping) * 2 * 16
    assert (base != before).sum() == written


def test_versions_are_bumped(implementation):
    k_cache, v_cache = caches()
    versions = k_cache._version, v_cache._version
    write_kv_cache(*tokens(), k_cache, v_cache, slots(1))
    assert k_cache._version > versions[0] and v_cache._version > versions[1]


INT8 = {
    0.5: 0,
    1.5: 2,
    2.5: 2,
    -0.5: 0,
    -1.5: -2,
    -2.5: -2,
    126.5: 126,
    130: 127,
    -200: -128,
    -128.4: -128,
    0.6: 1,
    99.9: 100,
    math.inf: 127,
    -math.inf: -128,
}
FP8 = {
    500: 448,
    -1e4: -448,
    448: 448,
    464: 448,
    465: 448,
    3e38: 448,
    1: 1,
    math.inf: 448,
    -math.inf: -448,
    1.0625: 1.0,
    1.1875: 1.25,
    2.0**-9: 2.0**-9,
    2.0**-10: 0.0,
    3 * 2.0**-10: 2.0**-8,
    17: 16,
    19: 20,
}


@pytest.mark.parametrize(("table", "kind"), [(INT8, torch.int8), (FP8, torch.float8_e4m3fn)])
@pytest.mark.parametrize("rows", [1, 3])
def test_codes_are_rounded_to_nearest_even_and_saturate(implementation, table, kind, rows):
    n = len(table)
    k = torch.tensor(list(table), dtype=torch.float32).expand(rows, 1, n)
    k_cache, v_cache = (torch.zeros(1, 4, 1, n).to(kind) for _ in range(2))
    one = torch.tensor(1.0)
    write_kv_cache(k, -k, k_cache, v_cache, slots(*range(1, rows + 1)), k_scale=one, v_scale=one)
    expected = torch.tensor(list(table.values()), dtype=torch.float32)
    assert torch.equal(k_cache[0, 1 : rows + 1, 0].float(), expected.expand(rows, n))
    assert (k_cache[0, 0].float() == 0).all()


def test_nan_stays_in_fp8_and_is_zero_in_int8(implementation):
    k = torch.full((1, 1, 2), math.nan)
    fp8 = torch.zeros(1, 1, 1, 2).to(torch.float8_e4m3fn)
    write_kv_cache(k, k, fp8, fp8.clone(), slots(0))
    assert fp8.float().isnan().all()
    int8, one = torch.ones(1, 1, 1, 2, dtype=torch.int8), torch.tensor(1.0)
    write_kv_cache(k, k, int8, int8.clone(), slots(0), k_scale=one, v_scale=one)
    assert (int8 == 0).all()


@pytest.mark.parametrize("kind", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_value_is_divided_by_its_heads_scale_in_float32(implementation, kind, dtype):
    k, v = tokens(dtype=dtype)
    k_cache, v_cache = (t.to(kind) for t in caches())
    k_scale, v_scale = torch.tensor([0.013, 0.7]), torch.tensor(0.031)
    write_kv_cache(k, v, k_cache, v_cache, slots(0, 1, 2, 3, 4, 5), k_scale=k_scale, v_scale=v_scale)
    for x, cache, scale in ((k, k_cache, k_scale[:, None]), (v, v_cache, v_scale)):
        ratio = x.float() / scale
        expected = ratio.round().clamp(-128, 127) if kind is torch.int8 else ratio.clamp(-448, 448).to(kind).float()
        assert torch.equal(cache.view(12, 2, 8)[:6].float(), expected)


def test_no_blocks_and_only_skipped_tokens(implementation):
    k_cache, v_cache = caches(N=0)
    write_kv_cache(*tokens(2), k_cache, v_cache, slots(-1, -1))
    write_kv_cache(*tokens(0), *caches(), slots())


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"k": torch.zeros(6, 16)}, ShapeError, "k has shape"),
        ({"k": torch.zeros(5, 2, 8)}, ShapeError, "tokens of k"),
        ({"k": torch.zeros(6, 2, 9)}, ShapeError, "heads of k_cache"),
        ({"k": torch.zeros(6, 2, 8).bfloat16()}, DtypeError, "share one dtype"),
        ({"k": torch.zeros(6, 2, 8).bfloat16(), "v": torch.zeros(6, 2, 8).bfloat16()}, DtypeError, "k_cache float32"),
        ({"k_cache": torch.zeros(12, 2, 8)}, ShapeError, "k_cache has shape"),
        ({"k_cache": torch.zeros(3, 4, 2, 8).bfloat16()}, DtypeError, "one dtype"),
        ({"k_cache": torch.zeros(3, 4, 2, 8).to(torch.float8_e5m2)}, DtypeError, "float8_e5m2"),
        ({"k_cache": torch.zeros(3, 4, 8, 2).transpose(2, 3)}, ArgumentError, "last stride"),
        ({"k_cache": torch.zeros(1, 4, 2, 8).expand(3, 4, 2, 8)}, ArgumentError, "several places"),
        ({"k_cache": torch.zeros(200).as_strided((3, 4, 2, 8), (40, 16, 7, 1))}, ArgumentError, "several places"),
        ({"slot_mapping": slots(1).int()}, DtypeError, "slot_mapping is int32"),
        ({"slot_mapping": slots(1)[None]}, ShapeError, "slot_mapping"),
        ({"slot_mapping": slots(*range(7))}, ShapeError, "7 slots for 6 tokens"),
        ({"slot_mapping": slots(12)}, ArgumentError, "slots 0 … 11"),
        ({"slot_mapping": slots(-2)}, ArgumentError, "holds -2"),
        ({"k_scale": torch.tensor(1.0)}, ArgumentError, "only int8 and float8"),
    ],
)
def test_bad_arguments_of_a_write_leave_the_cache_alone(change, error, words):
    k, v = tokens()
    k_cache, v_cache = caches()
    arguments = {"k": k, "v": v, "k_cache": k_cache, "v_cache": v_cache, "slot_mapping": slots(0, 1)} | change
    before = arguments["k_cache"].clone(), v_cache.clone()
    with pytest.raises(error, match=words):
        write_kv_cache(**arguments)
    assert torch.equal(arguments["k_cache"].float(), before[0].float()) and torch.equal(v_cache, before[1])


def test_k_and_v_must_not_be_the_same_memory():
    cache = torch.zeros(3, 4, 2, 8)
    for other in (cache, cache.view(-1).view(3, 4, 2, 8)):
        with pytest.raises(ArgumentError, match="overlap in memory"):
            write_kv_cache(*tokens(1), cache, other, slots(0))


def test_views_that_touch_in_one_place_only_are_refused_and_neighbours_are_not():
    base = torch.zeros(1000)
    k_cache = base.as_strided((2, 4, 2, 8), (64, 16, 8, 1))
    touching = base.as_strided((2, 4, 2, 8), (64, 16, 8, 1), 127)
    beside = base.as_strided((2, 4, 2, 8), (64, 16, 8, 1), 128)
    with pytest.raises(ArgumentError, match="overlap in memory"):
        write_kv_cache(*tokens(1), k_cache, touching, slots(0))
    write_kv_cache(*tokens(1), k_cache, beside, slots(0))


@pytest.mark.parametrize("seed", range(40))
def test_overlap_of_views_is_found_exactly(seed):
    """Against the set of all places, for nested strides with random gaps."""
    from hal.ops._overlap import check_apart

    draw = torch.Generator().manual_seed(seed)
    sizes = torch.randint(1, 4, (4,), generator=draw).tolist()
    strides, step = [0] * 4, 1
    for axis in reversed(range(4)):
        strides[axis] = step
        step = step * (sizes[axis] - 1) + step + int(torch.randint(0, 9, (1,), generator=draw))
    offset = int(torch.randint(0, step, (1,), generator=draw))
    base = torch.arange(2 * step + 200)
    one, other = base.as_strided(sizes, strides), base.as_strided(sizes, strides, offset)
    shared = set(one.flatten().tolist()) & set(other.flatten().tolist())
    if shared:
        with pytest.raises(ArgumentError):
            check_apart("op", [("a", one), ("b", other)])
    else:
        check_apart("op", [("a", one), ("b", other)])


TABLE = torch.tensor([[4, 1, 99], [-3, 99, 99], [0, 2, 5]], dtype=torch.int32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int8])
@pytest.mark.parametrize("interleaved", [False, True])
def test_gathered_rows_are_those_the_table_names(dtype, interleaved):
    k_cache, v_cache = (t.to(dtype) for t in caches(N=6))
    if interleaved:
        k_cache, v_cache = torch.stack((k_cache, v_cache), 1).unbind(1)
    coded = dtype in (torch.int8, torch.float8_e4m3fn)
    options = {"out_dtype": torch.float32} if coded else {}
    if coded:
        options |= {"k_scale": torch.tensor([0.25, 0.5]), "v_scale": torch.tensor(2.0)}
    k, v = gather_kv_cache(k_cache, v_cache, TABLE, int32(0, 5, 5, 14), 17, **options)
    assert k.dtype is (torch.float32 if coded else dtype) and k.is_contiguous() and v.is_contiguous()
    for got, cache, scale in ((k, k_cache, torch.tensor([[0.25], [0.5]])), (v, v_cache, 2.0)):
        rows = [cache[TABLE[b, j // 4], j % 4].float() for b, n in ((0, 5), (2, 9)) for j in range(n)]
        expected = torch.stack(rows) * (scale if coded else 1)
        assert torch.equal(got[:14].float(), expected) and (got[14:] == 0).all()


def test_gathering_into_another_dtype_rounds_once():
    k_cache, v_cache = (t.to(torch.int8) for t in caches(N=6))
    scale = torch.tensor(0.0123)
    args = (k_cache, v_cache, TABLE, int32(0, 5, 5, 14), 14)
    options = {"k_scale": scale, "v_scale": scale, "out_dtype": torch.bfloat16}
    result = gather_kv_cache(*args, **options)
    assert torch.equal(result[0][0], (k_cache[4, 0].float() * scale).bfloat16())
    assert budget_used("gather_kv_cache", args, options, result, False) <= 4
    wide, _ = gather_kv_cache(
        k_cache.bfloat16(), v_cache.bfloat16(), TABLE, int32(0, 5, 5, 14), 14, out_dtype=torch.float32
    )
    assert torch.equal(wide[0], k_cache[4, 0].float())


@pytest.mark.parametrize(
    ("B", "M", "N", "total"), [(0, 0, 3, 0), (0, 2, 3, 5), (2, 0, 3, 4), (2, 2, 0, 4), (2, 2, 3, 0)]
)
def test_gathering_nothing_gives_zeros(B, M, N, total):
    k, v = gather_kv_cache(
        *caches(N=N), torch.zeros(B, M, dtype=torch.int32), torch.zeros(B + 1, dtype=torch.int32), total
    )
    assert k.shape == v.shape == (total, 2, 8) and (k == 0).all() and (v == 0).all()


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"total_k": 13}, ArgumentError, "total_k is only 13"),
        ({"total_k": -1}, ArgumentError, "total_k is -1"),
        ({"cu_seqlens_k": int32(0, 5, 5, 18)}, ArgumentError, "hold 12"),
        ({"cu_seqlens_k": int32(0, 5, 5)}, ShapeError, "block_table"),
        ({"cu_seqlens_k": int32(0, 5, 4, 14)}, ArgumentError, "decreases"),
        ({"block_table": TABLE.clone().fill_(6)}, ArgumentError, "blocks 0 … 5"),
        ({"block_table": TABLE.long()}, DtypeError, "block_table"),
        ({"out_dtype": torch.int8}, DtypeError, "out_dtype"),
        ({"cu_seqlens_k_cpu": int32(0, 5, 5, 13)}, ArgumentError, "cu_seqlens_k_cpu"),
        ({"k_cache": torch.zeros(6, 4, 2, 8).bfloat16()}, DtypeError, "one dtype"),
    ],
)
def test_bad_arguments_of_a_gather_say_what_is_wrong(change, error, words):
    k_cache, v_cache = caches(N=6)
    arguments = {
        "k_cache": k_cache,
        "v_cache": v_cache,
        "block_table": TABLE,
        "cu_seqlens_k": int32(0, 5, 5, 14),
        "total_k": 20,
    } | change
    with pytest.raises(error, match=words):
        gather_kv_cache(**arguments)


def test_a_quantised_cache_needs_an_out_dtype():
    k_cache, v_cache = (t.to(torch.float8_e4m3fn) for t in caches(N=6))
    with pytest.raises(ArgumentError, match="out_dtype is None"):
        gather_kv_cache(k_cache, v_cache, TABLE, int32(0, 5, 5, 14), 14)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int8])
@pytest.mark.parametrize(
    ("src", "dst"),
    [((0, 1, 2), (1, 2, 3)), ((0, 3), (3, 0)), ((2, 2), (0, 1)), ((1,), (1,)), ((), ()), ((4, 4), (5, 5))],
)
def test_block_copies_behave_as_if_all_were_read_first(dtype, src, dst):
    layers = [caches(N=6) for _ in range(2)]
    k_caches, v_caches = ([t.to(dtype) for t in ts] for ts in zip(*layers, strict=True))
    k_caches[1], v_caches[1] = torch.stack((k_caches[1], v_caches[1]), 1).unbind(1)
    before = [t.clone() for t in (*k_caches, *v_caches)]
    assert copy_kv_blocks(k_caches, v_caches, slots(*src), slots(*dst)) is None
    for now, old in zip((*k_caches, *v_caches), before, strict=True):
        expected = old.clone()
        for s, d in zip(src, dst, strict=True):
            expected[d] = old[s]
        assert torch.equal(bits(now), bits(expected))


@pytest.mark.parametrize(
    ("src", "dst", "error", "words"),
    [
        (slots(0), slots(6), ArgumentError, "dst holds 6"),
        (slots(-1), slots(0), ArgumentError, "src holds -1"),
        (slots(0, 1), slots(3, 3), ArgumentError, "block 3 for several sources"),
        (slots(0, 1), slots(3), ShapeError, "2 sources and 1 destinations"),
        (slots(0).int(), slots(1), DtypeError, "src is int32"),
        (slots(0)[None], slots(1)[None], ShapeError, "src has shape"),
    ],
)
def test_bad_pairs_are_refused(src, dst, error, words):
    k_cache, v_cache = caches(N=6)
    with pytest.raises(error, match=words):
        copy_kv_blocks([k_cache], [v_cache], src, dst)


def test_lists_that_do_not_fit_are_refused():
    k_cache, v_cache = caches(N=6)
    with pytest.raises(ArgumentError, match="1 k_caches and 0 v_caches"):
        copy_kv_blocks([k_cache], [], slots(0), slots(1))
    with pytest.raises(ArgumentError, match="pass a list"):
        copy_kv_blocks(k_cache, [v_cache], slots(0), slots(1))
    with pytest.raises(ShapeError, match="all layers share block ids"):
        copy_kv_blocks([k_cache], [v_cache[:5]], slots(0), slots(1))
    with pytest.raises(ArgumentError, match="overlap in memory"):
        copy_kv_blocks([k_cache, k_cache], [v_cache, v_cache.clone()], slots(0), slots(1))
    copy_kv_blocks([], [], slots(), slots())


@pytest.mark.parametrize("name", list(FP8_SAMPLES))
def test_fp8_caches_trace_and_compile(name):
    (make,) = FP8_SAMPLES[name]
    args, kwargs = make()
    torch_op = getattr(torch.ops.hal, OPS[name].torch_name).default
    checks = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(torch_op, OPS[name].pack(*args, **kwargs), test_utils=checks)
    public = getattr(hal.ops, name)
    (eager_args, _), (compiled_args, _) = make(), make()
    eager, compiled = public(*eager_args, **kwargs), torch.compile(public, fullgraph=True)(*compiled_args, **kwargs)
    if eager is None:
        eager, compiled = eager_args[2:4], compiled_args[2:4]
    for one, other in zip(eager, compiled, strict=True):
        assert torch.equal(bits(one), bits(other))


def test_tokens_may_move_within_the_cache(implementation):
    k_cache, v_cache = caches()
    flat = [cache.flatten(0, 1) for cache in (k_cache, v_cache)]
    before = [t.clone() for t in flat]
    with forced("write_kv_cache", implementation):
        write_kv_cache(flat[0][1:6], flat[1][1:6], k_cache, v_cache, slots(0, 1, 2, 3, 4))
    for now, then in zip(flat, before, strict=True):
        assert torch.equal(now[:5], then[1:6])
        assert torch.equal(now[5:], then[5:])


def test_a_cache_in_a_graph_is_not_written_behind_autograds_back():
    (k, v), (k_cache, v_cache) = tokens(2), caches()
    leaf, kept = k_cache.clone().requires_grad_(), k_cache.clone()
    for cache in (leaf, leaf * 1):
        with pytest.raises(TransformError, match="k_cache, which requires a gradient"):
            write_kv_cache(k, v, cache, v_cache, slots(0, 1))
        with pytest.raises(TransformError, match="k_caches, which requires a gradient"):
            copy_kv_blocks([k_cache, cache], [v_cache, v_cache.clone()], slots(0), slots(1))
        assert torch.equal(cache, kept)
    with torch.no_grad():
        write_kv_cache(k, v, leaf, v_cache, slots(0, 1))
    assert torch.equal(leaf.flatten(0, 1)[:2], k)


def test_lazily_negated_tokens_are_written_by_value_and_such_a_cache_is_refused(implementation):
    (k, v), (k_cache, v_cache) = tokens(2), caches()
    with forced("write_kv_cache", implementation):
        write_kv_cache(torch._neg_view(k), v, k_cache, v_cache, slots(0, 1))
        assert torch.equal(k_cache.flatten(0, 1)[:2], -k)
        with pytest.raises(ArgumentError, match="lazily negated"):
            write_kv_cache(k, v, torch._neg_view(k_cache), v_cache, slots(0, 1))
