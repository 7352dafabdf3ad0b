"""R6 where results are not approximate: a case that would let an idle call or a shuffled result pass is mistrusted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from hal.conformance import subject
from hal.conformance.case import Case, cases
from hal.conformance.cases import family
from hal.conformance.inputs import Draft
from hal.conformance.judge import judge
from hal.conformance.recent import Recent
from hal.contract import OPS

Spoil = Callable[[dict[str, Any]], None]
WRITE, COPY, PROBS, SAMPLE = "write_kv_cache", "copy_kv_blocks", "top_k_top_p_probs", "top_k_top_p_sample"


def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Subjects are kept by a case's id, which tells neither its tags nor what a test did to its family."""
    monkeypatch.setattr(subject, "recent", Recent(1))


@pytest.fixture
def spoilt(monkeypatch: pytest.MonkeyPatch) -> Callable[[Case, Spoil], Case]:
    """The case, with something done to the arguments that its family drafts."""

    def spoil(case: Case, how: Spoil) -> Case:
        honest = family(case.op).drafted

        def drafted(asked: Case) -> Draft:
            draft = honest(asked)
            how(draft.args)
            draft.variants, draft.quotients = [], {}
            return draft

        monkeypatch.setattr(family(case.op), "drafted", drafted)
        forget(monkeypatch)
        return case

    return spoil


def recipe(op: str, *tags: str, **params: Any) -> Case:
    return family(op).case("float32", "edge", *tags, **params)


def mistrusted(case: Case, message: str) -> None:
    verdict = judge(case, OPS[case.op].reference)
    assert verdict.status == "mistrusted", verdict.findings
    assert "R6" in verdict.rules
    assert [finding.rule for finding in verdict.findings] == ["R6"]
    assert message in verdict.findings[0].message


def held_already(args: dict[str, Any]) -> None:
    """The caches hold what is written."""
    OPS[WRITE].reference(**args)


def half_held(args: dict[str, Any]) -> None:
    """v_cache holds 10 of the 16 elements of each head that is written."""
    OPS[WRITE].reference(**(args | {"k_cache": args["k_cache"].clone(), "v_cache": (full := args["v_cache"].clone())}))
    args["v_cache"][..., 6:] = full[..., 6:]


def constant(args: dict[str, Any]) -> None:
    args["v"].fill_(1.5)


def equal_blocks(args: dict[str, Any]) -> None:
    for cache in args["v_caches"]:
        cache[:] = cache[:1].clone()


def even(args: dict[str, Any]) -> None:
    args["logits"].zero_()


def first_token_certain(args: dict[str, Any]) -> None:
    args["logits"][:, 0] = 60.0


def third_token_certain(args: dict[str, Any]) -> None:
    args["logits"][:, 2] = 60.0


@pytest.mark.parametrize(
    ("case", "how", "message"),
    [
        (recipe(WRITE, skip="never"), held_already, "a call that leaves k_cache as it was would pass"),
        (recipe(WRITE, D=16, skip="never"), half_held, "a call that leaves v_cache as it was would pass on 62%"),
        (recipe(WRITE, skip="never"), constant, "shuffled values would pass on 100% of what is written to v_cache"),
        (recipe(COPY), equal_blocks, "a call that leaves v_caches[0] as it was would pass"),
        (recipe(PROBS), even, "rotated tokens would pass in 100% of the rows of probs"),
        (recipe(SAMPLE), first_token_certain, "zeros would pass in 100% of the 24 rows of ids"),
        (recipe(SAMPLE), third_token_certain, "shuffled rows would pass in 100% of the 24 rows of ids"),
    ],
    ids=["written before", "mostly written before", "constant values", "equal blocks", "even", "zeros", "one id"],
)
def test_a_case_that_proves_nothing_is_mistrusted(
    case: Case, how: Spoil, message: str, spoilt: Callable[[Case, Spoil], Case]
) -> None:
    assert judge(case, OPS[case.op].reference).status == "passed"
    mistrusted(spoilt(case, how), message)


@pytest.mark.parametrize(
    ("op", "params"),
    [(WRITE, {"T": 6, "skip": "all"}), (WRITE, {"T": 5, "n": 0}), (COPY, {"pairs": "nothing"})],
    ids=["all skipped", "no slots", "no pairs"],
)
def test_a_case_in_which_nothing_is_to_be_done_must_say_so(
    op: str, params: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    mistrusted(recipe(op, **params), "as it was would pass")
    forget(monkeypatch)
    assert judge(recipe(op, "empty", **params), OPS[op].reference).status == "passed"


def test_codes_are_held_to_it_too(spoilt: Callable[[Case, Spoil], Case]) -> None:
    case = recipe(WRITE, cache="float8_e4m3fn", scale="one", skip="never")
    assert judge(case, OPS[WRITE].reference).status == "passed"
    mistrusted(spoilt(case, held_already), "a call that leaves k_cache as it was would pass")


def test_a_sampler_is_not_mistrusted_for_rows_that_the_contract_fixes() -> None:
    rows = recipe(SAMPLE, B=24, x="odd", k=20, p=0.9)  # one row without finite logits, one with an infinite one
    assert judge(rows, OPS[SAMPLE].reference).status == "passed"


@pytest.mark.parametrize("op", [WRITE, COPY, PROBS, SAMPLE])
def test_what_is_left_as_it_was_fails_where_it_is_not_mistrusted(op: str) -> None:
    """The rule and the judge agree: an idle call fails every quick case that is trusted and has something to do."""

    def idle(*args: Any, **kwargs: Any) -> Any:
        a = OPS[op].bind(args, kwargs)
        if OPS[op].mutates:
            return None
        return torch.zeros(a.logits.shape) if op == PROBS else torch.zeros(a.logits.shape[:1], dtype=torch.int64)

    asked = [case for case in cases(op) if not case.tags & {"bad-input", "empty", "special"}]
    passed = [case.id for case in asked[::6] if judge(case, idle).status != "failed"]
    assert len(asked) > 20 and not passed
