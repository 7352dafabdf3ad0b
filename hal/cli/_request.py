"""A call of an operator described on the command line: shapes, dtypes and options become fake tensors and numbers.

Whatever is not given gets a companion that fits the rest: k and v like q, a cache that has q's heads, and so on.
"""

from __future__ import annotations

import difflib
import inspect
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import torch

from hal.errors import ArgumentError, ShapeError
from hal.op import Args, Op

Shape = tuple[int, ...]

# Dtypes of tensors that do not follow --dtype.
_FIXED: dict[str, torch.dtype] = {
    "positions": torch.int64, "cos": torch.float32, "sin": torch.float32,
    "cu_seqlens_q": torch.int32, "cu_seqlens_k": torch.int32, "block_table": torch.int32, "seq_lens": torch.int32,
    "cu_seqlens_q_cpu": torch.int32, "cu_seqlens_k_cpu": torch.int32, "seq_lens_cpu": torch.int32,
    "slot_mapping": torch.int64, "target": torch.int64, "src": torch.int64, "dst": torch.int64, "seed": torch.int64,
    "k_scale": torch.float32, "v_scale": torch.float32, "lse_a": torch.float32, "lse_b": torch.float32,
    "mask": torch.bool,
    "temperature": torch.float32, "top_k": torch.int64, "top_p": torch.float32, "min_p": torch.float32,
}  # fmt: skip
_FOLLOWS_DOUBLE = ("lse_a", "lse_b")
_MOST_BYTES = 2**63 - 1
_LISTS = ("k_caches", "v_caches")
_FIRST: dict[str, Shape] = {
    "linear": (1, 128, 4096), "rms_norm": (128, 4096), "add_rms_norm": (128, 4096), "layer_norm": (128, 4096),
    "silu_and_mul": (128, 8192), "gelu_and_mul": (128, 8192), "softmax": (128, 4096),
    "rotary_embedding": (1, 128, 32, 128), "attention": (1, 128, 32, 128), "attention_varlen": (128, 32, 128),
    "merge_attention": (1, 128, 32, 128), "write_kv_cache": (128, 8, 128), "paged_attention": (8, 32, 128),
    "gather_kv_cache": (64, 16, 8, 128), "copy_kv_blocks": (64, 16, 8, 128), "cross_entropy": (128, 32000),
    "top_k_top_p_probs": (8, 32000), "top_k_top_p_sample": (8, 32000),
}  # fmt: skip


_JSON = {"none": "null", "inf": "Infinity", "-inf": "-Infinity", "nan": "NaN"}
_SAID = {bool: "true or false", int: "an integer", float: "a number", str: "a word", torch.dtype: "a dtype",
         NoneType: "none"}  # fmt: skip


@dataclass
class Request:
    """Shapes and dtypes by argument, and the values of the other arguments."""

    shapes: dict[str, Shape] = field(default_factory=dict)
    dtypes: dict[str, torch.dtype] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)

    def arguments(self, device: torch.device) -> dict[str, Any]:
        """Keyword arguments of the call, tensors without data; call it under a FakeTensorMode."""
        arguments = dict(self.values)
        for name, shape in self.shapes.items():
            where = torch.device("cpu") if name.endswith("_cpu") else device
            if prod(shape) * self.dtypes[name].itemsize > _MOST_BYTES:
                raise ShapeError(
                    f"--shape {name}={','.join(map(str, shape))} is more than 2**63 - 1 bytes, which no tensor can be."
                )
            tensor = torch.empty(shape, dtype=self.dtypes[name], device=where)
            arguments[name] = [tensor] if name in _LISTS else tensor
        return arguments


def bind(op: Op, request: Request, device: torch.device) -> Args:
    """The call's arguments with every default filled."""
    return op.bind((), request.arguments(device))


