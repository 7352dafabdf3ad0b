"""What apply replaces, what it leaves, and that undo gives the model back."""

from __future__ import annotations

import copy
import gc
import io
import weakref

import pytest
import torch
from port_models import CONFIGS, prompt, rmse, tiny, twin
from torch import nn
from torch.nn import functional as F

from hal import dispatch_report
from hal.errors import ArgumentError
from hal.port.transformers import apply

# Rule R2's factor for a forward pass: the applied model may be this much further from float64 than the untouched one.
R2 = 1.2


@pytest.fixture(params=sorted(CONFIGS))
def family(request):
    return request.param


def test_logits_are_as_close_to_float64_as_the_untouched_models(family):
    model, ids = tiny(family), prompt()
    with torch.no_grad():
        exact, untouched = twin(model)(ids).logits, model(ids).logits
        with apply(model):
            dispatch_report.reset()
            found = model(ids).logits
            ran = {call["op"]: call["calls"] for call in dispatch_report.report()["calls"]}
    assert ran["attention"] == 2
    assert {"linear", "rms_norm"} <= set(ran)
    slack = 1 + 2 / exact.numel() ** 0.5
    unit = torch.finfo(torch.float32).eps / 2
    allowed = R2 * slack * rmse(untouched, exact) + unit * float(exact.square().mean().sqrt()) / 8
    assert rmse(found, exact) <= allowed


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generation_with_left_padding_is_equal(family, cache):
    model, ids = tiny(family), prompt()
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    options = {"attention_mask": mask, "max_new_tokens": 12, "do_sample": False, "disable_compile": True}
    options["cache_implementation"] = cache
    expected = model.generate(ids, **options)
    with apply(model):
        found = model.generate(ids, **options)
    assert torch.equal(found, expected)


def test_undo_gives_the_model_back_exactly(family):
    model, ids = tiny(family), prompt()
    implementation = model.config._attn_implementation
    attributes = {name: set(vars(m)) for name, m in model.named_modules()}
    weights = {name: (p, p.clone()) for name, p in model.state_dict(keep_vars=True).items()}
    with torch.no_grad():
        before = model(ids).logits
        applied = apply(model)
        assert list(model.state_dict()) == list(weights)
        assert model.config._attn_implementation == "hal"
        model(ids)
        applied.undo()
        after = model(ids).logits
    assert torch.equal(before, after)
    assert model.config._attn_implementation == implementation
    assert {name: set(vars(m)) for name, m in model.named_modules()} == attributes
    for name, p in model.state_dict(keep_vars=True).items():
        same, values = weights[name]
        assert p is same
        assert torch.equal(p, values)
        assert p.untyped_storage().nbytes() == p.numel() * p.itemsize


@pytest.mark.parametrize(
    ("family", "how"),
    [
        ("llama", "weight after rounding"),
        ("qwen3", "weight after rounding"),
        ("olmo2", "weight before rounding"),
        ("gemma2", "weight + 1 before rounding"),
    ],
)
def test_norms_get_the_rounding_that_the_model_has(family, how):
    with apply(tiny(family)) as applied:
        norms = [item for item in applied.replaced if item.ops == ("rms_norm",)]
    assert norms
    assert {item.how for item in norms} == {how}


@pytest.mark.parametrize(
    ("family", "how"),
    [
        ("llama", "rotary in halves"),
        ("qwen3", "q and k normed per head, rotary in halves"),
        ("olmo2", "q and k normed over all heads, rotary in halves"),
        ("glm", "rotary in interleaved pairs"),
        ("gemma2", "rotary in halves, softcap 50"),
    ],
)
def test_attention_modules_are_recognised_by_what_they_hand_over(family, how):
    with apply(tiny(family)) as applied:
        found = [item.how for item in applied.replaced if "attention" in item.ops]
    assert found == [how, how]


def test_a_layer_without_rotary_is_told_from_one_with():
    with apply(tiny("smollm3")) as applied:
        found = [item.how for item in applied.replaced if "attention" in item.ops]
    assert found == ["rotary in halves", "no rotary"]


