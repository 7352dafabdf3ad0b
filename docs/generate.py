"""Write what documentation the code says; with --check, fail if a page is not current.

Whole pages: operators.md, ascend-operators.md and report.schema.json. In ascend.md the table between two marks.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterable
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

import hal
from hal.backends.ascend import mapping, software
from hal.backends.ascend.simulator.constraints import Constraint
from hal.capability import Implementation, Limit
from hal.conformance.report_schema import schema_text
from hal.op import OPS, Op

PAGE = Path(__file__).with_name("operators.md")
SCHEMA = Path(__file__).with_name("report.schema.json")
ASCEND = Path(__file__).with_name("ascend.md")
ASCEND_PAGE = Path(__file__).with_name("ascend-operators.md")
# What ascend.md has between these is written here, from hal/data/ascend/versions.json.
MARKS = ("<!-- versions: written by docs/generate.py -->\n", "<!-- versions: end -->\n")
ASCEND_HEAD = """\
# Operators on Ascend

<!-- Written by docs/generate.py from hal.backends.ascend. Change the code, then run `make docs`. -->

Which operators of CANN serve hal's, on each chip, and which documented rules limit them. Contract-tested on simulated
CANN; never run on a device: what that proves is in [Ascend](ascend.md#what-is-proven). The versions of CANN's operators
are those that torch_npu 2.13.0 chooses on CANN 8.5.0; torch_npu chooses by chip and CANN.

`composed` is the operator's reference, put together from ATen on the NPU, where ATen in turn runs through CANN. For one
call `hal explain` says what runs, and why nothing else.

## At a glance

"""
ASCEND_READING = """\
The chips in CANN's words: 910B is Ascend910B1 to B4, A3 is Ascend910_93, 950 is Ascend950PR and DT, 310P is Ascend310P.
`triton` are Triton-Ascend kernels, asked second, if triton-ascend is installed. – : refused.

In what an implementation takes, the letters are those of [concepts](concepts.md#conventions). A call that uses what it
refuses goes to the next one; where no native one is left, `HAL_FALLBACK=error` refuses the call and
`HAL_FALLBACK=portable` composes it ([settings](settings.md#fallback)).

"""
ASCEND_RULES = """\
# Rules of CANN's operators

The host code of torch_npu refuses what breaks some of them; the simulated CANN checks the others. `hal simulate ascend
--constraints` prints them all, those of operators that hal does not call too. The last column names the page of the
vendor's documents.

"""
ENFORCED = {"wheel": "torch_npu refuses", "document": "documented", "field": "seen on devices"}
ROLES = {"forward": "", "training": "in training", "gradient": "gradient"}
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


def limit(name: str, of: Limit) -> str:
    low = "" if of.min is None else f"{of.min} ≤ "
    high = "" if of.max is None else f" ≤ {of.max}"
    multiple = "" if of.multiple_of is None else f" a multiple of {of.multiple_of}"
    return f"{low}`{name}`{high}" + (f",{multiple}" if high and multiple else multiple)


def accepts(op: Op, implementation: Implementation) -> str:
    """What an implementation takes, and which features it refuses, in a list entry."""
    supports = implementation.supports
    parts = [
        names(sorted(supports.dtypes or ())),
        *(limit(name, of) for name, of in sorted(supports.limits.items())),
        *([" ".join((supports.where.__doc__ or "").split())] if supports.where else []),
    ]
    refused = sorted(set(op.features) - set(op.features if supports.features is None else supports.features))
    without = f". Refuses {names(refused)}" if refused else ""
    capture = "" if implementation.declares.capturable else " No graph may record it."
    return f"- `{implementation.name}` takes {'; '.join(parts)}{without}.{capture}\n"


def routes(op: Op) -> Iterable[str]:
    """Rows that say what each implementation calls on each of its chips."""
    for found in mapping.implementations(op.name):
        on = mapping.chips(found)
        if found.kind == "composed" or found.name == "triton":
            what = "the reference in ATen" if found.kind == "composed" else "kernels of `hal.kernels`"
            yield f"| `{found.name}` | {labels(on)} | | {what} | |\n"
            continue
        steps = mapping.ROUTES.get((op.name, found.name))
        if steps is None:
            raise SystemExit(f"hal/backends/ascend/mapping.py: say in ROUTES what {op.name}'s {found.name!r} calls")
        for step in steps:
            for aclnn, served in by_operator(step, on):
                yield f"| `{found.name}` | {labels(served)} | {ROLES[step.role]} | `{step.call}` | `{aclnn}` |\n"
        if op.grad and found.backward is None:
            yield f"| `{found.name}` | {labels(on)} | gradient | the reference, differentiated | |\n"
        elif op.grad and not any(step.role == "gradient" for step in steps):
            yield f"| `{found.name}` | {labels(on)} | gradient | ATen | |\n"


def by_operator(step: mapping.Step, on: list[str]) -> Iterable[tuple[str, list[str]]]:
    """A step's operators, each with the chips that have it."""
    found: dict[str, list[str]] = {}
    for chip in on:
        found.setdefault(step.on(chip), []).append(chip)
    return found.items()


def labels(on: list[str]) -> str:
    return ", ".join(mapping.CHIPS[chip][0] for chip in on)


def glance(op: Op) -> str:
    cells = [f"[{op.name}](#{op.name})"]
    for chip in mapping.CHIPS:
        here = [found for found in mapping.implementations(op.name) if chip in mapping.chips(found)]
        native = [found.name for found in here if found.kind == "native"]
        cells.append(names(native) if native else "composed" if here else "–")
    return f"| {' | '.join(cells)} |\n"


def rule(row: Constraint) -> str:
    where = []
    for label, socs in mapping.CHIPS.values():
        if row.socs is None or socs <= row.socs:
            where.append(label)
        elif socs & row.socs:
            where.append(", ".join(sorted(socs & row.socs)))
    chips = "all" if row.socs is None else ", ".join(where)
    text = row.rule.replace("|", "\\|")
    return f"| {text} | {chips} | {row.cann or 'all'} | {ENFORCED[row.enforced_by]} | {row.page} |\n"


def ascend_page() -> str:
    """What the Ascend backend calls for each operator, and the rules of what it calls."""
    rules = dict(mapping.rules())
    head = f"| operator | {' | '.join(label for label, _ in mapping.CHIPS.values())} |\n|---|---|---|---|---|\n"
    parts = [ASCEND_HEAD, head, *(glance(op) for op in OPS.values()), "\n", ASCEND_READING]
    for op in OPS.values():
        found = mapping.implementations(op.name)
        parts.append(f"## {op.name}\n\n| implementation | chips | | calls | of CANN |\n|---|---|---|---|---|\n")
        parts += [*routes(op), "\n", *(accepts(op, i) for i in found if i.kind == "native")]
        used = {
            mapping.family(step.on(chip))
            for i in found
            for step in mapping.ROUTES.get((op.name, i.name), ())
            for chip in mapping.chips(i)
        }
        linked = ", ".join(f"[{name}](#{name.lower()})" for name in sorted(used & set(rules)))
        parts.append(f"\nRules: {linked}.\n\n" if linked else "\n")
    parts.append(ASCEND_RULES)
    for name, rows in rules.items():
        parts.append(f"## {name}\n\n| rule | chips | CANN | who enforces it | page |\n|---|---|---|---|---|\n")
        parts += [*map(rule, rows), "\n"]
    return "".join(parts).rstrip() + "\n"


def versions() -> str:
    """ascend.md with the table of versions that go together as hal has it."""
    rows = [f"| {r.torch} | {r.torch_npu} | {r.cann} | {r.product} |\n" for r in software.releases()]
    table = "| torch | torch_npu | CANN | product |\n|---|---|---|---|\n" + "".join(rows)
    source = "\nSources:\n\n"
    for told in software.tables():
        source += f"- {told['source']}, read on {told['read']}"
        if "compatible" in told:
            products, lines = (", ".join(told["compatible"][name]) for name in ("products", "cann"))
            source += f".\n  It calls each product of {products} compatible with each CANN of {lines}"
        source += "\n"
    before, after = ASCEND.read_text().split(MARKS[0])
    return f"{before}{MARKS[0]}{table}{source}{MARKS[1]}{after.split(MARKS[1])[1]}"


def main() -> int:
    stale = 0
    pages = ((PAGE, page()), (ASCEND_PAGE, ascend_page()), (ASCEND, versions()), (SCHEMA, schema_text()))
    for path, text in pages:
        if "--check" not in sys.argv[1:]:
            path.write_text(text)
        elif not path.exists() or path.read_text() != text:
            print(f"docs/{path.name} is not what the code says; run `make docs` and commit it", file=sys.stderr)
            stale = 1
    return stale


if __name__ == "__main__":
    sys.exit(main())
