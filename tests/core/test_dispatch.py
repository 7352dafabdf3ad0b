"""The way of a call: when it goes straight to the plan, when through the torch op, and what it refuses."""

from __future__ import annotations

import threading

import pytest
import torch
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

import hal
from hal import dispatch, registry
from hal.capability import Implementation
from hal.errors import DeviceError, TransformError
from hal.hookspec import hookimpl


class Extension:
    """An extension of the cpu backend with one implementation of rms_norm that leaves its mark."""

    def __init__(self, name: str, factor: float = 1.0, **kwargs: object) -> None:
        def forward(x, weight=None, eps=1e-6, *, weight_offset=0.0, round_before_weight=False):
            self.calls += 1
            return hal.ops.rms_norm.op.reference(x, weight, eps) * factor

        self.calls = 0
        self.implementation = Implementation(op="rms_norm", name=name, forward=forward, priority=1000, **kwargs)

    @hookimpl
    def hal_implementations(self, backend: str):
        return [self.implementation] if backend == "cpu" else []


@pytest.fixture
def extend():
    names = []

    def add(extension: Extension) -> Extension:
        names.append(f"cpu.{extension.implementation.name}")
        registry.register(extension, names[-1])
        return extension

    yield add
    for name in names:
        registry.unregister(name)


class Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_a_plain_call_reaches_the_implementation_without_the_torch_op(extend):
    extension = extend(Extension("spy"))
    x = torch.randn(2, 8)
    hal.ops.rms_norm(x)
    hal.ops.rms_norm(x)
    assert extension.calls == 2


def test_a_dispatch_mode_sees_the_torch_op():
    with Recorder() as recorder:
        hal.ops.rms_norm(torch.randn(2, 8))
    assert "hal.rms_norm_fwd.default" in recorder.names


def test_both_ways_give_the_same_bits():
    x, w = torch.randn(3, 16), torch.randn(16)
    short = hal.ops.rms_norm(x, w, round_before_weight=True)
    with Recorder():
        long = hal.ops.rms_norm(x, w, round_before_weight=True)
    assert torch.equal(short, long)


def test_a_new_plug_in_serves_the_next_call_of_a_known_shape(extend):
    x = torch.randn(2, 8)
    hal.ops.rms_norm(x)
    extend(Extension("doubled", factor=2.0))
    assert torch.equal(hal.ops.rms_norm(x), hal.ops.rms_norm.op.reference(x) * 2)


def test_settings_are_read_on_every_call(extend, monkeypatch):
    extension = extend(Extension("spy2"))
    x = torch.randn(2, 8)
    hal.ops.rms_norm(x)
    assert extension.calls == 1
    monkeypatch.setenv("HAL_IMPL", "rms_norm=reference")
    hal.ops.rms_norm(x)
    assert extension.calls == 1
    monkeypatch.delenv("HAL_IMPL")
    hal.ops.rms_norm(x)
    assert extension.calls == 2


def test_use_overrides_in_this_thread_only(extend):
    extension = extend(Extension("spy3"))
    x = torch.randn(2, 8)
    with hal.use(impl={"rms_norm": "reference"}):
        hal.ops.rms_norm(x)
        assert extension.calls == 0
        thread = threading.Thread(target=hal.ops.rms_norm, args=(x,))
        thread.start()
        thread.join()
    assert extension.calls == 1


def test_gradients_are_recorded_by_value_and_by_position():
    x = torch.randn(4, 8, dtype=torch.float64, requires_grad=True)
    w = torch.randn(8, dtype=torch.float64, requires_grad=True)
    expected = torch.autograd.grad((x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * w).cos().sum(), (x, w))
    for y in (hal.ops.rms_norm(x, w, 1e-5), hal.ops.rms_norm(x, eps=1e-5, weight=w)):
        got = torch.autograd.grad(y.cos().sum(), (x, w))
        torch.testing.assert_close(got, expected)


def test_a_tensor_that_needs_no_gradient_gets_none():
    x = torch.randn(4, 8, requires_grad=True)
    w = torch.randn(8)
    hal.ops.rms_norm(x, w).sum().backward()
    assert x.grad is not None and w.grad is None


def test_no_grad_takes_the_short_way_with_tensors_that_require_grad():
    x = torch.randn(4, 8, requires_grad=True)
    with torch.no_grad():
        assert not hal.ops.rms_norm(x).requires_grad


