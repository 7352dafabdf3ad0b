"""`hal warmup`: kernels compiled, and tuned if asked for, before they are needed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from hal.cli._console import console, line, table, torch_device
from hal.cli.bench import DTYPES, check_dtype

if TYPE_CHECKING:
    import torch

    from hal.bench.tuning import Call, Trial
    from hal.hookspec import Tuner


def warmup(
    model: Annotated[
        Path | None, typer.Option(metavar="PATH", help="Make ready what this model calls: GGUF file or directory.")
    ] = None,
    tokens: Annotated[str, typer.Option(help="Prompt lengths to run the model with, comma-separated.")] = "128,2048",
    batch: Annotated[int, typer.Option(min=1, help="Sequences of a prompt.")] = 1,
    suite: Annotated[str, typer.Option(help="Without a model: the workloads of `hal bench` to make ready.")] = "core",
    match: Annotated[str, typer.Option(metavar="TEXT", help="Without a model: only workloads with this name.")] = "",
    device: Annotated[str, typer.Option(help="Torch device.")] = "cpu",
    dtype: Annotated[str, typer.Option(help=f"One of {', '.join(DTYPES)}.")] = "bfloat16",
    tune: Annotated[
        bool, typer.Option("--tune", help="Also try the kernels' other tiles, and keep the fastest that are right.")
    ] = False,
) -> None:
    """Compile the kernels that a model, or the benchmark's workloads, will call; with --tune, choose their tiles.

    An operator's call never tunes by itself: it takes what a table says, or what tuning kept. Tuning checks each tile
    against the oracle on the very call, times the right ones, and keeps the best in the user's cache directory, for
    this device and these kernels.

    Exit status: 0 done, 2 could not run.

    Examples:

    - `hal warmup --suite smoke`
    - `hal warmup --device cuda --tune --match "rms_norm 16384"`
    - `hal warmup --model SmolLM2-135M-Instruct.Q4_1.gguf --device cuda --tokens 512 --tune`
    """
    check_dtype(dtype)
    where: torch.device = torch_device(device, used=True)
    with Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(),
        console=console(stderr=True), transient=True,
    ) as progress:  # fmt: skip
        if model is not None:
            calls = _of_model(progress, model, tokens, batch, where, dtype)
        else:
            calls = _of_suite(suite, match, where, dtype)
        trials, failed = _ready(progress, calls, where, tune)
    line(f"{len(calls) - len(failed)} calls made ready on {where}")
    for call, why in failed.items():
        line(f"left out: {call}: {why}", "yellow")
    if trials:
        _show(trials)


def _lengths(text: str) -> list[int]:
    from hal.errors import ArgumentError

    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or min(found) < 1:
        raise ArgumentError(f"--tokens {text}: numbers above 0, separated by commas, are wanted, such as 128,2048")
    return found


def _of_model(
    progress: Progress, path: Path, tokens: str, batch: int, where: torch.device, dtype: str
) -> Sequence[Call]:
    import torch

    from hal.bench.warmup import Calls, run_model
    from hal.port import loading
    from hal.port.transformers import apply

    lengths = _lengths(tokens)
    loaded, _ = loading.load(path, getattr(torch, dtype))
    loaded = loaded.to(where)
    task = progress.add_task("prompts", total=len(lengths))
    seen = Calls()
    with apply(loaded), seen:
        for _ in run_model(loaded, lengths, batch, where):
            progress.advance(task)
    return list(seen.kinds.values())


def _of_suite(suite: str, match: str, where: torch.device, dtype: str) -> Sequence[Call]:
    import torch

    from hal.bench.warmup import call_of
    from hal.bench.workload import workloads
    from hal.errors import ArgumentError

    wanted = [w for w in workloads(suite) if match in w.name]
    if not wanted:
        raise ArgumentError(f"--match {match}: no workload of {suite} has this in its name")
    return [call_of(w, where, getattr(torch, dtype)) for w in wanted]


def _ready(
    progress: Progress, calls: Sequence[Call], where: torch.device, tune: bool
) -> tuple[list[Trial], dict[str, str]]:
    from hal import registry, selection

    backend = selection.serving(where)
    tuner = registry.tuner(backend.partition(":")[0]) if tune else None
    if tune and tuner is None:
        line(f"backend {backend} has nothing to tune", "yellow", stderr=True)
    trials: list[Trial] = []
    failed: dict[str, str] = {}
    for call in _counted(progress, calls):
        why = _made_ready(call, tuner, where, trials)
        if why is not None:
            failed[call.op.name] = why
    return trials, failed


def _made_ready(call: Call, tuner: Tuner | None, where: torch.device, trials: list[Trial]) -> str | None:
    """Why it could not be; None if it was."""
    import torch

    from hal.bench import tuning
    from hal.errors import UnsupportedError

    try:
        call.run()()
        if tuner is not None:
            trials += tuning.tune(call, tuner, where)
    except (UnsupportedError, torch.OutOfMemoryError) as error:
        return str(error).splitlines()[0]
    return None


def _counted(progress: Progress, calls: Sequence[Call]) -> Iterator[Any]:
    task = progress.add_task("calls", total=len(calls))
    for call in calls:
        progress.update(task, description=call.op.name)
        yield call
        progress.advance(task)


def _show(trials: Sequence[Trial]) -> None:
    rows = table("tactics: µs a call")
    for name in ("decision", "for", "was", "is", "before", "now", "refused"):
        rows.add_column(name)
    for trial in trials:
        before = "wrong" if trial.before_us is None else f"{trial.before_us:.1f}"
        changed = trial.chosen if trial.chosen != trial.before else "the same"
        rows.add_row(
            trial.choice.name, trial.choice.shape, trial.before, changed, before, f"{trial.chosen_us:.1f}",
            "; ".join(f"{tactic}: {why}" for tactic, why in trial.refused.items()),
        )  # fmt: skip
    console().print(rows)
