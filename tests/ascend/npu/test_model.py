"""SmolLM2-135M-Instruct with hal's operators on the simulated device, beside the same model on the CPU."""

from __future__ import annotations

import pytest
import torch

import hal
from hal.bench.model import model_path
from hal.port import generation, loading
from hal.port.transformers import apply

pytestmark = [pytest.mark.model, pytest.mark.slow]

TOKENS = 8
OPERATORS = {"linear", "rms_norm", "add_rms_norm", "attention", "rotary_embedding", "silu_and_mul"}


@pytest.fixture
def fallbacks(capfd):
    """Operators that torch_npu has run on the CPU since this was last asked."""
    before = torch.is_warn_always_enabled()
    torch.set_warn_always(True)

    def told():
        return [line for line in capfd.readouterr().err.splitlines() if "fall back to run on the CPU" in line]

    torch.nonzero_static(torch.ones(1, device="npu"), size=1)  # one that torch_npu has not
    assert len(told()) == 1
    yield told
    torch.set_warn_always(before)


def test_greedy_tokens_are_the_cpus_and_native_operators_served_them(fallbacks):
    model, tokenizer = loading.load(model_path(), torch.float16, "cpu")

    def generated(backend):
        with hal.use(backend=backend, fallback="error"), apply(model):
            return generation.generate(model, tokenizer, "The capital of France is", TOKENS, raw=True)

    expected = generated("cpu")
    model.to("npu:0")
    found = generated("ascend")
    assert len(found.token_ids) == TOKENS
    assert found.token_ids == expected.token_ids
    calls = found.report["calls"]
    assert {call["op"] for call in calls} == OPERATORS
    assert {(call["backend"], call["kind"], call["device"]) for call in calls} == {("ascend", "native", "npu")}
    assert fallbacks() == []
