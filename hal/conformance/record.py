"""Making bundles: a run with its evidence, and the same cases again from a bundle on this machine."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from hal import registry
from hal.conformance import bundle, evidence, runner
from hal.conformance.archive import Bundle
from hal.conformance.bundle import StoredCase, Tensors
from hal.conformance.case import find
from hal.conformance.report import Report, Request
from hal.conformance.runner import Plan, Progress
from hal.conformance.site import Site
from hal.errors import ArgumentError, BundleError

__all__ = ["Again", "again", "bundled", "cut", "record"]


def record(
    what: Plan,
    workers: int = 0,
    progress: Progress | None = None,
    tensors: Tensors = "none",
    keep: frozenset[str] = frozenset(),
) -> tuple[Report, Bundle]:
    """Judge everything in the plan and gather the evidence.

    tensors: which results to store, `none`, `failures` or `all`; `keep` names further cases whose results are stored.
    """
    report = runner.run(what, workers, progress)
    return report, bundled(what.site, report, workers, tensors, keep)


def bundled(
    site: Site, report: Report, workers: int = 0, tensors: Tensors = "none", keep: frozenset[str] = frozenset()
) -> Bundle:
    """The bundle of a run that was just made on this site; gathers the evidence, with the options of `record`."""
    seen = evidence.gather(site, evidence.wanted(report, tensors, keep), workers)
    cases: dict[str, list[bundle.StoredVerdict]] = {}
    heads = {result.case: result for result in report.results}
    for result in report.results:
        found, name = seen[result.case], result.implementation
        verdict = bundle.of_result(result, found.outputs.get(name, ()), found.lost.get(name))
        cases.setdefault(result.case, []).append(verdict)
    stored = {name: data for found in seen.values() for name, data in found.packed.items()}
    entries = [
        StoredCase(
            id=case,
            op=heads[case].op,
            dtype=heads[case].dtype,
            seed=heads[case].seed,
            tags=heads[case].tags,
            inputs=seen[case].inputs,
            verdicts=tuple(verdicts),
        )
        for case, verdicts in cases.items()
    ]
    return Bundle(bundle.of_report(report, entries, _device(site), stored), stored)


def _device(site: Site) -> dict[str, Any] | None:
    kind = torch.device(site.target.device).type
    for descriptor in registry.devices(site.target.backend):
        if descriptor.torch_device == kind:
            told: dict[str, Any] = descriptor.model_dump(mode="json", exclude_defaults=True)
            return told
    return None


@dataclass(frozen=True)
class Again:
    """The cases of a bundle to judge here.

    recorded: the bundle, cut to what is asked for. unknown: ids that cannot be built here, and why. differ: cases
    whose inputs come out with other bits here. Neither kind is run, for a comparison of them would say nothing of a
    backend.
    """

    recorded: Bundle
    plan: Plan
    unknown: dict[str, str]
    differ: tuple[str, ...]

    @property
    def keep(self) -> frozenset[str]:
        """Cases whose results the bundle stores: kept here too, the two can be held against each other."""
        return frozenset(
            case.id
            for case in self.recorded.manifest.cases
            for verdict in case.verdicts
            if any(output.digest in self.recorded.packed for output in verdict.outputs)
        )


def again(site: Site, recorded: Bundle, ops: tuple[str, ...] = (), implementations: tuple[str, ...] = ()) -> Again:
    """Regenerate the inputs of every case, compare their digests, and plan the run of those that agree (maybe none).

    ArgumentError for an op that the bundle has no case of, or an implementation that the backend has not;
    BundleError for a bundle without cases.
    """
    manifest = recorded.manifest
    for op in ops:
        known = sorted({case.op for case in manifest.cases})
        if op not in known:
            raise ArgumentError(f"the bundle has no case of {op!r}; it has cases of {', '.join(known)}")
    chosen = [case for case in manifest.cases if not ops or case.op in ops]
    if not chosen:
        raise BundleError("the bundle has no cases: there is nothing to judge. Record a run that was not interrupted")
    good: list[str] = []
    unknown: dict[str, str] = {}
    differ: list[str] = []
    for stored in chosen:
        try:
            agrees = evidence.inputs_digest(find(stored.id)) == stored.inputs
        except Exception as error:  # an id is text from elsewhere: it may ask for anything
            unknown[stored.id] = f"{type(error).__name__}: {error}"
            continue
        (good if agrees else differ).append(stored.id)
    asked = manifest.request
    request = Request(suite=asked.suite, ops=ops or asked.ops, implementations=implementations, cases=asked.cases)
    plan = Plan(site, request, (), ())
    if good:
        # by id: what a suite lists here may have changed since
        found = runner.plan(site, implementations=implementations, case_ids=tuple(good))
        plan = replace(found, request=request)
    return Again(cut(recorded, ops, implementations), plan, unknown, tuple(differ))


def cut(recorded: Bundle, ops: tuple[str, ...] = (), implementations: tuple[str, ...] = ()) -> Bundle:
    """The bundle with the cases of the named ops alone, and of each case the named verdicts where it has any."""
    cases = tuple(_only(case, implementations) for case in recorded.manifest.cases if not ops or case.op in ops)
    return replace(recorded, manifest=recorded.manifest.model_copy(update={"cases": cases}))


def _only(case: StoredCase, implementations: tuple[str, ...]) -> StoredCase:
    """The case with the named verdicts alone, where it has any; another backend's have other names."""
    kept = tuple(verdict for verdict in case.verdicts if verdict.implementation in implementations)
    return case.model_copy(update={"verdicts": kept}) if kept else case
