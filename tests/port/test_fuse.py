"""Linear layers that share their input run as one, and only while that means the same."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers
from port_models import prompt, tiny
from torch import nn

from hal import dispatch_report
from hal.port.transformers import apply


def linear_calls(model, ids):
    dispatch_report.reset()
    with torch.no_grad():
        logits = model(ids).logits
    return logits, sum(c["calls"] for c in dispatch_report.report()["calls"] if c["op"] == "linear")


def storage_bytes(model):
    return sum({p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in model.parameters()}.values())


# Per layer q, k, v and gate, up as one each, o and down; then the head.
FUSED, APART = 2 * 4 + 1, 2 * 7 + 1


def test_layers_that_share_their_input_run_as_one():
    model, ids = tiny("qwen2"), prompt()
    with torch.no_grad():
        expected = model(ids).logits
    with apply(model):
        found, calls = linear_calls(model, ids)
    assert calls == FUSED
    torch.testing.assert_close(found, expected)


def test_memory_is_not_doubled():
    model = tiny("qwen2")
    before = storage_bytes(model)
    with apply(model):
        assert storage_bytes(model) == before
    assert storage_bytes(model) == before


def test_while_gradients_are_recorded_the_layers_run_one_by_one():
    model, ids = tiny("llama"), prompt()
    with apply(model):
        dispatch_report.reset()
        model(ids)
        calls = sum(c["calls"] for c in dispatch_report.report()["calls"] if c["op"] == "linear")
    assert calls == APART


def test_an_optimiser_step_is_seen():
    model, ids = tiny("llama").train(), prompt()
    other = copy.deepcopy(model)
    for m in (model, other):
        with apply(m) if m is model else torch.enable_grad():
            optimiser = torch.optim.SGD(m.parameters(), lr=0.5)
            m(ids, labels=ids).loss.backward()
            optimiser.step()
            found, calls = linear_calls(m, ids)
            if m is model:
                applied, applied_calls = found, calls
    assert applied_calls == FUSED
    torch.testing.assert_close(applied, found, rtol=1e-4, atol=1e-4)


def test_undo_keeps_what_training_changed():
    model = tiny("llama")
    weight = model.model.layers[0].mlp.up_proj.weight
    with apply(model), torch.no_grad():
        weight.fill_(0.5)
    assert bool((weight == 0.5).all())


@pytest.mark.parametrize("change", ["dtype", "adapter", "hook", "assign"])
def test_what_breaks_the_arrangement_is_noticed(change):
    model, ids = tiny("llama"), prompt()
    with apply(model):
        before, calls = linear_calls(model, ids)
        assert calls == FUSED
        mlp = model.model.layers[0].mlp
        if change == "dtype":
            model.double()
        elif change == "adapter":
            mlp.up_proj = nn.Sequential(mlp.up_proj, nn.Tanh())
        elif change == "hook":
            mlp.up_proj.register_forward_hook(lambda module, args, output: output * 2)
        else:
            zeros = {"up_proj.weight": torch.zeros_like(mlp.up_proj.weight)}
            mlp.load_state_dict(mlp.state_dict() | zeros, assign=True)
        after, calls = linear_calls(model, ids)
        assert calls > FUSED
        if change == "dtype":
            torch.testing.assert_close(after.float(), before)
        else:
            assert not torch.allclose(after, before)
        if change == "adapter":
            mlp.up_proj = mlp.up_proj[0]


def test_values_loaded_in_place_are_seen():
    model, other, ids = tiny("llama"), tiny("llama"), prompt()
    with torch.no_grad():
        for p in other.parameters():
            p.mul_(1.5)
        expected = other(ids).logits
    with apply(model):
        model.load_state_dict(other.state_dict())
        found, calls = linear_calls(model, ids)
    assert calls == FUSED
    torch.testing.assert_close(found, expected)


def test_tied_weights_are_not_moved():
    model, ids = tiny("llama"), prompt()
    mlp = model.model.layers[0].mlp
    mlp.up_proj.weight = mlp.gate_proj.weight
    pointer = mlp.up_proj.weight.data_ptr()
    with torch.no_grad():
        expected = model(ids).logits
    with apply(model):
        found, calls = linear_calls(model, ids)
        assert mlp.up_proj.weight.data_ptr() == pointer
    assert calls == FUSED + 1
    torch.testing.assert_close(found, expected)


def test_an_applied_model_saves_and_loads(tmp_path):
    model, ids = tiny("llama"), prompt()
    with torch.no_grad():
        expected = model(ids).logits
    with apply(model):
        model.save_pretrained(tmp_path)
        torch.save(model.state_dict(), tmp_path / "state.pt")
    with torch.no_grad():
        loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
        assert loaded.config._attn_implementation == "sdpa"
        assert torch.equal(loaded(ids).logits, expected)
        loaded.load_state_dict(torch.load(tmp_path / "state.pt"))
        assert torch.equal(loaded(ids).logits, expected)
