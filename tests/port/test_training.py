"""Training an applied model: gradients, dropout, checkpointing, bfloat16, torch.compile."""

from __future__ import annotations

import pytest
import torch
from port_models import prompt, rmse, tiny, twin

from hal import dispatch_report
from hal.port.transformers import apply

FAMILIES = ("llama", "qwen3", "gemma2", "glm")
# Rule R2's factor for gradients.
R2_GRADIENTS = 1.5


def gradients(model, ids):
    model.zero_grad()
    model(ids, labels=ids).loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_are_as_close_to_float64_as_the_untouched_models(family):
    model, ids = tiny(family).train(), prompt()
    exact, untouched = gradients(twin(model), ids), gradients(model, ids)
    with apply(model):
        found = gradients(model, ids)
    assert set(found) == set(exact)

    def total(grads):
        return sum(rmse(grads[name], exact[name]) ** 2 * exact[name].numel() for name in exact) ** 0.5

    assert total(found) <= R2_GRADIENTS * total(untouched)
    for name, gradient in exact.items():
        assert rmse(found[name], gradient) <= 1e-5 * float(gradient.square().mean().sqrt()) + 1e-9, name


@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_logits_are_no_worse_than_the_untouched_models(family):
    model, ids = tiny(family, torch.bfloat16), prompt()
    with torch.no_grad():
        exact, untouched = twin(model)(ids).logits, model(ids).logits
        with apply(model) as applied:
            found = model(ids).logits
    assert found.dtype is torch.bfloat16
    assert any("attention" in item.ops for item in applied.replaced)
    assert rmse(found, exact) <= 1.2 * (1 + 2 / exact.numel() ** 0.5) * rmse(untouched, exact)


def test_attention_that_trains_with_dropout_is_left_and_says_so():
    model = tiny("llama", attention_dropout=0.25).train()
    with apply(model) as applied:
        left = [item for item in applied.left if item.module == "LlamaAttention"]
        assert not any("attention" in item.ops for item in applied.replaced)
    assert len(left) == 2
    assert all("dropout 0.25" in item.why for item in left)


def test_attention_with_dropout_uses_hal_in_evaluation_only():
    model, ids = tiny("llama", attention_dropout=0.5), prompt()
    with apply(model) as applied, torch.no_grad():
        assert any("its own forward while it trains" in item.how for item in applied.replaced)
        assert torch.equal(model(ids).logits, model(ids).logits)
        model.train()
        torch.manual_seed(0)
        first = model(ids).logits
        assert not torch.equal(model(ids).logits, first)
        torch.manual_seed(0)
        found = model(ids).logits
        assert torch.equal(found, first)


def test_gradient_checkpointing_gives_the_same_gradients():
    model, ids = tiny("llama").train(), prompt()
    with apply(model):
        expected = gradients(model, ids)
        model.activation_checkpointing_enable()
        calls = []
        hook = model.model.layers[0].mlp.register_forward_pre_hook(lambda *_: calls.append(1))
        found = gradients(model, ids)
        hook.remove()
        model.activation_checkpointing_disable()
    assert len(calls) == 2
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient)


def test_a_compiled_applied_model_gives_the_same_logits():
    model, ids = tiny("llama"), prompt()
    with torch.no_grad(), apply(model):
        expected = model(ids).logits
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(ids).logits, expected)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2"])
def test_under_autocast_logits_and_gradients_are_no_worse_than_the_untouched_models(family):
    model, ids = tiny(family).train(), prompt()

    def run():
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(ids).logits
        return logits.detach(), gradients_under_autocast(model, ids)

    exact_logits, exact = twin(model)(ids).logits.detach(), gradients(twin(model), ids)
    logits, untouched = run()
    with apply(model):
        dispatch_report.reset()
        found_logits, found = run()
        ran = {call["op"] for call in dispatch_report.report()["calls"]}
    assert {"linear", "attention", "rms_norm"} <= ran
    assert found_logits.dtype is logits.dtype
    assert rmse(found_logits, exact_logits) <= 1.2 * rmse(logits, exact_logits)
    errors = [sum(rmse(g[name], exact[name]) ** 2 * exact[name].numel() for name in exact) for g in (found, untouched)]
    assert errors[0] ** 0.5 <= R2_GRADIENTS * errors[1] ** 0.5


def gradients_under_autocast(model, ids):
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(ids, labels=ids).loss
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
