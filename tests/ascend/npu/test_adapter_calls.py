"""How the adapter drives CANN: synchronisations, constants, switches, and what stays outside the operators."""

from __future__ import annotations

from functools import partial

import pytest
import torch

import hal
from hal import host
from hal.backends.ascend import simulator
from hal.backends.ascend.attention_calls import triangle
from hal.backends.ascend.kv_cache import without_skips
from hal.backends.ascend.simulator import trace
from hal.errors import SyncError

B, H, K, D, F, P = 4, 8, 2, 64, 512, 16


@pytest.fixture(autouse=True)
def on_ascend():
    with hal.use(backend="ascend"), torch.no_grad():
        yield


def normal(*shape, dtype=torch.bfloat16, seed=0, device="npu"):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(device)


def decoded(host_lengths=True, device="npu"):
    """A decode step, with tensors of its own."""
    made = partial(normal, device=device)
    lens = torch.tensor([5, 20, 33, 1], dtype=torch.int32)
    cu = torch.arange(B + 1, dtype=torch.int32)
    table = torch.arange(B * 3, dtype=torch.int32).view(B, 3).to(device)
    slots = ((lens.long() - 1) % P + (torch.arange(B) * 3 + (lens.long() - 1) // P) * P).to(device)
    x, residual, weight = made(B, F), made(B, F, seed=1), made(F, seed=2)
    q, k, v = made(B, H, D), made(B, K, D, seed=1), made(B, K, D, seed=2)
    caches = made(B * 3, P, K, D, seed=3), made(B * 3, P, K, D, seed=4)
    cos, sin = (t.to(device) for t in hal.ops.rotary_cache(64, D))
    positions, device_lens, device_cu = (lens.long() - 1).to(device), lens.to(device), cu.to(device)
    copies = {"seq_lens_cpu": lens, "cu_seqlens_q_cpu": cu} if host_lengths else {}

    def step():
        normed, _ = hal.ops.add_rms_norm(x, residual, weight)
        rotated, keys = hal.ops.rotary_embedding(q, k, positions, cos, sin)
        hal.ops.write_kv_cache(keys, v, *caches, without_skips(slots))
        o = hal.ops.paged_attention(rotated, *caches, table, device_lens, device_cu, 1, **copies)
        return normed, o, hal.ops.silu_and_mul(normed), hal.ops.linear(normed, made(8, F))

    return step


def test_a_decode_step_with_lengths_from_the_host_never_synchronises():
    step = decoded()
    weight_upload = 1  # the step's own `made`
    step()
    with trace.recording() as recorded, hal.use(sync="error"):
        step()
    assert len([copy for copy in recorded.copies if copy.direction == "device_to_host"]) == 0
    uploads = [copy for copy in recorded.copies if copy.direction == "host_to_device"]
    assert len(uploads) == weight_upload
    assert len(recorded.synchronisations) == len([copy for copy in uploads if not copy.asynchronous])
    names = {call.operator for call in recorded.calls}
    assert {"aclnnScatterPaKvCache", "aclnnFusedInferAttentionScoreV3", "aclnnSwiGlu"} <= names


def test_without_host_lengths_a_decode_step_synchronises_once_and_says_so():
    step = decoded(host_lengths=False)
    step()
    before = sum(host.synchronisations.values())
    with trace.recording() as recorded:
        step()
    assert len([copy for copy in recorded.copies if copy.direction == "device_to_host"]) == 1
    assert sum(host.synchronisations.values()) == before + 1
    with hal.use(sync="error"), pytest.raises(SyncError, match="paged_attention"):
        step()


def test_the_decode_step_attends_to_the_keys_it_has_just_written():
    found = decoded()()
    with hal.use(backend="cpu"):
        expected = decoded(device="cpu")()
    # Both round to bfloat16 in several places: a few units in its last place.
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours.cpu(), theirs, rtol=2**-6, atol=2**-6)


@pytest.mark.parametrize("skipped", [[], [1], [0, 1, 2]])
def test_skipped_slots_leave_the_cache_alone_without_a_look_from_the_host(skipped):
    slots = torch.tensor([3, 18, 40])
    slots[skipped] = -1
    k, v = normal(3, K, D), normal(3, K, D, seed=1)
    before = normal(6, P, K, D)
    caches = before.clone(), before.clone()
    device_slots = slots.to("npu")
    with trace.recording() as recorded:
        hal.ops.write_kv_cache(k, v, *caches, device_slots)
    assert not recorded.synchronisations
    assert not [copy for copy in recorded.copies if copy.direction == "device_to_host"]
    for rows, cache in zip((k, v), caches, strict=True):
        expected = before.cpu().clone().view(-1, K, D)
        for i, slot in enumerate(slots.tolist()):
            if slot >= 0:
                expected[slot] = rows[i].cpu()
        assert torch.equal(cache.cpu().view(-1, K, D), expected)


def test_the_mark_scatters_and_a_strided_cache_does_without():
    slots = without_skips(torch.tensor([3, 18]).to("npu"))
    k, v, whole = normal(2, K, D), normal(2, K, D, seed=1), normal(3, P, 2 * K, D)
    for caches, scatters in (((normal(3, P, K, D), normal(3, P, K, D)), True), (whole.split(K, 2), False)):
        with trace.recording() as recorded:
            hal.ops.write_kv_cache(k, v, *caches, slots)
        assert ("aclnnScatterPaKvCache" in {call.operator for call in recorded.calls}) == scatters
        for cache, rows in zip(caches, (k, v), strict=True):
            assert torch.equal(cache.cpu()[1, 2], rows.cpu()[1])


def test_without_a_copy_of_the_sums_a_row_past_the_end_is_found_without_another_read():
    lens, table = torch.tensor([5, 20], dtype=torch.int32), torch.arange(4, dtype=torch.int32).view(2, 2)
    cu, q = torch.tensor([0, 0, 1], dtype=torch.int32), normal(2, H, D)
    caches = normal(4, P, K, D), normal(4, P, K, D, seed=1)

    def attended(device):
        given = (t.to(device) for t in (q, *caches, table, lens, cu))
        return hal.ops.paged_attention(*given, 1, seq_lens_cpu=lens)

    with trace.recording() as recorded, hal.use(sync="error"):
        found = attended("npu")
    assert not [copy for copy in recorded.copies if copy.direction == "device_to_host"]
    with hal.use(backend="cpu"):
        expected = attended("cpu")
    torch.testing.assert_close(found.cpu(), expected, rtol=2**-6, atol=2**-6)
    assert not found[1].cpu().any()


def test_the_causal_triangle_is_made_once_for_a_device_and_hides_what_lies_above():
    q = normal(1, 5, 2, 32)
    hal.ops.attention(q, q, q, causal=True)
    with trace.recording() as recorded:
        hal.ops.attention(q, q, q, causal=True)
    assert [call.operator for call in recorded.calls] == ["aclnnFusedInferAttentionScoreV3"]
    arguments = recorded.calls[0].arguments
    assert arguments["sparse_mode"] == 3
    assert arguments["scale_value"] == 32**-0.5
    mask = triangle(torch.device("npu:0")).cpu()
    assert torch.equal(mask, torch.ones(2048, 2048, dtype=torch.bool).triu(1))


@pytest.mark.parametrize(("precision", "hf32"), [("highest", False), ("high", True)])
@pytest.mark.parametrize("switch", [False, True])
def test_float32_products_obey_torchs_precision_and_give_the_switch_back(precision, hf32, switch):
    x, weight = normal(3, 64, dtype=torch.float32), normal(8, 64, dtype=torch.float32)
    torch_before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision(precision)
        torch.npu.matmul.allow_hf32 = switch
        with trace.recording() as recorded:
            hal.ops.linear(x, weight)
        assert torch.npu.matmul.allow_hf32 is switch
    finally:
        torch.npu.matmul.allow_hf32 = False
        torch.set_float32_matmul_precision(torch_before)
    (product,) = [call for call in recorded.calls if "cube_math_type" in call.arguments]
    assert (product.arguments["cube_math_type"] != 0) == hf32


def test_gelu_is_the_operator_with_the_form_that_was_asked_for():
    x = normal(3, 64)
    for approximate, code in (("none", 0), ("tanh", 1)):
        with trace.recording() as recorded:
            hal.ops.gelu_and_mul(x, approximate=approximate)
        call = recorded.calls[0]
        assert call.operator == "aclnnGeGluV3"
        assert (call.arguments["approximate"], call.arguments["activate_left"]) == (code, True)
        assert not [other for other in recorded.calls if "Gelu" in other.operator]


def test_what_no_operator_does_is_refused_with_reasons_and_composed_where_policy_allows():
    q = normal(1, 5, 2, 32)
    with pytest.raises(hal.errors.UnsupportedError) as refused:
        hal.ops.attention(q, q, q, softcap=2.0)
    assert refused.value.rejections["ascend/fused_infer"] == ("softcap is not supported",)
    with hal.use(fallback="portable"):
        assert hal.ops.attention(q, q, q, softcap=2.0).shape == q.shape


def test_training_goes_through_the_training_operator_and_its_gradient():
    q, k = normal(1, 6, 4, 32).requires_grad_(), normal(1, 6, 2, 32).requires_grad_()
    with torch.enable_grad(), trace.recording() as recorded:
        hal.ops.attention(q, k, k, causal=True).float().sum().backward()
    names = [call.operator for call in recorded.calls]
    assert "aclnnFlashAttentionScore" in names
    assert "aclnnFlashAttentionScoreGrad" in names
    assert "aclnnFusedInferAttentionScoreV3" not in names


def test_every_device_is_described_by_its_chip_and_marked_as_simulated():
    from hal import registry

    found = registry.devices("ascend")
    assert len(found) == torch.npu.device_count()
    for index, descriptor in enumerate(found):
        assert descriptor.device == f"npu:{index}"
        assert descriptor.simulated
        assert descriptor.architecture == {"A2": "Ascend910B", "A3": "Ascend910_93", "950": "dav-c310"}.get(
            simulator.current().soc.family, "Ascend310P"
        )
        assert any(note.startswith("torch_npu ") for note in descriptor.notes)
        assert f"CANN {simulator.current().cann}" in descriptor.notes
