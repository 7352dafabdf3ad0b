"""Recording what a running model asks of hal's operators: one call of each kind, with its values, cut to size.

Use as `with Recorder() as seen: model.generate(...)`, then `write(seen, folder)`. The cases of the tag `captured`
read what it writes: `captured.json` (operators, arguments, shapes, memory layouts) and `captured.safetensors`.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hal.contract import OPS, dtype_name
from hal.errors import ArgumentError, FileError

__all__ = ["LARGEST", "Recorder", "write"]

LARGEST = 400_000
"""Bytes of both files together: they are part of the package."""

Arguments = dict[str, Any]


@dataclass(frozen=True)
class Call:
    """The arguments of one call, and how each tensor lay in memory."""

    op: str
    arguments: Arguments
    layouts: dict[str, str]


class Recorder(TorchDispatchMode):
    """Within the block, keeps one call of each kind. Layers make the same calls; the kept one comes from the later
    half of them, where a model's values are largest."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: dict[str, Call] = {}
        self._seen: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func._overloadpacket.__name__
        if func.namespace == "hal" and not name.endswith("_bwd"):
            op = OPS[name.removesuffix("_fwd")]
            self.add(op.name, op.unpack(args[: len(op.schema_names)]))
        return func(*args, **(kwargs or {}))

    def add(self, op: str, arguments: Arguments) -> None:
        """Note a call of `op`."""
        kind = _kind(op, arguments)
        self._seen[kind] += 1
        count = self._seen[kind]
        if count & (count - 1) == 0:  # 1, 2, 4, 8, …: the last of these lies in the later half
            layouts = {name: _layout(v) for name, v in arguments.items() if isinstance(v, Tensor)}
            self.calls[kind] = Call(op, {name: _copied(v) for name, v in arguments.items()}, layouts)


def write(recorder: Recorder, folder: Path, source: str) -> int:
    """Write the recorded calls to `captured.json` and `captured.safetensors` in `folder`; their size in bytes.

    Values of `source` (a model's name) are cut to size: few rows of a weight, few rows of logits. Raises
    ArgumentError if they are still too many, FileError if the files cannot be written.
    """
    from safetensors.torch import save

    tensors: dict[str, Tensor] = {}
    calls: list[dict[str, Any]] = []
    numbers: Counter[str] = Counter()
    for call in recorder.calls.values():
        arguments = dict(call.arguments)
        if call.op in CUTS:
            arguments = CUTS[call.op](arguments)
        name = f"{call.op}-{numbers[call.op]}"
        numbers[call.op] += 1
        described: Arguments = {}
        for parameter, value in arguments.items():
            if isinstance(value, Tensor):
                tensors[f"{name}.{parameter}"] = value.contiguous()
                described[parameter] = {"layout": call.layouts[parameter]}
            else:
                described[parameter] = value
        calls.append({"name": name, "op": call.op, "arguments": described})
    text = json.dumps({"version": 1, "source": source, "calls": calls}, indent=1) + "\n"
    contents = {folder / "captured.json": text.encode(), folder / "captured.safetensors": save(tensors)}
    size = sum(map(len, contents.values()))
    if size > LARGEST:
        raise ArgumentError(f"the recorded calls take {size} bytes, more than {LARGEST}; record a shorter run")
    try:
        for path, content in contents.items():
            temporary = path.with_suffix(".tmp")
            temporary.write_bytes(content)
            temporary.replace(path)
    except OSError as error:
        raise FileError(f"{error.filename} cannot be written: {error.strerror}; name a folder that can be") from error
    return size


def _kind(op: str, arguments: Arguments) -> str:
    """Two calls of one kind differ in values only; of a linear layer the weight's shape alone counts."""
    parts = [op]
    for name, value in arguments.items():
        if op == "linear" and name == "x":
            continue
        text = f"{dtype_name(value.dtype)}{tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
        parts.append(f"{name}={text}")
    return ",".join(parts)


def _copied(value: Any) -> Any:
    return value.detach().cpu().contiguous().clone() if isinstance(value, Tensor) else value


def _layout(t: Tensor) -> str:
    """The conformance suite's word for how a tensor lies in memory."""
    if t.is_contiguous():
        return "contiguous"
    if t.dim() >= 3 and t.transpose(-2, -3).is_contiguous():
        return "swapped"
    return "sliced" if t.stride(-1) == 1 else "stepped"


def _cut_linear(a: Arguments) -> Arguments:
    rows = 16
    return a | {"weight": a["weight"][:rows], "bias": None if a["bias"] is None else a["bias"][:rows]}


def _cut_logits(a: Arguments) -> Arguments:
    rows, classes = 2, 4096
    a["logits"] = a["logits"][-rows:, :classes]
    if "target" in a:
        a["target"] = a["target"][-rows:] % classes
    return a


CUTS: dict[str, Callable[[Arguments], Arguments]] = {
    "linear": _cut_linear,
    "cross_entropy": _cut_logits,
    "top_k_top_p_probs": _cut_logits,
    "top_k_top_p_sample": _cut_logits,
}
