"""Tuning keeps the fastest of the tactics that agree with the oracle; a wrong one, however fast, is refused."""

from __future__ import annotations

import contextlib
import time
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

import hal
from hal import host, registry
from hal.bench.model import model_path
from hal.bench.tuning import Call, tune
from hal.capability import Implementation
from hal.cli import app
from hal.contract import OPS, Args
from hal.errors import CaptureError, UnsupportedError
from hal.hookspec import Choice, hookimpl

CPU = torch.device("cpu")
OP = OPS["layer_norm"]
EFFECTS = ("in use", "wrong", "fast", "crashes", "wrong gradient")


class Fake:
    """A backend of one implementation with one decision, and its tuner."""

    def __init__(self, tactics: tuple[str, ...]) -> None:
        self.choice = Choice("example", "(8,)", tactics)
        self.force, self.kept, self.decided = "", "", 0
        self.implementation = Implementation(
            "layer_norm", "tunable", self.forward, priority=1000, train=self.train, backward=self.backward
        )

    @property
    def tactic(self) -> str:
        self.decided += 1
        return self.force or self.kept or self.choice.tactics[0]

    def forward(self, x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5) -> Tensor:
        y = OP.reference(x, weight, bias, eps)
        match self.tactic:
            case "in use":
                time.sleep(0.003)
            case "wrong":
                return y * 1.001
            case "crashes":
                raise RuntimeError("out of resource: shared memory\nand more")
        return y

    def train(
        self, x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
    ) -> tuple[Tensor, ...]:
        a = Args(x=x, weight=weight, bias=bias, eps=eps)
        y = self.forward(x, weight, bias, eps)
        assert OP.compute_stats is not None
        return y, *OP.compute_stats(a, (y,))

    def backward(self, a: Args, outs: Any, grads: Any, needs: tuple[bool, ...]) -> tuple[Tensor | None, ...]:
        leaves = [t.detach().requires_grad_() for t in (a.x, a.weight, a.bias)]
        found = torch.autograd.grad(OP.reference(*leaves, a.eps), leaves, grads[0])
        return tuple(d * 1.001 for d in found) if self.tactic == "wrong gradient" else found

    @contextlib.contextmanager
    def watching(self) -> Iterator[list[Choice]]:
        found: list[Choice] = []
        before = self.decided
        yield found
        if self.decided > before:
            found.append(self.choice)

    @contextlib.contextmanager
    def using(self, choice: Choice, tactic: str) -> Iterator[None]:
        self.force = tactic
        try:
            yield
        finally:
            self.force = ""

    def keep(self, choice: Choice, tactic: str) -> None:
        self.kept = tactic


@pytest.fixture
def fake() -> Iterator[Fake]:
    made = Fake(EFFECTS)
    plugin: Any = types.ModuleType("tunable")
    plugin.hal_implementations = hookimpl(lambda backend: [made.implementation] if backend == "cpu" else [])
    plugin.hal_tuner = hookimpl(lambda backend: made if backend == "cpu" else None)
    registry.register(plugin, "cpu.tunable")
    yield made
    registry.unregister("cpu.tunable")


def call(backward: bool = False) -> Call:
    arguments = {"x": torch.randn(6, 64), "weight": torch.randn(64), "bias": torch.randn(64)}
    return Call(OP, arguments, backward)


def test_the_fastest_right_tactic_is_kept_and_the_others_are_refused_with_reasons(fake: Fake) -> None:
    (trial,) = tune(call(), fake, CPU)
    assert fake.kept in ("fast", "wrong gradient")  # whose results are right, and as fast
    assert (trial.before, trial.chosen) == ("in use", fake.kept)
    assert trial.before_us is not None and trial.chosen_us < trial.before_us
    assert sorted(trial.refused) == ["crashes", "wrong"]
    assert trial.refused["wrong"].startswith("R1") or "y[" in trial.refused["wrong"]
    assert trial.refused["crashes"] == "RuntimeError: out of resource: shared memory"


def test_gradients_are_checked_by_their_own_bounds(fake: Fake) -> None:
    (trial,) = tune(call(backward=True), fake, CPU)
    assert "d_x[" in trial.refused["wrong gradient"]


def test_a_tactic_that_gains_nothing_is_not_kept(fake: Fake) -> None:
    fake.choice = Choice("example", "(8,)", ("fast", "in use"))
    (trial,) = tune(call(), fake, CPU)
    assert (trial.chosen, fake.kept) == ("fast", "")


def test_where_no_tactic_is_right_nothing_is_kept(fake: Fake) -> None:
    fake.choice = Choice("example", "(8,)", ("wrong", "crashes"))
    fake.force = ""
    with pytest.raises(UnsupportedError, match="no tactic is right"):
        tune(call(), fake, CPU)
    assert fake.kept == ""


def test_nothing_is_tuned_inside_a_capture(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "capturing", lambda device: True)
    with pytest.raises(CaptureError, match="not tuned inside a graph capture"):
        tune(call(), fake, CPU)


def test_an_operators_call_never_tunes(fake: Fake) -> None:
    hal.ops.layer_norm(torch.randn(3, 8))
    assert fake.kept == ""


def test_warmup_tunes_a_suites_calls_and_shows_what_it_chose(fake: Fake) -> None:
    done = CliRunner().invoke(app, ["warmup", "--suite", "smoke", "--match", "layer_norm", "--tune"])
    assert done.exit_code == 0, done.output
    assert "calls made ready" in done.output and "example" in done.output
    assert fake.kept


def test_warmup_without_a_tuner_compiles_and_says_that_there_is_nothing_to_tune() -> None:
    done = CliRunner().invoke(app, ["warmup", "--suite", "smoke", "--match", "softmax", "--tune"])
    assert done.exit_code == 0, done.output
    assert "backend cpu has nothing to tune" in done.output and "1 calls made ready on cpu" in done.output


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--suite", "huge"], "there are smoke, core"),
        (["--match", "nothing like it"], "no workload of core"),
        (["--dtype", "int8"], "there are bfloat16"),
        (["--model", "nowhere.gguf", "--tokens", "12,x"], "numbers above 0"),
    ],
)
def test_warmup_refuses_what_means_nothing(arguments: list[str], said: str) -> None:
    done = CliRunner().invoke(app, ["warmup", *arguments])
    assert done.exit_code == 2 and said in " ".join(done.output.split())


@pytest.mark.model
def test_warmup_makes_ready_what_a_model_calls() -> None:
    arguments = ["warmup", "--model", str(model_path()), "--tokens", "8,12", "--dtype", "float32"]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    ready = next(line for line in done.output.splitlines() if "calls made ready" in line)
    assert int(ready.split()[0]) >= 10
