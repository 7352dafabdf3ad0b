"""Greedy generation with a static cache, timed, with what ran where."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hal import dispatch_report
from hal.errors import ArgumentError
from hal.port.shares import Shares, Watch

__all__ = ["Generation", "generate", "is_chat", "shares"]

_WATCHED_TOKENS = 8


@dataclass(frozen=True)
class Generation:
    """A prompt's continuation. Seconds: to the first token, and for the tokens after it."""

    text: str
    token_ids: tuple[int, ...]
    prompt_tokens: int
    first_seconds: float
    decode_seconds: float
    report: dict[str, Any]

    @property
    def tokens_per_second(self) -> float | None:
        """Rate of decoding, the first token left out; None if there was only one."""
        later = len(self.token_ids) - 1
        return later / self.decode_seconds if later > 0 and self.decode_seconds > 0 else None


class _Clock:
    """Takes the time of each token; transformers calls it as a streamer."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: Tensor) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass


def generate(model: Any, tokenizer: Any, prompt: str, max_new_tokens: int, raw: bool = False) -> Generation:
    """Answer a prompt greedily. The dispatch report covers this call alone.

    A model with a chat template gets the prompt as a user's message, unless `raw`; others continue it.

    Raises ArgumentError if the prompt is empty or longer than the model takes.
    """
    inputs = _encoded(model, tokenizer, prompt, max_new_tokens, raw)
    clock = _Clock()
    dispatch_report.reset()
    start = time.perf_counter()
    with torch.inference_mode():
        found = model.generate(
            **inputs,
            max_new_tokens=max_new_tokens,
            do_sample=False,
            cache_implementation="static",
            disable_compile=True,
            streamer=clock,
        )
    n_prompt = inputs["input_ids"].shape[1]
    ids = tuple(found[0, n_prompt:].tolist())
    # The streamer is given the prompt first.
    tokens = clock.times[1:]
    return Generation(
        tokenizer.decode(ids, skip_special_tokens=True),
        ids,
        n_prompt,
        tokens[0] - start,
        tokens[-1] - tokens[0],
        dispatch_report.report(),
    )


def is_chat(tokenizer: Any) -> bool:
    """Whether the model was trained on conversations, as far as its tokenizer says."""
    return bool(getattr(tokenizer, "chat_template", None))


def shares(model: Any, tokenizer: Any, prompt: str, max_new_tokens: int = _WATCHED_TOKENS, raw: bool = False) -> Shares:
    """Shares of time and arithmetic that run through hal, measured on a generation of its own."""
    inputs = _encoded(model, tokenizer, prompt, max_new_tokens, raw)
    watch = Watch()
    with torch.inference_mode(), watch:
        model.generate(
            **inputs,
            max_new_tokens=max_new_tokens,
            do_sample=False,
            cache_implementation="static",
            disable_compile=True,
        )
    return watch.shares


def _encoded(model: Any, tokenizer: Any, prompt: str, max_new_tokens: int, raw: bool) -> Any:
    chat = prompt and is_chat(tokenizer) and not raw
    if chat:
        messages = [{"role": "user", "content": prompt}]
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    # The template writes the special tokens itself.
    inputs = tokenizer(prompt, return_tensors="pt", add_special_tokens=not chat).to(model.device)
    n_prompt = inputs["input_ids"].shape[1]
    if n_prompt == 0:
        raise ArgumentError("the prompt is empty: there is nothing to continue")
    most = getattr(model.config, "max_position_embeddings", None)
    if most is not None and n_prompt + max_new_tokens > most:
        raise ArgumentError(
            f"{n_prompt} tokens of prompt and {max_new_tokens} new ones exceed the model's {most} positions; "
            "shorten the prompt or ask for fewer tokens"
        )
    with contextlib.suppress(KeyError):
        del inputs["token_type_ids"]
    return inputs
