"""The simulated CANN under the real torch_npu: devices, memory, streams, operators, errors, traces."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
import torch_npu

import hal
from hal.backends.ascend import simulator
from hal.backends.ascend.simulator import operators, runtime, symbols, trace
from hal.descriptor import describe
from hal.errors import DeviceError


def npu(*values, dtype=torch.float32):
    return torch.tensor(values, dtype=dtype).npu()


@pytest.fixture
def bridge():
    return runtime.attached()


@pytest.fixture
def signature(bridge):
    """Sets the signature that the native side has of an operator, for one test."""
    changed = []

    def change(name, letters):
        index = [found and found.name for found in bridge._table].index(name)
        changed.append((index, bridge._table[index].signature))
        bridge._native.sim_define(index, letters.encode())

    yield change
    for index, letters in changed:
        bridge._native.sim_define(index, letters.encode())


def test_device_and_descriptor_say_what_is_simulated():
    assert simulator.active()
    assert torch.npu.device_count() == simulator.current().devices
    assert torch.npu.get_device_name(0) == simulator.current().soc.name
    descriptor = describe("npu:0")
    assert descriptor.simulated
    assert torch.npu.get_device_properties(0).total_memory == simulator.current().memory


def test_copies_keep_every_bit_and_both_devices_are_apart():
    data = torch.randint(-(2**62), 2**62, (1000,))
    for device in ("npu:0", "npu:1"):
        there = data.to(device)
        assert there.device == torch.device(device)
        assert torch.equal(there.cpu(), data)
    assert torch.equal(data.to("npu:0").to("npu:1").cpu(), data)


@pytest.mark.parametrize(
    ("call", "refused"),
    [
        (lambda a, b: a + b, "aclnnAdd: a call's tensors lie on one device, but found npu:0 npu:1"),
        (lambda a, b: torch.where(a > 0, a, b), "aclnnSWhere: a call's tensors lie on one device"),
        (lambda a, b: torch.add(a, a, out=b), "aclnnAdd: a call's tensors lie on one device"),
        # torch_npu's own check
        (lambda a, b: torch_npu.npu_rms_norm(a, b[0]), "Expected all tensors to be on the same device"),
        # hal's, before any work
        (lambda a, b: hal.ops.rms_norm(a, b[0]), "x on npu:0, weight on npu:1, but all tensors must be on one device"),
    ],
)
def test_operands_on_two_devices_are_refused_by_whoever_looks_first(call, refused):
    a, b = torch.ones(2, 2).to("npu:0"), torch.ones(2, 2).to("npu:1")
    with pytest.raises((RuntimeError, DeviceError), match=refused):
        call(a, b)
    assert torch.equal((b + b).cpu(), torch.full((2, 2), 2.0)), "a call on the other device alone must run"


def test_operators_read_and_write_through_strides_and_offsets():
    x = torch.arange(24.0).view(4, 6)
    y = x.npu()
    y.t()[1::2].add_(100)
    x.t()[1::2].add_(100)
    assert torch.equal(y.cpu(), x)
    assert torch.equal((y[1:, 2:] + y[:3, :4]).cpu(), x[1:, 2:] + x[:3, :4])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.int32, torch.int64])
def test_scalars_of_every_dtype_arrive(dtype):
    assert torch.equal((npu(1, 2, 3, dtype=dtype) + 5).cpu(), torch.tensor([6, 7, 8], dtype=dtype))


def test_an_unwritten_tensor_holds_no_number():
    before = torch.npu.memory_reserved()
    fresh = torch.empty(64 << 20, dtype=torch.float32, device="npu")
    assert torch.npu.memory_reserved() > before
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        assert torch.isnan(fresh.view(dtype)[:100].cpu()).all()


def test_more_memory_than_there_is_raises_and_freed_memory_comes_back(bridge):
    total = simulator.current().memory
    torch.npu.empty_cache()
    before = bridge.used(0)
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(total + 1, dtype=torch.uint8, device="npu")
    block = torch.empty(total // 2, dtype=torch.uint8, device="npu")
    free, told = torch.npu.mem_get_info(0)
    assert told == total
    assert bridge.used(0) >= before + total // 2
    assert free == total - bridge.used(0)
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(total * 3 // 4, dtype=torch.uint8, device="npu")
    del block
    torch.npu.empty_cache()
    assert bridge.used(0) <= before
    torch.empty(total * 3 // 4, dtype=torch.uint8, device="npu")


def test_streams_and_events():
    stream = torch.npu.Stream()
    start, end = (torch.npu.Event(enable_timing=True) for _ in range(2))
    with torch.npu.stream(stream):
        start.record()
        x = npu(1.0) + 1
        end.record()
    end.synchronize()
    assert end.query() and stream.query()
    assert start.elapsed_time(end) > 0
    assert x.item() == 2


def test_a_fused_operator_computes_and_differentiates():
    g = torch.Generator().manual_seed(0)
    x, weight, dy = (torch.randn(shape, generator=g) for shape in ((4, 64), (64,), (4, 64)))
    there, weight_there = x.npu().requires_grad_(), weight.npu().requires_grad_()
    torch_npu.npu_rms_norm(there, weight_there, 1e-6)[0].backward(dy.npu())
    x.requires_grad_(), weight.requires_grad_()
    F.rms_norm(x, (64,), weight, 1e-6).backward(dy)
    torch.testing.assert_close(there.grad.cpu(), x.grad)
    torch.testing.assert_close(weight_there.grad.cpu(), weight.grad)


def test_modes_of_the_caller_do_not_reach_operators():
    from torch.utils._python_dispatch import TorchDispatchMode

    seen = []

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    with Seen(), torch.device("npu"):
        y = torch.ones(3) + 1
    assert torch.equal(y.cpu(), torch.full((3,), 2.0))
    assert not [name for name in seen if "as_strided" in name or "copy_" in name], seen


def test_threads_share_the_device():
    results = {}

    def work(index):
        x = torch.full((100,), float(index), device="npu")
        for _ in range(50):
            x = x + 1
        results[index] = x.cpu()

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert all(torch.equal(results[i], torch.full((100,), i + 50.0)) for i in range(4))


def test_an_operator_without_callback_fails_by_name_with_a_guess_of_its_arguments(signature):
    x = npu(1.0, 2.0)
    signature("aclnnAdd", "")
    with pytest.raises(RuntimeError, match=r"aclnnAdd is not simulated .* look like: t t k t "):
        x + x


@pytest.mark.parametrize(
    ("letters", "told"),
    [
        ("ttst", "argument 3 is an aclScalar, the signature says 's'"),
        ("tlkt", "argument 2 is an aclTensor, the signature says 'l'"),
        ("tt", "signature 'tt' does not fit; its integer-class arguments look like: t t k t"),
    ],
)
def test_a_signature_that_does_not_fit_is_caught(signature, letters, told):
    x = npu(1.0, 2.0)
    signature("aclnnAdd", letters)
    with pytest.raises(RuntimeError) as caught:
        x + x
    assert told in str(caught.value)


def test_a_result_whose_size_depends_on_values_has_its_shape(bridge, monkeypatch):
    def masked_select(self, mask, out):
        found = self[mask]
        out[: found.numel()].copy_(found)
        bridge.set_shape(out, [found.numel()])

    index = [bridge._native.sim_operator_name(i) for i in range(len(bridge._table))].index(b"aclnnMaskedSelect")
    table = list(bridge._table)
    table[index] = operators.Operator("aclnnMaskedSelect", "ttt", ("self", "mask", "out"), masked_select)
    monkeypatch.setattr(bridge, "_table", table)
    before = operators.OPERATORS.get("aclnnMaskedSelect")
    bridge._native.sim_define(index, b"ttt")
    try:
        x = npu(1.0, 2.0, 3.0)
        assert torch.masked_select(x, npu(True, False, True, dtype=torch.bool)).cpu().tolist() == [1.0, 3.0]
    finally:
        bridge._native.sim_define(index, before.signature.encode() if before else b"")


def test_only_devices_that_were_used_have_a_context(simulated):
    code = (
        "import ctypes, torch; torch.ones(1, device='npu:1'); a = (ctypes.c_int32 * 3)(); "
        "native = ctypes.CDLL('libascendcl.so'); "
        "[native.aclrtGetPrimaryCtxState(i, None, ctypes.byref(a, 4 * i)) for i in range(3)]; print(list(a))"
    )
    assert simulated(code, "--devices", "3") == "[0, 1, 0]"


def test_a_legacy_operator_fails_by_name():
    with pytest.raises(RuntimeError, match="simulated CANN"):
        torch_npu.npu_format_cast(torch.ones(16, 16, device="npu").half(), 29).cpu() + 1


def test_an_operator_that_raises_gives_torch_npus_error_with_the_text(bridge, monkeypatch):
    index = [found and found.name for found in bridge._table].index("aclnnInplaceOne")

    def broken(self_ref):
        raise KeyError("nothing here")

    table = list(bridge._table)
    table[index] = replace(table[index], function=broken)
    monkeypatch.setattr(bridge, "_table", table)
    with pytest.raises(RuntimeError, match="simulated CANN: aclnnInplaceOne: KeyError: 'nothing here'"):
        torch.ones(3, device="npu")


def test_a_broken_constraint_is_torch_npus_error_with_the_rule():
    with pytest.raises(RuntimeError, match=r"aclnnRmsNorm: .*\(page "):
        torch_npu.npu_rms_norm(torch.ones(4, 64, device="npu"), torch.ones(32, device="npu"))


def test_what_torch_npu_checks_itself_is_its_own():
    q = torch.ones(16, 8, 64, dtype=torch.float16, device="npu")
    with pytest.raises(RuntimeError, match="BSH/SBH/BNSD/BSND/TND"):
        torch_npu.npu_fusion_attention(q, q, q, 8, "XYZ")


def test_recording_has_calls_copies_and_synchronisations_in_order():
    x = npu(1.0, 2.0)
    with trace.recording() as recorded:
        y = x + x
        y.cpu()
        torch.npu.synchronize()
    with trace.recording() as later:
        pass
    call, *rest = recorded.events
    assert call == recorded.calls[0]
    assert call.operator == "aclnnAdd"
    assert call.arguments["self"] == {"dtype": "float32", "shape": [2], "strides": [1]}
    assert call.arguments["alpha"] == 1
    down = next(copy for copy in recorded.copies if copy.direction == "device_to_host")
    assert down.bytes == 8
    assert rest.index(down) < rest.index(recorded.synchronisations[-1])
    assert [wait.what for wait in recorded.synchronisations].count("device") == 1
    assert not later.events


def test_every_simulated_operator_is_one_that_this_torch_npu_calls():
    known = set(symbols.operators(symbols.find_wheel()))
    # Versions of an operator differ between wheels; a name that no wheel has would be a slip.
    strange = sorted(set(operators.load()) - known)
    assert not strange
