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

__all__ = ["Generation", "generate", "shares"]

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


def generate(model: Any, tokenizer: Any, prompt: str, max_new_tokens: int) -> Generation:
    """Continue a prompt greedily. The dispatch report covers this call alone.

    Raises ArgumentError if the prompt is empty or longer than the model takes.
    """
    inputs = _encoded(model, tokenizer, prompt, max_new_tokens)
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


def shares(model: Any, tokenizer: Any, prompt: str, max_new_tokens: int = _WATCHED_TOKENS) -> Shares:
    """Shares of time and arithmetic that run through hal, measured on a generation of its own."""
    inputs = _encoded(model, tokenizer, prompt, max_new_tokens)
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


def _encoded(model: Any, tokenizer: Any, prompt: str, max_new_tokens: int) -> Any:
    inputs = tokenizer(prompt, return_tensors="pt").to(model.device)
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
