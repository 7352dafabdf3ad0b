"""The simulated device itself: it must behave as a device does, else what runs on it shows nothing."""

from __future__ import annotations

import pickle
import threading

import pytest
import torch

from hal.backends.portable import simdev
from hal.descriptor import describe
from hal.errors import DeviceError

DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16,
    torch.float32, torch.float64, torch.complex64, torch.float8_e4m3fn, torch.float8_e5m2,
]  # fmt: skip


@pytest.fixture
def x():
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(0))


def test_install_is_idempotent(devices):
    assert simdev.install() is devices
    assert simdev.installed() is devices
    assert torch.simdev is devices


@pytest.mark.parametrize("index", [0, 1])
def test_bytes_survive_the_round_trip(devices, x, index):
    y = x.to(f"simdev:{index}")
    assert y.device == torch.device("simdev", index)
    assert y.is_simdev
    assert torch.equal(y.cpu(), x)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_lives_on_the_device(devices, dtype):
    t = torch.zeros(3, dtype=dtype, device="simdev:1")
    assert t.device.index == 1
    assert t.cpu().dtype is dtype


def test_views_share_storage_and_writes_show_through(devices, x):
    y = x.to("simdev:1")
    view = y.view(2, 12)[1, ::2]
    assert view.untyped_storage().data_ptr() == y.untyped_storage().data_ptr()
    assert view.storage_offset() == 12
    view.zero_()
    assert (y.cpu().view(2, 12)[1, ::2] == 0).all()
    assert torch.equal(y.cpu()[:2], x[:2])


def test_dtype_views_of_a_buffer(devices):
    buffer = torch.full((16,), 0xFF, dtype=torch.uint8, device="simdev:0")
    assert torch.isnan(buffer.view(torch.float32)).all().item()
    assert buffer.view(torch.float32).untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr()


MIXTURES = {
    "device and host": lambda y, x: y + x,
    "two devices": lambda y, x: y + x.to("simdev:0"),
    "cat": lambda y, x: torch.cat([y, x]),
    "matmul": lambda y, x: y @ x.t(),
    "where": lambda y, x: torch.where(y > 0, y, x),
    "index_select": lambda y, x: y.index_select(0, torch.tensor([0])),
}


@pytest.mark.parametrize("mixture", MIXTURES.values(), ids=MIXTURES.keys())
def test_operands_on_different_devices_are_refused(devices, x, mixture):
    with pytest.raises(RuntimeError, match="same device"):
        mixture(x.to("simdev:1"), x)


def test_numbers_and_host_indices_are_no_mixture(devices, x):
    y = x.to("simdev:1")
    assert torch.equal((y + torch.tensor(2.0)).cpu(), x + 2)
    assert torch.equal(y[torch.tensor([2, 0])].cpu(), x[[2, 0]])