def test_a_norm_that_only_looks_like_one_is_left():
    class Doubling(type(tiny("llama").model.norm)):
        def forward(self, hidden_states):
            return 2 * super().forward(hidden_states)

    model, ids = tiny("llama"), prompt()
    model.model.norm.__class__ = Doubling
    with torch.no_grad():
        expected = model(ids).logits
        with apply(model) as applied:
            found = model(ids).logits
    assert [item.path for item in applied.left if item.module == "Doubling"] == ["model.norm"]
    torch.testing.assert_close(found, expected)


def test_an_mlp_that_only_looks_gated_is_left():
    model, ids = tiny("llama"), prompt()

    class Ungated(type(model.model.layers[0].mlp)):
        def forward(self, x):
            return self.down_proj(self.act_fn(self.gate_proj(x)) + self.up_proj(x))

    model.model.layers[0].mlp.__class__ = Ungated
    with torch.no_grad():
        expected = model(ids).logits
        with apply(model) as applied:
            found = model(ids).logits
    assert [item.path for item in applied.left if item.module == "Ungated"] == ["model.layers.0.mlp"]
    torch.testing.assert_close(found, expected)


def test_an_attention_with_one_more_step_is_left():
    model, ids = tiny("llama"), prompt()

    class Gated(type(model.model.layers[0].self_attn)):
        def forward(self, hidden_states, *args, cache=None, **kwargs):
            output, weights = super().forward(hidden_states, *args, cache=cache, **kwargs)
            return output * hidden_states.sigmoid(), weights

    model.model.layers[1].self_attn.__class__ = Gated
    with torch.no_grad():
        expected = model(ids).logits
        with apply(model) as applied:
            found = model(ids).logits
    assert [item.path for item in applied.left if item.module == "Gated"] == ["model.layers.1.self_attn"]
    torch.testing.assert_close(found, expected)


def test_the_summary_names_what_was_replaced_and_what_was_left_with_the_reason():
    with apply(tiny("phi3")) as applied:
        text = str(applied)
    assert "Phi3RMSNorm: rms_norm (weight after rounding)" in text
    assert "Phi3Attention: its projections are laid out in a way that hal does not know" in text
    assert applied.to_dict()["model"] == "Phi3ForCausalLM"


def test_every_computing_module_is_accounted_for():
    model = tiny("llama")
    with apply(model) as applied:
        named = {item.path for item in (*applied.replaced, *applied.left)}
    inside_mlp = {f"model.layers.{i}.mlp.act_fn" for i in range(2)}
    leaves = {name for name, m in model.named_modules() if not list(m.children())} - inside_mlp
    assert leaves <= named


def test_a_model_that_already_runs_through_hal_is_refused():
    model = tiny("llama")
    with apply(model), pytest.raises(ArgumentError, match="undo"):
        apply(model)
    with apply(model):
        pass


def test_a_model_stays_applied_when_the_result_is_dropped_and_is_still_collected():
    model = tiny("llama")
    apply(model)
    with pytest.raises(ArgumentError, match="undo"):
        apply(model)
    watcher = weakref.ref(model)
    del model
    gc.collect()
    assert watcher() is None


def test_what_is_no_transformers_model_is_refused():
    with pytest.raises(ArgumentError, match="Linear"):
        apply(nn.Linear(2, 2))


def test_undo_refuses_while_something_else_stands_on_top():
    model, ids = tiny("llama"), prompt()
    applied = apply(model)
    ours = model.lm_head.forward
    model.lm_head.forward = lambda x: ours(x)
    with pytest.raises(ArgumentError, match="replaced again"):
        applied.undo()
    assert model.config._attn_implementation == "hal"
    model.lm_head.forward = ours
    applied.undo()
    assert "forward" not in vars(model.lm_head)
    model(ids)


def test_a_failing_apply_leaves_the_model_untouched(monkeypatch):
    model = tiny("llama")
    monkeypatch.setattr("hal.port.transformers.Layers", None)
    with pytest.raises(TypeError):
        apply(model)
    assert not any("forward" in vars(m) for m in model.modules())
    assert model.config._attn_implementation == "sdpa"


