"""Cases: ids that give themselves back, inputs that are the same everywhere, guards that notice."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hal.conformance import inputs
from hal.conformance.case import Case, cases, decode, encode, find, make
from hal.conformance.cases import drawn, families, family
from hal.errors import ArgumentError, ShapeError


def digest(case: Case) -> str:
    """A digest of a case's inputs, memory around them included."""
    total = hashlib.sha256()
    for held in case.build("cpu").guarded:
        total.update(held.name.encode() + bytes(held.buffer.numpy()))
    return total.hexdigest()[:16]


def test_an_id_alone_gives_the_case_back() -> None:
    everything = cases(suite="full")
    assert len({case.id for case in everything}) == len(everything)
    for case in everything[::7]:
        assert find(case.id) == case
        head, _, _ = case.id.rpartition("~")
        assert decode(head.split("/", 2)[2]) == dict(case.params)


def test_a_case_that_no_suite_lists_is_found_by_its_id() -> None:
    case = family("attention").case("bfloat16", "drawn", suite="full", S=3, L=4, D=22, window=(2, None))
    found = find(case.id)
    assert (found.params, found.seed, found.dtype) == (case.params, case.seed, "bfloat16")
    assert found.build().args["window"] == (2, None)


def test_ids_are_safe_to_paste_into_a_shell() -> None:
    allowed = set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_=,.:/~+-")
    for case in cases(suite="full"):
        assert set(case.id) <= allowed, case.id
        assert len(case.id) < 200


@pytest.mark.parametrize(
    "case_id",
    [
        "",
        "rms_norm",
        "rms_norm/float32/T=7,F=576",
        "rms_norm/float32/T=7,F=576~0000",
        "no_such_op/float32/T=7~1234",
        "rms_norm/float32/T=7,F~1234",
        "rms_norm/float32/T=7x~1234",
        "rms_norm/float99/T=7~1234",
    ],
)
def test_a_damaged_id_is_an_error_that_says_what_is_wrong(case_id: str) -> None:
    with pytest.raises(ArgumentError, match=r"case id|recipe|ops with cases"):
        find(case_id)


def test_recipes_survive_the_way_through_text() -> None:
    recipe = {"a": 1, "b": -2.5, "c": 1e-08, "d": None, "e": True, "f": "word", "g": [3, None, 0.5], "h": [], "i": [7]}
    assert decode(encode(recipe)) == recipe
    assert decode(encode({})) == {}
    for bad in ("two words", "none", "1st", float("nan"), object()):
        with pytest.raises(ArgumentError):
            encode({"key": bad})


def test_unknown_parameters_and_tags_are_errors() -> None:
    with pytest.raises(ArgumentError, match="have no parameter tokens"):
        family("rms_norm").case("float32", tokens=3)
    with pytest.raises(ArgumentError, match="unknown case tags"):
        make("rms_norm", "float32", {}, {"grd"})
    with pytest.raises(ArgumentError, match="no conformance cases"):
        cases("rope")
    with pytest.raises(ArgumentError, match="no suite"):
        cases("rms_norm", suite="slow")


# From the first run; a change means that inputs are no longer what recorded runs were judged on.
DIGESTS = {
    "add_rms_norm": "d1a32b43c6c565be",
    "attention": "0574721d9f2e2cfd",
    "attention_varlen": "a78e6282189ec945",
    "copy_kv_blocks": "aacd0c366731f8ff",
    "cross_entropy": "d5632453e3fefefb",
    "gather_kv_cache": "a2aea43b134c9eac",
    "gelu_and_mul": "7664dcc579e813aa",
    "layer_norm": "a5380dd458adc353",
    "linear": "3d51cca50cc24d30",
    "merge_attention": "d4937d804adfeb5c",
    "paged_attention": "f0c8135210c5e58c",
    "rms_norm": "c1074023ee2eb2c2",
    "rotary_embedding": "2da93d9eb9ef6a59",
    "silu_and_mul": "ff57d9334f440bcc",
    "softmax": "11fb50a16eb6b17d",
    "top_k_top_p_probs": "f57de4e29845e3b2",
    "top_k_top_p_sample": "72baaee0b9063b9b",
    "write_kv_cache": "f516b3d23f8cfe16",
}


def test_inputs_are_the_same_bits_as_ever() -> None:
    for op in DIGESTS:
        assert digest(next(case for case in cases(op) if not case.bad_input)) == DIGESTS[op], op
    assert set(DIGESTS) == set(families())


