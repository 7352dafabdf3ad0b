"""The judge rejects wrong implementations, by the right rule and with a message that says where and by how much."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from faulty import attention, rms_into, truncated

from hal import memory
from hal.capability import Declares, Implementation
from hal.conformance.case import Case
from hal.conformance.cases import family
from hal.conformance.judge import judge
from hal.conformance.mutants.mutant import after, before, reference
from hal.errors import UnsupportedError

F32, BF16, F16 = "float32", "bfloat16", "float16"
U_P = Declares(u_p={"bfloat16": 2.0**-8})


def recipe(op: str, dtype: str, **params: Any) -> Case:
    return family(op).case(dtype, "edge", **params)


def rejected(case: Case, call: Callable[..., Any], rule: str, message: str, declares: Declares | None = None) -> None:
    honest = judge(case, reference(case.op))
    assert honest.status == "passed", honest.findings
    candidate: Any = call if declares is None else Implementation(case.op, "faulty", call, declares=declares)
    verdict = judge(case, candidate)
    assert verdict.status == "failed"
    hit = [finding for finding in verdict.findings if finding.rule == rule]
    assert hit, f"{rule} is not among {verdict.findings}"
    assert any(re.search(message, finding.message) for finding in hit), [finding.message for finding in hit]
    assert all(finding.message.endswith(f"[{case.id}]") for finding in verdict.findings)


ELEMENT = r"^%s\[\d+(,\d+)*\] = \S+, but should be \S+ ± \S+.* \(\d+ of \d+ elements, \S+ times the budget\)"
Y, O, LSE = ELEMENT % "y", ELEMENT % "o", ELEMENT % "lse"


def half_precision_squares(a: dict[str, Any]) -> dict[str, Any]:
    return {"x": torch.where(a["x"].abs() > 255, math.inf, a["x"].double()).to(a["x"].dtype)}


def one_pass_layer_norm(y: Any, a: dict[str, Any]) -> Any:
    x = a["x"].float()
    mean = x.mean(-1, keepdim=True)
    rstd = torch.rsqrt((x.square().mean(-1, keepdim=True) - mean.square()).clamp_min(0) + a["eps"])
    return ((x - mean) * rstd * a["weight"].float() + a["bias"].float()).to(a["x"].dtype)


def eps_outside(y: Any, a: dict[str, Any]) -> Any:
    x = a["x"].double()
    return (x / (x.square().mean(-1, keepdim=True).sqrt() + a["eps"]) * a["weight"].double()).to(a["x"].dtype)


R1 = {
    "rms_norm returns zeros": (recipe("rms_norm", F32, F=576), after("rms_norm", lambda y, a: torch.zeros_like(y)), Y),
    "rms_norm is off by 2^-8": (recipe("rms_norm", F32, F=576), after("rms_norm", lambda y, a: y * (1 + 2.0**-8)), Y),
    "rms_norm has eps outside the root": (recipe("rms_norm", BF16, F=300, x="tiny"), after("rms_norm", eps_outside), Y),
    "rms_norm ignores the weight's offset": (
        recipe("rms_norm", BF16, F=320, weight_offset=1.0),
        before("rms_norm", lambda a: {"weight_offset": 0.0}),
        Y,
    ),
    "rms_norm reads float32 weights as bfloat16": (
        recipe("rms_norm", F16, F=257, weight="float32"),
        before("rms_norm", lambda a: {"weight": a["weight"].bfloat16()}),
        Y,
    ),
    "rms_norm rounds late where it should early": (
        recipe("rms_norm", BF16, F=320, round_before_weight=True, weight="float32"),
        before("rms_norm", lambda a: {"round_before_weight": False}),
        Y,
    ),
    "add_rms_norm norms the rounded sum": (
        recipe("add_rms_norm", BF16, T=6, F=320, x="mean50", round_residual=False),
        before("add_rms_norm", lambda a: {"round_residual": True}),
        Y,
    ),
    "layer_norm takes E[x²] − E[x]²": (
        recipe("layer_norm", F32, F=1000, x="mean1000"),
        after("layer_norm", one_pass_layer_norm),
        Y,
    ),
    "layer_norm drops the bias": (recipe("layer_norm", F32, F=320), before("layer_norm", lambda a: {"bias": None}), Y),
    "silu ignores alpha": (
        recipe("silu_and_mul", BF16, F=90, spread=3.0, alpha=1.702),
        before("silu_and_mul", lambda a: {"alpha": 1.0}),
        Y,
    ),
    "silu ignores the limit": (
        recipe("silu_and_mul", F32, F=90, spread=3.0, limit=2.5),
        before("silu_and_mul", lambda a: {"limit": None}),
        Y,
    ),
    "gelu is the other gelu": (
        recipe("gelu_and_mul", F32, F=173, spread=2.0),
        before("gelu_and_mul", lambda a: {"approximate": "tanh"}),
        Y,
    ),
    "softmax takes the last axis": (
        recipe("softmax", F32, shape=[6, 6, 6], dim=1),
        before("softmax", lambda a: {"dim": -1}),
        Y,
    ),
    "rotary is interleaved": (
        recipe("rotary_embedding", BF16, H=7),
        before("rotary_embedding", lambda a: {"interleaved": True}),
        ELEMENT % "q_out",
    ),
    "rotary turns the other way": (
        recipe("rotary_embedding", F32, H=7),
        before("rotary_embedding", lambda a: {"sin": -a["sin"]}),
        ELEMENT % "q_out",
    ),
    "linear accumulates in bfloat16": (
        recipe("linear", F32, T=7, I=177, O=150),
        after("linear", lambda y, a: (a["x"].bfloat16() @ a["weight"].bfloat16().T).float()),
        Y,
    ),
    "linear drops the bias": (
        recipe("linear", BF16, T=5, I=96, O=33, bias="float32"),
        before("linear", lambda a: {"bias": None}),
        Y,
    ),
    "the window is one too wide": (
        recipe("attention", BF16, S=21, L=21, causal=True, window=[6, 0]),
        before("attention", lambda a: {"window": (a["window"][0] + 1, 0)}),
        O,
    ),
    "causal is aligned top-left": (
        recipe("attention", F32, S=4, L=19, H=7, causal=True, lse=True),
        attention(top_left=True),
        O,
    ),
    "the kv head is h % K": (recipe("attention", BF16, S=7, L=33, H=4, K=2), attention(head=lambda h, H, K: h % K), O),
    "the scale is that of a padded head": (
        recipe("attention", F32, S=6, L=37, D=72),
        before("attention", lambda a: {"scale": 128**-0.5}),
        O,
    ),
    "there is no scale": (recipe("attention", BF16, S=9, L=30), before("attention", lambda a: {"scale": 1.0}), O),
    "softcap is dropped": (
        recipe("attention", BF16, S=9, L=30, softcap=1.5),
        before("attention", lambda a: {"softcap": None}),
        O,
    ),
    "sinks are dropped": (
        recipe("attention", BF16, S=9, L=12, H=6, K=2, sinks="same"),
        before("attention", lambda a: {"sinks": None}),
        O,
    ),
    "lse is in base 2": (recipe("attention", F32, S=7, L=33, lse=True), attention(base=2.0), LSE),
    "the mask is inverted": (
        recipe("attention", F32, S=6, L=23, mask="bool"),
        before("attention", lambda a: {"mask": ~a["mask"]}),
        O,
    ),
    "one sequence too short": (
        recipe("attention_varlen", F32, q=[3, 4], k=[9, 12]),
        before(
            "attention_varlen",
            lambda a: {"cu_seqlens_k": a["cu_seqlens_k"] - torch.tensor([0, 1, 0], dtype=torch.int32)},
        ),
        O,
    ),
    "one sequence reads another's pages": (
        recipe("paged_attention", BF16, q=[1, 1], k=[32, 32]),
        before("paged_attention", lambda a: {"block_table": a["block_table"].flip(0)}),
        O,
    ),
    "the k scale is used for v": (
        recipe("paged_attention", BF16, cache="float8_e4m3fn", kv_scale="one"),
        before("paged_attention", lambda a: {"v_scale": a["k_scale"]}),
        O,
    ),
    "pieces are averaged": (
        recipe("merge_attention", F32, lead=[9], E=64, gaps=False),
        after("merge_attention", lambda r, a: ((a["out_a"] + a["out_b"]) / 2, r[1])),
        ELEMENT % "out",
    ),
    "the mean is over all rows": (
        recipe("cross_entropy", F32, T=9, V=177),
        after("cross_entropy", lambda y, a: y * (a["target"] >= 0).sum() / a["target"].shape[0]),
        r"^loss = \S+, but should be \S+ ± ",
    ),
    "label smoothing is dropped": (
        recipe("cross_entropy", F32, T=9, V=100, smoothing=0.1, reduction="each"),
        before("cross_entropy", lambda a: {"label_smoothing": 0.0}),
        ELEMENT % "loss",
    ),
    "int8 codes are truncated": (
        recipe("write_kv_cache", BF16, cache="int8", scale="one"),
        before("write_kv_cache", lambda a: {"k": (a["k"].float() / a["k_scale"]).trunc() * a["k_scale"]}),
        r"^k_cache\[\d+,\d+,\d+,\d+\] = -?\d+, but should be -?\d+ bit for bit as written",
    ),
    "a skipped token lands in the last slot": (
        recipe("write_kv_cache", F32),
        before(
            "write_kv_cache",
            lambda a: {"slot_mapping": a["slot_mapping"] % (a["k_cache"].shape[0] * a["k_cache"].shape[1])},
        ),
        r"^k_cache\[3,15,0,0\] = ",
    ),
    "pairs are copied one by one": (
        recipe("copy_kv_blocks", BF16, pairs="chain"),
        lambda k_caches, v_caches, src, dst: (
            [c[int(d)].copy_(c[int(s)]) for c in (*k_caches, *v_caches) for s, d in zip(src, dst, strict=True)] and None
        ),
        r"^k_caches\[0\]\[2,0,0,0\] = ",
    ),
    "the drawn id is one that top-k drops": (
        recipe("top_k_top_p_sample", F32, spread=0.5, k=5),
        before("top_k_top_p_sample", lambda a: {"top_k": None}),
        r"^ids\[\d+\] = \d+, but should be \d+: the filters drop it",
    ),
    "the drawn id is surely dropped in a row with a token in doubt": (
        recipe("top_k_top_p_sample", F32, B=9, V=8, x="equal", p=0.5),
        after("top_k_top_p_sample", lambda ids, a: torch.full_like(ids, 7)),
        r"^ids\[\d+\] = 7, but should be \d+: the filters drop it",
    ),
    "a tie that is exact goes away from zero": (
        recipe("write_kv_cache", F32, cache="int8", scale="power", x="ties"),
        before("write_kv_cache", lambda a: {"k": a["k"].double() * (1 + 2.0**-30)}),
        r"^k_cache\[\d+,\d+,\d+,\d+\] = -?\d+, but should be -?\d+ bit for bit as written",
    ),
    "the drawn id ignores the seed": (
        recipe("top_k_top_p_sample", F32),
        before("top_k_top_p_sample", lambda a: {"seed": 1}),
        r"^ids\[\d+\] = \d+, but should be \d+: its score is lower by",
    ),
}

R4 = {
    "a row that sees nothing is NaN": (
        recipe("attention", F32, S=13, L=6, K=2, causal=True),
        attention(dead=math.nan),
        r"^o\[0,0,0,0\] = nan, but should be 0 ",
    ),
    "the lse of a row that sees nothing is finite in float64": (
        recipe("attention", "float64", S=13, L=6, K=2, causal=True, lse=True),
        after("attention", lambda r, a: (r[0], r[1].clamp(min=-1e30))),
        r"^lse\[0,0,0\] = -1e\+30, but should be -inf",
    ),
    "a row that sees nothing is tiny": (
        recipe("attention", F32, S=13, L=6, K=2, causal=True),
        attention(dead=1e-9),
        r"^o\[0,0,0,0\] = 1e-09, but should be 0 exactly",
    ),
    "squares overflow in half precision": (
        recipe("rms_norm", F16, T=3, F=1536, x="large"),
        before("rms_norm", half_precision_squares),
        r"^y\[.*\] = nan, but",
    ),
    "a row of the result is never written": (
        recipe("rms_norm", BF16, T=7, F=33),
        rms_into(lambda y, true: y[:-1].copy_(true[:-1])),
        r"^y\[6,0\] = nan, but should be",
    ),
    "NaN is flushed to zero": (
        recipe("rms_norm", F32, T=6, F=40, x="special"),
        after("rms_norm", lambda y, a: y.nan_to_num()),
        r"^y\[0,0\] = 0, but should be nan",
    ),
    "softmax of all −inf is NaN": (
        recipe("softmax", F32, shape=[9, 100], dead=True),
        after("softmax", lambda y, a: torch.softmax(a["x"], a["dim"])),
        r"^y\[0,0\] = nan, but should be 0 ",
    ),
    "rows past the last sequence are not zero": (
        recipe("gather_kv_cache", F32, tail=3),
        after(
            "gather_kv_cache",
            lambda r, a: (r[0].masked_fill(torch.arange(r[0].shape[0])[:, None, None] >= 58, 7.0), r[1]),
        ),
        r"^k\[58,0,0\] = 7, but should be 0 exactly",
    ),
    "all tokens equal to the k-th are kept": (
        recipe("top_k_top_p_probs", F32, x="ties", k=9),
        after(
            "top_k_top_p_probs",
            lambda y, a: torch.softmax(
                a["logits"].masked_fill(a["logits"] < a["logits"].topk(9).values[:, -1:], -math.inf).float(), -1
            ),
        ),
        r"token \d+ is kept, but should be dropped",
    ),
    "top-p comes before top-k": (
        recipe("top_k_top_p_probs", F32, k=7, p=0.8),
        after(
            "top_k_top_p_probs",
            lambda y, a: reference("top_k_top_p_probs")(
                reference("top_k_top_p_probs")(a["logits"], top_p=0.8).log(), top_k=7
            ),
        ),
        r"token \d+ is kept, but should be dropped",
    ),
    "an id lies outside the vocabulary": (
        recipe("top_k_top_p_sample", F32),
        after("top_k_top_p_sample", lambda y, a: y + 77),
        r"^ids\[0\] = \d+, but should lie in 0 … 76",
    ),
}


@pytest.mark.parametrize("fault", R1)
def test_R1_rejects(fault: str) -> None:
    case, call, message = R1[fault]
    rejected(case, call, "R1", message)


@pytest.mark.parametrize("fault", R4)
def test_R4_rejects(fault: str) -> None:
    case, call, message = R4[fault]
    rejected(case, call, "R4", message)


def test_R2_rejects_noise_that_each_element_could_have() -> None:
    def coarse(p: torch.Tensor) -> torch.Tensor:  # one bit fewer than the bfloat16 that is declared
        mantissa, exponent = torch.frexp(p)
        return torch.ldexp((mantissa * 2**7).round() / 2**7, exponent)

    case = recipe("attention", BF16, S=40, L=300, H=4, K=2, spread=2.0)
    call = attention(round_p=coarse)
    verdict = judge(case, Implementation("attention", "coarse", call, declares=U_P))
    assert {finding.rule for finding in verdict.findings} == {"R2"}
    assert re.match(
        r"o has an RMS error of \S+, but should have at most \S+, by the honest baseline, over 10240 elements",
        verdict.findings[0].message,
    )
    assert verdict.r2 is not None and 1 < verdict.r2 < 2
    honest = Implementation("attention", "honest", attention(round_p=lambda p: p.bfloat16().float()), declares=U_P)
    assert judge(case, honest).status == "passed"


def test_R3_rejects_truncated_probabilities() -> None:
    case = recipe("attention", BF16, S=40, L=300, H=4, K=2, spread=2.0)
    call = attention(round_p=lambda p: truncated(p, torch.bfloat16).float())
    rejected(
        case, call, "R3", r"^o errs toward zero: bias 0\.[4-9]\d* of the summed error, but should be at most 0\.3", U_P
    )


def test_R1_and_R3_reject_truncated_results() -> None:
    case = recipe("attention", BF16, S=17, L=17, H=3, causal=True)
    verdict = judge(case, attention(to=truncated))
    assert {"R1", "R3"} <= {finding.rule for finding in verdict.findings}
    assert verdict.r3 is not None and verdict.r3 > 0.95


def test_R5_names_poison_that_leaks_through_zero_probability() -> None:
    case = recipe("attention", F32, S=6, L=23, H=4, K=2, mask="columns", poison="nan")
    rejected(
        case, attention(nan_safe=False), "R5", r"^poison \(nan\) in unused parts of k, v leaks: o\[0,0,0,0\] = nan"
    )


def test_R5_names_poison_in_an_ignored_row() -> None:
    def leaky(y: Any, a: dict[str, Any]) -> Any:
        return y + 0 * a["logits"].float().sum()

    rejected(
        recipe("cross_entropy", F32, T=9, V=50, poison="inf"),
        after("cross_entropy", leaky),
        "R5",
        r"^poison \(inf\) in unused parts of logits leaks: loss = nan",
    )


def modify(a: dict[str, Any]) -> dict[str, Any]:
    a["x"].mul_(1)
    a["x"][0, 0] += 1
    return {}


def around(distance: int) -> Callable[[dict[str, Any]], dict[str, Any]]:
    def write(a: dict[str, Any]) -> dict[str, Any]:
        x = a["x"]
        x.as_strided((1,), (1,), x.storage_offset() + distance).fill_(1.0)
        return {}

    return write


def outside(y: torch.Tensor, true: torch.Tensor) -> None:
    y.copy_(true)
    y.as_strided((1,), (1,), y.storage_offset() + y.numel()).fill_(1.0)


R5_MEMORY = {
    "an input is modified": (before("rms_norm", modify), r"^x was modified: \d+ of its bytes changed"),
    "memory before an input is written": (
        before("rms_norm", around(-1)),
        r"^4 bytes around x were overwritten, the first at -4",
    ),
    "memory behind an input is written": (
        before("rms_norm", around(4 * 64)),
        r"^4 bytes around x were overwritten, the first at \+1024",
    ),
    "an allocation is overrun": (rms_into(outside), r"^allocation 0 of 1024 bytes was written outside its bounds"),
    "a result is a view of an input": (
        after("rms_norm", lambda y, a: a["x"].view_as(y)),
        r"^y shares memory with the input x",
    ),
}


@pytest.mark.parametrize("fault", R5_MEMORY)
def test_R5_sees_that(fault: str) -> None:
    call, message = R5_MEMORY[fault]
    rejected(recipe("rms_norm", F32, T=4, F=64), call, "R5", message)


def test_R5_sees_reads_that_take_any_strides_for_dense_ones() -> None:
    def dense(a: dict[str, Any]) -> dict[str, Any]:
        x = a["x"]
        return {"x": x.as_strided(x.shape, (x.shape[1], 1), x.storage_offset())}

    rejected(recipe("rms_norm", F32, T=4, F=64), before("rms_norm", dense), "R5", r"^y\[.* = nan|^y\[.* with x \w+")


def wobbling(step: float) -> Callable[..., Any]:
    """Every second call is off by `step`, relative."""
    calls = itertools.count()
    return after("rms_norm", lambda y, a: y * (1 + step * (next(calls) % 2)))


def test_R5_holds_run_to_run_to_the_bit_where_it_is_declared_and_to_R1_where_not() -> None:
    case = recipe("rms_norm", F32, T=4, F=64)
    rejected(
        case,
        wobbling(2.0**-23),
        "R5",
        r"^y\[.*\] = \S+, but should be \S+ bit for bit as in the first call "
        r"\(run_to_run is declared\)",
        Declares(run_to_run=True),
    )
    calm = Implementation("rms_norm", "calm", wobbling(2.0**-23), declares=Declares(run_to_run=False))
    assert judge(case, calm).status == "passed"
    wild = Implementation("rms_norm", "wild", wobbling(2.0**-12), declares=Declares(run_to_run=False))
    assert judge(case, wild).status == "failed"


def nudged(op: str, when: Callable[[dict[str, Any]], bool]) -> Callable[..., Any]:
    return after(op, lambda y, a: y * (1 + 2.0**-23) if when(a) else y)


@pytest.mark.parametrize(
    ("case", "when", "name"),
    [
        (recipe("rms_norm", F32, T=4, F=64), lambda a: a["x"].shape[0] == 1, "batch_invariant"),
        (
            recipe("rms_norm", F32, T=4, F=64),
            lambda a: not a["x"].is_contiguous() or a["x"].storage_offset() % 16,
            "stride_invariant",
        ),
        (recipe("paged_attention", F32, H=3, K=3), lambda a: int(a["block_table"][0, 0]) % 2 == 0, "block_permutation"),
    ],
    ids=["batch_invariant", "stride_invariant", "block_permutation"],
)
def test_R5_tests_declared_bitwise_properties_bit_for_bit(case: Case, when: Any, name: str) -> None:
    call = nudged(case.op, when)
    rejected(case, call, "R5", rf"bit for bit .*\({name} is declared\)", Declares(**{name: True}))
    assert judge(case, Implementation(case.op, "undeclared", call)).status == "passed"


@pytest.mark.parametrize(
    ("case", "when", "variant"),
    [
        (recipe("attention", BF16, S=7, L=33, H=4, K=2), lambda a: a["k"].shape[2] == 4, "kv heads expanded"),
        (recipe("attention", BF16, S=7, L=33, causal=True), lambda a: a["q"].shape[1] == 1, "the last query alone"),
        (recipe("attention", BF16, S=7, L=33), lambda a: a["k"].shape[1] < 33, "keys in two pieces, merged"),
        (recipe("attention", BF16, S=7, L=33), lambda a: a["window"] == (40, 40), "a window wider than everything"),
        (
            recipe("paged_attention", BF16, q=[3, 1, 2]),
            lambda a: a["max_seqlen_q"] == 1,
            "the last query of each sequence",
        ),
        (recipe("attention_varlen", BF16), lambda a: a["cu_seqlens_q"].shape[0] == 2, "sequence 2 alone"),
    ],
    ids=["GQA", "decode", "split", "window", "paged decode", "varlen"],
)
def test_R5_compares_paths_that_must_agree(case: Case, when: Any, variant: str) -> None:
    def spoil(r: Any, a: dict[str, Any]) -> Any:
        if not when(a):
            return r
        return (r[0] * 1.02, r[1]) if isinstance(r, tuple) else r * 1.02

    rejected(case, after(case.op, spoil), "R5", rf"^o\[.* ± .* in the variant '{variant}'")


def refuse(*args: Any, **kwargs: Any) -> Any:
    raise UnsupportedError("not today")


def crash(*args: Any, **kwargs: Any) -> Any:
    raise ZeroDivisionError("integer division by the row count")


R8 = {
    "accepts and then refuses": (
        refuse,
        r"^refuse accepts the request but refuses the call: UnsupportedError: not today",
    ),
    "accepts and then crashes": (crash, r"^crash accepts the request but fails: ZeroDivisionError: integer division"),
    "returns another dtype": (
        after("rms_norm", lambda y, a: y.float()),
        r"^y has dtype float32, but should have bfloat16",
    ),
    "returns another shape": (
        after("rms_norm", lambda y, a: y[:1]),
        r"^y has shape \(1, 64\), but should have \(4, 64\)",
    ),
    "returns strided memory": (
        after("rms_norm", lambda y, a: y.t().contiguous().t()),
        r"^y has strides \(1, 4\), but should be contiguous",
    ),
}


@pytest.mark.parametrize("fault", R8)
def test_R8_rejects_an_implementation_that(fault: str) -> None:
    call, message = R8[fault]
    rejected(recipe("rms_norm", BF16, T=4, F=64), call, "R8", message)


def test_R6_mistrusts_a_case_that_zeros_would_pass() -> None:
    verdict = judge(recipe("softmax", F16, shape=[3, 1025], spread=20.0), reference("softmax"))
    assert verdict.status == "mistrusted"
    assert re.match(
        r"the case proves little: zeros would pass on \d+% of the 3075 free elements of y", verdict.findings[0].message
    )


def test_R6_mistrusts_a_case_that_a_shuffled_result_would_pass() -> None:
    verdict = judge(recipe("top_k_top_p_probs", F32), reference("top_k_top_p_probs"))
    assert verdict.status == "passed"
    verdict = judge(recipe("merge_attention", F32, lead=[9], apart=0.0, gaps=False), reference("merge_attention"))
    assert verdict.status == "mistrusted"
    assert "a shuffled result would pass on 100% of the 27 free elements of lse" in verdict.findings[0].message


def test_a_fault_in_a_workspace_shows_because_fresh_memory_is_poisoned() -> None:
    def lazy(y: torch.Tensor, true: torch.Tensor) -> None:
        sums = memory.empty((1,), dtype=torch.float32, device=y.device)
        y.copy_(true + (sums * 0).to(true.dtype))

    rejected(recipe("rms_norm", F32, T=4, F=64), rms_into(lazy), "R4", r"^y\[0,0\] = nan, but should be")
