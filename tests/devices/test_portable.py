"""The portable backend on the host, and what it says of devices that are not there."""

from __future__ import annotations

import pytest
import torch

import hal
from hal import registry
from hal.errors import DeviceError
from hal.op import OPS
from hal.selection import explain


@pytest.fixture
def x():
    return torch.randn(3, 8, generator=torch.Generator().manual_seed(0))


def test_every_operator_has_one_composed_implementation():
    for op in OPS:
        (found,) = registry.implementations("portable", op)
        assert (found.name, found.kind, found.forward) == ("composed", "composed", OPS[op].reference)


def test_portable_cpu_runs_the_reference(x):
    with hal.use(backend="portable:cpu"):
        found = hal.ops.rms_norm(x)
    assert torch.equal(found, OPS["rms_norm"].reference(x))
    assert ("rms_norm", "portable:cpu", "composed") in {
        (c["op"], c["backend"], c["implementation"]) for c in hal.report()["calls"]
    }


def test_a_gradient_goes_through_the_composed_implementation(x):
    leaf, expected = x.clone().requires_grad_(), x.clone().requires_grad_()
    with hal.use(backend="portable:cpu"):
        hal.ops.rms_norm(leaf).square().sum().backward()
    OPS["rms_norm"].reference(expected).square().sum().backward()
    torch.testing.assert_close(leaf.grad, expected.grad)


def test_it_is_chosen_under_deterministic_algorithms(x):
    torch.use_deterministic_algorithms(True)
    try:
        with hal.use(backend="portable:cpu"):
            told = explain(OPS["rms_norm"], OPS["rms_norm"].bind((x,), {}))
    finally:
        torch.use_deterministic_algorithms(False)
    assert told.chosen is not None
    assert told.chosen.label == "portable:cpu/composed"


def test_the_host_is_its_device():
    assert [d.device for d in registry.devices("portable:cpu")] == ["cpu"]


def test_a_device_type_that_torch_does_not_know_is_a_typed_error():
    with pytest.raises(DeviceError, match="torch knows no device type 'quantum'"):
        registry.devices("portable:quantum")


@pytest.mark.skipif(torch.accelerator.is_available(), reason="this machine has an accelerator")
def test_a_known_device_type_without_devices_has_none():
    assert registry.devices("portable:cuda") == ()
    assert registry.devices("portable") == ()
