"""The attention and KV-cache references never ask the host for a value: they run where values do not exist."""

from __future__ import annotations

import pytest
import torch
from samples_attention import FP8_SAMPLES, SAMPLES
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map

from hal.op import OPS

CALLS = [
    pytest.param(name, make, id=f"{name}-{i}")
    for name in SAMPLES
    for i, make in enumerate([*SAMPLES[name], *FP8_SAMPLES.get(name, [])])
]


@pytest.mark.parametrize(("name", "make"), CALLS)
def test_references_read_no_value_on_the_host(name, make):
    args, kwargs = make()
    kwargs = {key: value for key, value in kwargs.items() if key not in OPS[name].host_lengths}
    mode = FakeTensorMode()

    def fake(value):
        if not isinstance(value, torch.Tensor):
            return value
        return mode.from_tensor(value.detach()).requires_grad_(value.requires_grad)

    args, kwargs = tree_map(fake, (args, kwargs))
    with mode:
        result = OPS[name].reference(*args, **kwargs)
        outs = [t for t in (result if isinstance(result, tuple) else (result,)) if t is not None and t.requires_grad]
        if outs:
            torch.autograd.backward(outs, [torch.ones_like(t) for t in outs])