def build(op: Op, shapes: Sequence[str], dtypes: Sequence[str], settings: Sequence[str]) -> Request:
    """Read --shape, --dtype and --set, and fill in the companions."""
    names = list(op.signature.parameters)
    first = names[0]
    request = Request(values={name: _set(op, name, text) for name, text in _pairs("--set", settings, names, op)})
    for name, text in _pairs("--shape", shapes, names, op, default=first):
        request.shapes[name] = _shape(text)
    given = dict(_pairs("--dtype", dtypes, names, op, default=""))
    base = _dtype(given.pop("", "float32"))
    if op.name in _FIRST and first not in (*request.shapes, *request.values):
        request.shapes[first] = _FIRST[op.name]
    if op.name in _COMPANIONS:
        try:
            companions = _COMPANIONS[op.name](request)
        except LookupError:  # a tensor left out, or of too low a rank for its companions' shapes
            told = ", ".join(f"{name}={list(shape)}" for name, shape in request.shapes.items()) or "nothing"
            raise ShapeError(
                f"{op.name} needs {first} with all its axes to shape the other tensors, but was given {told}."
            ) from None
        for name, companion in companions.items():
            if name in request.shapes or name in request.values:
                continue
            if isinstance(companion, tuple):
                request.shapes[name] = companion
            else:
                request.values[name] = companion
    for name in request.shapes:
        default = _FIXED.get(name, base)
        if name in _FOLLOWS_DOUBLE and base == torch.float64:
            default = base
        request.dtypes[name] = _dtype(given.pop(name)) if name in given else default
    if given:
        name = next(iter(given))
        raise ArgumentError(f"--dtype {name}=… names no tensor of this call; give --shape {name}=… too.")
    missing = [
        name
        for name, parameter in op.signature.parameters.items()
        if parameter.default is inspect.Parameter.empty and name not in request.shapes and name not in request.values
    ]
    if missing:
        raise ArgumentError(
            f"{op.name} needs {', '.join(missing)}: give --shape NAME=… for a tensor, --set NAME=… for another value."
        )
    return request


def _pairs(
    option: str, texts: Sequence[str], names: Sequence[str], op: Op, default: str | None = None
) -> list[tuple[str, str]]:
    pairs: list[tuple[str, str]] = []
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            if default is None:
                raise ArgumentError(f"{option} {text}: write {option} NAME=VALUE, NAME an argument of {op.name}.")
            name, value = default, text
        elif name not in names:
            near = difflib.get_close_matches(name, names, 1)
            hint = f" Did you mean {near[0]}?" if near else ""
            raise ArgumentError(
                f"{option} {text}: {op.name} has no argument {name!r}; it has {', '.join(names)}.{hint}"
            )
        if name in (seen for seen, _ in pairs):
            raise ArgumentError(f"{option} is given twice for {name or 'the whole call'}; give it once.")
        pairs.append((name, value))
    return pairs


def _shape(text: str) -> Shape:
    try:
        shape = tuple(int(part) for part in text.split(",")) if text.strip() else ()
    except ValueError:
        shape = (-1,)
    if any(size < 0 for size in shape):
        raise ArgumentError(f"--shape …{text!r}: write sizes of 0 or more between commas, such as 1,128,32,128.")
    return shape


def _dtype(text: str) -> torch.dtype:
    aliases = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "fp64": "float64"}
    dtype = getattr(torch, aliases.get(text, text), None)
    if not isinstance(dtype, torch.dtype):
        raise ArgumentError(
            f"--dtype {text!r} is no torch dtype: write float64, float32, bfloat16 or float16; "
            "a cache may also be float8_e4m3fn or int8."
        )
    return dtype


def _value(name: str, text: str) -> Any:
    """true, false, none, numbers, `a,b` for a pair; dtypes by name for *_dtype; anything else is a string."""
    if name.endswith("_dtype") and text.lower() != "none":
        return _dtype(text)
    if "," in text:
        return tuple(_value(name, part.strip()) for part in text.split(","))
    try:
        return json.loads(_JSON.get(text.lower(), text.lower()))
    except json.JSONDecodeError:
        return text


def _set(op: Op, name: str, text: str) -> Any:
    """The value of an option. ArgumentError for one that the argument's annotation does not admit."""
    kinds = list(_kinds(get_type_hints(op.reference)[name]))
    value = text if kinds == [str] else _value(name, text)  # "none" is a word there
    if not any(_admits(kind, value) for kind in kinds):
        told = [_SAID[kind] for kind in kinds if kind in _SAID] + ["a pair such as 4095,0 or none,0"] * any(
            get_origin(kind) is tuple for kind in kinds
        )
        tensor = f", or --shape {name}=…" if torch.Tensor in kinds else ""
        raise ArgumentError(f"--set {name}: {value!r} is no value for it; write {' or '.join(told) or 'none'}{tensor}.")
    return value


def _kinds(hint: Any) -> Iterator[Any]:
    if isinstance(hint, UnionType) or get_origin(hint) is Union:
        for member in get_args(hint):
            yield from _kinds(member)
    else:
        yield hint


