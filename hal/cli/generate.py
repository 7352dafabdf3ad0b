"""`hal generate`: answer a prompt with a real model, and show what ran where."""

from __future__ import annotations

from contextlib import ExitStack
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hal.cli._console import console, line, print_json, table, torch_device
from hal.errors import ArgumentError

if TYPE_CHECKING:
    from hal.port.generation import Generation
    from hal.port.shares import Shares
    from hal.port.transformers import Applied


class DtypeName(StrEnum):
    """Dtypes that a model is run in."""

    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


def generate(
    prompt: Annotated[str, typer.Argument(help="A message to the model, or text to continue.")],
    model: Annotated[
        Path,
        typer.Option(metavar="PATH", help="A GGUF file or a Hugging Face directory. Nothing is downloaded."),
    ],
    max_new_tokens: Annotated[int, typer.Option(min=1, metavar="N", help="How many tokens at most.")] = 64,
    dtype: Annotated[DtypeName, typer.Option(help="Dtype of weights and activations.")] = DtypeName.float32,
    backend: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Backend, such as cpu or portable:cpu. Default: HAL_BACKEND, else auto."),
    ] = None,
    device: Annotated[str, typer.Option(metavar="DEVICE", help="torch device, such as cpu or cuda:0.")] = "cpu",
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue the prompt as it stands, whatever template the model has.")
    ] = False,
    no_hal: Annotated[bool, typer.Option("--no-hal", help="Run the model untouched, for comparison.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON: text, rates, replacements, dispatch report.")
    ] = False,
) -> None:
    """Answer a prompt greedily with a model whose operators run through hal.

    A model with a chat template gets the prompt as a user's message; others, and any with --raw, continue it.

    Prints the text, tokens per second, what was replaced in the model, what ran where and how often, and the share
    of time and arithmetic that ran through hal (measured on eight more tokens). Needs `torch-hal[transformers]`.

    Examples:

    - `hal generate --model SmolLM2-135M-Instruct.Q4_1.gguf "What is the capital of France?"`
    - `hal generate --model SmolLM2-135M-Instruct.Q4_1.gguf --raw "The capital of France is"`
    - `HAL_BACKEND=portable:cpu hal generate --model ./model "Once" --max-new-tokens 20 --json`
    """
    import torch

    import hal
    from hal.port import generation, loading
    from hal.port.transformers import apply

    try:
        prompt.encode()
    except UnicodeEncodeError:
        raise ArgumentError("the prompt is not UTF-8 text; set a UTF-8 locale, or convert it") from None
    torch_device(device, used=True)
    applied: Applied | None = None
    with ExitStack() as stack:
        if backend is not None:
            stack.enter_context(hal.use(backend=backend))
        loaded, tokenizer = loading.load(model, getattr(torch, dtype.value), device)
        if not no_hal:
            applied = stack.enter_context(apply(loaded))
        found = generation.generate(loaded, tokenizer, prompt, max_new_tokens, raw)
        shares = None if no_hal else generation.shares(loaded, tokenizer, prompt, raw=raw)
        chat = generation.is_chat(tokenizer) and not raw
    if as_json:
        print_json(_data(prompt, found, applied, shares))
    else:
        _show("" if chat else prompt, found, applied, shares)


def _data(prompt: str, found: Generation, applied: Applied | None, shares: Shares | None) -> dict[str, Any]:
    return {
        "prompt": prompt,
        "text": found.text,
        "token_ids": list(found.token_ids),
        "prompt_tokens": found.prompt_tokens,
        "seconds_to_first_token": found.first_seconds,
        "tokens_per_second": found.tokens_per_second,
        "model": None if applied is None else applied.to_dict(),
        "report": found.report,
        "shares": None if shares is None else shares.to_dict(),
    }


def _show(prompt: str, found: Generation, applied: Applied | None, shares: Shares | None) -> None:
    line(prompt + found.text)
    rate = found.tokens_per_second
    speed = "" if rate is None else f", then {rate:.1f} tokens/s"
    line(
        f"\n{found.prompt_tokens} + {len(found.token_ids)} tokens, the first after {found.first_seconds:.2f} s{speed}",
        "bold",
    )
    if applied is None or shares is None:
        line("The model ran untouched.")
        return
    line(f"\n{applied}\n")
    seconds = {_plain(name): value for name, value in shares.hal_seconds.items()}
    total = sum(shares.hal_seconds.values()) + sum(shares.other_seconds.values())
    rows = table()
    for column in ("operator", "ran on"):
        rows.add_column(column)
    for column in ("calls", "share of time"):
        rows.add_column(column, justify="right")
    for call in found.report["calls"]:
        share = f"{seconds.get(call['op'], 0.0) / total:.1%}"
        rows.add_row(call["op"], f"{call['backend']}/{call['implementation']}", str(call["calls"]), share)
    rows.add_row("outside hal", "torch", "", f"{1 - shares.seconds:.1%}")
    console().print(rows)
    line(f"through hal: {shares.seconds:.1%} of operator time, {shares.flops:.2%} of the arithmetic", "bold")
    for why, count in found.report["synchronisations"].items():
        line(f"{count} synchronisations by {why}", "yellow")


def _plain(torch_name: str) -> str:
    return torch_name.removesuffix("_fwd").removesuffix("_bwd")
