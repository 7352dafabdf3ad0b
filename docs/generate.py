"""Write docs/operators.md and docs/report.schema.json from the code; with --check, fail if they are not current."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterable
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

import hal
from hal.conformance.report_schema import schema_text
from hal.op import OPS, Op

PAGE = Path(__file__).with_name("operators.md")
SCHEMA = Path(__file__).with_name("report.schema.json")
HEAD = """\
# Operators

<!-- Written by docs/generate.py from the contract. Change the operator's docstring, then run `make docs`. -->

Every operator is `hal.ops.NAME`. The body of its reference function, in the module that its section links to, is its
meaning. Conventions that hold for all of them are in [concepts](concepts.md); how results are judged in
[numerics](numerics.md).

"""
READING = """\
## Reading an entry

The text is what `help(hal.ops.NAME)` prints. In signatures `Window` is `tuple[int | None, int | None]`, `Parameter` is
`float | Tensor | None`, `Count` is `int | Tensor | None` and `Scaling` a mapping. Below it stand

- **gradients**: the arguments that can be differentiated, and **kept**: what a `backward` of an implementation gets of
  the results and statistics, by these names;
- **writes**: what is written beside the results;
- **features**: what an implementation accepts by listing it in `Supports.features`;
- **limits**: the dimensions that `Supports.limits` can bound;
- **judged**: the rule, and why its bound is what it is;
- **torch op**: what autograd, `torch.compile` and `torch.export` see.

A call uses a feature when

"""
# What uses a feature, where its name is not simply that of an argument which is given, true or not its default.
USES = {
    "bias": "a bias is given; in `attention`, a mask that is not boolean",
    "different_v_dim": "k and v differ in head dim",
    "gqa": "there are fewer kv heads than query heads",
    "host_lengths": "every optional CPU copy of lengths is given",
    "inner_dim": "`dim` is not the last axis",
    "key": "k is given",
    "kv_fp8, kv_int8": "the cache is of that dtype",
    "kv_scale": "a scale is given",
    "kv_scale_per_head": "a scale has an entry per kv head",
    "lse": "`return_lse` is true",
    "mask": "a boolean mask is given",
    "mixed_bias_dtype, mixed_weight_dtype": "the bias or weight has another dtype than x",
    "out_dtype": "the result has another dtype than the cache",
    "partial": "the tables rotate fewer dims than a head has",
    "prefill": "`max_seqlen_q` is above 1",
    "reduction_mean, reduction_none, reduction_sum": "`reduction` is that",
    "tanh": "`approximate` is `tanh`",
    "temperature, top_k, top_p, min_p": "it is given, as a number or a tensor",
    "temperature_tensor, top_k_tensor, top_p_tensor, min_p_tensor, seed_tensor": "it is given as a tensor",
    "window": "one of its sides is bounded",
}


def signature(name: str, of: inspect.Signature) -> str:
    """A signature, a parameter a line where it is long, without the module names of types."""
    parts, keyword_only = [], False
    for parameter in of.parameters.values():
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY and not keyword_only:
            parts.append("*")
            keyword_only = True
        shown = str(parameter)
        if isinstance(parameter.annotation, str):
            shown = shown.replace(repr(parameter.annotation), parameter.annotation, 1)
        parts.append(shown)
    returns = of.return_annotation
    returns = returns if isinstance(returns, str) else inspect.formatannotation(returns)
    line = f"{name}({', '.join(parts)}) -> {returns}"
    if len(line) > 100:
        line = f"{name}(\n" + "".join(f"    {part},\n" for part in parts) + f") -> {returns}"
    return line.replace("torch.Tensor", "Tensor").replace("torch.dtype", "dtype")


def judged(op: Op) -> str:
    """The accuracy contract in a sentence."""
    rules = {
        "bound": "a derived bound per element",
        "bitwise": "bit for bit",
        "codes": "equal codes, the adjacent one within the tie band",
        "sampling": "exact keep sets, and the drawn id within the bound of the oracle's best",
    }
    notes = " ".join(op.accuracy.notes.split()).replace("|", "\\|").replace("*", "\\*")
    return rules[op.accuracy.rule] + (f". {notes}" if notes else "")


def names(of: Iterable[str], none: str = "none") -> str:
    return ", ".join(f"`{name}`" for name in of) or none


def reading() -> str:
    """How to read an entry. A feature that is not named after an argument must be explained."""
    explained = {name for key in USES for name in key.split(", ")}
    for op in OPS.values():
        for name in set(op.features) - explained - set(op.signature.parameters):
            raise SystemExit(f"docs/generate.py: say in USES what uses the feature {name!r} of {op.name}")
    rows = [f"| {names(key.split(', '))} | {text} |" for key, text in USES.items()]
    rows.append("| any other | the argument of that name is given, true or not its default |")
    return READING + "| feature | when |\n|---|---|\n" + "\n".join(rows) + "\n\n"


def entry(op: Op) -> str:
    schema = str(getattr(torch.ops.hal, op.torch_name).default._schema)
    rows = [
        ("gradients", names(op.grad)),
        *([("kept", names(op.saves, "the arguments alone"))] if op.grad else []),
        ("writes", names(op.mutates, "nothing but its results")),
        ("features", names(op.features)),
        ("limits", names(op.dims)),
        ("judged", judged(op)),
        ("torch op", f"`{schema}`"),
    ]
    table = "\n".join(f"| {name} | {text} |" for name, text in rows)
    text = block(signature(op.name, op.signature), op.reference)
    return f"### {op.name}\n\n{text}\n| | |\n|---|---|\n{table}\n"


def block(text: str, function: Any) -> str:
    """Signature and docstring as text: they are written for `help()`, and their formulas are no Markdown."""
    return f"```text\n{text}\n\n{inspect.getdoc(function) or ''}\n```\n"


def helper(name: str, function: Any) -> str:
    """A public function that is no operator: it lowers to no torch op and is not dispatched."""
    text = signature(name, inspect.signature(function))
    return f"### {name}\n\nA helper in plain torch, not dispatched.\n\n{block(text, function)}"


def home(name: str) -> str:
    """The public module that a function belongs to; its body may stand in a private one."""
    public = [m for m in sorted(sys.modules) if m.startswith("hal.ops.") and not m.startswith("hal.ops._")]
    return next(module for module in public if name in getattr(sys.modules[module], "__all__", ()))


def page() -> str:
    functions = {name: getattr(hal.ops, name) for name in hal.ops.__all__}
    index, parts = ["| operators | |\n|---|---|\n"], []
    for module, members in groupby(sorted(functions, key=home), key=home):
        path, found = module.replace(".", "/") + ".py", list(members)
        about = " ".join((inspect.getdoc(sys.modules[module]) or "").split("\n\n")[0].split())
        index.append(f"| {', '.join(f'[{n}](#{n})' for n in found)} | {about} |\n")
        parts.append(f"## [{module.rpartition('.')[2]}](../{path})\n\n{about}\n\n")
        parts.extend((entry(OPS[n]) if n in OPS else helper(n, functions[n])) + "\n" for n in found)
    return "".join([HEAD, *index, "\n", reading(), *parts]).rstrip() + "\n"


def main() -> int:
    stale = 0
    for path, text in ((PAGE, page()), (SCHEMA, schema_text())):
        if "--check" not in sys.argv[1:]:
            path.write_text(text)
        elif not path.exists() or path.read_text() != text:
            print(f"docs/{path.name} is not what the code says; run `make docs` and commit it", file=sys.stderr)
            stale = 1
    return stale


if __name__ == "__main__":
    sys.exit(main())