def test_backward_uses_the_plan_that_its_forward_was_bound_to(extend):
    seen = []

    def backward(a, outs, grads, needs):
        seen.append(outs["rstd"].shape)
        return grads[0], None

    extend(Extension("own_backward", backward=backward))
    x = torch.randn(4, 8, requires_grad=True)
    y = hal.ops.rms_norm(x)
    with hal.use(impl={"rms_norm": "reference"}):
        y.sum().backward()
    assert seen == [(4,)]
    assert torch.equal(x.grad, torch.ones(4, 8))


def test_double_backward_raises():
    x = torch.randn(4, 8, requires_grad=True)
    (gradient,) = torch.autograd.grad(hal.ops.rms_norm(x).sum(), x, create_graph=True)
    with pytest.raises(TransformError, match="no second derivative"):
        gradient.sum().backward()


def test_forward_mode_raises():
    with forward_ad.dual_level():
        x = forward_ad.make_dual(torch.randn(4, 8), torch.randn(4, 8))
        with pytest.raises(TransformError, match="reverse mode"):
            hal.ops.rms_norm(x)


def test_vmap_raises():
    with pytest.raises(TransformError, match="vmap"):
        torch.vmap(hal.ops.rms_norm)(torch.randn(4, 2, 8))


def test_a_tensor_subclass_goes_through_the_torch_op():
    class Sub(torch.Tensor):
        pass

    x = torch.randn(4, 8)
    assert torch.equal(hal.ops.rms_norm(x.as_subclass(Sub)).as_subclass(torch.Tensor), hal.ops.rms_norm(x))


def test_calls_are_counted_in_the_report():
    from hal import dispatch_report

    dispatch_report.reset()
    x = torch.randn(2, 8)
    with hal.use(impl={"rms_norm": "reference"}):
        for _ in range(3):
            hal.ops.rms_norm(x)
    (row,) = hal.report()["calls"]
    assert (row["op"], row["implementation"], row["backend"], row["calls"]) == ("rms_norm", "reference", "cpu", 3)


def test_plans_do_not_pile_up_over_ever_new_shapes(monkeypatch):
    monkeypatch.setattr(dispatch, "_MAX_PLANS", 16)
    dispatch.clear()
    for n in range(1, 100):
        hal.ops.rms_norm(torch.randn(1, n))
    assert max(len(cache) for cache in dispatch._caches) <= 16


def test_many_threads_agree():
    x = torch.randn(4, 8)
    expected = hal.ops.rms_norm(x)
    wrong = []

    def work() -> None:
        for _ in range(50):
            dispatch.clear()
            if not torch.equal(hal.ops.rms_norm(x), expected):
                wrong.append(1)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_autocast_leaves_the_operators_that_keep_their_inputs_dtypes_alone():
    x, weight = torch.randn(3, 64, requires_grad=True), torch.randn(8, 64)

    def results(implementation):
        with hal.use(impl={"linear": implementation}):
            y = hal.ops.linear(x, weight)
            with torch.no_grad():
                plain = hal.ops.linear(x, weight)
            return [plain, y.detach(), *torch.autograd.grad(y, x, torch.ones_like(y))]

    for implementation in ("aten", "reference"):
        expected = results(implementation)
        with torch.autocast("cpu", torch.bfloat16):
            got = results(implementation)
        for g, e in zip(got, expected, strict=True):
            assert g.dtype is torch.float32
            assert torch.equal(g, e)


def test_autocast_leaves_compiled_calls_alone():
    x, weight = torch.randn(3, 64), torch.randn(8, 64)
    with torch.autocast("cpu", torch.bfloat16):
        y = torch.compile(lambda x, w: hal.ops.linear(x, w), backend="eager", fullgraph=True)(x, weight)
    torch.testing.assert_close(y, hal.ops.linear(x, weight))


def test_autocast_knows_nothing_of_a_meta_tensor_and_lets_it_be():
    q = torch.empty(1, 3, 2, 4, device="meta")
    with torch.autocast("cpu", torch.bfloat16):
        assert hal.ops.attention(q, q, q).dtype is torch.float32
        with pytest.raises(DeviceError):
            hal.ops.attention(q, torch.empty(1, 3, 2, 4), q)


def test_torch_func_grad_raises_where_it_would_differentiate_and_only_there():
    x = torch.randn(2, 8)
    for loss in (lambda x: hal.ops.rms_norm(x).sum(), lambda x: hal.ops.top_k_top_p_probs(x).sum()):
        with pytest.raises(TransformError, match=r"torch\.func"):
            torch.func.grad(loss)(x)
    constant = torch.func.grad(lambda factor: (hal.ops.rms_norm(x) * factor).sum())(x)
    torch.testing.assert_close(constant, hal.ops.rms_norm(x))
