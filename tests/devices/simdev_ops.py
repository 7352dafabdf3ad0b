"""Every operator through `portable:simdev`: on its tensors' device, without a transfer or a wait, judged right."""

from __future__ import annotations

import pytest
import torch

import hal
from hal import registry
from hal.conformance.case import cases
from hal.conformance.judge import judge
from hal.errors import ArgumentError
from hal.op import OPS

BACKEND = "portable:simdev"
# rotary_cache makes tensors out of numbers: there is no operand whose device it could follow.
OPERANDS = sorted(set(OPS) - {"rotary_cache"})


def samples(op):
    """A quick case of each tag, legal ones only."""
    try:
        listed = cases(op, "quick")
    except ArgumentError:  # no family of cases; a test of its own says so
        return []
    chosen = {}
    for case in listed:
        if not case.bad_input and case.dtype in ("float32", "bfloat16"):
            for tag in case.tags:
                chosen.setdefault((tag, case.dtype), case)
    return list({case.id: case for case in chosen.values()}.values())


def tensors(value):
    if isinstance(value, torch.Tensor):
        return [value]
    return [t for item in value for t in tensors(item)] if isinstance(value, list | tuple) else []


def pairs(op):
    return [pytest.param(op, case, id=case.id) for case in samples(op)]


@pytest.mark.parametrize("op", OPERANDS)
def test_every_operator_has_cases_to_run(op):
    assert samples(op), f"no conformance case of {op} that this module could run"


@pytest.mark.parametrize(("op", "case"), [p for op in OPERANDS for p in pairs(op)])
def test_runs_on_the_second_device_without_touching_the_host(devices, op, case):
    arguments = case.build("simdev:1").args
    assert devices.current_device() == 0
    with devices.trace() as trace, hal.use(backend=BACKEND):
        found = getattr(hal.ops, op)(**arguments)
    written = [arguments[name] for name in OPS[op].mutates]
    assert tensors(written or found)
    assert {t.device for t in tensors(written or found)} == {torch.device("simdev:1")}
    assert trace.kernels or "grid" not in case.tags
    assert trace.uploads == []
    assert trace.downloads == []
    assert trace.synchronisations == []
    (implementation,) = registry.implementations("portable", op)
    verdict = judge(case, implementation, "simdev:1", backend=BACKEND)
    assert verdict.status == "passed", verdict.findings


@pytest.mark.parametrize("op", [op for op in OPERANDS if OPS[op].grad])
def test_gradients_stay_on_the_second_device(devices, op):
    case = next(case for case in cases(op, "full") if case.dtype == "float64" and "grid" in case.tags)
    with devices.trace() as trace:
        found = gradients(op, case.build("simdev:1").args, BACKEND)
    # building the case uploads it; nothing may come back
    assert trace.downloads == []
    expected = gradients(op, case.build("cpu").args, "cpu", impl=f"{op}=reference")
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        assert gradient.device == torch.device("simdev:1")
        torch.testing.assert_close(gradient.cpu(), expected[name], msg=lambda text, name=name: f"{name}: {text}")


def gradients(op, arguments, backend, impl=None):
    arguments = dict(arguments)
    leaves = {}
    for name in OPS[op].grad:
        if isinstance(arguments.get(name), torch.Tensor) and arguments[name].is_floating_point():
            arguments[name] = leaves[name] = arguments[name].detach().requires_grad_()
    with hal.use(backend=backend, impl=impl):
        outcome = getattr(hal.ops, op)(**arguments)
        first = tensors(outcome)[0]
        first.backward(torch.linspace(-1, 1, first.numel()).reshape(first.shape).to(first))
    return {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}


def test_auto_gives_an_unclaimed_device_to_the_portable_backend(devices):
    from hal.selection import auto_backend

    assert auto_backend(torch.device("simdev:1")) == BACKEND


def test_the_implementation_is_composed_and_the_devices_are_marked_simulated(devices):
    assert [(d.device, d.simulated) for d in registry.devices(BACKEND)] == [
        ("simdev:0", True),
        ("simdev:1", True),
    ]
    assert {i.kind for op in OPS for i in registry.implementations("portable", op)} == {"composed"}
    assert {op for op in OPS if registry.implementations("portable", op)} == set(OPS)


def test_the_dispatch_report_names_the_device_type(devices):
    def calls():
        told = [c for c in hal.report()["calls"] if (c["op"], c["backend"]) == ("rms_norm", BACKEND)]
        assert all((c["kind"], c["device"]) == ("composed", "simdev") for c in told)
        return sum(c["calls"] for c in told)

    before = calls()
    with hal.use(backend=BACKEND):
        hal.ops.rms_norm(torch.ones(2, 4, device="simdev:1"))
    assert calls() == before + 1


def test_tensors_on_two_devices_are_refused_before_any_kernel(devices):
    x, weight = torch.ones(2, 4, device="simdev:0"), torch.ones(4, device="simdev:1")
    with devices.trace() as trace, pytest.raises(hal.errors.DeviceError), hal.use(backend=BACKEND):
        hal.ops.rms_norm(x, weight)
    assert trace.kernels == []