def test_a_copy_of_an_applied_model_has_its_own_weights():
    model, ids = tiny("llama"), prompt()
    with torch.no_grad(), apply(model):
        other = copy.deepcopy(model)
        before = other(ids).logits
        model.lm_head.weight.zero_()
        assert torch.equal(other(ids).logits, before)


def test_an_adapter_put_in_after_apply_is_respected():
    model, ids = tiny("llama"), prompt()
    with torch.no_grad(), apply(model):
        before = model(ids).logits
        inner = model.model.layers[0].self_attn.q_proj
        model.model.layers[0].self_attn.q_proj = nn.Sequential(inner, nn.Identity(), nn.LayerNorm(64))
        assert not torch.allclose(model(ids).logits, before)
        model.model.layers[0].self_attn.q_proj = inner
        assert torch.equal(model(ids).logits, before)


def test_another_attention_chosen_after_apply_is_respected():
    model, ids = tiny("llama"), prompt()
    with torch.no_grad(), apply(model):
        model.set_attn_implementation("eager")
        weights = model(ids, output_attentions=True).attentions
    assert len(weights) == 2
    assert weights[0].shape == (2, 4, 12, 12)


def test_hidden_states_can_still_be_asked_for():
    model, ids = tiny("llama"), prompt()
    with torch.no_grad():
        expected = model(ids, output_hidden_states=True).hidden_states
        with apply(model):
            found = model(ids, output_hidden_states=True).hidden_states
    assert len(found) == len(expected) == 3
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)


def test_a_part_of_an_applied_model_one_around_it_and_a_copy_are_refused():
    model = tiny("llama")
    with apply(model):
        for other in (model.model, copy.deepcopy(model)):
            with pytest.raises(ArgumentError, match="already runs through hal"):
                apply(other)
    with apply(model.model), pytest.raises(ArgumentError, match="already runs through hal"):
        apply(model)
    with apply(model):
        pass


def test_a_pickled_applied_model_is_loaded_with_its_classes_forwards():
    model, ids = tiny("llama"), prompt()
    stored = io.BytesIO()
    with torch.no_grad(), apply(model):
        torch.save(model, stored)
    stored.seek(0)
    loaded = torch.load(stored, weights_only=False)
    assert {m.forward.__func__ for m in loaded.modules()} == {type(m).forward for m in loaded.modules()}
    with torch.no_grad():
        torch.testing.assert_close(loaded(ids).logits, model(ids).logits)


@pytest.mark.parametrize(
    "activations",
    [(nn.GELU(), nn.GELU("tanh")), (F.silu, F.gelu), (nn.LeakyReLU(0.1), nn.SiLU())],
    ids=["two kinds of one class", "functions", "one of them unknown"],
)
def test_each_layers_own_activation_is_told_from_the_others(activations):
    model, ids = tiny("llama"), prompt()
    for layer, activation in zip(model.model.layers, activations, strict=True):
        del layer.mlp.act_fn
        layer.mlp.act_fn = activation
    with torch.no_grad():
        expected = model(ids).logits
        with apply(model):
            torch.testing.assert_close(model(ids).logits, expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("what", ["activation", "hook on the activation", "eps"])
def test_what_is_changed_after_apply_counts(what):
    model, ids, layer = tiny("llama"), prompt(), 1
    with torch.no_grad():
        before = model(ids).logits
        applied = apply(model)
        if what == "activation":
            model.model.layers[layer].mlp.act_fn = nn.ReLU()
        elif what == "hook on the activation":
            model.model.layers[layer].mlp.act_fn.register_forward_hook(lambda module, args, output: 2 * output)
        else:
            model.model.norm.variance_epsilon = 0.5
            model.model.layers[layer].post_attention_layernorm.variance_epsilon = 0.5
        found = model(ids).logits
        applied.undo()
        expected = model(ids).logits
    assert not torch.allclose(expected, before, atol=1e-3)
    torch.testing.assert_close(found, expected)