def _admits(kind: Any, value: Any) -> bool:
    if get_origin(kind) is tuple:
        members = get_args(kind)
        return (
            isinstance(value, tuple)
            and len(value) == len(members)
            and all(any(_admits(k, v) for k in _kinds(m)) for m, v in zip(members, value, strict=True))
        )
    if value is None or isinstance(value, bool):
        # None also leaves a tensor out; whether the operator can do without it is its own to say.
        return kind is type(value) or (value is None and (kind is torch.Tensor or get_origin(kind) is list))
    if kind is float:
        return isinstance(value, int | float)
    return isinstance(kind, type) and isinstance(value, kind)


Companions = Mapping[str, Any]


def _linear(r: Request) -> Companions:
    features = r.shapes["x"][-1:]
    return {"weight": r.shapes.get("bias", (4096,)) + features}


def _norm(r: Request) -> Companions:
    return {"weight": r.shapes["x"][-1:]}


def _add_norm(r: Request) -> Companions:
    return {"residual": r.shapes["x"], "weight": r.shapes["x"][-1:]}


def _rotary(r: Request) -> Companions:
    q = r.shapes["q"]
    half = (r.values.get("rotary_dim") or q[-1]) // 2
    table = r.shapes.get("cos", r.shapes.get("sin", (4096, half)))
    return {"k": q, "positions": q[:-2], "cos": table, "sin": table}


def _attention(r: Request) -> Companions:
    k = r.shapes.get("k", r.shapes.get("v", r.shapes["q"]))
    return {"k": k, "v": k}


def _varlen(r: Request) -> Companions:
    k = r.shapes.get("k", r.shapes.get("v", r.shapes["q"]))
    lengths = r.shapes.get("cu_seqlens_q", r.shapes.get("cu_seqlens_k", (2,)))
    return {
        "k": k, "v": k, "cu_seqlens_q": lengths, "cu_seqlens_k": lengths,
        "max_seqlen_q": r.shapes["q"][0], "max_seqlen_k": k[0],
    }  # fmt: skip


def _merge(r: Request) -> Companions:
    out = r.shapes["out_a"]
    lse = (out[0], out[2], out[1]) if len(out) == 4 else out[:-1]
    return {"lse_a": lse, "out_b": out, "lse_b": lse}


def _write(r: Request) -> Companions:
    k = r.shapes["k"]
    cache = r.shapes.get("k_cache", r.shapes.get("v_cache", (64, 16, *k[1:])))
    return {"v": r.shapes.get("v", k), "k_cache": cache, "v_cache": cache, "slot_mapping": k[:1]}


def _paged(r: Request) -> Companions:
    q = r.shapes["q"]
    cache = r.shapes.get("k_cache", r.shapes.get("v_cache", (64, 16, *q[1:])))
    batch = r.shapes.get("seq_lens", r.shapes.get("block_table", q)[:1])
    return {
        "k_cache": cache, "v_cache": cache, "block_table": (*batch, cache[0]), "seq_lens": batch,
        "cu_seqlens_q": (batch[0] + 1,), "max_seqlen_q": -(-q[0] // max(batch[0], 1)),
    }  # fmt: skip


def _gather(r: Request) -> Companions:
    cache = r.shapes["k_cache"]
    table = r.shapes.get("block_table", (1, cache[0]))
    return {"v_cache": cache, "block_table": table, "cu_seqlens_k": (table[0] + 1,), "total_k": prod(cache[:2])}


def _copy(r: Request) -> Companions:
    pairs = r.shapes.get("src", r.shapes.get("dst", (1,)))
    return {"v_caches": r.shapes["k_caches"], "src": pairs, "dst": pairs}


_COMPANIONS: dict[str, Callable[[Request], Companions]] = {
    "linear": _linear,
    "rms_norm": _norm,
    "layer_norm": _norm,
    "add_rms_norm": _add_norm,
    "rotary_embedding": _rotary,
    "attention": _attention,
    "attention_varlen": _varlen,
    "merge_attention": _merge,
    "write_kv_cache": _write,
    "paged_attention": _paged,
    "gather_kv_cache": _gather,
    "copy_kv_blocks": _copy,
    "cross_entropy": lambda r: {"target": r.shapes["logits"][:-1]},
    "top_k_top_p_sample": lambda r: {"seed": 0},
}
