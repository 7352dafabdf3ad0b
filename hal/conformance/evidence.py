"""Evidence of a run: digests of every case's inputs and of every implementation's results, and the results themselves.

Gathered after the judgement, by a call of its own for each implementation: made like the judge's first one, through
the public op with the choice forced, in poisoned and fenced memory; under autograd where the case is about gradients.
"""

from __future__ import annotations

import ctypes
import hashlib
import math
from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hal.conformance.bundle import Output, Tensors
from hal.conformance.candidate import Target
from hal.conformance.case import Case, find
from hal.conformance.gradients import GradientTrial, gradient_subject
from hal.conformance.judge import Trial
from hal.conformance.report import BAD, Report
from hal.conformance.site import Site
from hal.conformance.workers import Done, share_out
from hal.contract import OPS, dtype_name
from hal.settings import use

__all__ = ["Seen", "Wanted", "digest", "gather", "inputs_digest", "pack", "unpack", "wanted"]

CALLED = frozenset({"passed", "failed", "mistrusted", "waived"})


@dataclass(frozen=True)
class Wanted:
    """A case, the implementations to call on it, and those of them whose results to keep."""

    case: str
    implementations: tuple[str, ...]
    kept: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Seen:
    """What a case came to: its inputs' digest, each implementation's outputs or why there are none (`lost`), and kept
    results by digest."""

    case: str
    inputs: str
    outputs: Mapping[str, tuple[Output, ...]] = field(default_factory=dict)
    packed: Mapping[str, bytes] = field(default_factory=dict)
    lost: Mapping[str, str] = field(default_factory=dict)

    def __or__(self, other: Seen) -> Seen:
        """What two looks at one case saw together."""
        return Seen(
            self.case,
            self.inputs,
            {**self.outputs, **other.outputs},
            {**self.packed, **other.packed},
            {**self.lost, **other.lost},
        )


def digest(t: Tensor) -> str:
    """sha256 over dtype, shape and the little-endian bytes of the contiguous CPU tensor, as 64 hexadecimal digits."""
    total = hashlib.sha256(f"{dtype_name(t.dtype)}{list(t.shape)}\n".encode())
    held = t.detach().cpu().contiguous()
    size = math.prod(held.shape) * held.element_size()
    if size:
        total.update((ctypes.c_char * size).from_address(held.data_ptr()))
    return total.hexdigest()


def inputs_digest(case: Case) -> str:
    """One digest over all that a case gives to the op: its arguments, poison included, and the gradients that come in.

    ArgumentError for an odd recipe.
    """
    total = hashlib.sha256()
    given: dict[str, Any] = dict(case.build("cpu").args)
    if case.gradient:
        made = gradient_subject(case, lse=False)
        given |= {f"d_{name}": grad for name, grad in zip(made.op.results, made.upstream, strict=True)}
    for name, value in sorted(given.items()):
        total.update(f"{name}={_described(value)}\n".encode())
    return total.hexdigest()


def _described(value: Any) -> str:
    if isinstance(value, Tensor):
        # bad input may stand on another device on purpose, where there are no values
        meta = value.device.type == "meta"
        return f"meta {dtype_name(value.dtype)}{list(value.shape)}" if meta else digest(value)
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_described(item) for item in value) + "]"
    return repr(value)


def pack(t: Tensor) -> bytes:
    """A tensor as safetensors."""
    from safetensors.torch import save

    return save({"result": t.detach().cpu().contiguous()})


def unpack(content: bytes) -> Tensor:
    """The inverse of `pack`. Raises whatever safetensors does for damaged content."""
    from safetensors.torch import load

    (found,) = load(content).values()
    return found


def wanted(report: Report, tensors: Tensors = "none", keep: frozenset[str] = frozenset()) -> list[Wanted]:
    """What to gather for a run; `keep` names further cases whose results to keep."""
    by_case: dict[str, dict[str, bool]] = {}
    for result in report.results:
        names = by_case.setdefault(result.case, {})
        if result.status in CALLED and "bad-input" not in result.tags:
            names[result.implementation] = (
                tensors == "all" or (tensors == "failures" and result.status in BAD) or result.case in keep
            )
    return [
        Wanted(case, tuple(names), frozenset(name for name, kept in names.items() if kept))
        for case, names in by_case.items()
    ]


def gather(site: Site, what: Iterable[Wanted], workers: int = 0) -> dict[str, Seen]:
    """The evidence by case id; `workers` as for a run. A call that fails or crashes leaves no outputs."""
    items = list(what)
    stream = _in_workers(site, items, workers) if workers else (_look(site, item) for item in items)
    found: dict[str, Seen] = {}
    for seen in stream:
        # a case that was taken apart comes in pieces
        found[seen.case] = found[seen.case] | seen if seen.case in found else seen
    return found


def _look(site: Site, item: Wanted) -> Seen:
    case = find(item.case)
    seen = Seen(case.id, inputs_digest(case))
    for name in item.implementations:
        seen |= _called(site, case, name, seen.inputs, name in item.kept)
    return seen


def _called(site: Site, case: Case, name: str, inputs: str, kept: bool) -> Seen:
    try:
        results = _results(site, case, name)
        outputs = tuple(
            Output(name=result, dtype=dtype_name(t.dtype), shape=tuple(t.shape), digest=digest(t))
            for result, t in results
        )
        packed = {o.digest: pack(t) for o, (_, t) in zip(outputs, results, strict=True)} if kept else {}
    except Exception as error:  # whatever a broken implementation does must not cost the bundle of all others
        return Seen(case.id, inputs, lost={name: f"{type(error).__name__}: {error}"})
    return Seen(case.id, inputs, {name: outputs}, packed)


def _results(site: Site, case: Case, name: str) -> list[tuple[str, Tensor]]:
    """Names and CPU values of the results of one call; raises what the call raises."""
    import hal.ops  # noqa: F401  (fills OPS)

    target = Target.of(OPS[case.op], site.implementation(case.op, name), site.target.backend)
    trial = (GradientTrial if case.gradient else Trial)(case, target, torch.device(site.target.device))
    with use(fallback="error"):
        outcome = trial.ask(trial.place(trial.subject.family.poison(case)))
    if outcome.error is not None:
        raise outcome.error
    names = trial.subject.names
    found = enumerate(outcome.results or ())
    return [(names[i] if i < len(names) else f"result[{i}]", t.cpu()) for i, t in found]


def _in_workers(site: Site, items: list[Wanted], workers: int) -> Generator[Seen, None, None]:
    threads = max(1, torch.get_num_threads() // workers)
    left = items
    while left:
        again: list[Wanted] = []
        for outcome in share_out(left, workers, _looker, (site.target.backend, threads, site.pinned)):
            item: Wanted = outcome.item
            if isinstance(outcome, Done):
                yield outcome.value
            elif len(item.implementations) > 1:
                # whichever of them it was: alone, each answers for itself
                again.extend(Wanted(item.case, (name,), item.kept & {name}) for name in item.implementations)
            else:
                lost = dict.fromkeys(item.implementations, f"the process that called it ended with {outcome.how}")
                yield Seen(item.case, inputs_digest(find(item.case)), lost=lost)
        left = again


def _looker(backend: str, threads: int, device: str | None) -> Callable[[Wanted], Seen]:
    torch.set_num_threads(threads)
    site = Site.of(backend, device)
    return lambda item: _look(site, item)