def test_numbers_keep_the_dtype_of_the_tensor_they_meet(devices):
    t = torch.tensor([9, 10], dtype=torch.int32, device="simdev:1")
    for found in (t % 4, t & 3, t + 1, t // 2, t[0] % 4):
        assert found.dtype is torch.int32
    assert (t % 4).tolist() == [1, 2]


def test_an_index_that_does_not_exist_is_an_error(devices):
    with pytest.raises(DeviceError, match="there are 2 simulated devices"):
        torch.empty(1, device="simdev:2")


def test_the_current_device_is_where_unnumbered_tensors_go(devices):
    assert torch.zeros(1, device="simdev").device.index == 0
    with devices.device(1):
        assert torch.zeros(1, device="simdev").device.index == 1
        assert torch.arange(3, device="simdev").device.index == 1
    assert devices.current_device() == 0


def test_results_follow_their_operands_not_the_current_device(devices, x):
    y = x.to("simdev:1")
    assert devices.current_device() == 0
    assert {t.device.index for t in (y + 1, y @ y.t(), y.sort().values, torch.empty_like(y), y.new_zeros(3))} == {1}


def test_in_place_and_out_write_the_operand(devices, x):
    y = x.to("simdev:1")
    assert y.add_(1) is y
    assert torch.equal(y.cpu(), x + 1)
    out = torch.empty(0, device="simdev:1")
    assert torch.mul(y, 2, out=out) is out
    assert out.shape == y.shape
    assert torch.equal(out.cpu(), (x + 1) * 2)


def test_resize_keeps_what_fits(devices):
    t = torch.arange(4, device="simdev:1")
    t.resize_(6)
    assert t.shape == (6,)
    assert t[:4].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("index", [0, 1])
def test_autograd_runs_on_either_device(devices, x, index):
    # float64: away from the CPU, torch differentiates silu by another formula
    x = x.double()
    w_host = torch.randn(6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()
    w = w_host.detach().to(f"simdev:{index}").requires_grad_()
    (torch.nn.functional.silu(x.to(f"simdev:{index}") @ w)[:, ::2] ** 2).sum().backward()
    (torch.nn.functional.silu(x @ w_host)[:, ::2] ** 2).sum().backward()
    assert w.grad.device == w.device
    torch.testing.assert_close(w.grad.cpu(), w_host.grad)


def test_trace_tells_device_work_from_transfers_and_waits(devices, x):
    y = x.to("simdev:1")
    with devices.trace() as quiet:
        torch.softmax(y, -1).sum(0).t().contiguous()
    assert quiet.kernels
    assert (quiet.uploads, quiet.downloads, quiet.synchronisations) == ([], [], [])
    with devices.trace() as loud:
        y.sum().item()
        y.cpu()
        x.to("simdev:1")
        y.to("simdev:0")
    assert loud.downloads == ["_copy_from"]
    assert loud.uploads == ["_copy_from"]
    assert loud.synchronisations == ["_local_scalar_dense", "_copy_from"]


@pytest.mark.parametrize(
    "waits",
    [
        lambda y: y[y > 0],
        lambda y: (y > 0).nonzero(),
        lambda y: y.masked_select(y > 0),
        lambda y: bool((y > 0).all()),
        lambda y: torch.equal(y, y),
        lambda y: y.tolist(),
        lambda y: y.repeat_interleave((y[0] > -9).to(torch.int64), 1),
    ],
)
def test_every_way_of_waiting_is_seen(devices, x, waits):
    y = x.to("simdev:1")
    with devices.trace() as trace:
        waits(y)
    assert trace.synchronisations


def test_an_operator_without_a_kernel_names_the_device(devices):
    lib = torch.library.Library("simdev_test", "FRAGMENT")
    lib.define("nothing(Tensor x) -> Tensor")
    with pytest.raises(NotImplementedError, match="no kernel for simdev"):
        torch.ops.simdev_test.nothing(torch.ones(1, device="simdev"))


def test_fake_tensors_and_compile_know_the_device(devices, x):
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        a = torch.empty(4, 6, device="simdev:1")
        assert (a @ a.t()).device == torch.device("simdev:1")
    y = x.to("simdev:1")
    compiled = torch.compile(lambda t: torch.softmax(t * 2, -1) + 1, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(y).cpu(), torch.softmax(x * 2, -1) + 1)


def test_other_threads_may_run_forward(devices, x):
    seen = []
    thread = threading.Thread(target=lambda: seen.append((x.to("simdev:1") + 1).cpu()))
    thread.start()
    thread.join()
    assert torch.equal(seen[0], x + 1)


def test_the_descriptor_says_that_it_is_simulated(devices):
    descriptor = describe("simdev:1")
    assert descriptor.simulated
    assert descriptor.device == "simdev:1"
    assert descriptor.memory_bytes is None
    assert pickle.loads(pickle.dumps(descriptor)) == descriptor


def test_describe_refuses_a_device_that_is_not_there(devices):
    with pytest.raises(DeviceError, match="sees 2 simdev"):
        describe("simdev:5")
