"""Settings of a model's own that a port must read right: how much of a head is rotated."""

from __future__ import annotations

import pytest
import torch

transformers = pytest.importorskip("transformers")

from hal.port import rotary  # noqa: E402
from hal.port import transformers as port  # noqa: E402

SHAPE = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
NESTED = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}}


@pytest.mark.parametrize(
    ("family", "spelling", "rotated"),
    [
        ("StableLm", {"partial_rotary_factor": 0.5}, 8),
        ("StableLm", NESTED, 8),
        ("Glm", {"partial_rotary_factor": 0.5, "head_dim": 16}, 8),
        ("Glm", NESTED | {"head_dim": 16}, 8),
        ("Glm", {"partial_rotary_factor": 1.0, "head_dim": 16}, 16),
        ("Llama", {}, 16),
    ],
)
def test_the_rotated_part_of_a_head_follows_every_spelling_and_never_shrinks(monkeypatch, family, spelling, rotated):
    """vllm-project/vllm-ascend#6581, vllm-project/vllm#43770, #16904.

    One of the spellings goes unread, or a shared rotary object is halved once per layer.
    """
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**SHAPE, **spelling)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    ids, seen, real = torch.arange(12)[None], [], rotary.rotary_embedding

    def spy(*args, **kwargs):
        seen.append(kwargs["rotary_dim"])
        return real(*args, **kwargs)

    monkeypatch.setattr(rotary, "rotary_embedding", spy)
    with torch.no_grad():
        expected = model(ids).logits
        for _ in range(3):
            with port.apply(model):
                seen.clear()
                logits = model(ids).logits
            assert seen == [rotated] * 3, "one call per layer, all alike"
            torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)
