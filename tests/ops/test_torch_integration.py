"""Every operator as PyTorch sees it: opcheck, torch.compile, torch.export and gradcheck on the samples."""

from __future__ import annotations

import pytest
import torch
from samples import SAMPLES
from torch.utils._pytree import tree_flatten

import hal
from hal.op import OPS

CALLS = [pytest.param(name, make, id=f"{name}-{i}") for name in sorted(SAMPLES) for i, make in enumerate(SAMPLES[name])]
FIRST = [pytest.param(name, SAMPLES[name][0], id=name) for name in sorted(SAMPLES)]


def tensors(values):
    return [v for v in tree_flatten(values)[0] if isinstance(v, torch.Tensor)]


def wanted(values):
    return [t for t in tensors(values) if t.requires_grad]


def detached(values):
    if isinstance(values, torch.Tensor):
        return values.detach().clone()
    if isinstance(values, dict):
        return {k: detached(v) for k, v in values.items()}
    if isinstance(values, list | tuple):
        return type(values)(map(detached, values))
    return values


def same(got, expected, what):
    assert len(got) == len(expected), f"{what}: {len(got)} tensors, but should be {len(expected)}"
    for i, (g, e) in enumerate(zip(got, expected, strict=True)):
        torch.testing.assert_close(g, e, rtol=0, atol=0, equal_nan=True, msg=lambda m, i=i: f"{what}[{i}]: {m}")


def gradients(outs, inputs):
    outs = [o for o in tensors(outs) if o.requires_grad]
    seeds = [torch.linspace(-1, 1, o.numel(), dtype=o.dtype).view_as(o) for o in outs]
    return [g for g in torch.autograd.grad(outs, inputs, seeds, allow_unused=True) if g is not None]


def test_every_operator_has_samples():
    assert sorted(SAMPLES) == sorted(OPS)


@pytest.mark.parametrize(("name", "make"), CALLS)
def test_opcheck_accepts_the_torch_op(name, make):
    op = OPS[name]
    args, kwargs = make()
    packed = op.pack(*args, **kwargs)
    torch_op = getattr(torch.ops.hal, op.torch_name).default
    save = bool(op.grad) and bool(wanted(packed))
    torch.library.opcheck(torch_op, (*packed, save) if op.grad else packed)


@pytest.mark.parametrize(("name", "make"), CALLS)
def test_the_torch_op_gives_what_the_short_way_gives(name, make):
    op, public = OPS[name], getattr(hal.ops, name)
    short_args, short_kwargs = detached(make())
    short = public(*short_args, **short_kwargs)
    args, kwargs = detached(make())
    packed = op.pack(*args, **kwargs)
    outs = getattr(torch.ops.hal, op.torch_name).default(*packed, *([False] if op.grad else []))
    outs = outs if isinstance(outs, tuple) else () if outs is None else (outs,)
    same(tensors(op.public(outs[: len(op.results)], packed)), tensors(short), name)
    same(tensors((args, kwargs)), tensors((short_args, short_kwargs)), f"arguments of {name}")


@pytest.mark.parametrize(("name", "make"), CALLS)
def test_results_have_the_form_that_meta_promises(name, make):
    op = OPS[name]
    args, kwargs = detached(make())
    a = op.bind(args, kwargs)
    metas = op.meta(a)[: len(op.results)]
    for result, out, meta in zip(op.results, op.outs(a, getattr(hal.ops, name)(*args, **kwargs)), metas, strict=True):
        assert (tuple(out.shape), out.dtype) == (tuple(meta.shape), meta.dtype), result
        assert out.is_contiguous(), f"{result} has strides {out.stride()} for shape {tuple(out.shape)}"


@pytest.mark.parametrize(("name", "make"), CALLS)
def test_traits_name_every_declared_dimension_and_no_unknown_feature(name, make):
    op = OPS[name]
    args, kwargs = make()
    traits = op.traits(op.bind(args, kwargs))
    assert tuple(traits.dims) == op.dims
    assert traits.features <= set(op.features)


@pytest.mark.parametrize(("name", "make"), FIRST)
def test_compile_without_graph_breaks_gives_the_same_values_and_gradients(name, make):
    torch._dynamo.reset()
    public = getattr(hal.ops, name)
    args, kwargs = make()
    expected = public(*args, **kwargs)
    again_args, again_kwargs = make()
    got = torch.compile(public, fullgraph=True)(*again_args, **again_kwargs)
    same(tensors(got), tensors(expected), name)
    same([t.detach() for t in tensors((again_args, again_kwargs))], [t.detach() for t in tensors((args, kwargs))], name)
    if OPS[name].grad:
        expected_grads = gradients(expected, wanted((args, kwargs)))
        assert expected_grads, f"{name}: the first sample requires no gradient"
        same(gradients(got, wanted((again_args, again_kwargs))), expected_grads, f"gradients of {name}")


@pytest.mark.parametrize(("name", "make"), FIRST)
def test_export_gives_a_program_with_the_same_values(name, make):
    public = getattr(hal.ops, name)

    class Module(torch.nn.Module):
        def forward(self, args, kwargs):
            return public(*args, **kwargs)

    args, kwargs = detached(make())
    expected_args, expected_kwargs = detached(make())
    expected = public(*expected_args, **expected_kwargs)
    program = torch.export.export(Module(), (args, kwargs))
    assert any("hal." in str(node.target) for node in program.graph.nodes), "the operator was traced through"
    got = program.module()(args, kwargs)
    same(tensors(got), tensors(expected), name)
    same(tensors((args, kwargs)), tensors((expected_args, expected_kwargs)), f"arguments of {name}")


GRADCHECKED = [
    pytest.param(name, make, id=f"{name}-{i}")
    for name in sorted(SAMPLES)
    for i, make in enumerate(SAMPLES[name])
    if OPS[name].grad and (leaves := wanted(make())) and all(t.dtype is torch.float64 for t in leaves)
]


def test_every_differentiable_operator_has_a_sample_for_gradcheck():
    assert {p.values[0] for p in GRADCHECKED} == {name for name, op in OPS.items() if op.grad}


@pytest.mark.parametrize("implementation", ["reference", "preferred"])
@pytest.mark.parametrize(("name", "make"), GRADCHECKED)
def test_gradients_equal_finite_differences(name, make, implementation):
    args, kwargs = make()
    leaves = wanted((args, kwargs))
    flat, spec = tree_flatten((args, kwargs))
    places = [i for i, v in enumerate(flat) if isinstance(v, torch.Tensor) and v.requires_grad]

    def call(*inputs):
        values = list(flat)
        for i, t in zip(places, inputs, strict=True):
            values[i] = t
        args, kwargs = torch.utils._pytree.tree_unflatten(values, spec)
        outs = getattr(hal.ops, name)(*args, **kwargs)
        outs = tensors(outs)
        # The logarithm of a denominator gets a gradient only where the implementation says so.
        return tuple(outs[:1] if "lse" in OPS[name].results else outs)

    with hal.use(impl={name: "reference"} if implementation == "reference" else None):
        assert torch.autograd.gradcheck(call, leaves, fast_mode=True)