def test_inputs_are_the_same_bits_in_another_process() -> None:
    case = family("paged_attention").case("bfloat16", "grid", "poison", q=[1, 7], k=[33, 7], layout="gapped")
    here = str(Path(__file__).parent)
    code = (
        f"import sys; sys.path.insert(0, {here!r}); from test_cases import digest, find; "
        f"print(digest(find({case.id!r})))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.strip() == digest(case)


def test_seeds_differ_from_case_to_case_and_from_tensor_to_tensor() -> None:
    listed = cases(suite="full")
    assert len({case.seed for case in listed}) == len(listed)
    a = family("attention").case("float32", S=9, L=9, H=2, K=2).build().args
    assert not torch.equal(a["k"], a["v"])


def test_quick_is_part_of_full() -> None:
    quick, full = ({case.id for case in cases(suite=suite)} for suite in ("quick", "full"))
    assert quick < full


def test_every_op_has_drawn_cases_in_both_suites() -> None:
    for op in families():
        found = drawn.cases(op)
        assert sum(case.suite == "quick" for case in found) == drawn.QUICK, op
        assert len(found) == drawn.FULL, op


def test_drawn_recipes_fit_their_families() -> None:
    for op in families():
        for case in drawn.cases(op)[::6]:
            assert case.build().args


def test_drawing_is_deterministic() -> None:
    assert drawn.draw("softmax", 5, seed=1) == drawn.draw("softmax", 5, seed=1)
    assert drawn.draw("softmax", 5, seed=1) != drawn.draw("softmax", 5, seed=2)


@pytest.mark.parametrize("layout", inputs.LAYOUTS)
@pytest.mark.parametrize("shape", [(5,), (3, 4), (2, 3, 4, 5), (0, 4), (1, 1, 6)])
def test_layouts_hold_the_same_values_and_guards_notice_every_byte_around(layout: str, shape: tuple[int, ...]) -> None:
    value = torch.arange(torch.Size(shape).numel()).reshape(shape).to(torch.bfloat16)
    held = inputs.guard("x", value, layout)
    assert torch.equal(held.view, value)
    assert held.damage() is None
    inside = held._inside()
    assert int(inside.sum()) == value.numel() * 2
    for at in (~inside).nonzero()[:, 0].tolist()[::5]:
        held.buffer[at] ^= 1
        assert "bytes around x were overwritten" in str(held.damage(writable=True))
        held.buffer[at] ^= 1
    if value.numel():
        held.view[(0,) * len(shape)] += 1
        assert "x was modified" in str(held.damage())
        assert held.damage(writable=True) is None


@pytest.mark.parametrize("layout", ["sliced", "transposed", "gapped", "reversed"])
def test_layouts_other_than_contiguous_are_not(layout: str) -> None:
    assert not inputs.guard("x", torch.zeros(3, 4, 5), layout).view.is_contiguous()


def test_stride_0_stays_stride_0() -> None:
    held = inputs.guard("x", torch.tensor([[1.0, 2.0]]).expand(4, 2), "contiguous")
    assert held.view.stride() == (0, 1)
    assert held.damage() is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn, torch.int8, torch.int32])
def test_poison_stands_where_nothing_may_look_and_nowhere_else(dtype: torch.dtype) -> None:
    value = torch.ones(4, 3).to(dtype)
    unused = torch.tensor([False, True, False, True])[:, None]
    for kind in ("nan", "inf", "huge"):
        bad = inputs.poisoned(value, unused, kind).float()
        assert torch.equal(bad[::2], torch.ones(2, 3))
        assert not (bad[1::2] == 1).any()
    assert torch.equal(value.float(), torch.ones(4, 3))


def test_the_oracle_never_sees_poison() -> None:
    case = family("paged_attention").case("float32", poison="nan", k=[5, 20, 33])
    built = case.build()
    assert built.args["k_cache"].isnan().any()
    assert not built.clean["k_cache"].isnan().any()


def test_bad_input_cases_name_errors_of_hal() -> None:
    from hal import errors

    for name, of in families().items():
        assert of.bad, name
        for kind, (error, _, _) in of.bad.items():
            assert issubclass(getattr(errors, error), errors.HalError), (name, kind)
    assert issubclass(ShapeError, ValueError)
