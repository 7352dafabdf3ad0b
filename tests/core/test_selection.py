"""Selection: which implementation serves a call, and every reason against the others."""

from __future__ import annotations

import pytest
import torch

import hal
from hal import registry
from hal.capability import Declares, Implementation, Limit, Supports
from hal.errors import ConfigError, DeviceError, UnsupportedError
from hal.hookspec import Backend, hookimpl


def forward(x, weight=None, eps=1e-6, *, weight_offset=0.0, round_before_weight=False):
    return hal.ops.rms_norm.op.reference(x, weight, eps)


class Toy:
    """A backend for the meta device: enough to select on, nothing to compute."""

    def __init__(self, *implementations: Implementation) -> None:
        self.implementations = implementations

    @hookimpl
    def hal_backend(self):
        return Backend("toy", ("meta",))

    @hookimpl
    def hal_implementations(self, backend: str):
        return self.implementations if backend == "toy" else []


@pytest.fixture
def toy():
    def install(*implementations: Implementation) -> None:
        registry.register(Toy(*implementations), "toy")

    yield install
    registry.unregister("toy")


def explain(**kwargs):
    op = hal.ops.rms_norm.op
    return hal.explain(op, op.bind((), {"x": torch.empty(2, 8, device="meta"), **kwargs}))


def native(name: str, **kwargs) -> Implementation:
    return Implementation(op="rms_norm", name=name, forward=forward, **kwargs)


def composed(name: str) -> Implementation:
    return native(name, kind="composed")


def test_the_preferred_implementation_that_accepts_is_chosen(toy):
    toy(
        native("low", priority=1),
        native("high", priority=5),
        native("narrow", priority=9, supports=Supports(dtypes=frozenset({"bfloat16"}))),
    )
    found = explain()
    assert found.chosen.implementation.name == "high"
    assert [c.implementation.name for c in found.candidates] == ["narrow", "high", "low"]


def test_every_reason_is_given(toy):
    supports = Supports(
        dtypes=frozenset({"bfloat16"}),
        features=frozenset({"weight"}),
        limits={"features": Limit(max=4, multiple_of=3)},
        device_types=frozenset({"cuda"}),
        where=lambda a: ["eps is odd"],
    )
    toy(native("picky", supports=supports))
    (candidate,) = explain(weight_offset=1.0).candidates
    assert candidate.reasons == (
        "device type meta is not among cuda",
        "dtype float32 is not among bfloat16",
        "weight_offset is not supported",
        "features is 8, the most supported is 4",
        "features is 8, not a multiple of 3",
        "eps is odd",
    )


def test_nothing_accepts_raises_with_the_reasons(toy):
    toy(native("picky", supports=Supports(dtypes=frozenset({"bfloat16"}))))
    with pytest.raises(UnsupportedError, match=r"toy/picky: dtype float32 is not among bfloat16") as caught:
        hal.ops.rms_norm(torch.empty(2, 8, device="meta"))
    assert caught.value.rejections == {"toy/picky": ("dtype float32 is not among bfloat16",)}


def test_composed_is_allowed_where_no_native_one_is_registered(toy):
    toy(composed("plain"))
    assert explain().chosen.kind == "composed"


def test_composed_is_refused_after_a_native_refusal_unless_fallback_allows_it(toy):
    toy(native("picky", supports=Supports(dtypes=frozenset({"bfloat16"}))), composed("plain"))
    assert explain().chosen is None
    with hal.use(fallback="portable"):
        assert explain().chosen.implementation.name == "plain"


def test_a_native_one_of_another_chip_is_none_here(toy):
    toy(native("other", supports=Supports(architectures=frozenset({"sm_90"}))), composed("plain"))
    assert explain().chosen.implementation.name == "plain"


def test_portable_fallback_brings_the_portable_backend_in(toy):
    toy(native("picky", supports=Supports(dtypes=frozenset({"bfloat16"}))))
    with hal.use(fallback="portable"):
        found = explain()
    assert (found.chosen.backend, found.chosen.kind) == ("portable:meta", "composed")


def test_cpu_fallback_is_foreign(toy):
    toy(native("picky", supports=Supports(dtypes=frozenset({"bfloat16"}))))
    with hal.use(fallback="cpu"):
        found = explain()
    assert (found.chosen.backend, found.chosen.kind) == ("cpu", "foreign")


def test_a_forced_implementation_is_the_only_candidate_left(toy):
    toy(native("low", priority=1), native("high", priority=5))
    with hal.use(impl="rms_norm=low"):
        found = explain()
    assert found.chosen.implementation.name == "low"
    assert found.candidates[0].reasons == ("HAL_IMPL asks for low",)


@pytest.mark.parametrize(("impl", "text"), [("rms_nrom=low", "did you mean rms_norm"), ("rms_norm=nothing", "has low")])
def test_a_forced_name_that_does_not_exist_raises(toy, impl, text):
    toy(native("low"))
    with pytest.raises(ConfigError, match=text), hal.use(impl=impl):
        explain()


def test_invariance_is_demanded_when_asked_for(toy):
    toy(native("varies", priority=5), native("steady", declares=Declares(batch_invariant=True)))
    assert explain().chosen.implementation.name == "varies"
    with hal.use(invariant=True):
        found = explain()
    assert found.chosen.implementation.name == "steady"
    assert "batch_invariant" in found.candidates[0].reasons[0]


def test_determinism_is_demanded_when_torch_asks_for_it(toy):
    toy(native("racy", priority=5, declares=Declares(run_to_run=False)), native("steady"))
    torch.use_deterministic_algorithms(True)
    try:
        found = explain()
    finally:
        torch.use_deterministic_algorithms(False)
    assert found.chosen.implementation.name == "steady"
    assert "run_to_run" in found.candidates[0].reasons[0]


def test_auto_gives_an_unclaimed_device_to_portable():
    assert explain().chosen.backend == "portable:meta"


def test_auto_gives_a_claimed_device_to_its_backend(toy):
    toy(native("one"))
    assert explain().chosen.backend == "toy"


def test_a_backend_that_does_not_serve_the_device_raises():
    with hal.use(backend="cpu"), pytest.raises(DeviceError, match="backend 'cpu' serves cpu"):
        explain()


@pytest.mark.parametrize("name", ["CPU", "cpu ", "none-such", "0", "portable", "cpu:0"])
def test_an_unknown_backend_raises(monkeypatch, name):
    monkeypatch.setenv("HAL_BACKEND", name)
    with pytest.raises(ConfigError):
        hal.ops.rms_norm(torch.randn(2, 8))


def test_foreign_results_come_back_to_the_device(monkeypatch):
    from hal.selection import _on_cpu

    op = hal.ops.rms_norm.op
    moved = _on_cpu(op, op.reference, torch.device("meta"))(torch.randn(2, 8))
    assert moved.device.type == "meta"
