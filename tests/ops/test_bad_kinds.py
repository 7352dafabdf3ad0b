"""Arguments of kinds that no operator takes: a typed error on every way of a call, never a guess."""

from __future__ import annotations

import inspect
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from samples import SAMPLES

import hal
from hal.errors import ArgumentError, HalError
from hal.op import OPS

NAMES = sorted(SAMPLES)
WAYS = {
    "short": nullcontext,
    "through the torch op": lambda: torch.device("cpu"),
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
}
# Of no use for any parameter of any operator.
NONSENSE = [
    object(),
    {"a": 1},
    "no such word",
    b"bytes",
    1j,
    10**400,
    np.ones((3, 3), np.float32),
    np.float32(1.0),
    np.bool_(True),
    [None],
    [[1.0]],
    torch.eye(3).to_sparse(),
    torch.eye(3).to_sparse_csr(),
    torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    torch.ones(3, 3, dtype=torch.complex64),
]


def bound(name):
    args, kwargs = SAMPLES[name][0]()
    a = inspect.signature(getattr(hal.ops, name)).bind(*args, **kwargs)
    a.apply_defaults()
    return a


def call(name, a):
    # Recording is a way of its own; a sample's leaves would also refuse to be written.
    with torch.no_grad():
        return getattr(hal.ops, name)(*a.args, **a.kwargs)


def refuses(name, parameter, value, way):
    a = bound(name)
    call(name, a)  # a plan is there, under a key that must not fit
    a.arguments[parameter] = value
    with WAYS[way](), pytest.raises(HalError):
        call(name, a)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", NAMES)
def test_nonsense_in_any_parameter_is_a_typed_error(name, way):
    for parameter in OPS[name].signature.parameters:
        for value in NONSENSE:
            refuses(name, parameter, value, way)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", NAMES)
def test_a_flag_is_no_number_and_a_number_no_flag(name, way):
    for parameter, default in OPS[name].signature.parameters.items():
        flag = isinstance(default.default, bool)
        for value in (0, 1, 1.0, None, torch.tensor(True)) if flag else (True, False):
            refuses(name, parameter, value, way)


@pytest.mark.parametrize("window", [(True, 0), (1.0, 0), (np.int64(1), 0), (1, False), (1, None, 0), (2**64, 0)])
def test_a_window_that_equals_a_legal_one_is_not_taken_for_it(window):
    q = torch.randn(1, 3, 2, 4)
    hal.ops.attention(q, q, q, window=(1, 0))
    hal.ops.attention(q, q, q, window=[1, 0])
    with pytest.raises(ArgumentError, match="window"):
        hal.ops.attention(q, q, q, window=window)


@pytest.mark.parametrize("seed", [2**63, -(2**63) - 1, 2**70])
def test_a_seed_beyond_64_bits_is_refused_although_plans_are_shared_across_seeds(seed):
    logits = torch.zeros(2, 5)
    hal.ops.top_k_top_p_sample(logits, 1)
    with pytest.raises(ArgumentError, match="seed"):
        hal.ops.top_k_top_p_sample(logits, seed)


def test_an_opaque_tensor_under_the_key_of_a_plain_one_is_refused():
    if not torch.backends.mkldnn.is_available():
        pytest.skip("this torch has no opaque layout")
    x = torch.randn(2, 8)
    hal.ops.softmax(x)
    with pytest.raises(ArgumentError, match="layout _mkldnn"):
        hal.ops.softmax(x.to_mkldnn())


def test_a_plan_is_not_found_by_a_string_that_only_looks_like_a_keyword():
    class Text(str):
        __slots__ = ()

    x = torch.randn(2, 8)
    hal.ops.rms_norm(x, eps=0.5)
    with pytest.raises(ArgumentError, match="x is"):
        hal.ops.rms_norm(Text("eps"), x, 0.5)
