"""SmolLM2-135M-Instruct through hal beside the untouched model."""

from __future__ import annotations

import pytest
import torch

from hal.bench.model import compare, model_path, table

pytestmark = [pytest.mark.model, pytest.mark.slow]


@pytest.fixture(scope="module")
def comparison():
    return compare(model_path(), torch.float32, tokens=64, rounds=0)


def test_greedy_tokens_are_equal_on_three_prompts(comparison):
    assert comparison.tokens == 64
    assert comparison.equal_tokens == (True, True, True)


def test_logits_are_within_rule_r2_of_the_untouched_models(comparison):
    assert 0 < comparison.hal_error <= comparison.error_allowed


def test_nearly_all_of_the_work_runs_through_hal(comparison):
    assert comparison.flops_share > 0.99
    assert comparison.time_share > 0.9
    assert {c["op"] for c in comparison.calls} == {
        "linear",
        "rms_norm",
        "add_rms_norm",
        "rotary_embedding",
        "attention",
        "silu_and_mul",
    }


def test_the_table_says_what_was_compared(comparison):
    text = table(comparison)
    assert "equal greedy tokens: 3 of 3 prompts" in text
    assert "float32" in text
