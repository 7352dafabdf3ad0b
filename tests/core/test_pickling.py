"""What crosses process borders: operators, errors, data sheets, declarations."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from core_processes import python

import hal
from hal import errors
from hal.capability import Declares, Limit, Rejected, Supports
from hal.op import OPS


@pytest.mark.parametrize("name", sorted(OPS))
def test_operators_pickle_by_name_and_copy_to_themselves(name):
    op = OPS[name]
    assert pickle.loads(pickle.dumps(op)) is op
    assert copy.deepcopy(op) is op


def test_a_public_function_pickles_by_name():
    assert pickle.loads(pickle.dumps(hal.ops.rms_norm)) is hal.ops.rms_norm


def test_an_operator_arrives_in_a_process_that_has_not_imported_hal():
    data = pickle.dumps(OPS["rms_norm"])
    name, _ = python(f"import pickle; answer(pickle.loads({data!r}).name)")
    assert name == "rms_norm"


def test_an_operator_that_does_not_exist_here_says_so():
    data = pickle.dumps(OPS["rms_norm"]).replace(b"rms_norm", b"rms_nor2")
    with pytest.raises(errors.HalError, match="rms_nor2"):
        pickle.loads(data)


@pytest.mark.parametrize("name", errors.__all__)
def test_errors_pickle_with_what_they_carry(name):
    error = getattr(errors, name)("text")
    if name == "UnsupportedError":
        error.rejections["cpu/aten"] = ("dtype",)
    if name == "PluginError":
        error.plugin = "toy"
    back = pickle.loads(pickle.dumps(error))
    assert type(back) is type(error)
    assert str(back) == "text"
    assert vars(back) == vars(error)


def test_declarations_and_descriptors_pickle():
    from hal.descriptor import describe

    for thing in (
        Supports(dtypes=frozenset({"float32"}), limits={"head_dim": Limit(max=256)}),
        Declares(u_p={"bfloat16": 2.0**-9}),
        Rejected(("a", "b")),
        describe(torch.device("cpu")),
    ):
        assert pickle.loads(pickle.dumps(thing)) == thing
