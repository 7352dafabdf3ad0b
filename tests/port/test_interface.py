"""hal's attention under transformers' conventions: masks, softcap, sinks, biases, caches, grouped heads."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from port_models import prompt, tiny
from transformers import AttentionInterface, StaticCache
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, causal_mask_function
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward as eager_with_sinks

from hal import dispatch_report
from hal.port import interface
from hal.port.transformers import apply

interface.register()
hal_attention = AttentionInterface()["hal"]
hal_mask = ALL_MASK_ATTENTION_FUNCTIONS["hal"]
sdpa = AttentionInterface()["sdpa"]

B, H, K, S, L, D = 2, 6, 2, 5, 9, 16


@pytest.fixture
def module():
    return SimpleNamespace(num_key_value_groups=H // K, is_causal=True, training=False)


def qkv(s=S, length=L):
    generator = torch.Generator().manual_seed(1)
    return (torch.randn(B, n, t, D, generator=generator) for n, t in ((H, s), (K, length), (K, length)))


def mask(s=S, length=L):
    keep = torch.ones(s, length, dtype=torch.bool).tril(length - s).expand(B, 1, s, length).clone()
    keep[0, :, :, :2] = False
    return keep


@pytest.mark.parametrize("additive", [False, True])
def test_a_mask_means_what_it_means_to_sdpa(module, additive):
    q, k, v = qkv()
    keep = mask()
    given = torch.zeros(keep.shape).masked_fill(~keep, torch.finfo(torch.float32).min) if additive else keep
    expected, _ = sdpa(module, q, k, v, given, scaling=0.3)
    found, weights = hal_attention(module, q, k, v, given, scaling=0.3)
    assert weights is None
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(("s", "length"), [(5, 5), (1, 9), (5, 9)])
def test_without_a_mask_queries_see_what_sdpa_lets_them_see(module, s, length):
    q, k, v = qkv(s, length)
    expected, _ = sdpa(module, q, k, v, None, scaling=0.3)
    found, _ = hal_attention(module, q, k, v, None, scaling=0.3)
    torch.testing.assert_close(found, expected)


def test_an_encoder_sees_everything(module):
    module.is_causal = False
    q, k, v = qkv()
    expected, _ = sdpa(module, q, k, v, None, scaling=0.3)
    found, _ = hal_attention(module, q, k, v, None, scaling=0.3)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("given", [None, "bool", "additive"])
def test_a_position_bias_is_added(module, given):
    q, k, v = qkv(S, S)
    bias = torch.randn(1, H, S, S, generator=torch.Generator().manual_seed(2))
    keep = mask(S, S)
    keep[..., 0] = True  # every row sees something: SDPA's answer for the others is not defined
    attention_mask = {
        None: None,
        "bool": keep,
        "additive": torch.zeros(keep.shape).masked_fill(~keep, torch.finfo(torch.float32).min),
    }[given]
    expected, _ = sdpa(module, q, k, v, attention_mask, scaling=0.3, position_bias=bias)
    found, _ = hal_attention(module, q, k, v, attention_mask, scaling=0.3, position_bias=bias)
    torch.testing.assert_close(found, expected)


def test_sinks_join_the_denominator(module):
    q, k, v = qkv()
    module.sinks = torch.tensor([-1.0, 0.0, 0.5, 1.0, 2.0, 3.0])
    keep = mask()
    additive = torch.zeros(keep.shape).masked_fill(~keep, torch.finfo(torch.float32).min)
    expected, _ = eager_with_sinks(module, q, k, v, additive, scaling=0.3)
    found, _ = hal_attention(module, q, k, v, keep, scaling=0.3, s_aux=module.sinks)
    torch.testing.assert_close(found, expected)


def test_dropout_goes_to_transformers_own_attention(module, caplog):
    q, k, v = qkv()
    dispatch_report.reset()
    torch.manual_seed(3)
    expected, _ = sdpa(module, q, k, v, mask(), dropout=0.5, scaling=0.3)
    torch.manual_seed(3)
    found, _ = hal_attention(module, q, k, v, mask(), dropout=0.5, scaling=0.3)
    assert torch.equal(found, expected)
    assert dispatch_report.report()["calls"] == []


def test_one_query_on_a_static_cache_needs_no_mask_and_only_the_filled_keys(module):
    found = hal_mask(B, 1, 32, torch.tensor(8), 0, causal_mask_function, allow_is_causal_skip=False, device="cpu")
    assert found.shape[-1] == 9
    assert bool(found.all())
    q, k, v = qkv(1, 32)
    k[:, :, 9:], v[:, :, 9:] = float("nan"), float("nan")
    expected, _ = sdpa(module, q, k[:, :, :9], v[:, :, :9], None, scaling=0.3)
    torch.testing.assert_close(hal_attention(module, q, k, v, found, scaling=0.3)[0], expected)


def test_padding_keeps_the_mask_over_the_filled_keys():
    padding = torch.ones(B, 9, dtype=torch.bool)
    padding[1, :3] = False
    found = hal_mask(
        B, 1, 32, torch.tensor(8), 0, causal_mask_function, padding, allow_is_causal_skip=False, device="cpu"
    )
    assert found.shape == (B, 1, 1, 9)
    assert torch.equal(found[:, 0, 0], padding)


def test_the_first_key_alone_is_not_mistaken_for_all_keys(module):
    found = hal_mask(B, 1, 4, torch.tensor(0), 0, causal_mask_function, allow_is_causal_skip=False, device="cpu")
    q, k, v = qkv(1, 4)
    expected, _ = sdpa(module, q, k[:, :, :1], v[:, :, :1], None, scaling=0.3)
    torch.testing.assert_close(hal_attention(module, q, k, v, found, scaling=0.3)[0], expected)


def test_a_static_cache_filled_in_two_steps_gives_the_same_logits():
    model, ids = tiny("llama"), prompt(1, 10)
    with torch.no_grad(), apply(model):
        whole = model(ids).logits
        cache = StaticCache(config=model.config, max_cache_len=16)
        first = model(ids[:, :6], cache=cache, use_cache=True).logits
        second = model(ids[:, 6:], cache=cache, use_cache=True).logits
    torch.testing.assert_close(torch.cat((first, second), 1), whole)


def test_grouped_heads_are_not_repeated(monkeypatch):
    seen = []
    attention = interface.attention
    monkeypatch.setattr(
        interface, "attention", lambda q, k, v, **rest: seen.append(k.shape) or attention(q, k, v, **rest)
    )
    model, ids = tiny("llama"), prompt()
    with torch.no_grad(), apply(model):
        seen.clear()
        model(ids)
    assert [shape[2] for shape in seen] == [2, 2]
