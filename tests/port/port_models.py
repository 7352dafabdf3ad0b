"""Tiny random models of several families, and what tests compare them with."""

from __future__ import annotations

import copy

import torch
import transformers

BASE = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
WIDE = BASE | {"head_dim": 16}

CONFIGS = {
    "llama": lambda: transformers.LlamaConfig(**BASE),
    "qwen2": lambda: transformers.Qwen2Config(**BASE),
    "qwen3": lambda: transformers.Qwen3Config(**WIDE),
    "mistral": lambda: transformers.MistralConfig(**BASE, sliding_window=8),
    "gemma": lambda: transformers.GemmaConfig(**WIDE),
    "gemma2": lambda: transformers.Gemma2Config(**WIDE, sliding_window=8, attn_implementation="eager"),
    "gemma3": lambda: transformers.Gemma3TextConfig(**WIDE, sliding_window=8),
    "phi3": lambda: transformers.Phi3Config(**BASE),
    "glm": lambda: transformers.GlmConfig(**WIDE),
    "olmo2": lambda: transformers.Olmo2Config(**BASE),
    "smollm3": lambda: transformers.SmolLM3Config(**BASE, no_rope_layers=[1, 0]),
}


def tiny(family: str, dtype: torch.dtype = torch.float32, **changes: object) -> transformers.PreTrainedModel:
    """A random model of a family, two layers deep; every norm weight and bias is random too."""
    torch.manual_seed(7)
    config = CONFIGS[family]()
    for name, value in changes.items():
        setattr(config, name, value)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    for parameter in model.parameters():
        if parameter.ndim == 1:
            parameter.data.add_(torch.rand_like(parameter) * 0.5)
    return model.to(dtype)


def prompt(batch: int = 2, length: int = 12) -> torch.Tensor:
    return torch.randint(3, 97, (batch, length), generator=torch.Generator().manual_seed(5))


def twin(model: torch.nn.Module, dtype: torch.dtype = torch.float64) -> torch.nn.Module:
    return copy.deepcopy(model).to(dtype)


def rmse(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found.double() - exact.double()).square().mean().sqrt())
