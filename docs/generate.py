"""Write docs/operators.md and docs/report.schema.json from the code; with --check, fail if they are not current."""

from __future__ import annotations

import inspect
import sys
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

Every operator is `hal.ops.NAME`. The body of its reference function is its meaning: each entry links to it.
Conventions that hold for all of them are in [concepts](concepts.md); how results are judged in
[numerics](numerics.md).

"""


def signature(name: str, of: inspect.Signature) -> str:
    """A signature, a parameter a line where it is long, without the module names of types."""
    parts, keyword_only = [], False
    for parameter in of.parameters.values():
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY and not keyword_only:
            parts.append("*")
            keyword_only = True
        parts.append(str(parameter).replace("'", ""))
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


def entry(op: Op) -> str:
    schema = str(getattr(torch.ops.hal, op.torch_name).default._schema)
    rows = [
        ("gradients", ", ".join(f"`{name}`" for name in op.grad) or "none"),
        ("writes", ", ".join(f"`{name}`" for name in op.mutates) or "nothing but its results"),
        ("features", ", ".join(f"`{name}`" for name in op.features) or "none"),
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
    parts = [HEAD]
    for module, names in groupby(sorted(functions, key=home), key=home):
        path = module.replace(".", "/") + ".py"
        about = (inspect.getdoc(sys.modules[module]) or "").split("\n\n")[0]
        parts.append(f"## [{module.rpartition('.')[2]}](../{path})\n\n{about}\n\n")
        parts.extend((entry(OPS[n]) if n in OPS else helper(n, functions[n])) + "\n" for n in names)
    return "".join(parts).rstrip() + "\n"


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
