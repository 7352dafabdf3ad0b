"""`hal explain`: which implementation would serve a call, and why not the others."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Annotated

import typer

from hal.cli._console import console, line, print_json, table, torch_device
from hal.errors import ArgumentError

if TYPE_CHECKING:
    from hal.contract import Args, Op
    from hal.selection import Explanation


def explain(
    op: Annotated[str, typer.Argument(metavar="OP", help="The operator; 'hal ops' lists them.")],
    dtype: Annotated[
        list[str] | None,
        typer.Option(metavar="[NAME=]DTYPE", help="Dtype of the floating tensors, or of one. Repeatable."),
    ] = None,
    shape: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[NAME=]SIZES",
            help="Sizes between commas: of the argument NAME, or of the first tensor. Repeatable. Tensors that are not "
            "given get a shape that fits (k and v like q, and so on).",
        ),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="NAME=VALUE",
            help="Another argument: true, false, none, a number, a word, or a pair such as 4095,0. Repeatable. "
            "none also leaves out an optional tensor.",
        ),
    ] = None,
    backend: Annotated[
        str | None, typer.Option(metavar="NAME", help="auto, cpu, portable:cuda … Default: HAL_BACKEND, else auto.")
    ] = None,
    device: Annotated[
        str | None, typer.Option(metavar="DEVICE", help="Torch device of the tensors. Default: the backend's device.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Print the plan for a call: the chosen implementation, and each other one with all its reasons.

    Nothing is computed and no memory is taken: tensors are described, not made. HAL_IMPL, HAL_FALLBACK and
    HAL_INVARIANT count as in a real call. Exit status: 0 something serves the call, 1 nothing does.

    Examples:

    - `hal explain attention --dtype bfloat16 --shape 1,128,32,128 --set causal=true`
    - `hal explain attention --dtype bf16 --shape q=1,128,32,128 --shape k=1,128,8,128 --set window=4095,0`
    - `hal explain rms_norm --shape 4096,576 --dtype weight=float32 --set weight_offset=1`
    - `hal explain write_kv_cache --dtype k_cache=int8 --dtype v_cache=int8 --shape k_scale= --shape v_scale=`
    """
    from hal.descriptor import is_simulated
    from hal.settings import use

    contract = _operator(op)
    with nullcontext() if backend is None else use(backend=backend):
        explanation, a = _explain(contract, shape or [], dtype or [], settings or [], device)
    simulated = is_simulated(explanation.device.type)
    if as_json:
        print_json({"call": _call(contract, a), "simulated": simulated} | explanation.to_dict())
    else:
        device = f"{explanation.device}{' (simulated)' if simulated else ''}"
        line(f"{_call(contract, a)} on {device}, backend {explanation.backend}")
        _print(explanation)
    raise typer.Exit(0 if explanation.chosen is not None else 1)


def _operator(name: str) -> Op:
    import difflib

    from hal import ops
    from hal.op import OPS

    if name not in OPS and callable(getattr(ops, name, None)):
        raise ArgumentError(f"{name} is a helper in plain torch, the same on every backend: nothing is selected.")
    if name not in OPS:
        near = difflib.get_close_matches(name, OPS, 1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ArgumentError(f"no operator is named {name!r}; there are {', '.join(sorted(OPS))}.{hint}")
    return OPS[name]


def _explain(
    op: Op, shapes: list[str], dtypes: list[str], settings: list[str], device: str | None
) -> tuple[Explanation, Args]:
    from torch._subclasses.fake_tensor import FakeTensorMode

    from hal import selection
    from hal.cli import _request
    from hal.conformance.site import Site
    from hal.settings import current

    request = _request.build(op, shapes, dtypes, settings)
    where = torch_device(device or Site.of(current().backend).target.device)
    with FakeTensorMode():
        a = _request.bind(op, request, where)
        op.validate(a)
        return selection.explain(op, a, where), a


def _print(explanation: Explanation) -> None:
    if explanation.candidates:
        _table(explanation)
    if explanation.chosen is None:
        line(_advice(explanation), "red")


def _table(explanation: Explanation) -> None:
    rows = table()
    for column in ("", "implementation", "kind", "priority", "why not"):
        rows.add_column(column, overflow="fold")
    for candidate in explanation.candidates:
        chosen = candidate is explanation.chosen
        if chosen:
            verdict: tuple[str, ...] = ("chosen",)
        elif candidate.accepted:
            verdict = ("accepted, less preferred",)
        else:
            verdict = candidate.reasons
        name = candidate.label
        rows.add_row(
            "*" if chosen else "",
            name,
            candidate.kind,
            str(candidate.implementation.priority),
            "\n".join(verdict),
            style="bold" if chosen else "",
        )
    console().print(rows)


def _advice(explanation: Explanation) -> str:
    from hal.settings import current

    told = "Nothing serves this call"
    if not explanation.candidates:
        told = f"Backend {explanation.backend} has no implementation of {explanation.op.name}"
    if current().fallback == "error":
        return f"{told}; HAL_FALLBACK=portable allows composed ones on the same device, cpu those of the CPU."
    return f"{told}, and HAL_FALLBACK={current().fallback} allows nothing that does; change the call or the backend."


def _call(op: Op, a: Args) -> str:
    return f"{op.name}({', '.join(f'{name}={_shown(value)}' for name, value in vars(a).items() if value is not None)})"


def _shown(value: object) -> str:
    import torch

    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}[{','.join(str(size) for size in value.shape)}]"
    if isinstance(value, list):
        return f"[{', '.join(_shown(member) for member in value)}]"
    return str(value)
